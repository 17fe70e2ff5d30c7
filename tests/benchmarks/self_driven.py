"""What the guard costs an `AsyncLLM`: one engine, read through `AsyncLifecycle` and by itself in turn.

The engine, its process, the model and the consumers are the same on both sides, so what differs is the guard
alone: admission in the owner's thread, the way from vLLM's collector to the reader, and the news of the end.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_adapter.models import prepare_smollm2
from lifecycle import AsyncLifecycle
from tests.benchmarks.measure import Line, no_gc
from tests.benchmarks.streams import Block, Load, block_of, speed, speed_by

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 256}


async def compare(model: Path, loads: dict[Load, int], **settings: Any) -> list[tuple[Load, Any, Any]]:
    """Blocks of both sides for each load, after a round that warms up."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), disable_log_stats=True, **settings))
    results = []
    try:
        async with AsyncLifecycle.from_async_llm(llm, sinks=(), weights="unchecked") as guarded:
            for load, rounds in loads.items():
                sides: tuple[list[Block], list[Block]] = ([], [])
                for number in range(rounds + 1):
                    runs = list(zip((llm, guarded), sides, strict=True))
                    for engine, blocks in runs if number % 2 else reversed(runs):
                        with no_gc():
                            block = await block_of(engine, load)
                        if number:
                            blocks.append(block)
                results.append((load, *sides))
    finally:
        llm.shutdown()
    return results


def lines_of(load: Load, plain: list[Block], guarded: list[Block], *, judged: bool) -> Line:
    """Throughput by that of the plain engine. It is missed where even the upper 95 % bound is too low."""
    median, low, high = speed_by(plain, guarded)
    note = (
        f"{'upper bound; ' if judged else ''}median {median:.3f}, {low:.3f} to {high:.3f}; plain "
        f"{speed(plain):,.0f}, guarded {speed(guarded):,.0f} tokens/s; {len(plain)} rounds"
    )
    figure, bound = (high, 0.99) if judged else (median, None)
    return Line(f"tokens per second of a guarded AsyncLLM, {load}", figure, "", at_least=bound, note=note)


def run(*, quick: bool) -> Iterator[Line]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for the engine, one for who reads its streams
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from tests.engines import model_dir

    rounds = 5 if quick else 15
    loads = {Load(1, 100): rounds, Load(32, 60): rounds, Load(256, 40): rounds}
    for result in asyncio.run(compare(model_dir(), loads, **SETTINGS)):  # it computes next to nothing
        line = lines_of(*result, judged=False)
        yield replace(line, name=f"{line.name}, tiny model")
    rounds = 2 if quick else 7
    loads = {Load(1, 40): rounds, Load(32, 16): rounds, Load(256, 4): rounds}
    for result in asyncio.run(compare(prepare_smollm2(progress=lambda _: None), loads, **SETTINGS)):
        line = lines_of(*result, judged=True)
        yield replace(line, name=f"{line.name}, SmolLM2-135M")
