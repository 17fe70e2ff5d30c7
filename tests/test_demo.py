"""The demo: the story ends well, and a planted fault never goes unnoticed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_adapter import demo
from lifecycle import Lifecycle

ROOT = Path(__file__).resolve().parent.parent
FAULTS = {"drop": "r04 lost", "dup": "r04 delivered twice", "alter": "r04 different"}
BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
SIMULATED = "from lifecycle.cli import main; sys.exit(main(['demo', '--simulated']))"


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


def play_without(*names):
    """The simulated demo in a process where these modules can't be imported."""
    code = BLOCK.format(names=names) + SIMULATED
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), check=False, capture_output=True, text=True
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
    difference = demo._difference([1, 2, 3], tokens, ends)
    assert difference.startswith(told)
    assert bool(difference) == bool(told)


def test_a_request_that_was_never_seen_is_noticed(capsys):
    """The comparison goes by the reference, so a request without any output is lost, not skipped."""
    problems = demo._compare(demo.Screen(), {"r00": [1]}, demo.Collected(), {"r00": [1]})
    assert problems == ["r00 lost: its last output never came, 0 of 1 tokens did"]
    problems = demo._compare(demo.Screen(), {"r00": []}, demo.Collected(ended={"r00": [""]}), {})
    assert problems == ["r00 after level 2: lost: its last output never came, 0 of 0 tokens did"]


def test_an_unsafe_call_that_is_served_is_noticed(monkeypatch, capsys):
    """If the lifecycle let an unsafe call through, the demo fails and names the call."""
    monkeypatch.setattr(demo, "_screen", demo.Screen)
    real = Lifecycle.step
    monkeypatch.setattr(Lifecycle, "step", lambda self: [] if self.is_sleeping() else real(self))
    assert demo.run(simulated=True) == 1
    assert "FAILED: step() was served although it is unsafe" in capsys.readouterr().out


def test_misuse_of_the_engine_is_noticed(monkeypatch, capsys):
    """If an illegal call reached the engine, the demo fails and shows which."""
    build = demo._on_simulated

    def spoiled():
        stage = build()
        stage.misuse.append("step while asleep")
        return stage

    monkeypatch.setattr(demo, "_on_simulated", spoiled)
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
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.run() == 2
    assert "--simulated" in capsys.readouterr().out


def test_ctrl_c_ends_cleanly(monkeypatch, capsys):
    """Ctrl-C ends the demo with the shell's status for it and no traceback."""

    def interrupted():
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "_on_simulated", interrupted)
    assert demo.run(simulated=True) == 130
    assert "Interrupted." in capsys.readouterr().out


@pytest.mark.vllm
def test_real_demo_ends_well():
    """On a real vLLM every request has the tokens of the uninterrupted run; vLLM's own log is silent."""
    from tests.engines import model_dir

    done = play(MODEL=str(model_dir()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 12 requests" in done.stdout
    assert len(same_rows(done)) == 12
    assert "INFO" not in done.stdout + done.stderr


@pytest.mark.vllm
def test_real_demo_notices_a_lost_output():
    """On a real vLLM a dropped output fails the demo and names the request."""
    from tests.engines import model_dir

    done = play(MODEL=str(model_dir()), FAULT="drop")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: r04 lost" in done.stdout
