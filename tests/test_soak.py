"""Many cycles: nothing lost, nothing grows."""

import gc
import os
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import Lifecycle

LEVELS_AND_MODES = [(level, mode) for level in (0, 1, 2) for mode in ("wait", "keep", "wait_all", "abort")]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(points):
    """Bytes a cycle, by least squares, without the one largest step.

    A process that has run many tests before gets its memory in larger pieces; that it takes one
    more of them in a run is no leak, growth that goes on is.
    """
    steps = [(after - before, place) for place, ((_, before), (_, after)) in enumerate(pairwise(points), 1)]
    largest, place = max(steps)
    points = [(x, y - largest * (index >= place)) for index, (x, y) in enumerate(points)]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def cycle(lifecycle, number, prompt, params):
    """Add some requests, step, sleep in one way, wake, and finish. Returns the last outputs by id."""
    done = {}

    def collect():
        done.update({output.request_id: output for output in lifecycle.step() if output.finished})

    level, mode = LEVELS_AND_MODES[number % len(LEVELS_AND_MODES)]
    for index in range(6):
        lifecycle.add_request(f"{number}-{index}", prompt(number, index), params(number, index))
    for _ in range(3):
        collect()
    lifecycle.sleep(level, mode)
    assert lifecycle.check() == []
    lifecycle.wake_up(["weights"] if level else None)
    if level == 2:
        lifecycle.reload_weights()
    lifecycle.wake_up()
    while lifecycle.has_unfinished_requests():
        collect()
    assert lifecycle.check() == []
    assert len(done) == 6
    return mode, done


def test_a_thousand_cycles_on_the_simulated_engine():
    """1,000 cycles over levels and modes: tokens right, memory flat, event buffer at its cap."""
    engine = SimulatedEngine(max_num_seqs=4, record=False)
    lifecycle = Lifecycle(engine, sinks=(), event_capacity=512)
    points = []

    def params(number, index):
        return SamplingParams(max_tokens=4 + index, seed=number % 7 + index)

    for number in range(1000):
        mode, done = cycle(lifecycle, number, lambda number, index: [number % 50 + 1, index + 1], params)
        for index in range(6):
            tokens = done[f"{number}-{index}"].outputs[0].token_ids
            want = expected_tokens([number % 50 + 1, index + 1], params(number, index))
            assert tokens == (want[: len(tokens)] if mode == "abort" else want)
        if number >= 300 and number % 10 == 0:
            gc.collect()
            points.append((number, resident_bytes()))
    assert engine.misuse == []
    assert len(lifecycle._core.events) == 512
    assert slope(points) < 1024


@pytest.mark.vllm
def test_fifty_cycles_on_vllm(guarded):
    """50 cycles with requests in flight on a real engine: invariants hold, memory is flat."""
    from vllm import SamplingParams as VllmParams

    points = []
    guarded._core.events._events = deque(maxlen=256)  # full, and no longer growing, when the count begins

    def params(number, index):
        return VllmParams(max_tokens=4 + index, seed=index, temperature=1.0, ignore_eos=True)

    reference = {}
    for number in range(134):
        mode, done = cycle(guarded, number, lambda number, index: f"prompt {index}", params)
        for index in range(6):
            tokens = list(done[f"{number}-{index}"].outputs[0].token_ids)
            want = reference.setdefault(index, tokens)
            assert tokens == (want[: len(tokens)] if mode == "abort" else want)
        if number >= 84:  # reloading leaves vLLM a few hundred bytes a time; its start-up caches take longer
            gc.collect()
            points.append((number, resident_bytes()))
    assert len(points) == 50
    assert slope(points) < 1024, [size - points[0][1] for _, size in points]
