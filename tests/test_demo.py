"""The demo: the story ends well, and a planted fault never goes unnoticed."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_adapter import demo, demo_async, demo_screen, demo_stage
from engine_adapter.demo_screen import Frame, StreamView
from lifecycle import AsyncLifecycle, IllegalCall, Lifecycle

# Seen at some moment of the drain: who started runs on, who waits is held, and no one else is asked for.
DRAINING = r"draining: [1-4] draining, 5 held, [2-5] finished, 1 later"
ROOT = Path(__file__).resolve().parent.parent
FAULTS = {"drop": "r04 lost", "dup": "r04 delivered twice", "alter": "r04 different"}
BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
SIMULATED = "from lifecycle.cli import main; sys.exit(main(['demo', '--simulated']))"
SIMULATED_ASYNC = SIMULATED.replace("'--simulated'", "'--simulated', '--async'")
# The whole asynchronous story, in less than its time.
QUICK_ASYNC = (
    "from engine_adapter import demo_async, demo_stage\n"
    "demo_stage.SIMULATED_STEP_S, demo_async._ASLEEP_S = 0.01, 0.4\n" + SIMULATED_ASYNC
)
# Each state lasts long enough to be printed; and once two streams (and all twelve of the reference) have
# ended, the second step takes so long that the sleep comes in it, on a busy machine too.
UNHURRIED_ASYNC = """\
import time
from engine_adapter.simulated import SimulatedEngine
step, ended, since = SimulatedEngine.step, [], []
def unhurried(self):
    outputs = step(self)
    if len(ended) == 14:
        since.append(None)
        if len(since) == 2:
            time.sleep(1)
    ended.extend(output for output in outputs if output.finished)
    return outputs
SimulatedEngine.step = unhurried
""" + QUICK_ASYNC.replace("0.4", "1.0")


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("MODEL", "FAULT")}
    return {**kept, "COLUMNS": "120", **changes}


def play(*arguments, **changes):
    return subprocess.run(
        [sys.executable, "-m", "lifecycle", "demo", *arguments],
        cwd=ROOT,
        env=environment(**changes),
        check=False,
        capture_output=True,
        text=True,
    )


def same_rows(done):
    """The requests of the last table that are the same in both columns."""
    return re.findall(r"^r\d\d .* same +same ", done.stdout, re.MULTILINE)


def play_without(*names, code=SIMULATED, **changes):
    """The simulated demo in a process of its own, where these modules can't be imported."""
    code = BLOCK.format(names=names) + code
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(**changes),
        check=False,
        capture_output=True,
        text=True,
    )


