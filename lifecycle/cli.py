"""The command line: `lifecycle doctor`, `lifecycle demo` and `lifecycle audit`.

Theory of operation
-------------------
This is the only module of the package that knows of `engine_adapter`, and it finds it
when it is run, by name: importing `lifecycle.cli` imports no adapter, no vLLM and no
torch. `main` returns the exit status instead of exiting, so that tests can call it.

`doctor` asks the adapter what this release of vLLM has of what is used. A missing vLLM
is an answer like any other (status 0); one that is there and can't be used is not (1).

`audit` reads logs, and is in `lifecycle.audit.commands`.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from lifecycle.audit import commands as audit

DISTRIBUTION: Final = "engine-lifecycle"
_MISSING: Final = "missing: "
_VERSIONS: Final = frozenset({"vllm", "torch", "platform"})
_EXAMPLES: Final = """\
examples:
  lifecycle doctor              what the installed vLLM can do, and what a missing part costs
  lifecycle doctor --json       the same for a program
  lifecycle demo                rollouts, sleep and wake on a real vLLM for CPUs
  lifecycle demo --async        the same with concurrent streams, printed side by side
  lifecycle demo --simulated    the same story in a second, without vLLM or torch
  MODEL=/models/my-model lifecycle demo
  FAULT=drop lifecycle demo --simulated
  lifecycle audit verify logs/*.jsonl            are the logs whole, and which call never returned?
  lifecycle audit merge --diverge logs/*.jsonl   which rank did something else than the others?
  lifecycle audit --help                         the rest of it
"""
_DEMO_HELP: Final = """\
Generate with 12 requests, sleep in the middle, wake, and compare every token with a run
that nothing interrupted.

exit status: 0 all the same; 1 something was lost, doubled or different; 2 it could not start;
130 interrupted; 141 its output was closed early

environment:
  MODEL   a folder with a model (without it: SmolLM2-135M, unpacked once and cached)
  FAULT   drop, dup or alter: spoil one output on purpose, to see the comparison notice
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = _parser().parse_args(audit.joined(sys.argv[1:] if argv is None else argv))
    if arguments.command == "doctor":
        return _doctor(as_json=arguments.json)
    if arguments.command == "audit":
        return audit.run(arguments)
    demo = importlib.import_module("engine_adapter.demo")
    status: int = demo.run(simulated=arguments.simulated, asynchronous=arguments.asynchronous)
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lifecycle",
        description="A finite-state machine around an inference engine: drain, sleep, wake, no request lost.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {_version(DISTRIBUTION)}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="versions, and what this vLLM can do")
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    demo = commands.add_parser(
        "demo", help="watch a drain, a sleep and a wake", description=_DEMO_HELP, formatter_class=raw
    )
    demo.add_argument(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="through AsyncLifecycle: concurrent streams, side by side as they come",
    )
    demo.add_argument("--simulated", action="store_true", help="on the simulated engine: no vLLM, no model")
    audit.add_parser(commands)
    return parser


def _version(distribution: str) -> str:
    """The installed version; "unknown" in a checkout that was never installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# -- doctor ----------------------------------------------------------------------------------------


def _doctor(*, as_json: bool) -> int:
    versions = {DISTRIBUTION: _version(DISTRIBUTION), "python": platform.python_version()}
    versions |= {name: _version(name) for name in ("transitions", "structlog")}
    found: dict[str, Any] = {"versions": versions, "capabilities": {}, "costs": {}, "problem": None}
    status = 0
    if importlib.util.find_spec("vllm") is None:
        found["problem"] = "vLLM is not installed; the simulated engine works without it"
    else:
        # Its greetings are not what was asked for; errors still come through.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        try:
            rows = importlib.import_module("engine_adapter.vllm_inprocess").doctor()
        except Exception as error:  # noqa: BLE001  (a vLLM that can't be used is what a doctor is for)
            found["problem"] = f"vLLM can't be used: {type(error).__name__}: {error}"
            status = 1
        else:
            _sort_rows(rows, found)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_findings(found)
    return status


def _sort_rows(rows: Iterable[tuple[str, str]], found: dict[str, Any]) -> None:
    """Versions to versions; every other row is something that is there, or missing at a cost."""
    for name, value in rows:
        if name in _VERSIONS:
            found["versions"][name] = value
            continue
        missing = value.startswith(_MISSING)
        found["capabilities"][name] = not missing
        if missing:
            found["costs"][name] = value.removeprefix(_MISSING)


def _print_findings(found: dict[str, Any]) -> None:
    width = max(map(len, (*found["versions"], *found["capabilities"])))
    for name, version in found["versions"].items():
        print(f"{name:{width}}  {version}")
    if found["problem"]:
        print(f"\n{found['problem']}")
        return
    print()
    for name, there in found["capabilities"].items():
        print(f"{name:{width}}  {'yes' if there else 'missing: ' + found['costs'][name]}")
    lost = len(found["costs"])
    print(f"\n{lost} missing: each costs what its line says" if lost else "\nnothing is missing")
