"""What a request costs while it waits outside a sleeping engine, and when it is admitted at the wake.

Memory is counted by `tracemalloc`, which sees every object, and by the growth of the process from 20,000 to
100,000 requests, which sees also what the allocator adds; prompts exist before, ids do not. On a real vLLM,
memory is counted again for its own parameter objects: equal ones in a row are shared, and those with a seed
for each request are not.

Holding must not become slower with what is held already. A step can't, because a sleeping engine takes none;
after the wake the requests are the engine's own (`steps` has 100,000 in flight). At the wake, a held request
may cost little more than the engine's own `add_request` of it.
"""

import gc
import itertools
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_adapter.simulated import NullEngine, SamplingParams
from lifecycle import Lifecycle
from lifecycle.engine import Call
from tests.benchmarks.measure import Line, no_gc, pairs_of, ratio

HELD = 100_000
CHUNK = 1000
BATCH = 200  # requests of one wake on a real engine

_ids = itertools.count()


def run(*, quick: bool) -> Iterator[Line]:
    del quick  # 100,000 requests take seconds either way
    prompts = [[number % 250] * 16 for number in range(HELD)]
    start = resident_bytes(HELD, prompts, first=HELD // 5)
    yield Line(f"memory of each of {HELD:,} held requests, of the process", start, "B", at_most=1024)
    lifecycle = asleep()
    traced = traced_bytes(lambda: hold(lifecycle, prompts))
    yield Line("  the same, by object", traced / HELD, "B", at_most=1024)
    lifecycle = asleep()
    with no_gc():
        chunks = [seconds_to_hold(lifecycle, prompts[at : at + CHUNK]) for at in range(0, HELD, CHUNK)]
        started = time.perf_counter()
        lifecycle.wake_up()
        wake = (time.perf_counter() - started) / HELD * 1e6
    tenth = len(chunks) // 10
    few, many = statistics.median(chunks[:tenth]), statistics.median(chunks[-tenth:])
    note = f"{few / CHUNK * 1e6:.2f} us each at first, {many / CHUNK * 1e6:.2f} us at last"
    yield Line("add_request while asleep, last tenth by first tenth", many / few, "", at_most=1.25, note=note)
    yield Line(f"  wake with {HELD:,} held, on an engine without costs", wake, "us", note="a request")


class Prepared(NullEngine):
    """Takes the call as it is, without the copy of its parameters that the simulated engine makes."""

    def prepare(self, request_id, prompt, params, options):
        return Call(request_id, prompt, params, 0.0, options)

    def validate(self, call):
        pass


def asleep() -> Lifecycle:
    lifecycle = Lifecycle(Prepared(), sinks=())
    lifecycle.sleep(level=1)
    return lifecycle


def hold(lifecycle: Lifecycle, prompts: Sequence[list[int]]) -> None:
    params = SamplingParams()
    for prompt in prompts:
        lifecycle.add_request(f"request-{next(_ids)}", prompt, params)


def seconds_to_hold(lifecycle: Lifecycle, prompts: Sequence[list[int]]) -> float:
    started = time.perf_counter()
    hold(lifecycle, prompts)
    return time.perf_counter() - started


def traced_bytes(work: Callable[[], None]) -> int:
    """Bytes of the objects that this leaves behind."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def resident_bytes(count: int, prompts: Sequence[list[int]], *, first: int) -> float:
    """Growth of the process for each request, once the first ones have filled what was free."""
    lifecycle = asleep()
    hold(lifecycle, prompts[:first])
    before = resident()
    hold(lifecycle, prompts[first:count])
    return (resident() - before) / (count - first)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


# -- on a real vLLM ---------------------------------------------------------------------------------


def run_on_vllm(*, quick: bool) -> Iterator[Line]:
    from tests.benchmarks.vllm_engine import pair

    llm = pair()
    for words, seeded in (("equal parameters", False), ("a seed for each", True)):
        each = held_bytes(llm, 500 if quick else 2000, seeded=seeded)
        yield Line(f"memory of a held request of vLLM, {words}", each, "B", at_most=1024)
    rounds = 15 if quick else 60
    for words, seeded in (("equal parameters", False), ("a seed for each", True)):
        pairs = pairs_of(
            lambda seeded=seeded: raw_add(llm, requests(BATCH, seeded=seeded)),
            lambda seeded=seeded: wake(llm, requests(BATCH, seeded=seeded)),
            rounds,
        )
        median, low, high = ratio(pairs)
        raw = statistics.median(first for first, _ in pairs) / BATCH * 1e6
        note = f"{BATCH} held; {raw:.0f} us each raw; 90 % interval {low:.3f} to {high:.3f}"
        yield Line(f"wake, for each held by raw add_request, {words}", median, "", at_most=1.1, note=note)


def requests(count: int, *, seeded: bool) -> list[tuple[dict[str, list[int]], Any]]:
    from vllm import SamplingParams as Params

    shared = Params(max_tokens=8)
    return [
        (
            {"prompt_token_ids": [10 + number % 200] * 16},
            Params(max_tokens=8, seed=number) if seeded else shared,
        )
        for number in range(count)
    ]


def add_all(add: Callable[..., str], wanted: Sequence[tuple[Any, Any]]) -> list[str]:
    return [add(f"request-{next(_ids)}", prompt, params) for prompt, params in wanted]


def empty(llm: Any, ids: Sequence[str]) -> None:
    """Drop what was added, and have the engine flush it."""
    llm.lifecycle.abort_request(ids)
    llm.engine.abort_request(ids, internal=True)
    llm.settle()


def held_bytes(llm: Any, count: int, *, seeded: bool) -> float:
    wanted = requests(count, seeded=seeded)
    llm.lifecycle.sleep(level=0)
    try:
        add_all(llm.lifecycle.add_request, wanted[:10])
        ids: list[str] = []
        return traced_bytes(lambda: ids.extend(add_all(llm.lifecycle.add_request, wanted))) / count
    finally:
        llm.lifecycle.abort_request([record.request_id for record in llm.lifecycle._core.ledger.records()])
        llm.lifecycle.wake_up()


def raw_add(llm: Any, wanted: Sequence[tuple[Any, Any]]) -> float:
    """Seconds to add these to the engine itself."""
    started = time.perf_counter()
    ids = add_all(llm.engine.add_request, wanted)
    seconds = time.perf_counter() - started
    empty(llm, ids)
    return seconds


def wake(llm: Any, wanted: Sequence[tuple[Any, Any]]) -> float:
    """Seconds of a wake that admits these."""
    llm.lifecycle.sleep(level=0)
    ids = add_all(llm.lifecycle.add_request, wanted)
    started = time.perf_counter()
    report = llm.lifecycle.wake_up()
    seconds = time.perf_counter() - started
    assert len(report.readmitted) == len(wanted)
    empty(llm, ids)
    return seconds
