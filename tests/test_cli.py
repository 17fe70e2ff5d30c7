"""The command line: help, versions, and a doctor that answers with or without vLLM."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lifecycle import cli

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = "engine_adapter.vllm_inprocess"


def give_vllm(monkeypatch, doctor):
    """Have the command line find an adapter whose `doctor` is this one."""
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, ADAPTER, types.SimpleNamespace(doctor=doctor))


def take_vllm(monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)


ROWS = [("vllm", "0.1"), ("torch", "2.0"), ("LLMEngine.sleep", "yes"), ("wake", "missing: nothing can wake")]


def test_help_shows_examples(capsys):
    """--help names every command and shows how each is called."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for example in ("lifecycle doctor --json", "demo --async", "demo --simulated", "MODEL=", "FAULT="):
        assert example in shown


def test_no_command_is_a_usage_error():
    """Without a command the status is argparse's 2."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2


def test_version_without_installation(monkeypatch, capsys):
    """A checkout that was never installed has the version "unknown", not a traceback."""

    def absent(name):
        raise cli.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.importlib.metadata, "version", absent)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "engine-lifecycle unknown\n"


def test_doctor_names_what_a_missing_part_costs(monkeypatch, capsys):
    """Each missing capability is shown with the guarantee that is lost."""
    give_vllm(monkeypatch, lambda: ROWS)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "missing: nothing can wake" in shown
    assert "1 missing" in shown


def test_doctor_json(monkeypatch, capsys):
    """--json is one object: versions, capabilities as booleans, and the cost of each missing one."""
    give_vllm(monkeypatch, lambda: ROWS)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["vllm"] == "0.1"
    assert set(found["versions"]) >= {"engine-lifecycle", "python", "transitions", "structlog", "torch"}
    assert found["capabilities"] == {"LLMEngine.sleep": True, "wake": False}
    assert found["costs"] == {"wake": "nothing can wake"}
    assert found["problem"] is None


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_doctor_without_vllm(monkeypatch, capsys, arguments):
    """Without vLLM the doctor says so and is satisfied: status 0."""
    take_vllm(monkeypatch)
    assert cli.main(["doctor", *arguments]) == 0
    assert "vLLM is not installed" in capsys.readouterr().out


def test_doctor_with_a_broken_vllm(monkeypatch, capsys):
    """A vLLM that is there and can't be imported is a finding with status 1, not a traceback."""

    def broken():
        raise ImportError("libcuda.so.1: no such file")

    give_vllm(monkeypatch, broken)
    assert cli.main(["doctor"]) == 1
    assert "vLLM can't be used: ImportError: libcuda.so.1" in capsys.readouterr().out


def test_importing_the_command_line_finds_no_adapter():
    """Adapters are found when a command is run: importing the command line imports none."""
    code = (
        "import sys, lifecycle.cli\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'engine_adapter', 'vllm', 'torch'}\n"
        "sys.exit(str(found) if found else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.vllm
def test_doctor_on_a_real_vllm():
    """On the vLLM that this was built with the doctor finds nothing missing, and prints JSON alone."""
    done = subprocess.run(
        [sys.executable, "-m", "lifecycle", "doctor", "--json"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problem"] is None
    assert all(found["capabilities"].values()), found["costs"]
