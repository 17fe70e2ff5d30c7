"""Steps per second of a guarded vLLM by those of the same engine without the lifecycle.

One engine, on the tiny model, whose steps take a millisecond or two: on a real model, where a step takes ten
or more, the share of the lifecycle is smaller. A block adds four requests of 60 tokens and steps until they
are done; admission is part of what is timed. Raw blocks call the `LLMEngine` itself, guarded ones the
lifecycle in front of it, and the last line is `LLM.generate` as it is against `LLM.generate` after `attach`.

The figure is the 95 % lower bound of the ratio: the target is met only if it is met beyond the noise.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.measure import Line, pairs_of, ratio, seconds_of

SEQUENCES = 4
TOKENS = 60
TARGET = 0.99

_ids = itertools.count()


def run(*, quick: bool) -> Iterator[Line]:
    from vllm.sampling_params import RequestOutputKind

    from tests.benchmarks.vllm_engine import pair

    llm = pair()
    count = 30 if quick else 150
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        name = kind.name.lower().replace("_", "-")
        yield line(
            f"steps per second, guarded by raw, {name}",
            lambda kind=kind: block(llm.engine, kind),
            lambda kind=kind: block(llm.lifecycle, kind),
            count,
        )
        llm.check_empty()
    yield line("the same, LLM.generate", lambda: generate(llm.raw), lambda: generate(llm.guarded), count)
    llm.check_empty()


def line(
    name: str, raw: Callable[[], tuple[float, int]], guarded: Callable[[], tuple[float, int]], count: int
) -> Line:
    """The ratio of the speeds of two kinds of blocks, which must take the same number of steps."""
    steps: set[int] = set()

    def speed(run_block: Callable[[], tuple[float, int]]) -> float:
        seconds, taken = run_block()
        steps.add(taken)
        return taken / seconds

    pairs = pairs_of(lambda: speed(raw), lambda: speed(guarded), count, warm_up=4)
    assert len(steps) == 1, f"not the same work: blocks of {sorted(steps)} steps"
    median, low, high = ratio(pairs)
    millis = 1000 / sorted(speed for speed, _ in pairs)[len(pairs) // 2]
    note = f"95 % bound; median {median:.4f}, to {high:.4f}; {count} pairs, {millis:.2f} ms a raw step"
    return Line(name, low, "", at_least=TARGET, note=note)


def params_of(kind: Any) -> list[Any]:
    from vllm import SamplingParams

    return [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, temperature=1.0, output_kind=kind)
        for seed in range(SEQUENCES)
    ]


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [10 + place, *range(20, 35)]} for place in range(SEQUENCES)]


def block(engine: Any, kind: Any) -> tuple[float, int]:
    """Seconds and steps of one block; the engine is an `LLMEngine` or a `Lifecycle`."""
    steps = 0
    params = params_of(kind)

    def work() -> None:
        nonlocal steps
        for prompt, wanted in zip(prompts(), params, strict=True):
            engine.add_request(str(next(_ids)), prompt, wanted)
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1

    return seconds_of(work), steps


def generate(llm: Any) -> tuple[float, int]:
    """The same through the blocking call; its steps are those of its tokens."""
    from vllm.sampling_params import RequestOutputKind

    params = params_of(RequestOutputKind.FINAL_ONLY)
    return seconds_of(lambda: llm.generate(prompts(), params, use_tqdm=False)), TOKENS
