"""`lifecycle audit` on logs of strangers: whatever is in a file, a command answers, and a terminal is safe.

What must hold is the same for all: a status of 0, 1 or 2, no exception, and on both outputs nothing but
printable characters and ends of lines; where colours are forced, those of rich as well.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import cli
from lifecycle.audit import AuditLog
from lifecycle.audit import format as form
from lifecycle.audit.screen import as_json, safe
from lifecycle.table import RULES
from tests.audit_runs import run_with

ROOT = Path(__file__).resolve().parent.parent
HEADER = {
    "event": "log_opened",
    "format": 1,
    "table": 1,
    "rules": [[rule.trigger, rule.source, rule.dest] for rule in RULES],
    "engine": "rollout",
    "rank": 0,
    "host": "host",
    "pid": 7,
    "time": 1.8e9,
    "part": 1,
    "first": 1,
    "chain": "00",
    "after": "",
}
COMMANDS = (
    ["show"],
    ["show", "--json"],
    [
        "show",
        "--state",
        "running",
        "--request",
        "r",
        "--since",
        "-1s",
        "--until",
        "2100-01-01",
        "--last",
        "9",
    ],
    ["verify"],
    ["verify", "--json"],
    ["stats"],
    ["stats", "--json"],
    ["merge"],
    ["merge", "--json"],
    ["export"],
    ["timeline", "-o", "page.html"],
)
TWICE = frozenset({"merge"})  # beside another log
SGR = re.compile(r"\x1b\[[0-9;]*m")
# What rich draws a view with: it moves the cursor, and clears.
MOVES = re.compile(r"\x1b\[\??[0-9;]*[A-Za-z]|\r")


class Terminal(io.TextIOWrapper):
    """An output that is kept."""

    def __init__(self, *, interactive):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.interactive = interactive

    def isatty(self):
        return self.interactive

    @property
    def text(self):
        return self.buffer.getvalue().decode()


def call(*arguments, interactive=False):
    """(exit status, output, errors) of `lifecycle audit`."""
    out, errors = Terminal(interactive=interactive), Terminal(interactive=interactive)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = cli.main(["audit", *map(str, arguments)])
        except SystemExit as exit_:  # argparse's
            status = exit_.code
    return status, out.text, errors.text


# Printable to Python, and nothing to be seen of them.
UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u180b\u2800\u3164\ufe0f\uffa0\U000e0100")


def unprintable(text):
    return {each for each in text if each != "\n" and (not each.isprintable() or each in UNSEEN)}


def check_all(folder, data, commands=COMMANDS):
    """Every command answers for a log that holds these bytes."""
    path, other = folder / "log.jsonl", folder / "other.jsonl"
    path.write_bytes(data)
    for name, *options in commands:
        paths = [path, other] if name in TWICE else [path]
        placed = [folder / each if each == "page.html" else each for each in options]
        status, out, errors = call(name, *paths, *placed)
        assert status in {0, 1, 2}, (name, errors)
        assert not unprintable(out + errors), (name, unprintable(out + errors))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where logs are written, with one that is whole."""
    place = tmp_path_factory.mktemp("hostile")
    run_with(AuditLog(place / "other.jsonl", texts=True), cycles=1)
    return place


@pytest.fixture(scope="module")
def whole(folder):
    return (folder / "other.jsonl").read_bytes()


def sealed(*records, header=HEADER):
    """A log of these records, with the sums that fit them."""
    chain = header["chain"] if isinstance(header.get("chain"), str) else ""
    lines = []
    for record in (header, *records):
        line, after = form.seal(record, chain)
        chain = chain if record.get("event") in form.FRAMES else after
        lines.append(line)
    return b"".join(lines)


def record(seq=1, **fields):
    return {"seq": seq, "time": 1.8e9 + seq, "engine": "rollout", "rank": 0, "event": "noop", **fields}


# -- texts -------------------------------------------------------------------------------------------

