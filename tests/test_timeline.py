"""The timeline: the page shows what the log says, and nothing out of a log becomes part of the page.

The tests with a browser compare what Chromium drew with the records: the model that the page made of
them, the rectangles, and the pixels of its canvas.
"""

import base64
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from html.parser import HTMLParser

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import EngineFailed, IllegalCall, Lifecycle, State
from lifecycle.audit import AuditLog, reading
from lifecycle.audit.timeline import page
from lifecycle.testing.recorder import EventRecorder
from tests import report

BEGAN = 1767225600.0  # 2026-01-01 00:00:00 UTC
SCRIPT = "</script><script>window.hacked=1</script>"
IMAGE = "<img src=x onerror='window.hacked=2'>"
UNSEEN = "\x1b[2J\u202eabc\u2066\u200b\x00\u2028\ud800"
HOSTILE = (SCRIPT, IMAGE, UNSEEN, "]]>-->&lt;{{data}}{{policy}}", "__proto__", "constructor", "$&$1\\1")

# -- Records -----------------------------------------------------------------------------------------


def told(drive, **options):
    """The events of a real run: what `drive` does to a lifecycle on a simulated engine."""
    recorder = EventRecorder()
    lifecycle = Lifecycle(lambda: SimulatedEngine(max_num_seqs=2), sinks=(recorder,), **options)
    drive(lifecycle)
    return recorder.events


def evenly(records, seconds=1.0):
    """The same records, so far apart that each can be seen."""
    return [{**record, "time": BEGAN + place * seconds} for place, record in enumerate(records)]


def add(lifecycle, name, tokens=6):
    lifecycle.add_request(name, f"prompt of {name}", SamplingParams(max_tokens=tokens, seed=1))


def step_to_the_end(lifecycle):
    while lifecycle.has_unfinished_requests():
        lifecycle.step()


def busy_day(lifecycle):
    """Work, a drain, sleeps at two levels, a wake by tags, refusals, and the end."""
    for index in range(4):
        add(lifecycle, f"r{index}")
    lifecycle.step()
    lifecycle.sleep(1)
    lifecycle.step()  # takes what the drain brought
    with pytest.raises(IllegalCall):
        lifecycle.step()
    lifecycle.wake_up()
    step_to_the_end(lifecycle)
    lifecycle.sleep(2)
    lifecycle.wake_up(["weights"])
    lifecycle.reload_weights()
    lifecycle.wake_up()
    lifecycle.close()


def fails_in_its_sleep(lifecycle):
    """The engine raises while it releases memory; it is built anew, and serves."""
    add(lifecycle, "r")
    lifecycle.step()
    lifecycle._core.engine.faults.add("sleep", raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed):
        lifecycle.sleep(1)
    lifecycle.recover()
    lifecycle.sleep(1)
    lifecycle.wake_up()
    lifecycle.close()


def hangs_in_its_wake(lifecycle):
    """All that a log has of a process that was killed during a wake."""
    lifecycle.sleep(1)
    lifecycle.wake_up()
    lifecycle.sleep(1)
    lifecycle.wake_up()


def until_it_hung(records):
    """The records up to the beginning of the last wake."""
    begins = [record["seq"] for record in records if is_begin(record, "wake_up")]
    return [record for record in records if record["seq"] <= begins[-1]]


def is_begin(record, call):
    return record["event"] == "operation_begin" and record["call"] == call


def bands_of(records, end):
    """What must be drawn, straight from the records: each state until the next one."""
    moves = [record for record in records if record["event"] in ("attached", "transition")]
    ends = [*(record["time"] for record in moves[1:]), end]
    return [[record["dest"], record["time"], ended] for record, ended in zip(moves, ends, strict=True)]


def many(count, *, rank=0, cycle=8):
    """So many records of an engine that sleeps and wakes all the time; every 5,000th move is a failure."""
    states = ("running", "draining", "sleeping", "partially_awake")
    for seq in range(1, count + 1):
        record = {"seq": seq, "time": BEGAN + seq * 0.05, "engine": "llm", "rank": rank}
        place, number = seq % cycle, seq // cycle
        if place == 0:
            yield {
                **record,
                "event": "operation_begin",
                "call": "sleep(level=1, mode=wait)",
                "state": "running",
            }
        elif place == 6:
            yield {**record, "event": "operation_end", "call": "sleep(level=1, mode=wait)", "duration_s": 0.3}
        elif place == 7:
            held = {"device_before": 70 * 2**30, "device_after": (2 + number % 5) * 2**30}
            yield {**record, "event": "memory", "call": "sleep", "bytes": held}
        else:
            dest = "failed" if seq % 5000 == 1 else states[seq % len(states)]
            counts = {"in_flight": number % 97, "held": seq % 7, "undelivered": 0}
            yield {**record, "event": "transition", "source": "awake", "dest": dest, "counts": counts}


# -- The data in the page, without a browser ---------------------------------------------------------


