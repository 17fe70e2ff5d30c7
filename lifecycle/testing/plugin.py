"""Fixtures for pytest: a simulated `LLM` or engine, whose misuse fails the test.

Theory of operation
-------------------
pytest finds this module by its entry point and imports it at the start of every run, so it
imports nothing but pytest; the engine is found by name when a fixture is used, as the command
line finds its adapters.

A fixture hands out a plain, unguarded stand-in, which the code under test attaches to as it
would to the real one. When the test is over, `_verdict` says what it did wrong, in words: what
the engine was asked that it should not have been, and what an attached lifecycle was left
with. Every finding fails the test. One that provokes misuse on purpose ends with
`llm.misuse.clear()`.
"""

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lifecycle.engine import Snapshot
    from lifecycle.testing.recorder import EventRecorder

pytest.register_assert_rewrite("lifecycle.testing.contract")


@pytest.fixture
def simulated_engine() -> Iterator[Any]:
    """A `SimulatedEngine`, idle and awake. Misuse fails the test."""
    engine = _find("simulated").SimulatedEngine()
    yield engine
    _fail_for(_misuse(engine.misuse))


@pytest.fixture
def make_simulated_llm() -> Iterator[Callable[..., Any]]:
    """Makes plain `SimulatedLLM`s with options of one's own, each judged at the end."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        llm = _find("simulated_llm").SimulatedLLM(**options)
        made.append(llm)
        return llm

    yield make
    _fail_for(finding for llm in made for finding in _verdict(llm))


@pytest.fixture
def simulated_llm(make_simulated_llm: Callable[..., Any]) -> Any:
    """What `LLM(...)` returns, without a model: plain, until the code under test attaches it.

    The test fails at its end if the engine was misused, or if an attached lifecycle was left
    with requests that nobody has got; the lifecycle is then taken off.
    """
    return make_simulated_llm()


@pytest.fixture
def event_recorder() -> "EventRecorder":
    """An `EventRecorder`, to be given as one of the `sinks`."""
    recorder: EventRecorder = importlib.import_module("lifecycle.testing.recorder").EventRecorder()
    return recorder


def _find(module: str) -> Any:
    return importlib.import_module(f"engine_adapter.{module}")


def _fail_for(findings: Iterable[str]) -> None:
    found = list(findings)
    if found:
        pytest.fail("\n".join(["the engine was misused:", *(f"- {each}" for each in found)]), pytrace=False)


def _misuse(lines: Iterable[str]) -> Iterator[str]:
    for line, count in Counter(lines).items():
        yield line if count == 1 else f"{line} ({count} times)"


def _verdict(llm: Any) -> Iterator[str]:
    """What was done wrong to this `SimulatedLLM`, in words; its lifecycle is taken off."""
    yield from _misuse(llm.misuse)
    lifecycle = _find("standin").attached(llm.llm_engine)
    if lifecycle is None:
        return
    left = lifecycle.snapshot()
    if left.operation is not None:  # its lock may never be let go
        yield f"{left.operation} is still under way"
        return
    yield from (f"a promise of the lifecycle's own is broken: {promise}" for promise in lifecycle.check())
    if left.state != "failed":  # a failure says by itself whose requests it ended
        yield from _left_behind(left)
    with contextlib.suppress(importlib.import_module("lifecycle.errors").IllegalCall):
        lifecycle.detach()


def _left_behind(left: "Snapshot") -> Iterator[str]:
    """Requests that nobody has got."""
    for count, words in (
        (left.in_flight, "still in flight: step until they are finished, or abort them"),
        (left.held, "still held: wake_up() admits them, or abort them"),
        (left.undelivered, "finished, but their last outputs were never taken: step() hands them out"),
    ):
        if count:
            yield f"at the end ({left.state.replace('_', ' ')}), {count} requests are {words}"