def test_simulated_demo_ends_well():
    """The simulated story ends with every request the same as without the lifecycle, and says so."""
    done = play("--simulated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "All 12 requests" in done.stdout
    assert "No illegal call reached the engine." in done.stdout
    assert len(same_rows(done)) == 12
    for told in ("cannot step while sleeping", "cannot generate while sleeping", "WeightsNotValid"):
        assert told in done.stdout


def test_simulated_demo_needs_neither_vllm_nor_torch():
    """--simulated imports neither vLLM nor torch: it runs where they can't be imported."""
    done = play_without("vllm", "torch", "transformers")
    assert done.returncode == 0, done.stderr


def test_simulated_demo_needs_no_rich():
    """Without rich the same story is told in plain text."""
    done = play_without("rich")
    assert done.returncode == 0, done.stderr
    assert "draining: 4 of 4 finished" in done.stdout
    assert len(same_rows(done)) == 12


def test_simulated_demo_starts_at_once():
    """The first line of the simulated demo comes within two seconds."""
    command = [sys.executable, "-m", "lifecycle", "demo", "--simulated"]
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seconds = time.monotonic() - started
        process.communicate()
    assert seconds < 2


@pytest.mark.parametrize("absent", [(), ("rich",)])
def test_a_letter_that_the_terminal_has_not_is_replaced(absent):
    """A model writes what it likes: a letter that the output's encoding lacks is a "?" and not the end."""
    code = (
        "from engine_adapter.demo_screen import make_screen\n"
        "screen = make_screen()\n"
        "screen.line('caf\\u00e9 \\u2026')\n"
        "screen.table(('text',), [('\\u7d4c',)])"
    )
    done = play_without(*absent, code=code, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["caf?", "?", "text", "?"]


@pytest.mark.parametrize("telling", [SIMULATED, SIMULATED_ASYNC])
@pytest.mark.parametrize("absent", [(), ("rich",)])
def test_a_reader_that_goes_away_ends_it(telling, absent):
    """Once nobody reads any more, as after `| head`, the demo ends with status 141 and says nothing."""
    code = BLOCK.format(names=absent) + telling
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 141


@pytest.mark.parametrize(("fault", "told"), FAULTS.items())
def test_planted_fault_is_noticed(fault, told):
    """An output that is dropped, doubled or altered behind the lifecycle fails the demo, by its name."""
    done = play("--simulated", FAULT=fault)
    assert done.returncode == 1
    assert f"FAILED: {told}" in done.stdout
    assert done.stdout.count("NOT THE SAME") == 1
    assert "All 12 requests" not in done.stdout


@pytest.mark.parametrize(
    ("tokens", "ends", "told"),
    [
        ([1, 2, 3], 1, ""),
        ([1, 2, 3], 0, "lost"),
        ([1, 2, 3, 3], 2, "delivered twice"),
        ([1, 3], 1, "2 tokens instead of 3"),
        ([1, 2, 2, 3], 1, "4 tokens instead of 3"),
        ([1, 2, 4], 1, "different: token 2 is 4, not 3"),
    ],
)
def test_comparison_sees_every_difference(tokens, ends, told):
    """Same means the same tokens in the same order and exactly one last output."""
    difference = demo_stage.difference([1, 2, 3], tokens, ends)
    assert difference.startswith(told)
    assert bool(difference) == bool(told)


def test_a_request_that_was_never_seen_is_noticed(capsys):
    """The comparison goes by the reference, so a request without any output is lost, not skipped."""
    screen, nothing = demo_screen.Screen(), demo_stage.Collected()
    problems = demo_stage.compare(screen, {"r00": [1]}, nothing, {"r00": [1]})
    assert problems == ["r00 lost: its last output never came, 0 of 1 tokens did"]
    problems = demo_stage.compare(screen, {"r00": []}, demo_stage.Collected(ended={"r00": [""]}), {})
    assert problems == ["r00 after level 2: lost: its last output never came, 0 of 0 tokens did"]


def test_an_unsafe_call_that_is_served_is_noticed(monkeypatch, capsys):
    """If the lifecycle let an unsafe call through, the demo fails and names the call."""
    monkeypatch.setattr(demo, "make_screen", demo_screen.Screen)
    real = Lifecycle.step
    monkeypatch.setattr(Lifecycle, "step", lambda self: [] if self.is_sleeping() else real(self))
    assert demo.run(simulated=True) == 1
    assert "FAILED: step() was served although it is unsafe" in capsys.readouterr().out


def misuse_the_engine(monkeypatch):
    build = demo.on_simulated

    def spoiled():
        stage = build()
        stage.misuse.append("step while asleep")
        return stage

    monkeypatch.setattr(demo, "on_simulated", spoiled)


def test_misuse_of_the_engine_is_noticed(monkeypatch, capsys):
    """If an illegal call reached the engine, the demo fails and shows which."""
    misuse_the_engine(monkeypatch)
    assert demo.run(simulated=True) == 1
    assert "an illegal call reached the engine: step while asleep" in capsys.readouterr().out


def test_unknown_fault_is_refused():
    """A FAULT that does not exist can't start the demo: status 2, and the ones that exist."""
    done = play("--simulated", FAULT="lose")
    assert done.returncode == 2
    assert "drop, dup, alter" in done.stdout


def test_model_that_is_no_model(tmp_path):
    """A MODEL that is no model folder can't start the demo: status 2, its name, no traceback."""
    done = play(MODEL=str(tmp_path / "absent"))
    assert done.returncode == 2
    assert "absent" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.vllm
def test_model_that_vllm_can_not_serve(tmp_path):
    """A model folder that vLLM refuses is said in one line: status 2, no traceback."""
    (tmp_path / "config.json").write_text("{}")
    done = play(MODEL=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "vLLM could not serve the model" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_without_vllm_the_simulated_demo_is_offered(monkeypatch, capsys):
    """Where vLLM is not installed the demo can't start, and names the one that can."""
    monkeypatch.setattr(demo_stage.importlib.util, "find_spec", lambda name: None)
    assert demo.run() == 2
    assert "--simulated" in capsys.readouterr().out


def test_ctrl_c_ends_cleanly(monkeypatch, capsys):
    """Ctrl-C ends the demo with the shell's status for it and no traceback."""

    def interrupted():
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "on_simulated", interrupted)
    assert demo.run(simulated=True) == 130
    assert "Interrupted." in capsys.readouterr().out


# -- the asynchronous telling ----------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """The asynchronous demo in this process, with short steps and a short sleep."""
    monkeypatch.setattr(demo_stage, "SIMULATED_STEP_S", 0.003)
    monkeypatch.setattr(demo_async, "_ASLEEP_S", 0.02)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FAULT", raising=False)
    return lambda: demo.run(simulated=True, asynchronous=True)


def test_async_demo_ends_well():
    """Concurrent streams, drained, held and woken, have the tokens of the run without; nothing is redrawn."""
    done = play_without(code=UNHURRIED_ASYNC)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "All 12 requests" in done.stdout
    assert "No illegal call reached the engine." in done.stdout
    assert len(same_rows(done)) == 12
    for told in (
        "cannot wake_up while draining",
        "sleeping: 6 held, 6 finished",
        "generate('r11') is held: 6 wait now",
        "cannot reload_weights while sleeping",
        "all memory is awake, and 12 streams are held",
    ):
        assert told in done.stdout
    assert re.search(DRAINING, done.stdout)
    assert "\x1b" not in done.stdout


def test_async_demo_needs_neither_vllm_nor_torch_nor_rich():
    """Without vLLM, torch and rich the streams are printed in plain text."""
    done = play_without(
        "vllm", "torch", "transformers", "rich", code=QUICK_ASYNC.replace("0.01, 0.4", "0.003, 0.02")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" s] awake: 12 finished\n  r00 finished 16/16") == 2
    assert len(same_rows(done)) == 12


@pytest.mark.parametrize(("fault", "told"), FAULTS.items())
def test_planted_fault_in_a_stream_is_noticed(fault, told, quick, monkeypatch, capsys):
    """An output of a stream that is dropped, doubled or altered fails the demo, by its request's name."""
    monkeypatch.setenv("FAULT", fault)
    assert quick() == 1
    shown = capsys.readouterr().out
    assert f"FAILED: {told}" in shown
    assert shown.count("NOT THE SAME") == 1
    assert "All 12 requests" not in shown


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("sleeping", "r11 was served while the engine slept"),
        ("partially_awake", "r00 was served from discarded weights"),
    ],
)
def test_a_stream_that_is_served_and_not_held_is_noticed(state, told, quick, monkeypatch, capsys):
    """If a stream brought something while it must be held, the demo fails and names it."""
    real = AsyncLifecycle.generate

    async def generate(self, prompt, params, name):
        if self.state == state:
            nothing = SimpleNamespace(token_ids=[], text="")
            yield SimpleNamespace(request_id=name, outputs=[nothing], finished=False)
        async for output in real(self, prompt, params, name):
            yield output

    monkeypatch.setattr(AsyncLifecycle, "generate", generate)
    assert quick() == 1
    assert f"FAILED: {told}" in capsys.readouterr().out