class Scripts(HTMLParser):
    """Every element of a page by its name, and the text of the scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=False)
        self.texts = []
        self._inside = None
        self.tags = Counter()
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        fields = dict(attrs)
        if fields.get("http-equiv") == "Content-Security-Policy":
            self.policy = fields["content"]
        self._inside = (tag, fields.get("type")) if tag in ("script", "style") else None
        if self._inside:
            self.texts.append([*self._inside, ""])

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.texts[-1][2] += data

    def text(self, tag, kind=None):
        (found,) = [text for name, of, text in self.texts if (name, of) == (tag, kind)]
        return found


def unpacked(text):
    """The lanes that a page holds, by name: what its script makes of the data."""
    data = json.loads(Scripts(text).text("script", "application/json"))
    lanes = {}
    for lane in data["lanes"]:
        lanes[lane["name"]] = records = []
        for shape, *row in lane["rows"]:
            numbers, others = data["shapes"][shape]
            values = [*row[: len(numbers)], *(data["values"][place] for place in row[len(numbers) :])]
            records.append(dict(zip([*numbers, *others], values, strict=True)))
    return lanes


def hostile_records():
    """Strings of an enemy in every field that can hold one, and in the names of fields."""
    for seq, (time_, record) in enumerate(_hostile(), 1):
        yield {"seq": seq, "time": BEGAN + time_, "rank": 0, **record}


def _hostile():
    for at, text in enumerate(HOSTILE, 1):
        refused = {
            "event": "refused",
            "engine": text,
            "call": text,
            "error": text,
            "state": "awake",
            "count": 1,
        }
        yield at, {**refused, text: text, "version": [text, {text: text}]}
    yield 90, {"event": "operation_begin", "state": SCRIPT, "call": IMAGE}
    for at, text in enumerate(HOSTILE, 91):
        yield at, {"event": "transition", "source": text, "dest": text, "trigger": text}
    yield 120, {"event": UNSEEN, "stacks": f"one\n{SCRIPT}\n{UNSEEN}"}
    yield 121, {"event": "failed", "call": UNSEEN, "error": SCRIPT, "__proto__": IMAGE}


def test_every_field_of_every_record_is_in_the_page():
    """Packed as it is, nothing is left out: the page's rows give the records back."""
    lanes = {"busy": told(busy_day), "failed": told(fails_in_its_sleep), "hostile": list(hostile_records())}
    assert unpacked(page(lanes, title="t")) == lanes


def test_what_json_can_not_say_is_in_the_page_as_text():
    """An infinite number, one that a browser would round, and an object become text; nothing is lost."""
    odd = {"a": math.inf, "b": math.nan, "c": 2**53 + 1, "d": {1}, "e": [math.inf], "f": True, "g": None}
    (record,) = unpacked(page({"lane": [{"seq": 1, "time": BEGAN, "event": "x", **odd}]}, title="t"))["lane"]
    written = {
        "a": "inf",
        "b": "nan",
        "c": "9007199254740993",
        "d": "{1}",
        "e": "[inf]",
        "f": True,
        "g": None,
    }
    assert {name: record[name] for name in odd} == written


def test_nothing_out_of_a_log_is_markup_or_script():
    """Whatever stands in a log, the page has the elements that the template has, and no other script."""
    plain = Scripts(page({}, title="t"))
    hostile = Scripts(page({text: hostile_records() for text in HOSTILE}, title=SCRIPT + UNSEEN))
    assert hostile.tags == plain.tags
    for tag in ("script", "style"):
        assert hostile.text(tag) == plain.text(tag)
    data = hostile.text("script", "application/json")
    assert data.isascii()
    assert not set("<>&") & set(data)


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else():
    """By their hashes; no request, no base, no form."""
    parsed = Scripts(page({"lane": hostile_records()}, title=SCRIPT))
    hashes = {
        tag: base64.b64encode(hashlib.sha256(parsed.text(tag).encode()).digest()).decode()
        for tag in ("script", "style")
    }
    assert parsed.policy == (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_the_script_makes_no_markup_and_asks_for_nothing():
    """No way from a string to an element, to code or to an address is in the template."""
    markup = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "setAttribute", "DOMParser")
    code = ("eval(", "Function(", "import(", "setTimeout", "javascript:")
    addresses = ("http:", "https:", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "src=", "href=")
    text = page({}, title="t")
    assert [way for way in (*markup, *code, *addresses) if way in text] == []


def test_records_are_packed():
    """Records repeat themselves, so a page takes far less than their own JSON."""
    records = list(many(20_000))
    assert len(page({"lane": records}, title="t")) < len(json.dumps(records)) / 2.5


# -- Colours -----------------------------------------------------------------------------------------

# What an eye without one kind of cones sees, in linear light (Machado, Oliveira and Fernandes 2009).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
JUST_NOTICED = 2.3  # a difference of so much in the Lab space