TRICKS = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets a title": "\x1b]0;owned\x07",
    "a C1 control": "\x9b31m\x85",
    "deletes": "\x7f\x08\x00",
    "ends the line": "a\r\nb\x0bc\x0c\x1c\u2028\u2029",
    "turns the direction": "\u202eabc\u2066\u200f",
    "is not seen": "\u200b\u200d\ufeff\u2060\u00ad\U000e0041" + "".join(sorted(UNSEEN)),
    "is no character": "\ud800-\udfff-\uffff\ufdd0",
    "markup of rich": "[red]x[/red][link=http://x]y[/link]:smile:",
    "markup of a page": "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "a formula": "=cmd|' /C calc'!A0",
    "a format": "%s %(prog)s {0} {rank}",
}
TEXT_FIELDS = (
    "engine",
    "event",
    "call",
    "trigger",
    "source",
    "dest",
    "state",
    "host",
    "error",
    "request",
    "outcome",
)


@pytest.mark.parametrize("trick", TRICKS)
def test_texts_of_strangers_are_shown_for_what_they_are(folder, trick):
    """A text in any field of any record reaches no output but as printable characters."""
    text = TRICKS[trick]
    texts = dict.fromkeys((*TEXT_FIELDS, "weights", "version", text), text)
    log = sealed(
        record(1, event="attached", dest=text),
        record(2, event="transition", trigger=text, source=text, dest=text, call=text, duration_s=1.0),
        record(3, event="operation_begin", call=text),
        record(4, event="request_admitted", request=text),
        record(5, event="request_finished", request=text, outcome=text, tokens=1),
        record(6, event="refused", call=text, error=text, count=1),
        record(7, event="failed", call=text, error=text),
        record(8, event="weights", weights="valid", version=text, epoch=1),
        record(9, **{**texts, "event": "noop"}, more={text: [text]}),
        record(10, **texts),
        record(11, event="request_admitted", request=text + text),
        header={**HEADER, "engine": text, "host": text},
    )
    check_all(folder, log)
    for name in ("show", "verify", "stats", "export"):
        assert safe(text) in call(name, folder / "log.jsonl")[1], name
    assert json.loads(call("show", "--json", folder / "log.jsonl")[1].splitlines()[7])["error"] == text


@pytest.mark.parametrize("trick", TRICKS)
def test_forced_colours_add_nothing_but_colours(folder, trick, monkeypatch):
    """Where colours are forced, the output is the same text with those of rich, and no markup was read."""
    text = TRICKS[trick]
    path = folder / "coloured.jsonl"
    path.write_bytes(sealed(record(1, event="failed", call=text, error=text), record(3, request=text)))
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no colours, forced or not
    for name in ("show", "verify", "stats"):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        plain = call(name, path)[1]
        monkeypatch.setenv("FORCE_COLOR", "1")
        coloured = call(name, path)[1]
        stripped = SGR.sub("", coloured)
        assert not unprintable(stripped)
        assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
        assert coloured != stripped or name == "stats"


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("interactive", [False, True])
def test_follow_is_as_safe(folder, trick, monkeypatch, interactive):
    """Followed logs are shown as safely, as lines and as a view."""

    def interrupt(seconds):
        raise KeyboardInterrupt

    text = TRICKS[trick]
    path = folder / "followed.jsonl"
    log = sealed(
        record(1, event="attached", dest=text),
        record(2, event="operation_begin", call=text, counts={"in_flight": 1 << 62}),
        header={**HEADER, "engine": text},
    )
    path.write_bytes(log)
    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    status, out, errors = call("show", "--follow", path, folder / "other.jsonl", interactive=interactive)
    assert (status, errors) == (130, "")
    assert ("\x1b[?25l" in out) == interactive
    assert not unprintable(MOVES.sub("", out))
    assert safe(text)[:20] in out


