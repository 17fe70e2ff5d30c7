"""What one guarded step costs, on an engine whose own step costs nothing.

Compared are `step()` and `has_unfinished_requests()` of the lifecycle with the same two calls of the bare
engine, as a caller's loop makes them: for steps without an output (what vLLM returns for final-only requests
until they end), for 256 outputs a step, and with 100,000 requests in flight, which must not cost more. The
steps of a drain do more for each request in flight: they count tokens and look for progress.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine_adapter.simulated import NullEngine, SamplingParams
from engine_adapter.standin import _like
from lifecycle import Lifecycle
from tests.benchmarks.measure import Line, median_difference, no_gc, pairs_of

OUTPUTS = 256
MANY = 100_000


def run(*, quick: bool) -> Iterator[Line]:
    blocks = 60 if quick else 300
    nothing = overhead(1, 0, blocks, 1000)
    yield Line("step() + has_unfinished_requests(), no outputs", nothing, "us", at_most=1.0)
    outputs = overhead(OUTPUTS, OUTPUTS, blocks, 50)
    each = (outputs - nothing) / OUTPUTS
    yield Line(f"  each of {OUTPUTS} outputs of a step", each, "us", at_most=0.3)
    many = overhead(MANY, 0, blocks, 1000)
    yield Line(f"  no outputs, {MANY:,} requests in flight", many, "us", at_most=1.0)
    attached = overhead(1, 0, blocks, 1000, attached=True)
    yield Line("  no outputs, as attach() puts it in place", attached, "us")
    each = drain_step(OUTPUTS, rounds=blocks // 10)
    yield Line(f"step of a drain, for each of {OUTPUTS} in flight", each, "us")


def overhead(in_flight: int, outputs: int, blocks: int, steps: int, *, attached: bool = False) -> float:
    """Microseconds that a step costs more, by the median over pairs of blocks."""
    engine = NullEngine()
    lifecycle = Lifecycle(engine, sinks=())
    params = SamplingParams()
    for number in range(in_flight):
        lifecycle.add_request(str(number), "p", params)
    engine.outputs = engine.outputs[:outputs]
    step, busy = lifecycle.step, lifecycle.has_unfinished_requests
    if attached:
        step, busy = _like(engine.step, step), _like(engine.has_work, busy)
    pairs = pairs_of(
        lambda: time_of(engine.step, engine.has_work, steps), lambda: time_of(step, busy, steps), blocks
    )
    return median_difference(pairs) * 1e6


def time_of(step: Callable[[], Any], busy: Callable[[], bool], steps: int) -> float:
    """Seconds of one round of a caller's loop, the median of three."""
    laps = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(steps):
            busy()
            step()
        laps.append((time.perf_counter() - started) / steps)
    return statistics.median(laps)


class Draining(NullEngine):
    """Is quiet once it has taken as many steps as it was told to."""

    until = 0

    def has_launched(self) -> bool:
        return self.steps < self.until


def drain_step(in_flight: int, rounds: int, steps: int = 100) -> float:
    """Microseconds that a step of a drain costs for each request in flight, none of which has an output."""
    engine = Draining()
    lifecycle = Lifecycle(engine, sinks=())
    for number in range(in_flight):
        lifecycle.add_request(str(number), "p", SamplingParams())
    engine.outputs = []
    laps = []
    for _ in range(rounds):
        engine.until = engine.steps + steps
        with no_gc():
            laps.append(lifecycle.sleep(level=0, mode="keep").drain_s)
        lifecycle.wake_up()
    return statistics.median(laps) / steps / in_flight * 1e6