def lab(color, eye):
    """A colour as that eye sees it: lightness, and two axes of hue."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    light = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels
    ]
    seen = [min(max(sum(a * b for a, b in zip(row, light, strict=True)), 0), 1) for row in EYES[eye]]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in rows]
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in (value / white for value, white in zip(xyz, (0.9505, 1, 1.089), strict=True))
    )
    return (116 * y - 16, 500 * (x - y), 200 * (y - z))


def colors(scheme):
    """The colours of the states, in the light or the dark scheme."""
    light, dark = re.findall(r":root \{(.*?)\}", page({}, title="t"), re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#\w{6});", dark))
    return {state: found[state.value] for state in State}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("eye", EYES)
def test_every_two_states_have_colours_that_every_eye_tells_apart(eye, scheme):
    """Eight times as far from each other as what is just noticed, whichever cones are missing."""
    seen = {state: lab(color, eye) for state, color in colors(scheme).items()}
    near = {
        (one.value, other.value): round(math.dist(seen[one], seen[other]), 1)
        for one, other in itertools.combinations(seen, 2)
        if math.dist(seen[one], seen[other]) < 8 * JUST_NOTICED
    }
    assert near == {}


# -- In a browser ------------------------------------------------------------------------------------

# How many pixels of each colour are in [x, y, width, height] of the canvas, before what is behind it. A copy
# is read, for reading a canvas itself changes how it is drawn.
PIXELS = """([x, y, width, height]) => {
  const ratio = devicePixelRatio, wide = Math.round(width * ratio), tall = Math.round(height * ratio);
  const copy = new OffscreenCanvas(wide, tall).getContext("2d");
  copy.fillStyle = getComputedStyle(document.body).backgroundColor;
  copy.fillRect(0, 0, wide, tall);
  copy.drawImage(document.getElementById("lanes"), -Math.round(x * ratio), -Math.round(y * ratio));
  const {data} = copy.getImageData(0, 0, wide, tall), counts = {};
  for (let at = 0; at < data.length; at += 4) {
    const color = "#" + [0, 1, 2].map((of) => data[at + of].toString(16).padStart(2, "0")).join("");
    counts[color] = (counts[color] ?? 0) + 1;
  }
  return counts;
}"""
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def whatever_is_missing():
    if importlib.util.find_spec("playwright") is None:
        return "no playwright here; requirements/dev.txt has it"
    if shutil.which("chromium") is None:
        return "no Chromium here; it is in Debian's package `chromium`"
    return None


@pytest.fixture(scope="module")
def chromium():
    missing = whatever_is_missing()
    if missing and os.environ.get("REQUIRE_CHROMIUM") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in the browser, and what can be asked of it."""

    def __init__(self, chromium, address, scheme, scale):
        self.address = address
        self.complaints = []
        self.requests = []
        self.tab = chromium.new_page(
            viewport={"width": 1400, "height": 900}, color_scheme=scheme, device_scale_factor=scale
        )
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        began = time.perf_counter()
        self.tab.goto(address)
        self.settle()
        self.opened_s = time.perf_counter() - began

    def settle(self):
        self.tab.evaluate(FRAMES)

    def ask(self, script, *arguments):
        return self.tab.evaluate(script, *arguments)

    @property
    def lanes(self):
        return {lane["name"]: lane for lane in self.ask("timeline.lanes")}

    @property
    def view(self):
        view = self.ask("timeline.view")
        return view["begin"], view["end"]

    @property
    def drawn(self):
        return self.ask("timeline.drawn")

    @property
    def box(self):
        return self.tab.locator("#lanes").bounding_box()

    def color(self, state):
        """The colour that the legend gives a state."""
        script = (
            "(state) => getComputedStyle(document.querySelector(`[data-state=${state}]`)).backgroundColor"
        )
        red, green, blue = re.findall(r"\d+", self.ask(script, state))[:3]
        return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"

    def variable(self, name):
        return self.ask("(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", name)

    def pixels(self, x, y, width, height):
        return Counter(self.ask(PIXELS, [x, y, width, height]))

    def main_color(self, x, y, width, height):
        return self.pixels(x, y, width, height).most_common(1)[0][0]

    def move(self, x, y):
        self.tab.mouse.move(self.box["x"] + x, self.box["y"] + y)
        self.settle()

    def wheel(self, amount):
        before, began = self.view, time.monotonic()
        self.tab.mouse.wheel(0, amount)
        while self.view == before:  # a wheel's event comes after the call has returned
            assert time.monotonic() - began < 10
        self.settle()

    def drag(self, right, down=0):
        x, y = self.box["x"] + 600, self.box["y"] + 200
        self.tab.mouse.move(x, y)
        self.tab.mouse.down()
        self.tab.mouse.move(x + right / 2, y + down / 2)
        self.tab.mouse.move(x + right, y + down)
        self.tab.mouse.up()
        self.settle()

    def key(self, name):
        self.tab.keyboard.press(name)
        self.settle()

    def text(self, of):
        return re.sub("[\u2068\u2069]", "", self.tab.locator(of).inner_text())  # what sets names apart

    def told(self, of):
        """What the tip or the details say: (name, value) of every row."""
        names, values = (self.tab.locator(f"{of} {part}").all_text_contents() for part in ("dt", "dd"))
        return list(zip(names, values, strict=True))


@pytest.fixture
def show(chromium, tmp_path):
    """Opens a page with these lanes. None may complain, or ask for anything but itself."""
    opened = []

    def now(lanes, *, title="a test", scheme="light", scale=1):
        path = tmp_path / f"timeline-{len(opened)}.html"
        path.write_text(page(lanes, title=title), "utf-8")
        opened.append(Opened(chromium, path.as_uri(), scheme, scale))
        return opened[-1]

    yield now
    for one in opened:
        one.settle()
        assert one.complaints == []
        assert one.requests == [one.address]
        one.tab.close()


RUNS = {"busy": busy_day, "failed": fails_in_its_sleep}


@pytest.mark.parametrize("run", RUNS)
def test_bands_are_the_transitions_of_the_log(show, run):
    """From `attached` and each `transition` to the next one, to the last record of a log that was closed."""
    records = told(RUNS[run])
    lane = show({"rank 0": records}).lanes["rank 0"]
    assert len(lane["bands"]) > 5
    assert lane["bands"] == bands_of(records, records[-1]["time"])
    assert lane["closed"]