def test_a_text_without_end_is_cut(folder):
    """Megabytes of text are a line of some hundred characters, with how many there were."""
    text = "A" * 900_000
    (folder / "log.jsonl").write_bytes(sealed(record(1, error=text, request=text, call=text, version=[text])))
    for name in ("show", "verify", "stats", "merge"):
        out = call(name, folder / "log.jsonl")[1]
        assert max(map(len, out.splitlines())) < 1000, name
    assert f"({len(text)} characters)" in call("stats", folder / "log.jsonl")[1]


# -- bytes -------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=400))
@settings(max_examples=40, deadline=None)
def test_any_bytes(folder, data):
    """A file of any bytes is answered for."""
    check_all(folder, data)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_log(folder, whole, data):
    """So is a log with bits flipped, cut, doubled, or its lines in another order."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(("flip", "cut", "remove", "double", "insert", "swap")))
        length = data.draw(st.integers(1, 300))
        if kind == "flip":
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[place + 1 :]
        elif kind == "remove":
            del damaged[place : min(place + length, len(damaged) - 1)]
        elif kind == "double":
            damaged[place:place] = damaged[place : place + length]
        elif kind == "insert":
            damaged[place:place] = data.draw(st.binary(min_size=1, max_size=20))
        else:
            lines = damaged.splitlines(keepends=True)
            one, two = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            lines[one], lines[two] = lines[two], lines[one]
            damaged = bytearray(b"".join(lines))
    check_all(folder, bytes(damaged))


def test_every_flipped_byte_is_found(folder, whole):
    """Wherever one byte of a log is changed, `verify` finds it, in one or two lines."""
    path = folder / "flipped.jsonl"
    places = range(7, len(whole) - 1, 211)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        status, out, _ = call("verify", path)
        assert status == 1, place
        line = whole[:place].count(b"\n") + 1
        assert f"{path}:{line}: " in out or f"{path}:{line + 1}: " in out
        assert out.count(f"{path}:") <= 3, out  # one or two, and the session


# -- records -----------------------------------------------------------------------------------------

NAMES = sorted(
    {"transition", "attached", "operation_begin", "operation_end", "request_admitted", "request_finished"}
    | {"memory", "weights", "refused", "noop", "repeated", "failed", "drain_progress", "stalled", "closed"}
    | form.FRAMES
)
FIELDS = sorted(
    {*TEXT_FIELDS, *HEADER, "seq", "count", "of", "epoch", "steps", "tokens", "remaining", "last", "lost"}
    | {"duration_s", "drain_s", "counts", "bytes", "resident", "held", "level", "weights", "version", "path"}
    | {"line", "problem", "record", "sum"}
)
texts = st.text(max_size=8) | st.sampled_from(
    ("awake", "running", "sleeping", "drain", "r", *TRICKS.values())
)
numbers = (
    st.integers(0, 5) | st.integers() | st.sampled_from((1 << 63, -1, 10**300, 1 << 62, 0.5, 1e17, 1e308))
)
scalars = st.none() | st.booleans() | numbers | texts | st.floats(allow_nan=False, allow_infinity=False)
keys = texts | st.sampled_from(
    ("in_flight", "held", "device_before", "device_after", "host_before", "host_after")
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=6,
)
counts = st.integers(0, 3) | st.sampled_from((1 << 62, (1 << 63) - 1))
KINDS = {  # what a field may be by its format, at the edges
    "time": st.floats(0, 2.5e11) | st.integers(0, 3),
    "counts": st.dictionaries(keys, counts, max_size=3),
    "bytes": st.dictionaries(keys, st.none() | counts, max_size=4),
    "resident": st.lists(texts, max_size=2),
    "held": st.booleans(),
    "level": st.none() | counts,
    "rules": st.lists(st.tuples(texts, st.none() | texts, texts), max_size=3),
    **dict.fromkeys(("duration_s", "drain_s"), st.floats(0, 1e17) | counts.filter(lambda n: n < 10**18)),
    **dict.fromkeys((*TEXT_FIELDS, "weights", "chain", "after"), texts),
    **dict.fromkeys(("seq", "count", "of", "epoch", "rank", "pid", "steps", "tokens", "remaining"), counts),
    **dict.fromkeys(("part", "first", "last", "lost", "table", "format"), counts),
}
# Mostly of the right kind: a record that is refused as a whole gets no further.
records = st.lists(
    st.sampled_from(FIELDS).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(*[KINDS.get(name, anything)] * 9, anything))
    ),
    max_size=6,
).map(dict)


@given(
    wild=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), records), max_size=8),
    header=records,
)
@settings(max_examples=60, deadline=None)
def test_any_records_with_sums_that_fit(folder, wild, header):
    """Records whose sums fit, with whatever in their fields: right kinds and wrong ones."""
    told = []
    owed = {"trigger": "drain", "source": "running", "dest": "draining", "call": "sleep", "request": "r"}
    owed |= {"outcome": "stop", "tokens": 3, "last": 1, "lost": 0, "error": "e", **HEADER}
    for seq, (name, complete, fields) in enumerate(wild, 1):
        told.append({**(owed if complete else {}), **record(seq), **fields, "event": name})
    check_all(folder, sealed(*told, header={**HEADER, **header, "event": "log_opened"}))


@pytest.mark.parametrize(
    "line",
    [
        b'{"seq":1,"time":1,"event":"noop","call":NaN}',
        b'{"seq":1,"time":1,"event":"noop","version":1e999}',
        b'{"seq":1,"time":1,"event":"noop","version":-1e999,"deep":[[1e999]]}',
        b'{"seq":1,"time":1e400,"event":"noop"}',
        b'{"seq":1,"time":253402300799,"event":"noop"}',
        b'{"seq":1,"time":-1,"event":"noop"}',
        b'{"seq":1,"seq":2,"time":1,"time":2,"event":"noop","event":"failed"}',
        b'{"seq":1,"time":1,"event":"noop","version":' + b"9" * 4000 + b"}",
        b'{"seq":1,"time":1,"event":"noop","version":' + b"9" * 5000 + b"}",
        b'{"seq":' + b"9" * 5000 + b',"time":1,"event":"noop"}',
        b'{"seq":1,"time":1,"event":"noop","deep":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"seq":1,"time":1,"event":"noop","deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"seq":1,"time":1,"event":"noop","error":"' + b"x" * (5 << 20) + b'"}',
        b'{"seq":1,"time":1,"event":"noop"}   ',
        b'\xef\xbb\xbf{"seq":1,"time":1,"event":"noop"}',
        '{"seq":1,"time":1,"event":"noop"}'.encode("utf-16"),
        b'{"event":["noop"]}',
        b'{"event":{}}',
        b"[]",
        b"null",
        b'"log_opened"',
        b"{}",
        b"\0" * 4096,
        b"",
    ],
    ids=lambda line: repr(line[:60]),
)
def test_lines_that_are_odd(folder, line):
    """JSON at its edges: what it can't hold, what is too large, too deep, too long, or no record at all."""
    log = sealed()
    check_all(folder, log + line + b"\n" + line)
    for depth in (400, 700, 900, 950):
        nested = log + line.replace(b"[" * 200 + b"]" * 200, b"[" * depth + b"]" * depth) + b"\n"
        if b"[" * depth in line or nested != log + line + b"\n":
            check_all(folder, nested)


