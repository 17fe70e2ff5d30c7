"""Whether any test notices a planted fault: `python -m tests.mutants`.

Each mutant (see `operators`) is planted and judged (see `judge`) by the tests that run
the line it changes. At least 90 % must be *killed*: a test fails, or hangs
where it did not before. The others stand in `survivors.toml`, each with the reason why it
does no harm; an entry there that no longer fits is an error too.

Which test runs which line is measured first, by a run without any mutant. A line that runs
at import, as all of the table does, or that no test was seen to run, is judged by every test
of the files that use its module.
"""

import argparse
import ast
import hashlib
import json
import os
import selectors
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# What the children need and would otherwise import one by one; nothing of the project.
import hypothesis
import pytest_asyncio
import structlog
import transitions

from tests.mutants import judge
from tests.mutants.operators import Mutant, mutants

# What is mutated, and the tests that judge it: those marked so.
FILES = {
    "lifecycle/table.py": "not vllm",
    "lifecycle/requests.py": "not vllm",
    "lifecycle/weights.py": "not vllm",
    "lifecycle/sleep.py": "not vllm",
    "lifecycle/core.py": "not vllm",
    "lifecycle/blocking.py": "not vllm",
    "engine_adapter/vllm_inprocess.py": "vllm",
}
# These look at sources and pages, not at behaviour; take minutes of random steps, so that a kill would be
# luck; or run pytest within pytest, which explains assertions only in a process's first session.
NOT_JUDGES = (
    "test_docs.py",
    "test_imports.py",
    "test_mutants.py",
    "test_soak.py",
    "test_machine.py",
    "test_testing.py",
)
ENOUGH = 0.9
INHERITED = (pytest_asyncio, structlog, transitions)
CACHE = Path(".cache/mutants")
# A test is taken to hang after so many times what it took without a mutant, and some seconds more.
PATIENCE = 10.0


class Verdict(NamedTuple):
    """word: killed, timeout, survived or invalid; by: the test, or why."""

    word: str
    by: str


class Survey(NamedTuple):
    """seconds: of each test, quickest first; ran: file, line -> the tests that ran it, "" for an import."""

    seconds: dict[str, float]
    ran: dict[str, dict[int, set[str]]]

    def judges(self, mutant: Mutant, spans: Sequence[tuple[int, int]]) -> list[str]:
        """The tests that ran the statement that the mutant changes."""
        lines = self.ran.get(mutant.file, {})
        first, last = min(
            (span for span in spans if span[0] <= mutant.line <= span[1]), key=lambda span: span[1] - span[0]
        )
        names = set().union(*(lines.get(line, ()) for line in range(first, last + 1)))
        if "" in names or not names:  # at import; or unseen, perhaps in a process that a test forks
            near = {test.partition("::")[0] for test in set().union(*lines.values())}
            names = {test for test in self.seconds if test.partition("::")[0] in near}
        return [test for test in self.seconds if test in names]


def statements(source: str) -> list[tuple[int, int]]:
    """First and last line of every statement; of a compound one, its head."""
    spans = [(1, source.count("\n") + 1)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            last = node.end_lineno if not body else max(body[0].lineno - 1, node.lineno)
            spans.append((first, last))
        elif isinstance(node, ast.ExceptHandler):
            spans.append((node.lineno, max(node.body[0].lineno - 1, node.lineno)))
    return spans


def look(files: list[str], tests: list[str], marker: str) -> Survey:
    """The survey of these files, made anew unless a source or a test changed since the last."""
    sources = sorted([*Path().glob("*/*.py"), *(Path(name) for name in (*files, *tests))])
    stamp = hashlib.sha256(repr((files, tests, marker)).encode())
    for path in sources:
        stamp.update(path.read_bytes())
    kept = CACHE / f"survey-{stamp.hexdigest()[:16]}.jsonl"
    if not kept.exists():
        say(f"running the tests once without a mutant, to see which runs what ({', '.join(files)})")
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(_told_by_survey(files, tests, marker)))
    seconds: dict[str, float] = {}
    ran: dict[str, dict[int, set[str]]] = {}
    for line in kept.read_text().splitlines():
        what = json.loads(line)
        if "ends" in what:
            seconds[what["ends"]] = what["seconds"]
        elif "file" in what:
            ran.setdefault(what["file"], {})[what["line"]] = set(what["tests"])
    return Survey(dict(sorted(seconds.items(), key=lambda item: item[1])), ran)


