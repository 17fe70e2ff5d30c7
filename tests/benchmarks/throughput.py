"""Steps per second of a guarded vLLM by those of the same engine without the lifecycle.

One engine, on the tiny model, whose steps take two or three milliseconds: on a real model, where a step takes
ten or more, the share of the lifecycle is smaller. Twice, because each way shows what the other can't:

blocks
    A block adds four requests and steps until they are done, all of it timed. Raw blocks call the `LLMEngine`
    itself, guarded ones the lifecycle in front of it, and `LLM.generate` is called without and with `attach`.
    Told only: two blocks lie so far apart in time that on a shared machine even raw by raw, the first of the
    lines, does not come within one percent. In blocks of 12 tokens a request admission and ends weigh most.
step by step
    One batch of four requests, admitted through the lifecycle, is stepped by the raw engine and by the
    lifecycle in turn (which of the two goes first is drawn by lot), so that both step the same batch.
    This one has the target: its bounds are narrow enough to judge. Without admission and ends.

The figure is the 95 % lower bound of the ratio: the target is met only if it is met beyond the noise.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.measure import Line, no_gc, pairs_of, ratio, seconds_of

SEQUENCES = 4
TOKENS = 60
SHORT = 12
TARGET = 0.99

_ids = itertools.count()


def run(*, quick: bool) -> Iterator[Line]:
    from vllm.sampling_params import RequestOutputKind

    from tests.benchmarks.vllm_engine import pair

    llm = pair()
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        name = kind.name.lower().replace("_", "-")
        yield line(
            f"steps per second, guarded by raw, {name}, step by step",
            in_turn(llm, kind, 20 if quick else 120),
        )
        llm.settle()
    for tokens, count in ((TOKENS, 30 if quick else 150), (SHORT, 40 if quick else 200)):
        size = f"blocks of {SEQUENCES} x {tokens} tokens"
        again = [block_of(llm.engine, RequestOutputKind.FINAL_ONLY, tokens) for _ in range(2)]
        yield line(f"  raw by raw, {size}", pairs_of(*again, count), judged=False)
        llm.settle()
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
            name = kind.name.lower().replace("_", "-")
            raw, guarded = block_of(llm.engine, kind, tokens), block_of(llm.lifecycle, kind, tokens)
            yield line(f"  {name}, {size}", pairs_of(raw, guarded, count), judged=False)
            llm.settle()
        raw, guarded = generate_of(llm.raw, tokens), generate_of(llm.guarded, tokens)
        yield line(f"  LLM.generate, {size}", pairs_of(raw, guarded, count), judged=False)
        llm.settle()


def line(name: str, pairs: list[tuple[float, float]], *, judged: bool = True) -> Line:
    """From pairs of seconds a step."""
    median, low, high = ratio([(second, first) for first, second in pairs])
    millis = sorted(first for first, _ in pairs)[len(pairs) // 2] * 1000
    note = f"95 % bound; median {median:.4f}, to {high:.4f}; {len(pairs)} pairs, {millis:.2f} ms a raw step"
    return Line(name, low, "", at_least=TARGET if judged else None, note=note)


def params_of(kind: Any, tokens: int) -> list[Any]:
    from vllm import SamplingParams

    return [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, temperature=1.0, output_kind=kind)
        for seed in range(SEQUENCES)
    ]


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [10 + place, *range(20, 35)]} for place in range(SEQUENCES)]


def add_all(engine: Any, params: list[Any]) -> None:
    for prompt, wanted in zip(prompts(), params, strict=True):
        engine.add_request(str(next(_ids)), prompt, wanted)


def block_of(engine: Any, kind: Any, tokens: int) -> Callable[[], float]:
    """A block whose result is its seconds a step; the engine is an `LLMEngine` or a `Lifecycle`."""

    def block() -> float:
        steps = 0
        params = params_of(kind, tokens)

        def work() -> None:
            nonlocal steps
            add_all(engine, params)
            while engine.has_unfinished_requests():
                engine.step()
                steps += 1

        seconds = seconds_of(work)
        assert steps == tokens, f"not the work that the others do: {steps} steps"
        return seconds / steps

    return block


def generate_of(llm: Any, tokens: int) -> Callable[[], float]:
    """The same through the blocking call."""
    from vllm.sampling_params import RequestOutputKind

    params = params_of(RequestOutputKind.FINAL_ONLY, tokens)
    return lambda: seconds_of(lambda: llm.generate(prompts(), params, use_tqdm=False)) / tokens


def in_turn(llm: Any, kind: Any, batches: int) -> list[tuple[float, float]]:
    """Pairs of seconds: a step by the raw engine, and one of the same batch by the lifecycle."""
    dice = random.Random(20240229)
    lifecycle = llm.lifecycle
    pairs = []
    for _ in range(batches):
        add_all(lifecycle, params_of(kind, TOKENS))
        lifecycle.step()
        with no_gc():
            for _ in range(TOKENS // 2 - 2):  # no request ends in these
                if dice.random() < 0.5:
                    first = seconds_of_step(llm.engine)
                    pairs.append((first, seconds_of_step(lifecycle)))
                else:
                    second = seconds_of_step(lifecycle)
                    pairs.append((seconds_of_step(llm.engine), second))
        while lifecycle.has_unfinished_requests():
            lifecycle.step()
    return pairs


def seconds_of_step(engine: Any) -> float:
    started = time.perf_counter()
    engine.has_unfinished_requests()
    engine.step()
    return time.perf_counter() - started