def test_a_value_that_json_cannot_hold_is_said():
    """Infinity, and what is nested too deeply to be written, become a text; the fields beside it stay."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (float("inf"), [float("-inf")], deep):
        assert json.loads(as_json({"a": 1, "b": value})) == {"a": 1, "b": "(a value that JSON can't hold)"}
        assert json.loads(as_json(value)) == "(a value that JSON can't hold)"


def test_rules_that_are_no_rules(folder):
    """A header whose table is of other kinds is a problem, and ends nothing."""
    for rules in ([["a", [], "b"]], [["a", {}, "b"]], [[1, 2, 3]], [[]], {}, "rules", [["a", "b"]], None):
        check_all(folder, sealed(record(), header={**HEADER, "rules": rules}))


def test_times_that_go_backwards_are_no_problem(folder):
    """A clock that was set back, or is absurd, costs no status: only what lies between is not counted."""
    times = (1.8e9, 5.0, 2.5e11, 0, 1.8e9)
    log = sealed(
        *(record(seq, time=at, event="attached", dest="awake") for seq, at in enumerate(times[:1], 1)),
        *(
            record(seq, time=at, event="transition", trigger=trigger, source=source, dest=dest)
            for seq, (at, trigger, source, dest) in enumerate(
                zip(
                    times[1:],
                    ("drain", "slept", "wake", "close"),
                    ("awake", "draining", "sleeping", "awake"),
                    ("draining", "sleeping", "awake", "closed"),
                    strict=True,
                ),
                2,
            )
        ),
    )
    check_all(folder, log)
    path = folder / "log.jsonl"
    for name in ("show", "verify", "stats"):
        assert call(name, path)[0] == 0, name
    states = json.loads(call("stats", path, "--json")[1])["together"]["states"]
    assert all(seconds >= 0 for seconds in states.values())


# -- how long it takes, and how much it holds --------------------------------------------------------


def test_lines_that_all_misfit_take_no_longer(folder):
    """A log in which no sum fits is read in the time of one in which all do, and not in the square of it."""
    lines = sealed(*(record(seq) for seq in range(1, 4001))).splitlines(keepends=True)
    lines = [lines[0], *(line[:-4] + b'g"}\n' for line in lines[1:])]
    (folder / "log.jsonl").write_bytes(b"".join(lines))
    started = time.process_time()
    assert call("verify", folder / "log.jsonl")[0] == 1
    assert time.process_time() - started < 5


def test_operations_that_never_end_take_no_longer(folder):
    """So is one in which thousands of operations begin and none of them ends."""
    begun = [record(seq, event="operation_begin", call=f"c{seq}") for seq in range(1, 4001)]
    ended = [record(seq, event="operation_end", call="other") for seq in range(4001, 8001)]
    (folder / "log.jsonl").write_bytes(sealed(*begun, *ended))
    started = time.process_time()
    status, out, _ = call("verify", folder / "log.jsonl")
    assert status == 1
    assert "more than 100 operations are under way" in out
    assert time.process_time() - started < 5


def test_names_without_end_are_one(folder):
    """Of thousands of names, calls and states the first are told apart, and the rest are one."""
    log = sealed(
        *(record(seq, event="refused", call=f"c{seq}", error=f"E{seq}: x") for seq in range(1, 1001))
    )
    (folder / "log.jsonl").write_bytes(log)
    refused = json.loads(call("stats", folder / "log.jsonl", "--json")[1])["together"]["refused"]
    assert len(refused) == 201
    assert refused["(others)"] == 800


# -- in processes of their own -----------------------------------------------------------------------


@pytest.mark.parametrize("command", [["show"], ["verify"], ["stats", "--json"], ["merge"], ["export"]])
def test_no_traceback_in_a_process(tmp_path, command):
    """In a process of its own, a hostile file ends no command with a traceback, whatever the locale."""
    path = tmp_path / "log\x1b[31m\udcff.jsonl"
    hostile = sealed(record(1, event="failed", call="".join(TRICKS.values()), error="\x1b[2J" * 1000))
    path.write_bytes(hostile + os.urandom(2000) + b"\n" + b"[" * 100_000)
    done = subprocess.run(
        [sys.executable, "-m", "lifecycle", "audit", *command, path],
        cwd=ROOT,
        check=False,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert done.returncode == 1
    for output in (done.stdout, done.stderr):
        assert b"Traceback" not in output
        assert not unprintable(output.decode("ascii"))