@pytest.mark.parametrize("call", ["wake_up", "reload_weights"])
def test_an_unsafe_call_from_asyncio_that_is_served_is_noticed(call, quick, monkeypatch, capsys):
    """If an unsafe call beside the streams was let through, the demo fails and names the call."""
    real = getattr(AsyncLifecycle, call)

    async def lenient(self, *arguments):
        try:
            return await real(self, *arguments)
        except IllegalCall:
            return None

    monkeypatch.setattr(AsyncLifecycle, call, lenient)
    assert quick() == 1
    assert re.search(rf"FAILED: {call}\(\) .* was served although it is unsafe", capsys.readouterr().out)


def test_misuse_of_the_engine_beside_streams_is_noticed(quick, monkeypatch, capsys):
    """If an illegal call reached the engine in its thread, the demo fails and shows which."""
    misuse_the_engine(monkeypatch)
    assert quick() == 1
    assert "an illegal call reached the engine: step while asleep" in capsys.readouterr().out


def test_what_keeps_the_engine_from_being_built_in_its_thread_is_told(monkeypatch, capsys):
    """What the building thread can't do ends the demo as it ends the blocking one: status 2, the reason."""
    monkeypatch.setattr(demo_stage.importlib.util, "find_spec", lambda name: None)
    assert demo.run(asynchronous=True) == 2
    assert "--simulated" in capsys.readouterr().out


