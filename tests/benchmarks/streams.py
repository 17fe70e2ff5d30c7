"""`AsyncLifecycle` against vLLM's own `AsyncLLM`: the same model, settings and consumers.

Both engines live at once, and blocks of the two alternate. In a block every stream asks for the same number
of tokens, with logprobs and text, and reads them as deltas. `AsyncLLM` has its engine in a process of its own
and so overlaps it with what happens here; `AsyncLifecycle` has it in a thread of this process and shares the
interpreter lock with the consumers. So figures come as tokens per second and time to first token, by number
of streams, with light consumers, and with ones that burn 5 ms of this process's time for each output.

A third side is vLLM's own loop on the same in-process engine, with nobody who reads: what one process
reaches at most. Where even that is slower than `AsyncLLM`, the bottleneck is the processor and not the
engine, and the figure is published and not judged.

In some more blocks a task asks for a wake-up every millisecond and notes how late it comes: so long the event
loop was kept from it, by the library, the consumers or the interpreter lock. (It is kept out of the other
blocks because it takes that lock from the engine a thousand times a second.) What the library alone does is
seen on the simulated engine, whose steps take time but neither the processor nor the lock.

On a machine with a GPU: `python -m tests.gpu.streams`, with models of other sizes.
"""

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine_adapter.models import prepare_smollm2
from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine
from lifecycle import AsyncLifecycle, Lifecycle
from tests.benchmarks.measure import Line, no_gc, ratio

HEARTBEAT_S = 0.001
HEARTBEAT_ROUNDS = 3
BURN_S = 0.005
PROMPT_TOKENS = 16
BEGUN_AT_ONCE = 16
STEP_S = 0.004  # of the simulated engine
# vLLM's own loop reaches so much of `AsyncLLM` where both wait for the device.
ENGINE_BOUND = 0.98

_ids = itertools.count()