def test_a_log_from_disk_is_drawn_without_a_doubt(show, tmp_path):
    """Two engines in turn wrote it, in parts, the first was killed: what the log adds itself is no gap."""
    path, told_of = tmp_path / "log.jsonl", []
    for drive in (hangs_in_its_wake, busy_day):
        log, recorder = AuditLog(path, requests=True, max_bytes=6000), EventRecorder()
        drive(Lifecycle(lambda: SimulatedEngine(max_num_seqs=2), sinks=(log, recorder)))
        log.end(clean=False)
        told_of.append(recorder.events)
    records = [entry.record for entry in reading.read(path)]
    assert len(reading.parts(path)) > 1
    lane = show({"rank 0": records}).lanes["rank 0"]
    assert lane["closed"]
    assert lane["bands"] == bands_of([record for events in told_of for record in events], records[-1]["time"])
    assert [event for event, _ in lane["marks"]] == ["refused"]
    assert {how for *_, how in lane["operations"]} == {"returned"}


@pytest.mark.parametrize(("scheme", "scale"), [("light", 1), ("dark", 2)])
@pytest.mark.parametrize("run", RUNS)
def test_the_pixels_in_the_middle_of_a_band_have_the_colour_of_its_state(show, run, scheme, scale):
    """What is drawn is where the records' times are, in the lane of its log, in the legend's colour."""
    other = "failed" if run == "busy" else "busy"
    lanes = {"above": evenly(told(RUNS[other])), "below": evenly(told(RUNS[run]))}
    shown = show(lanes, scheme=scheme, scale=scale)
    begin, end = shown.view
    scale = shown.box["width"] / (end - begin)
    looked_at = set()
    for place, records in enumerate(lanes.values()):
        beside = shown.tab.locator(f".name:nth-child({place + 1})").bounding_box()
        rectangles = [rectangle for rectangle in shown.drawn["bands"] if rectangle["lane"] == place]
        expected = bands_of(records, records[-1]["time"])
        assert [(r["state"], *r["band"]) for r in rectangles] == [tuple(band) for band in expected]
        for rectangle, (state, since, until) in zip(rectangles, expected, strict=True):
            assert beside["y"] < shown.box["y"] + rectangle["y"] < beside["y"] + beside["height"]
            assert rectangle["x"] == pytest.approx((since - begin) * scale, abs=0.01)
            assert rectangle["width"] == pytest.approx((until - since) * scale, abs=0.01)
            middle = rectangle["x"] + rectangle["width"] / 2
            seen = shown.main_color(middle - 4, rectangle["y"] + 1, 8, rectangle["height"] - 2)
            assert seen == shown.color(state), (place, state)
            looked_at.add(state)
    assert len(looked_at) >= 6


def pairs_of(records):
    """(call, begin, end) of the operations whose end is in the log, in the order in which they began."""
    begun = []
    for record in records:
        if record["event"] == "operation_begin":
            begun.append([record["call"], record["time"], None])
        if record["event"] == "operation_end":
            next(one for one in reversed(begun) if one[0] == record["call"] and one[2] is None)[2] = record[
                "time"
            ]
    return begun


def test_operations_are_from_their_begin_to_their_end(show):
    """One inside the other, too: the whole sleep, and the engine's call in it."""
    records = told(busy_day)
    operations = show({"rank 0": records}).lanes["rank 0"]["operations"]
    assert [operation[:3] for operation in operations] == pairs_of(records)
    assert {operation[3] for operation in operations} == {"returned"}


def test_an_operation_that_raised_is_no_open_one(show):
    """The engine's call, the sleep around it, and the recovery after it: all say that they ended."""
    records = told(fails_in_its_sleep)
    shown = show({"rank 0": records})
    operations = shown.lanes["rank 0"]["operations"]
    assert [operation[:3] for operation in operations] == pairs_of(records)
    how = [(call, how) for call, *_, how in operations]
    assert how[:3] == [("sleep(level=1, mode=wait)", "raised"), ("sleep", "raised"), ("recover", "returned")]
    assert "never returned" not in shown.text("#findings")
    assert "2 operations raised" in shown.text("#findings")


OUTAGE = {"event": "log_outage", "lost": 3, "error": "OSError: no space left on device"}


@pytest.mark.parametrize("said", ["said", "not said"])
def test_where_records_are_missing_nothing_is_claimed(show, said):
    """Neither the state, until the log says it again, nor that an operation whose end may be lost hangs."""
    records = evenly(told(busy_day))
    gone = next(place for place, record in enumerate(records) if is_begin(record, "wake_up")) + 1
    left = [*records[:gone], *records[gone + 3 :]]
    if said == "said":
        left.insert(gone, {**OUTAGE, "time": records[gone]["time"] + 0.5})
    lane = show({"rank 0": left}).lanes["rank 0"]
    noticed = left[gone]["time"]
    assert {"operation_end", "transition"} <= {record["event"] for record in records[gone : gone + 3]}
    assert "never returned" not in {how for *_, how in lane["operations"]}
    assert ["wake_up", records[gone - 1]["time"], noticed, "over"] in lane["operations"]
    assert ["missing", noticed] in lane["marks"]
    assert [event for event, _ in lane["marks"]].count("missing") == 1
    after = next(record["time"] for record in left[gone:] if "dest" in record)
    assert ["unknown", records[gone - 1]["time"], after] in lane["bands"]