def _told_by_survey(files: list[str], tests: list[str], marker: str) -> Iterator[str]:
    pid, reads = judge.fork(lambda tell: judge.survey(files, tests, marker, tell, together=_together(marker)))
    line = ""
    try:
        with os.fdopen(reads) as lines:
            for line in lines:
                what = json.loads(line)
                if "killed" in what:
                    sys.exit(f"fails without any mutant: {what['killed']}: {what['why']}")
                if "survived" in what:
                    return
                yield line
        sys.exit(f"the run without a mutant ended early, after {line}")
    finally:
        judge.end(pid)


@dataclass
class _Case:
    """A child at work: what it judges, the test it is at, and since when."""

    mutant: Mutant
    pid: int
    at: str = ""
    since: float = 0.0
    rest: bytes = b""
    verdict: Verdict | None = None


def trials(
    queue: Iterable[tuple[Mutant, list[str]]], seconds: Mapping[str, float], jobs: int, patience: float
) -> Iterator[tuple[Mutant, Verdict]]:
    """Judge the mutants, `jobs` at a time; each with its verdict, as they come.

    The test files that killed most so far come first, and in each the quickest tests.
    """
    waiting = iter(queue)
    kills: Counter[str] = Counter()
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                while len(selector.get_map()) < jobs and (entry := next(waiting, None)) is not None:
                    mutant, tests = entry
                    if not tests:
                        yield mutant, Verdict("survived", "no test runs it")
                        continue
                    tests.sort(key=lambda test: -kills[test.partition("::")[0]])
                    work = partial(judge.judge, mutant, tests, together=_together(FILES.get(mutant.file)))
                    pid, reads = judge.fork(work)
                    case = _Case(mutant, pid, since=time.monotonic())
                    selector.register(reads, selectors.EVENT_READ, case)
                if not selector.get_map():
                    return
                for key, _ in selector.select(timeout=1.0):
                    _listen(key.data, os.read(key.fd, 1 << 16))
                for key in list(selector.get_map().values()):
                    case = key.data
                    limit = patience + PATIENCE * seconds.get(case.at, 1.0)
                    if case.verdict is None and time.monotonic() - case.since > limit:
                        case.verdict = Verdict("timeout", case.at or "at import")
                    if case.verdict is not None:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        judge.end(case.pid)
                        kills[case.verdict.by.partition("::")[0]] += case.verdict.word == "killed"
                        yield case.mutant, case.verdict
        finally:
            for key in list(selector.get_map().values()):
                judge.end(key.data.pid)


def _together(marker: str | None) -> bool:
    """Whether the tests run in one session, to share its engine; else file by file, which is quicker."""
    return marker == "vllm"


def _listen(case: _Case, told: bytes) -> None:
    if not told:
        case.verdict = case.verdict or Verdict("killed", f"{case.at}: the process died")
    *lines, case.rest = (case.rest + told).split(b"\n")
    for line in lines:
        what = json.loads(line)
        case.since = time.monotonic()
        if "begins" in what:
            case.at = what["begins"]
        if "broke" in what:  # this tool, not the mutant
            raise RuntimeError(what["broke"])
        for word in ("killed", "invalid", "survived"):
            if word in what and case.verdict is None:
                case.verdict = Verdict(word, what[word])