def test_streams_are_printed_while_they_run():
    """Not on a terminal the streams are seen half done, while the engine drains; Ctrl-C ends cleanly."""
    command = [sys.executable, "-m", "lifecycle", "demo", "--simulated", "--async"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if re.search(r"r02 draining \d\d/40 …?[a-z]{8}", line):
                break
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate()
    assert process.returncode == 130
    assert shown.rstrip().endswith("Interrupted.")
    assert errors == ""


def test_ctrl_c_gives_the_terminal_back():
    """On a terminal a panel for each stream is redrawn in place; Ctrl-C ends it and shows the cursor."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "lifecycle", "demo", "--simulated", "--async"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(TERM="xterm", LINES="40"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        shown = b""
        while b"r02 draining" not in shown:
            shown += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(master, 65536):
                shown += more
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
    os.close(master)
    assert process.returncode == 130
    for seen in ("╭─", "r06 held", "\x1b[1A"):
        assert seen.encode() in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"Interrupted." in shown
    assert b"Traceback" not in shown


def test_a_log_with_colours_is_not_redrawn(quick, monkeypatch, capsys):
    """FORCE_COLOR gives a log its colours, and no movements of a cursor that it has not."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert quick() == 0
    shown = capsys.readouterr().out
    assert "\x1b[36m" in shown or "\x1b[1;36m" in shown
    assert not re.search(r"\x1b\[\d*[ABCDHJK]|\x1b\[\?", shown)


def frame(texts):
    """A frame of streams with these texts."""
    statuses = ("running", "draining", "held", "finished", "waiting", "later")
    return Frame(
        "draining",
        1.5,
        [
            StreamView(f"r{place:02}", statuses[place % 6], len(text), 99, text)
            for place, text in enumerate(texts)
        ],
    )


def test_a_frame_follows_the_line_that_explains_it(monkeypatch, capsys):
    """A new state is printed once it lasts, after the line that says how it came; nothing unchanged twice."""
    ticks = []

    @contextlib.asynccontextmanager
    async def by_hand(draw):
        ticks.append(draw)
        yield

    monkeypatch.setattr(demo_screen, "_ticking", by_hand)
    monkeypatch.setattr(demo_screen, "_PRINT_EVERY_S", 0.0)
    few, more = frame(["a"]).streams, frame(["a b"]).streams
    seen = [
        (Frame("running", 0.0, few), ""),
        (Frame("running", 0.1, few), "running 0.1"),
        (Frame("running", 0.2, few), ""),
        (Frame("running", 0.3, more), "running 0.3"),
        (Frame("asleep", 0.4, more), ""),
        (Frame("asleep", 0.5, more), "asleep 0.5"),
        (Frame("asleep", 0.6, more), ""),
    ]
    now = []

    async def story():
        async with demo_screen.Screen().streams(lambda: now[-1]):
            for view, told in seen:
                now.append(view)
                ticks[0]()
                printed = re.findall(r"^\[ *([\d.]+) s\] (\w+):", capsys.readouterr().out, re.MULTILINE)
                assert [f"{state} {seconds}" for seconds, state in printed] == [told] * bool(told)
        assert "[ 0.6 s] asleep" in capsys.readouterr().out  # and the end in any case

    asyncio.run(story())


@pytest.mark.parametrize("width", [30, 37, 80, 120, 200])
def test_rows_are_aligned_and_cut_from_the_left(width):
    """In rows every stream has its own place; of a long text the end is seen, with a mark where it is cut."""
    texts = ["", "short", *["".join(f"{n} " for n in range(40)) + f"end{place:02}" for place in range(10)]]
    rows = frame(texts).rows(width)
    shown = "\n".join(rows)
    assert all(len(row) <= width for row in rows)
    assert [shown.count(f"r{place:02} ") for place in range(12)] == [1] * 12
    assert [shown.count(f"end{place:02}") for place in range(10)] == [1] * 10
    assert shown.count("…") == 10
    starts = {tuple(found.start() for found in re.finditer(r"r\d\d ", row)) for row in rows}
    longest = max(starts, key=len)
    assert all(places == longest[: len(places)] for places in starts)


@pytest.mark.parametrize(
    ("size", "panels"),
    [((160, 50), 6), ((120, 40), 4), ((80, 24), 3), ((80, 18), 3), ((80, 14), 0), ((40, 24), 0)],
)
def test_panels_are_side_by_side_where_they_fit(size, panels):
    """The picture never exceeds the terminal: as many panels in a row as fit, or a row for each stream."""
    from rich.console import Console

    texts = ["", "one", *["a word and another, " * 9 + f"end{place:02}" for place in range(10)]]
    console = Console(width=size[0], height=size[1], color_system=None)
    with console.capture() as captured:
        console.print(demo_screen._picture(frame(texts), *size))
    lines = captured.get().splitlines()
    assert len(lines) < size[1]
    assert max(map(len, lines)) <= size[0]
    assert lines[1].count("╭") == panels
    shown = "\n".join(lines)
    assert [shown.count(f"r{place:02} ") for place in range(12)] == [1] * 12
    assert [shown.count(f"end{place:02}") for place in range(10)] == [1] * 10


# -- on a real vLLM --------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("telling", [[], ["--async"]])
def test_real_demo_ends_well(telling):
    """On a real vLLM every request has the tokens of the uninterrupted run; vLLM's own log is silent."""
    from tests.engines import model_dir

    done = play(*telling, MODEL=str(model_dir()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 12 requests" in done.stdout
    assert len(same_rows(done)) == 12
    assert "INFO" not in done.stdout + done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("telling", [[], ["--async"]])
def test_real_demo_notices_a_lost_output(telling):
    """On a real vLLM a dropped output fails the demo and names the request."""
    from tests.engines import model_dir

    done = play(*telling, MODEL=str(model_dir()), FAULT="drop")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: r04 lost" in done.stdout