@dataclass
class Block:
    """What one block measured, in seconds. first: of each stream, until its first token."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """What a block asks for: so many streams, tokens of each, and seconds that a consumer burns an output."""

    streams: int
    tokens: int
    burn_s: float = 0.0

    def __str__(self) -> str:
        burning = f", {self.burn_s * 1000:.0f} ms an output" if self.burn_s else ""
        return f"{self.streams} x {self.tokens}{burning}"


def params_of(load: Load) -> Any:
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    return Params(
        max_tokens=load.tokens,
        ignore_eos=True,
        temperature=0.0,
        logprobs=1,
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": [10 + number % 200] * PROMPT_TOKENS}


async def block_of(engine: Any, load: Load) -> Block:
    """Run one block on an `AsyncLLM` or an `AsyncLifecycle`."""
    params = params_of(load)
    block = Block()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(load.streams):
            group.create_task(consume(engine, load, prompt_of(number), params, block))
            if number % BEGUN_AT_ONCE == 0:  # the others of this turn of the loop are the caller's own doing
                await asyncio.sleep(0)
    block.seconds = time.perf_counter() - started
    return complete(block, load)


async def lateness_of(engine: Any, load: Load) -> list[float]:
    """Seconds that each heartbeat of a block came late."""
    late: list[float] = []
    heart = asyncio.create_task(beat(late))
    await block_of(engine, load)
    heart.cancel()
    return late


def loop_of(engine: Any, load: Load) -> Block:
    """Run one block on an `LLMEngine`, as vLLM's `LLM` does. In the thread that built it."""
    params = params_of(load)
    block = Block()
    started = time.perf_counter()
    for number in range(load.streams):
        engine.add_request(f"loop-{next(_ids)}", prompt_of(number), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            block.tokens += len(output.outputs[0].token_ids)
    block.seconds = time.perf_counter() - started
    return complete(block, load)


def complete(block: Block, load: Load) -> Block:
    assert block.tokens == load.streams * load.tokens, f"{block.tokens} tokens of {load}"
    return block


async def consume(engine: Any, load: Load, prompt: dict[str, Any], params: Any, block: Block) -> None:
    asked, waits = time.perf_counter(), True
    async for output in engine.generate(prompt, params, f"stream-{next(_ids)}"):
        if waits:
            block.first.append(time.perf_counter() - asked)
            waits = False
        block.tokens += len(output.outputs[0].token_ids)
        if load.burn_s:
            burn(load.burn_s)


def burn(seconds: float) -> None:
    """Use the processor for so long, as an agent's own code would."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def beat(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + HEARTBEAT_S
        await asyncio.sleep(HEARTBEAT_S)
        late.append(time.perf_counter() - due)


@dataclass
class Sides:
    """The blocks of one load: of `AsyncLLM`, of `AsyncLifecycle`, and of vLLM's own in-process loop.

    late: of each heartbeat, with the first two.
    """

    plain: list[Block] = field(default_factory=list)
    guarded: list[Block] = field(default_factory=list)
    loop: list[Block] = field(default_factory=list)
    late: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


async def compare(plain: Any, guarded: AsyncLifecycle, load: Load, rounds: int) -> Sides:
    """So many rounds of blocks, each side first in turn, after a round that warms up."""
    sides = Sides()

    async def looped() -> Block:  # unguarded, in the engine's thread
        block: Block = await guarded._ask("loop", lambda core: loop_of(core.engine._engine, load))
        return block

    runs = [
        (sides.plain, lambda: block_of(plain, load)),
        (sides.guarded, lambda: block_of(guarded, load)),
    ]
    if not load.burn_s:
        runs.append((sides.loop, looped))
    for number in range(rounds + 1):
        turn = number % len(runs)
        for blocks, run in runs[turn:] + runs[:turn]:
            with no_gc():
                block = await run()
            if number:
                blocks.append(block)
    for _ in range(min(rounds, HEARTBEAT_ROUNDS)):
        for engine, late in zip((plain, guarded), sides.late, strict=True):
            with no_gc():
                late.extend(await lateness_of(engine, load))
    return sides


def speed_by(plain: list[Block], ours: list[Block]) -> tuple[float, float, float]:
    """Tokens per second by those of `AsyncLLM`: median and bounds, of pairs."""
    return ratio([(one.seconds, other.seconds) for other, one in zip(plain, ours, strict=True)])


def speed(blocks: list[Block]) -> float:
    return statistics.median(block.tokens / block.seconds for block in blocks)


def lines_of(load: Load, sides: Sides, *, judged: bool) -> Iterator[Line]:
    """The figures of one load.

    Its throughput is judged where the engine is the bottleneck: it may not be shown to be less than that
    of `AsyncLLM`, which it is when even the upper 95 % bound of the ratio lies below 1.
    """
    plain, guarded = sides.plain, sides.guarded
    bound_by_engine = bool(sides.loop) and speed_by(plain, sides.loop)[0] >= ENGINE_BOUND
    judged = judged and bound_by_engine
    median, low, high = speed_by(plain, guarded)
    note = (
        f"{'upper bound; ' if judged else ''}median {median:.3f}, {low:.3f} to {high:.3f}; "
        f"AsyncLLM {speed(plain):,.0f}, here {speed(guarded):,.0f} tokens/s; {len(plain)} rounds"
    )
    figure, bound = (high, 1.0) if judged else (median, None)
    yield Line(f"tokens per second by AsyncLLM's, {load}", figure, "", at_least=bound, note=note)
    if sides.loop:
        note = f"{speed(sides.loop):,.0f} tokens/s"
        if not bound_by_engine:
            note += ": the processor is the bottleneck"
        yield Line(f"  vLLM's own loop in one process, {load}", speed_by(plain, sides.loop)[0], "", note=note)
    firsts = [
        statistics.median(itertools.chain(*(block.first for block in side))) for side in (plain, guarded)
    ]
    note = f"AsyncLLM {firsts[0] * 1000:.1f} ms, here {firsts[1] * 1000:.1f} ms"
    yield Line(f"  time to first token by AsyncLLM's, {load}", firsts[1] / firsts[0], "", note=note)
    late = [quantile(side, 0.999) * 1000 for side in sides.late]
    yield Line(
        f"  event loop late, 99.9 % of heartbeats, {load}", late[1], "ms", note=f"AsyncLLM {late[0]:.1f} ms"
    )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@asynccontextmanager
async def both(model: Path, **settings: Any) -> AsyncIterator[tuple[Any, AsyncLifecycle]]:
    """Both engines on one model. `AsyncLLM` comes first: it may fork, which nothing with threads should."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_adapter import VllmInprocess

    arguments = {"model": str(model), "disable_log_stats": True, **settings}
    plain = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    build = partial(VllmInprocess, **arguments)
    try:
        async with AsyncLifecycle(build, sinks=(), weights="declared") as guarded:
            await guarded.mark_weights_loaded()  # the random ones of a dummy load will do
            yield plain, guarded
    finally:
        plain.shutdown()


def measure(model: Path, loads: dict[Load, int], *, judged: bool = True, **settings: Any) -> Iterator[Line]:
    """The lines of every load, with its number of rounds."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        plain, guarded = runner.run(stack.enter_async_context(both(model, **settings)))
        try:
            for load, rounds in loads.items():
                sides = runner.run(compare(plain, guarded, load, rounds))
                yield from lines_of(load, sides, judged=judged)
        finally:
            runner.run(stack.aclose())


def run(*, quick: bool) -> Iterator[Line]:
    yield from hand_overs(quick=quick)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for the engine, one for who reads its streams
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from tests.engines import model_dir

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 256}
    rounds = 5 if quick else 15
    loads = {
        Load(1, 100): rounds,
        Load(32, 60): rounds,
        Load(256, 40): rounds,
        Load(32, 20, BURN_S): 1 if quick else 3,
    }
    for line in measure(model_dir(), loads, judged=False, **settings):  # it computes next to nothing
        yield replace(line, name=f"{line.name}, tiny model")
    rounds = 2 if quick else 7
    loads = {Load(1, 40): rounds, Load(32, 16): rounds, Load(256, 4): rounds}
    real = prepare_smollm2(progress=lambda _: None)
    for line in measure(real, loads, **settings):
        yield replace(line, name=f"{line.name}, SmolLM2-135M")


# -- the way from the engine's thread to a stream ------------------------------------------------------


class Computing(SimulatedEngine):
    """Each step takes its time without the interpreter lock, as on a device."""

    def step(self) -> list[Any]:
        time.sleep(STEP_S)
        return super().step()


def hand_overs(*, quick: bool) -> Iterator[Line]:
    """Processor time of both threads for an output, beyond that of the blocking loop on the same engine."""
    for kind, streams, bound in (
        (OutputKind.DELTA, 256, 5.0),
        (OutputKind.CUMULATIVE, 256, None),
        (OutputKind.DELTA, 32, None),
        (OutputKind.DELTA, 1, None),
    ):
        params = SamplingParams(max_tokens=100, output_kind=kind)
        laps = []
        for _ in range(3 if quick else 15):
            handed = asyncio.run(seconds_of_streams(streams, params))
            laps.append((handed - seconds_of_loop(streams, params)) / (streams * 100) * 1e6)
        name = f"hand-over of an output to its consumer, {kind.name.lower()}, {streams} streams"
        yield Line(
            name, statistics.median(laps), "us", at_most=bound, note=f"{min(laps):.2f} to {max(laps):.2f}"
        )
    laps = [asyncio.run(seconds_of_asyncio(256, 100)) / 25600 * 1e6 for _ in range(3 if quick else 9)]
    name = "  what asyncio alone takes to wake a reader, 256 generators"
    yield Line(name, statistics.median(laps), "us", note=f"{min(laps):.2f} to {max(laps):.2f}")
    params = SamplingParams(max_tokens=100, output_kind=OutputKind.DELTA)
    for streams, bound in ((256, 10.0), (1024, None)):  # a step of 1,024 computes as long itself
        late: list[float] = []
        asyncio.run(seconds_of_streams(streams, params, late))
        figure = quantile(late, 0.999) * 1000
        yield Line(f"event loop late, 99.9 % of heartbeats, {streams} streams", figure, "ms", at_most=bound)


async def seconds_of_streams(streams: int, params: SamplingParams, late: list[float] | None = None) -> float:
    """late: where a heartbeat notes how late it comes."""

    async def read(number: int) -> None:
        async for _ in lifecycle.generate([1, 2, 3], params, str(number)):
            pass

    async with AsyncLifecycle(lambda: Computing(max_num_seqs=streams, record=False), sinks=()) as lifecycle:
        heart = None if late is None else asyncio.create_task(beat(late))
        with no_gc():
            started = time.process_time()
            await asyncio.gather(*map(read, range(streams)))
            seconds = time.process_time() - started
        if heart is not None:
            heart.cancel()
        return seconds


async def seconds_of_asyncio(readers: int, times: int) -> float:
    """Processor time for the same without a library: tasks that read generators, woken at the same pace."""
    loop = asyncio.get_running_loop()
    waiters: list[asyncio.Future[None]] = [loop.create_future() for _ in range(readers)]

    async def generate(number: int) -> AsyncIterator[int]:
        for turn in range(times):
            await waiters[number]
            waiters[number] = loop.create_future()
            yield turn

    async def read(number: int) -> None:
        async for _ in generate(number):
            pass

    async def wake() -> None:
        for _ in range(times):
            await asyncio.sleep(STEP_S)
            for waiter in waiters:
                waiter.set_result(None)

    with no_gc():
        started = time.process_time()
        await asyncio.gather(wake(), *map(read, range(readers)))
        return time.process_time() - started


def seconds_of_loop(streams: int, params: SamplingParams) -> float:
    lifecycle = Lifecycle(Computing(max_num_seqs=streams, record=False), sinks=())
    with no_gc():
        started = time.process_time()
        for number in range(streams):
            lifecycle.add_request(str(number), [1, 2, 3], params)
        while lifecycle.has_unfinished_requests():
            lifecycle.step()
        return time.process_time() - started