def test_an_operation_that_never_returned_goes_to_the_end_of_its_lane_and_says_so(show):
    """Beyond the last record of its log, to the end of the page; in the lane, beside it and above all."""
    hung = evenly(until_it_hung(told(hangs_in_its_wake)))
    other = evenly(told(hangs_in_its_wake), 2.0)
    shown = show({"rank 0": other, "rank 1": hung})
    lane = shown.lanes["rank 1"]
    assert lane["operations"][-1] == ["wake_up", hung[-1]["time"], lane["end"], "never returned"]
    assert lane["end"] > other[-1]["time"] > hung[-1]["time"] == lane["last"]
    assert shown.text(".name:nth-child(2)").split("\n")[1] == "never returned: wake_up"
    assert "rank 1: wake_up never returned" in shown.text("#findings")
    assert "never returned" not in shown.text(".name:nth-child(1)")
    (rectangle,) = (one for one in shown.drawn["operations"] if one["how"] == "never returned")
    for part in (0.6, 0.99):
        x = rectangle["x"] + rectangle["width"] * part
        seen = shown.pixels(x - 12, rectangle["y"] + 3, 12, rectangle["height"] - 6)
        assert seen[shown.variable("--alarm")] > seen.total() / 12
        assert seen[shown.color("sleeping")] == 0


def test_what_hangs_is_the_innermost_operation(show):
    """A sleep that hangs in the engine's call: one finding, that names the call and what waits for it."""
    records = evenly(told(lambda lifecycle: lifecycle.sleep(1)))
    until = next(place for place, record in enumerate(records) if is_begin(record, "sleep"))
    shown = show({"rank 0": records[: until + 1]})
    assert [how for *_, how in shown.lanes["rank 0"]["operations"]] == ["never returned"] * 2
    assert shown.text("#findings").startswith("sleep in sleep(level=1, mode=wait) never returned")
    assert shown.text("#findings").count("never returned") == 1


def test_what_a_log_says_after_another_start_does_not_end_an_operation(show):
    """A process was killed in a wake, and another one went on with its log: the wake never returned."""
    records = evenly([*until_it_hung(told(hangs_in_its_wake)), *told(busy_day)])
    again = [record["time"] for record in records if record["event"] == "attached"][1]
    shown = show({"rank 0": records})
    stuck = [one for one in shown.lanes["rank 0"]["operations"] if one[3] == "never returned"]
    assert [(call, end) for call, _, end, _ in stuck] == [("wake_up", again)]


def test_the_lines_are_the_counts_and_the_memory_of_the_log(show):
    """Counts at every record that has them, what remains of a drain too; memory around its operation."""
    records = evenly(told(busy_day))
    progress = {"event": "drain_progress", "call": "sleep(level=1, mode=wait)", "remaining": 17}
    drain = next(place for place, record in enumerate(records) if record.get("trigger") == "drain")
    records.insert(drain + 1, {"seq": 999, "time": records[drain]["time"] + 0.5, **progress})
    lane = show({"rank 0": records}).lanes["rank 0"]
    counted = [
        record for record in records if "in_flight" in record.get("counts", {}) or "remaining" in record
    ]
    in_flight = [record.get("remaining", record.get("counts", {}).get("in_flight")) for record in counted]
    assert lane["inFlight"] == {"times": [record["time"] for record in counted], "values": in_flight}
    assert 17 in in_flight
    assert lane["held"]["values"] == [record["counts"]["held"] for record in counted if "counts" in record]
    ended = {end: begin for call, begin, end in pairs_of(records) if call in ("sleep", "wake_up")}
    points = []
    for record in records:
        if record["event"] == "memory":
            end = max(time for time in ended if time < record["time"])
            points += [(ended[end], record["bytes"]["device_before"]), (end, record["bytes"]["device_after"])]
    assert list(zip(lane["memory"]["times"], lane["memory"]["values"], strict=True)) == points
    assert len(points) >= 8


def test_a_line_is_the_higher_the_more_there_is(show):
    """Pixels: the line of requests in flight stands highest where the log has the most."""
    log = [
        {"seq": seq, "time": BEGAN + seq, "event": "transition", "source": "awake", "dest": "running",
         "counts": {"in_flight": number, "held": 0}}
        for seq, number in enumerate((0, 40, 10, 20, 0))
    ]  # fmt: skip
    shown = show({"rank 0": log})
    rectangles = shown.drawn["bands"]
    ink, tops = shown.variable("--ink"), []
    for rectangle in rectangles[:4]:
        x, y = rectangle["x"] + rectangle["width"] * 0.7, rectangle["y"] + rectangle["height"] + 10
        rows = [shown.pixels(x, y + row, 1, 1) for row in range(130)]
        dark = [row for row, seen in enumerate(rows) if lab(next(iter(seen)), "all cones")[0] < 50]
        tops.append(dark[0])
    assert lab(ink, "all cones")[0] < 20
    assert sorted(range(4), key=lambda place: tops[place]) == [1, 3, 2, 0]
    none, forty, ten, twenty = tops
    assert (none - twenty) / (none - forty) == pytest.approx(0.5, abs=0.05)
    assert (none - ten) / (none - forty) == pytest.approx(0.25, abs=0.05)


MARKED = (
    *("failed", "stalled", "log_outage", "sink_failed"),
    *("request_rejected", "unexpected_output", "refused"),
)


