"""A drain takes no engine step that the loop written by hand would not take, and little time besides.

The loop by hand is the shortest that loses nothing: abort what never started, to be added again later, and
step while the scheduler has requests or a launched batch waits. Steps are counted in vLLM's engine core,
below all that is compared. Both drains start from the same moment, reached by the same steps: with nothing
started, in the first wave of requests, in the last tokens of one, in the second wave; with and without
launching ahead.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.measure import Line, median_difference, pairs_of

MOMENTS = (0, 1, 2, 5, 11, 12, 13, 17)
REQUESTS = 10
WAITING = 1000

_ids = itertools.count()


def run(*, quick: bool) -> Iterator[Line]:
    from tests.benchmarks.vllm_engine import pair
    from tests.engines import give_batch_queue, take_batch_queue

    llm = pair()
    for ahead, words in ((False, ""), (True, ", launching ahead")):
        if ahead:
            give_batch_queue(llm.raw)
        try:
            counts = [(steps_of(llm, by_hand, moment), steps_of(llm, guarded, moment)) for moment in MOMENTS]
        finally:
            take_batch_queue(llm.raw)
        note = f"by hand {[hand for hand, _ in counts]} at steps {list(MOMENTS)}"
        worst = max(guard - hand for hand, guard in counts)
        yield Line(f"engine steps more than by hand, worst{words}", worst, "", at_most=0, note=note)
        yield Line(f"  steps where nothing had started{words}", counts[0][1], "", at_most=1)
    rounds = 5 if quick else 20
    pairs = pairs_of(lambda: start_of(llm, by_hand), lambda: start_of(llm, guarded), rounds, warm_up=1)
    more = median_difference(pairs) / WAITING * 1e6
    hand = sorted(first for first, _ in pairs)[len(pairs) // 2] / WAITING * 1e6
    note = f"{WAITING} waiting; {hand:.1f} us each by hand"
    yield Line("recall of a waiting request, more than by hand", more, "us", note=note)


def fill(add: Callable[..., Any], step: Callable[[], Any], requests: int, steps: int) -> None:
    from vllm import SamplingParams

    for number in range(requests):
        params = SamplingParams(max_tokens=8 + number, ignore_eos=True, seed=number, temperature=1.0)
        add(str(next(_ids)), {"prompt_token_ids": [10, 11, 12 + number % 200]}, params)
    for _ in range(steps):
        step()


def by_hand(llm: Any, requests: int, moment: int) -> float:
    """Drain, sleep and wake without the lifecycle; returns the seconds of the drain."""
    engine, core = llm.engine, llm.core
    scheduler = core.scheduler
    fill(engine.add_request, engine.step, requests, moment)
    started = time.perf_counter()
    running = {request.request_id for request in scheduler.running}
    unstarted = [
        name
        for name, request in scheduler.requests.items()
        if name not in running
        and not (request.num_computed_tokens or request.num_output_tokens or request.num_preemptions)
    ]
    engine.abort_request(unstarted, internal=True)
    while scheduler.has_requests() or core.batch_queue:
        engine.step()
    seconds = time.perf_counter() - started
    engine.sleep(0, mode="keep")
    engine.wake_up()
    return seconds


def guarded(llm: Any, requests: int, moment: int) -> float:
    """The same through `sleep(level=0, mode="wait")`; what it held is dropped after the wake."""
    lifecycle = llm.lifecycle
    fill(lifecycle.add_request, lifecycle.step, requests, moment)
    report = lifecycle.sleep(level=0, mode="wait")
    lifecycle.abort_request(report.held)
    lifecycle.wake_up()
    while lifecycle.has_unfinished_requests():
        lifecycle.step()
    return report.drain_s


def steps_of(llm: Any, drain: Callable[[Any, int, int], float], moment: int) -> int:
    """Steps of the engine core in one drain, those before it not counted."""
    llm.settle()
    core, taken = llm.core, 0
    step = core.step_fn

    def counted() -> Any:
        nonlocal taken
        taken += 1
        return step()

    core.step_fn = counted
    try:
        drain(llm, REQUESTS, moment)
    finally:
        core.step_fn = step
    llm.settle()
    return taken - moment


def start_of(llm: Any, drain: Callable[[Any, int, int], float]) -> float:
    """Seconds of a drain that only recalls: nothing had started."""
    llm.settle()
    return drain(llm, WAITING, 0)
