"""The demo: a rollout that sleeps in the middle, and every token compared with one that did not.

Theory of operation
-------------------
`run` plays one of two tellings of the same story, on a real vLLM or on the simulated
engine: `_play`, here, with the blocking `Lifecycle` and a step loop; `demo_async.play`
with `AsyncLifecycle` and a coroutine for each request. What stands in either is what a
trainer would write. `demo_stage` has the engines and the comparison, `demo_screen` what is
seen.
"""

from __future__ import annotations

import time
from functools import partial

from engine_adapter import demo_async
from engine_adapter.demo_screen import Screen, make_screen
from engine_adapter.demo_stage import (
    CANNOT_START,
    INTERRUPTED,
    SLOTS,
    STEPS_BEFORE_SLEEP,
    VICTIM,
    CannotStartError,
    Collected,
    Stage,
    compare,
    count,
    on_simulated,
    on_vllm,
    read_fault,
    refused,
    verdict,
)
from engine_adapter.models import ModelPreparationError


def run(*, simulated: bool = False, asynchronous: bool = False) -> int:
    """Play the demo and return its exit status."""
    screen = make_screen()
    try:
        fault = read_fault()
        if fault:
            screen.line(f"FAULT={fault}: one output of {VICTIM} is spoiled before it is compared")
        set_stage = on_simulated if simulated else partial(on_vllm, screen)
        if asynchronous:
            return demo_async.play(screen, set_stage, fault)
        return _play(screen, set_stage(), fault)
    except (CannotStartError, ModelPreparationError) as error:
        screen.line(f"The demo can't start: {error}")
        return CANNOT_START
    except KeyboardInterrupt:
        screen.line("Interrupted.")
        return INTERRUPTED


def _play(screen: Screen, stage: Stage, fault: str) -> int:
    screen.heading("1. The reference: nothing guarded, nothing interrupted")
    screen.line(f"{stage.title}; {len(stage.requests)} requests in {SLOTS} slots")
    started = time.monotonic()
    reference = stage.run_plain()
    screen.line(f"{count(reference)} tokens in {time.monotonic() - started:.1f} s")

    screen.heading("2. The same requests guarded, and put to sleep in the middle")
    lifecycle, collected = stage.guard(), Collected(fault)
    *early, late = stage.requests
    for request in early:
        lifecycle.add_request(request.request_id, request.prompt, request.params)
    for _ in range(STEPS_BEFORE_SLEEP):
        collected.add(lifecycle.step(), "before the sleep")
    screen.line(f"{STEPS_BEFORE_SLEEP} steps: {len(collected.ended)} of {len(early)} requests finished")
    screen.line('sleep(level=1, mode="wait"): finish what started, hold the rest')
    with screen.drain_bar() as progress:
        slept = lifecycle.sleep(level=1, mode="wait", progress=progress)
    screen.line(f"finished before: {' '.join(collected.ended)}; in the drain: {' '.join(slept.drained)}")
    screen.line(f"held until the wake: {' '.join(slept.held)}")
    screen.slept(slept)

    screen.heading("3. While it sleeps: what is safe works, what is not is refused")
    collected.add(lifecycle.step(), "in the drain")
    screen.line("step() hands out what the drain finished, once")
    lifecycle.add_request(late.request_id, late.prompt, late.params)
    screen.line(f"add_request({late.request_id!r}) is held: {lifecycle.snapshot().held} wait now")
    problems: list[str] = []
    with refused(screen, "step()", problems):
        lifecycle.step()
    with refused(screen, "generate()", problems):
        stage.generate(lifecycle)

    screen.heading("4. Wake: the weights, then the KV cache, and finish the rest")
    screen.report(lifecycle.wake_up(["weights"]))
    screen.report(lifecycle.wake_up(["kv_cache"]))
    while lifecycle.has_unfinished_requests():
        collected.add(lifecycle.step(), "after the wake")
    screen.line(f"{len(collected.ended)} requests finished; the engine is {lifecycle.state}")

    screen.heading("5. Level 2 discards the weights: nothing is served until they are loaded")
    screen.slept(lifecycle.sleep(level=2))
    screen.report(lifecycle.wake_up())
    with refused(screen, "generate()", problems):
        stage.generate(lifecycle)
    loaded = lifecycle.reload_weights()
    screen.line(f"reload_weights() in {loaded.seconds:.2f} s; the engine is {lifecycle.state}")
    again = stage.generate(lifecycle)
    screen.line(f"generate(): {count(again)} tokens")

    screen.heading("6. Every transition, from lifecycle.events()")
    screen.transitions(lifecycle.events())

    screen.heading("7. Every request against the uninterrupted run")
    problems += compare(screen, reference, collected, again)
    return verdict(screen, stage, problems)