def test_what_went_wrong_is_marked(show):
    """Refusals, failures, stalls, outages and broken sinks stand over their lane, at their time."""
    log = evenly(
        [{"seq": seq, "event": event, "state": "awake"} for seq, event in enumerate(("noop", *MARKED))]
    )
    shown = show({"rank 0": log})
    assert shown.lanes["rank 0"]["marks"] == [[record["event"], record["time"]] for record in log[1:]]
    paper = shown.variable("--paper")
    for mark in shown.drawn["marks"]:
        seen = shown.pixels(mark["x"] - 5, mark["y"] - 5, 10, 10)
        assert seen[paper] < seen.total() * 0.8, mark["event"]
    assert [mark["event"] for mark in shown.drawn["marks"]] == list(MARKED)
    assert shown.color("awake") in shown.pixels(200, 15, 600, 20)


@pytest.mark.parametrize("place", [100, 7_001, 19_990])
def test_a_failure_is_never_joined_away(show, place):
    """One failed state of a millisecond among 20,000 others is seen, as a band and as a mark."""
    log = []
    for seq in range(20_000):
        dest = "failed" if seq == place else ("running", "sleeping", "draining")[seq % 3]
        log.append({"time": BEGAN + seq, "event": "transition", "source": "awake", "dest": dest})
    log[place]["time"] = log[place + 1]["time"] - 0.001
    log.insert(place + 1, {**log[place], "event": "failed", "error": "RuntimeError: gone", "call": "step"})
    log.append({**log[-1], "event": "closed"})
    shown = show({"rank 0": log})
    failed = [rectangle for rectangle in shown.drawn["bands"] if rectangle["state"] == "failed"]
    assert failed
    begin, end = shown.view
    x = (log[place]["time"] - begin) * shown.box["width"] / (end - begin)
    rectangle = failed[-1]
    assert rectangle["x"] - 1 <= x <= rectangle["x"] + rectangle["width"] + 1
    assert shown.color("failed") in shown.pixels(
        rectangle["x"], rectangle["y"], rectangle["width"], rectangle["height"]
    )
    assert [mark["event"] for mark in shown.drawn["marks"]] == ["failed"]


def test_bands_that_are_joined_keep_their_parts_of_the_time(show):
    """Where no band can be seen alone, each state has its part of the height."""
    log = []
    for cycle in range(10_000):
        for dest, at in (("running", 0.0), ("sleeping", 0.25)):
            log.append({"time": BEGAN + cycle + at, "event": "transition", "source": "awake", "dest": dest})
    log.append({"time": BEGAN + 10_000, "event": "closed"})
    shown = show({"rank 0": log})
    heights = Counter()
    for rectangle in shown.drawn["bands"]:
        heights[rectangle["state"]] += rectangle["height"] * rectangle["width"]
    assert heights["sleeping"] / heights.total() == pytest.approx(0.75, abs=0.02)
    top, high = shown.drawn["bands"][0]["y"], 24
    assert shown.main_color(300, top + 1, 300, high * 0.15) == shown.color("running")
    assert shown.main_color(300, top + high * 0.4, 300, high * 0.5) == shown.color("sleeping")


def test_the_tip_has_every_field_of_what_is_under_the_pointer(show):
    """The transition that led to the state, with all that its record says."""
    records = evenly(told(busy_day, name="llm", rank=3))
    record = next(record for record in records if record.get("dest") == "sleeping" and record["level"] == 1)
    record["added"] = "by a later version"
    shown = show({"rank 3": records})
    band = next(band for band in shown.drawn["bands"] if band["state"] == "sleeping")
    shown.move(band["x"] + band["width"] / 4, band["y"] + 5)
    rows = dict(shown.told("#tip"))
    assert set(record) <= set(rows)
    for name, value in record.items():
        if isinstance(value, str | int) and name != "time":
            assert rows[name] == str(value)
    assert float(rows["duration_s"]) == record["duration_s"]
    assert rows["counts"] == "in_flight 0, held 2, undelivered 2"
    assert rows["resident"] == "none"
    assert rows["time"].endswith("(2026-01-01 00:00:06.000000 UTC)")
    since, until = band["band"]
    assert f"sleeping for {until - since:g} s" in shown.text("#tip")
    shown.move(5, 880)
    assert not shown.tab.locator("#tip").is_visible()


def test_the_tip_has_the_operation_and_the_marks_under_the_pointer(show):
    """An operation with the fields of its end that its beginning had not; a mark with its error."""
    records = evenly(told(busy_day))
    shown = show({"rank 0": records})
    inner = next(one for one in shown.drawn["operations"] if one["call"] == "sleep")
    shown.move(inner["x"] + inner["width"] / 2, inner["y"] + 5)
    assert "sleep in sleep(level=1, mode=wait) returned after 1 s" in shown.text("#tip")
    assert [value for name, value in shown.told("#tip") if name == "event"][:2] == [
        "operation_end",
        "operation_begin",
    ]
    (mark,) = shown.drawn["marks"]
    shown.move(mark["x"], mark["y"])
    (refusal,) = (record for record in records if record["event"] == "refused")
    assert ("error", refusal["error"]) in shown.told("#tip")


def test_a_click_keeps_the_details_and_escape_drops_them(show):
    """What was under the pointer stays, to be read to its end and copied."""
    error = "RuntimeError: " + "far too long " * 100
    log = evenly([{"seq": 1, "event": "failed", "state": "awake", "call": "step", "error": error}] * 2)
    shown = show({"rank 0": log})
    mark = shown.drawn["marks"][0]
    shown.move(mark["x"], mark["y"])
    assert len(dict(shown.told("#tip"))["error"]) < 400
    shown.tab.mouse.click(shown.box["x"] + mark["x"], shown.box["y"] + mark["y"])
    shown.move(5, 700)
    assert dict(shown.told("#details"))["error"] == error
    shown.key("Escape")
    assert not shown.tab.locator("#details").is_visible()


