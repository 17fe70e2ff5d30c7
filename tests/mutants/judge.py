"""One mutant before its judges: a forked child that runs the tests with the fault planted.

Theory of operation
-------------------
Starting Python and importing pytest takes longer than most verdicts. So the parent has
imported everything but the packages under test, and forks. The child plants the mutant
with an import hook, imports its module, and runs pytest there; it says what happens as
JSON lines in a pipe, so that the parent sees a hang by its silence.

Only a failed test is a kill. A mutant whose module can't be imported is *invalid*, and a
test file that can't be collected judges nothing.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.operators import Mutant

Tell = Callable[..., None]


def module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


class _Planted(SourceFileLoader):
    """Loads a module from its own file, with other code."""

    def __init__(self, file: str, source: str) -> None:
        super().__init__(module_name(file), str(Path(file).resolve()))
        self._source = source

    def get_code(self, _: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder:
    """Puts one planted module before all others."""

    def __init__(self, loader: _Planted) -> None:
        self._loader = loader

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self._loader.name:
            return None
        return importlib.util.spec_from_file_location(name, self._loader.path, loader=self._loader)


class _Clerk:
    """A pytest plugin: chooses and orders the tests, and tells what becomes of them."""

    def __init__(self, tell: Tell, order: Mapping[str, int] | None, cover: coverage.Coverage | None) -> None:
        self._tell, self._order, self._cover = tell, order, cover
        self.killed, self.at = False, ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self._order
        if order is not None:
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._cover is not None:
            self._cover.switch_context(nodeid)
        self._began = time.perf_counter()
        self.at = nodeid
        self._tell(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.killed = True
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash is not None else str(report.longrepr)
            self._tell(killed=report.nodeid, why=" ".join(why.split())[:200])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._cover is not None:
            self._cover.switch_context("")
        self._tell(ends=nodeid, seconds=time.perf_counter() - self._began)


def fork(work: Callable[[Tell], None]) -> tuple[int, int]:
    """Run `work` in a child that is its own process group. Returns its pid and where it tells."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid, reads
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)

        def tell(**what: Any) -> None:
            os.write(writes, (json.dumps(what) + "\n").encode())

        try:
            work(tell)
        except BaseException as error:
            tell(broke=repr(error))
    finally:
        os._exit(0)


def end(pid: int) -> None:
    """End a child and all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def judge(mutant: Mutant, tests: Iterable[str], tell: Tell, *, together: bool) -> None:
    """Run these tests on the mutant until one fails, in their order: file by file, or together. In a child.

    To collect all files at once takes longer than most verdicts; but what a session shares ends with it.
    """
    loader = _Planted(mutant.file, mutant.source)
    sys.meta_path.insert(0, _Finder(loader))
    try:
        importlib.import_module(loader.name)
    except BaseException as error:
        tell(invalid=repr(error))
        return
    order = {nodeid: place for place, nodeid in enumerate(tests)}
    files = list(dict.fromkeys(nodeid.partition("::")[0] for nodeid in order))
    clerk = _Clerk(tell, order, None)
    for some in [files] if together else [[file] for file in files]:
        if clerk.killed:
            break
        try:
            code = _run_pytest(some, clerk, "-x")
        except BaseException as error:  # a mutant that lets a Ctrl-C of a test escape
            tell(killed=clerk.at, why=repr(error))
            break
        if code in {pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR} and not clerk.killed:
            tell(killed=clerk.at, why="the run was interrupted")
            break
    tell(survived="")


def survey(files: Iterable[str], tests: Iterable[str], marker: str, tell: Tell, *, together: bool) -> None:
    """Run all tests without a mutant and tell, for each line of `files`, which of them ran it. In a child.

    They run as the judges do, file by file or together: what fails so without a mutant would judge none.
    A line that ran at import has the test "" beside those that ran it later.
    """
    cover = coverage.Coverage(data_file=None, config_file=False, include=[*files], messages=False)
    cover.start()
    for file in files:
        importlib.import_module(module_name(file))
    for some in [[*tests]] if together else [[test] for test in tests]:
        _run_pytest(some, _Clerk(tell, None, cover), "-m", marker)
    cover.stop()
    data = cover.get_data()
    for file in files:
        contexts = data.contexts_by_lineno(str(Path(file).resolve()))
        for line, names in contexts.items():
            tell(file=file, line=line, tests=sorted(names))
    tell(survived="")


def _run_pytest(files: list[str], clerk: _Clerk, *options: str) -> int:
    off = ["no:cacheprovider", "no:faulthandler"]
    # pytest would rather import its plugins itself: the parent did.
    quiet = ["--timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return pytest.main(
        [*(f"-p{plugin}" for plugin in off), *quiet, "--continue-on-collection-errors", *options, *files],
        plugins=[clerk],
    )