def build_engine() -> list[Any]:
    """A vLLM engine in this process, for the children to inherit: each has it new, and none waits for it.

    Returns what must stay referenced. A child that shuts the engine down would otherwise destroy
    process groups whose threads did not come through the fork.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # nor would those of torch
    from tests import engines

    house = engines.House()
    house.llm()
    engines.House = lambda: house
    import torch
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)
    return [house, *distributed_c10d._world.pg_map]


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no child is left behind
    hypothesis.settings.register_profile("judge", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("judge")
    os.environ["COVERAGE_CORE"] = "ctrace"  # the newer one knows no contexts
    found = {file: list(mutants(file, Path(file).read_text())) for file in options.file or FILES}
    if options.sample:
        found = {file: every[:: max(1, len(every) // options.sample)] for file, every in found.items()}
    if options.list:
        for mutant in (mutant for every in found.values() for mutant in every):
            say(_line(mutant))
        return 0
    verdicts = dict(_judged(found, options))
    return report(verdicts, _read_survivors(options.survivors), whole=not options.sample)


def _judged(
    found: Mapping[str, list[Mutant]], options: argparse.Namespace
) -> Iterator[tuple[Mutant, Verdict]]:
    tests = sorted(str(path) for given in options.tests for path in _test_files(Path(given)))
    state = hashlib.sha256(b"".join(Path(test).read_bytes() for test in tests)).hexdigest()[:16]
    log = CACHE / "verdicts.jsonl"
    CACHE.mkdir(parents=True, exist_ok=True)
    known = {}
    for line in log.read_text().splitlines() if options.resume and log.exists() else ():
        entry = json.loads(line)
        if entry["word"] != "survived" or entry["tests"] == state:  # more tests kill more, seldom less
            known[entry["mutant"]] = Verdict(entry["word"], entry["by"])
    with log.open("a" if options.resume else "w") as out:
        for marker in dict.fromkeys(FILES.get(file, "") for file in found):
            files = [file for file in found if FILES.get(file, "") == marker]
            every = [mutant for file in files for mutant in found[file]]
            yield from ((mutant, known[mutant.digest]) for mutant in every if mutant.digest in known)
            new = [mutant for mutant in every if mutant.digest not in known]
            if not new:
                continue
            inherited = build_engine() if marker == "vllm" else []
            survey = look(files, tests, marker)
            spans = {file: statements(Path(file).read_text()) for file in files}
            queue = ((mutant, survey.judges(mutant, spans[mutant.file])) for mutant in new)
            for mutant, verdict in trials(queue, survey.seconds, options.jobs, options.patience):
                say(f"{_line(mutant)}   {verdict.word} {verdict.by}")
                entry = {"mutant": mutant.digest, "tests": state, "word": verdict.word, "by": verdict.by}
                out.write(json.dumps(entry) + "\n")
                out.flush()
                yield mutant, verdict
            del inherited


def _test_files(given: Path) -> list[Path]:
    files = sorted(given.glob("test_*.py")) if given.is_dir() else [given]
    return [path for path in files if path.name not in NOT_JUDGES]


def _read_survivors(path: Path) -> dict[tuple[str, str, str, str], str]:
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text()).get("survivor", [])
    return {
        (entry["file"], entry["where"], entry["before"], entry["after"]): entry["reason"] for entry in entries
    }


def _line(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.operator}: {mutant.before} -> {mutant.after}"


def report(
    verdicts: Mapping[Mutant, Verdict], survivors: Mapping[tuple[str, str, str, str], str], *, whole: bool
) -> int:
    """Print the score and what is wrong with it; 0 if nothing is."""
    counts: dict[str, Counter[str]] = {}
    for mutant, verdict in verdicts.items():
        counts.setdefault(mutant.file, Counter())[verdict.word] += 1
    counts["in total"] = sum(counts.values(), Counter())
    say(f"\n{'':34}{'mutants':>8}{'killed':>8}{'by time':>8}{'survived':>9}{'invalid':>8}{'score':>8}")
    for name, count in counts.items():
        killed, judged = count["killed"] + count["timeout"], count.total() - count["invalid"]
        score = killed / judged if judged else 1.0
        say(
            f"{name:34}{count.total():8}{count['killed']:8}{count['timeout']:8}"
            f"{count['survived']:9}{count['invalid']:8}{score:8.1%}"
        )
    alive = {mutant.key: verdict for mutant, verdict in verdicts.items() if verdict.word == "survived"}
    unlisted = {key: verdict for key, verdict in alive.items() if key not in survivors}
    stale = [key for key in survivors if whole and key[0] in counts and key not in alive]
    if unlisted:
        say("\nsurvivors without a reason:")
    for key, verdict in unlisted.items():
        fields = zip(("file", "where", "before", "after"), key, strict=True)
        say("\n[[survivor]]" + (f"  # {verdict.by}" if verdict.by else ""))
        say("\n".join(f"{name} = {json.dumps(value)}" for name, value in fields) + '\nreason = ""')
    if stale:
        say("\nlisted as survivors, but killed or gone:")
    for key in stale:
        say("  " + " | ".join(key))
    if score < ENOUGH:
        say(f"\nfewer than {ENOUGH:.0%} are killed")
    return int(bool(unlisted or stale or score < ENOUGH))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--file", action="append", help="mutate only this file; may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="children at a time")
    parser.add_argument(
        "--patience", type=float, default=15.0, help="seconds that a hang may take beyond its due"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the verdicts of the last run that still hold"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only about N mutants of each file, evenly spread"
    )
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="where the judges are")
    parser.add_argument("--survivors", type=Path, default=Path(__file__).with_name("survivors.toml"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