def test_the_wheel_zooms_around_the_pointer(show):
    """The time under the pointer stays where it is; everything else comes nearer, or goes away."""
    shown = show({"rank 0": evenly(told(busy_day))})
    x = 400.0
    shown.move(x, 40)

    def under_pointer():
        begin, end = shown.view
        return begin + x * (end - begin) / shown.box["width"], end - begin

    time_before, span_before = under_pointer()
    shown.wheel(-300)
    time_after, span_after = under_pointer()
    assert span_after < span_before * 0.7
    assert time_after == pytest.approx(time_before, abs=1e-5)
    shown.wheel(300)
    time_back, span_back = under_pointer()
    assert span_back == pytest.approx(span_before, rel=1e-6)
    assert time_back == pytest.approx(time_before, abs=1e-5)


def test_a_drag_pans(show):
    """What is dragged follows the pointer, pixel by pixel; the length of the view stays."""
    shown = show({"rank 0": evenly(told(busy_day))})
    begin, end = shown.view
    shown.drag(150)
    moved = 150 * (end - begin) / shown.box["width"]
    assert shown.view == (pytest.approx(begin - moved, abs=1e-5), pytest.approx(end - moved, abs=1e-5))


@pytest.mark.parametrize("how", ["double click", "0", "Home", "button"])
def test_all_of_it_is_shown_again(show, how):
    """A double click, a key and a button lead back to the view in which the page opened."""
    shown = show({"rank 0": evenly(told(busy_day))})
    whole = shown.view
    shown.move(300, 40)
    shown.wheel(-500)
    shown.drag(77)
    assert shown.view != whole
    if how == "double click":
        shown.tab.mouse.dblclick(shown.box["x"] + 500, shown.box["y"] + 300)
    elif how == "button":
        shown.tab.locator("#fit").click()
    else:
        shown.tab.keyboard.press(how)
    shown.settle()
    assert shown.view == whole
    begin, end = shown.view
    last = shown.lanes["rank 0"]["end"]
    assert begin < BEGAN < last < end


def test_keys_do_what_the_pointer_does(show):
    """`+` and `-` zoom, the arrows move."""
    shown = show({f"rank {rank}": evenly(told(busy_day)) for rank in range(64)})
    begin, end = shown.view
    for key in ("+", "="):
        before = shown.view[1] - shown.view[0]
        shown.key(key)
        assert shown.view[1] - shown.view[0] < before
    for key in ("-", "_"):
        shown.key(key)
    assert shown.view == (pytest.approx(begin), pytest.approx(end))
    shown.key("ArrowRight")
    assert shown.view[0] > begin + 1
    shown.key("ArrowLeft")
    assert shown.view == (pytest.approx(begin), pytest.approx(end))
    shown.key("ArrowDown")
    assert 0 < shown.ask("document.getElementById('scroller').scrollTop") < 100
    shown.key("PageDown")
    lowered = shown.ask("document.getElementById('scroller').scrollTop")
    assert lowered > 300
    shown.key("ArrowUp")
    assert 0 < shown.ask("document.getElementById('scroller').scrollTop") < lowered


def test_a_finding_leads_to_its_lane(show):
    """A click on what never returned shows it: the lane that was far below, the time, and the record."""
    lanes = {f"rank {rank}": evenly(told(hangs_in_its_wake)) for rank in range(64)}
    lanes["rank 50"] = until_it_hung(lanes["rank 50"])
    shown = show(lanes)
    assert 50 not in {rectangle["lane"] for rectangle in shown.drawn["bands"]}
    shown.tab.locator("#findings button").first.click()
    shown.settle()
    (stuck,) = (one for one in shown.drawn["operations"] if one["how"] == "never returned")
    assert stuck["lane"] == 50
    assert 0 < stuck["x"] < stuck["x"] + stuck["width"] < shown.box["width"]
    assert 0 < stuck["y"] < shown.box["height"]
    assert ("seq", str(lanes["rank 50"][-1]["seq"])) in shown.told("#details")


def test_findings_that_are_alike_are_one(show):
    """64 ranks that hang in the same call are one thing to know, with the first of them named."""
    hung = evenly(until_it_hung(told(hangs_in_its_wake)))
    shown = show({f"rank {rank}": hung for rank in range(64)})
    assert shown.tab.locator("#findings button").count() == 1
    said = shown.text("#findings")
    assert said.startswith("rank 0, rank 1, rank 2 and 61 others: wake_up never returned")


def test_a_good_run_is_said_to_be_one(show):
    """Where nothing stands out the page says so, and counts the little that went wrong."""
    shown = show({"rank 0": told(busy_day)})
    said = " ".join(shown.text("#findings").split())
    assert said == "Every call returned, and nothing failed. 1 refusal."
    assert shown.text(".name").split("\n")[1] == "ended, closed"


ODD_LOGS = {
    "no lane": {},
    "no record": {"rank 0": []},
    "one record": {"rank 0": [{"seq": 1, "time": BEGAN, "event": "attached", "dest": "awake"}]},
    "no fields": {"rank 0": [{"seq": 1, "time": BEGAN, "event": "memory"}, {"time": BEGAN, "event": ""}]},
    "an end without a beginning": {
        "rank 0": [{"seq": 1, "time": BEGAN, "event": "operation_end", "call": "wake_up", "duration_s": 1}]
    },
    "huge numbers": {
        "rank 0": [
            {"seq": 2**60, "time": BEGAN, "event": "attached", "dest": "awake", "level": 2**60},
            {"seq": 2**61, "time": BEGAN + 1, "event": "stalled", "call": "wake_up", "duration_s": 10**17},
            {"seq": 7, "time": BEGAN + 2, "event": "refused", "count": 2**62, "counts": {"held": 2**62}},
            {"seq": 8, "time": BEGAN + 3, "event": "memory", "bytes": {"device_after": 2**62}},
        ]
    },
    "a mad clock": {
        "rank 0": [
            {"seq": seq, "time": at, "event": "transition", "source": "awake", "dest": "running"}
            for seq, at in enumerate((0.0, 1e12, -5.0, 1e17))
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("log", ODD_LOGS)
def test_an_odd_log_is_drawn_as_far_as_it_goes(show, log):
    """Nothing that a log lacks stops the page."""
    shown = show(ODD_LOGS[log])
    assert list(shown.lanes) == list(ODD_LOGS[log])
    shown.move(300, 25)
    shown.wheel(-200)
    shown.key("0")
    assert shown.drawn["milliseconds"] > 0


def test_a_log_that_begins_in_the_middle_says_in_which_state(show):
    """The first record of a log whose beginning is gone tells where the engine was."""
    records = told(busy_day)
    drain = next(place for place, record in enumerate(records) if record.get("trigger") == "drain")
    bands = show({"rank 0": records[drain:]}).lanes["rank 0"]["bands"]
    assert bands == bands_of(records[drain:], records[-1]["time"])
    bands = show({"rank 0": records[drain - 1 :]}).lanes["rank 0"]["bands"]
    assert bands[0] == ["running", records[drain - 1]["time"], records[drain]["time"]]


def test_a_clock_that_goes_back_does_not_turn_a_band_around(show):
    """Records are drawn in the order of their numbers; the lane says that its clock was set."""
    records = evenly(told(busy_day))
    for record in records[10:]:
        record["time"] -= 9
    shown = show({"rank 0": records})
    times = [band[1] for band in shown.lanes["rank 0"]["bands"]]
    assert times == sorted(times)
    assert "the clock went back by 8 s" in shown.text(".name")


def test_a_hostile_log_executes_nothing_and_is_seen_for_what_it_is(show):
    """Markup is text, and what can't be seen, or turns text around, is written out."""
    shown = show({text: hostile_records() for text in HOSTILE}, title=SCRIPT + UNSEEN)
    for x in range(0, 1160, 80):
        shown.move(x, 22)
        shown.tab.mouse.click(shown.box["x"] + x, shown.box["y"] + 22)
    for button in shown.tab.locator("#findings button").all():
        button.click()
    assert shown.ask("window.hacked") is None
    assert shown.tab.locator("img, iframe, a, link, object, embed, form").count() == 0
    assert shown.ask("document.scripts.length") == 2
    escaped = "\\u{1b}[2J\\u{202e}abc\\u{2066}\\u{200b}\\u{0}\\u{2028}\\u{d800}"
    assert shown.tab.title() == SCRIPT + escaped
    assert shown.text("h1") == SCRIPT + escaped
    names = shown.tab.locator(".name b").all_text_contents()
    assert names == [escaped if text == UNSEEN else text for text in HOSTILE]
    rows = dict(shown.told("#details"))
    assert rows["call"] == escaped
    assert rows["error"] == SCRIPT
    assert rows["__proto__"] == IMAGE
    everything = shown.ask(
        "document.body.innerText + [...document.querySelectorAll('*')].map((one) => one.title).join()"
    )
    assert not re.search("[\x00-\x08\x0b-\x1f\u200b-\u200f\u202a-\u202e\u2066\u2067]", everything)
    assert everything.count("\u2068") == everything.count("\u2069") > 10


def test_sixty_four_lanes_and_100_000_records_are_drawn_at_once(show):
    """It opens within seconds, and answers a turn of the wheel within a fraction of one."""
    for name, lanes in {
        "one lane": {"rank 0": many(100_000)},
        "64 lanes": {f"rank {rank}": many(100_000 // 64, rank=rank) for rank in range(64)},
    }.items():
        shown = show(lanes)
        draws = [shown.ask("(timeline.draw(), timeline.drawn.milliseconds)") for _ in range(5)]
        shown.move(700, 30)
        wheels = []
        for _ in range(6):
            shown.wheel(-200)
            wheels.append(shown.ask("timeline.drawn.milliseconds"))
        size = len(shown.tab.content())
        report.say(
            "timeline",
            f"100,000 records in {name}: {size / 1e6:.1f} MB, opened in {shown.opened_s:.1f} s, drawn in "
            f"{min(draws):.0f} to {max(draws):.0f} ms, after a turn of the wheel in {min(wheels):.0f} to "
            f"{max(wheels):.0f} ms",
        )
        assert shown.opened_s < 10
        assert min(draws) < 200
        assert min(wheels) < 200
        shown.drag(0, -150)
        scrolled = shown.ask("document.getElementById('scroller').scrollTop")
        assert scrolled == (150 if name == "64 lanes" else 0)
