"""The demo's asynchronous telling: concurrent streams, asleep in the middle, printed side by side.

Theory of operation
-------------------
Each request is a coroutine that reads its stream; all run at once in the event loop, while
the engine steps in the thread of its `AsyncLifecycle`. That thread also builds the engine,
and plays the reference before the lifecycle gets it: one engine serves both, and no other
thread ever steps it. The story itself is one more coroutine of the same loop.

The sleep comes when two streams have finished and others run in their slots: those are
drained, and the rest wait and are held, as is one that is asked for while the engine
sleeps. What a stream is doing is told from outside, by what came and by the state: nothing
in the engine is asked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine_adapter.demo_screen import Frame, Screen, StreamView
from engine_adapter.demo_stage import (
    SLOTS,
    Collected,
    Request,
    Stage,
    Tokens,
    compare,
    count,
    refused,
    verdict,
)
from lifecycle import AsyncLifecycle, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lifecycle import Engine

# How long it stays asleep: here a trainer would train, or another model serve.
_ASLEEP_S: Final = 1.0
_CLOSED_TO_NEW: Final = (State.DRAINING, State.SLEEPING, State.PARTIALLY_AWAKE)


def play(screen: Screen, set_stage: Callable[[], Stage], fault: str) -> int:
    """Tell the story and return the demo's exit status."""
    return asyncio.run(_play(screen, set_stage, fault))


class _Rollout:
    """Streams that run at once, and what came of each so far."""

    def __init__(self, lifecycle: AsyncLifecycle, requests: Sequence[Request], fault: str = "") -> None:
        self._lifecycle = lifecycle
        self._requests = requests
        self._begun = time.monotonic()
        self._asked: set[str] = set()
        self._over: set[str] = set()
        self.collected = Collected(fault)
        self.when = "before the sleep"
        self.two_gave_way = asyncio.Event()  # more have begun than there are slots

    async def read(self, request: Request) -> None:
        """Read one stream to its end."""
        self._asked.add(request.request_id)
        async for output in self._lifecycle.generate(request.prompt, request.params, request.request_id):
            self.collected.add([output], self.when)
            if len(self.collected.tokens) == SLOTS + 2:
                self.two_gave_way.set()
        self._over.add(request.request_id)

    def look(self) -> Frame:
        """All streams now."""
        state = self._lifecycle.state
        views = [self._view(request, state) for request in self._requests]
        return Frame(state.value.replace("_", " "), time.monotonic() - self._begun, views)

    def _view(self, request: Request, state: State) -> StreamView:
        name = request.request_id
        tokens = len(self.collected.tokens.get(name, ()))
        if name not in self._asked:
            status = "later"
        elif name in self._over:
            status = "finished"
        elif tokens:
            status = "draining" if state is State.DRAINING else "running"
        else:
            status = "held" if state in _CLOSED_TO_NEW else "waiting"
        return StreamView(name, status, tokens, request.tokens, self.collected.one_line(name))


@dataclass(slots=True)
class _Built:
    """What the engine's thread leaves behind when it has built the engine."""

    stage: Stage
    reference: Tokens
    seconds: float


async def _play(screen: Screen, set_stage: Callable[[], Stage], fault: str) -> int:
    built: list[_Built] = []

    def build() -> Engine:
        """In the engine's own thread. The reference comes first: nothing guards the engine yet."""
        stage = set_stage()
        started = time.monotonic()
        reference = stage.run_plain()
        built.append(_Built(stage, reference, time.monotonic() - started))
        return stage.engine()

    screen.heading(
        "1. The reference, in the thread that owns the engine: nothing guarded, nothing interrupted"
    )
    async with AsyncLifecycle(build) as lifecycle:
        [ready] = built
        requests = ready.stage.requests
        history = asyncio.create_task(_keep(lifecycle))
        screen.line(f"{ready.stage.title}; {len(requests)} requests in {SLOTS} slots")
        screen.line(f"{count(ready.reference)} tokens in {ready.seconds:.1f} s")

        screen.heading("2. The same requests as concurrent streams, and a sleep in the middle")
        rollout = _Rollout(lifecycle, requests, fault)
        problems = await _sleep_in_the_middle(screen, lifecycle, requests, rollout)

        screen.heading("3. Level 2 discards the weights: streams are held until they are loaded")
        again = _Rollout(lifecycle, requests)
        problems += await _hold_until_loaded(screen, lifecycle, requests, again)

    screen.heading("4. Every transition, from lifecycle.events()")
    screen.transitions(await history)

    screen.heading("5. Every stream against the uninterrupted run")
    problems += compare(screen, ready.reference, rollout.collected, again.collected.tokens)
    return verdict(screen, ready.stage, problems)


async def _keep(lifecycle: AsyncLifecycle) -> list[dict[str, Any]]:
    """Every event from the first to the last: the iterator ends when the lifecycle is closed."""
    return [event async for event in lifecycle.events(since=0)]


async def _sleep_in_the_middle(
    screen: Screen, lifecycle: AsyncLifecycle, requests: Sequence[Request], rollout: _Rollout
) -> list[str]:
    problems: list[str] = []
    *early, late = requests
    async with screen.streams(rollout.look), asyncio.TaskGroup() as group:
        for request in early:
            group.create_task(rollout.read(request))
        await rollout.two_gave_way.wait()

        rollout.when = "in the drain"
        screen.line('sleep(level=1, mode="wait"): finish what started, hold the rest')
        falling_asleep = group.create_task(lifecycle.sleep(level=1, mode="wait"))
        await lifecycle.wait_for("draining")
        with refused(screen, "wake_up() while it drains", problems):
            await lifecycle.wake_up()
        slept = await falling_asleep
        screen.slept(slept)
        screen.line(f"drained: {' '.join(slept.drained)}; held until the wake: {' '.join(slept.held)}")

        group.create_task(rollout.read(late))
        await asyncio.sleep(_ASLEEP_S)
        screen.line(f"generate({late.request_id!r}) is held: {lifecycle.snapshot().held} wait now")
        problems += [
            f"{name} was served while the engine slept"
            for name in (*slept.held, late.request_id)
            if name in rollout.collected.tokens
        ]
        with refused(screen, "reload_weights() asleep", problems):
            await lifecycle.reload_weights()

        rollout.when = "after the wake"
        screen.report(await lifecycle.wake_up(["weights"]))
        screen.report(await lifecycle.wake_up(["kv_cache"]))
    screen.line(f"{len(rollout.collected.ended)} streams finished; the engine is {lifecycle.state}")
    return problems


async def _hold_until_loaded(
    screen: Screen, lifecycle: AsyncLifecycle, requests: Sequence[Request], rollout: _Rollout
) -> list[str]:
    screen.slept(await lifecycle.sleep(level=2))
    screen.report(await lifecycle.wake_up())
    async with screen.streams(rollout.look), asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(rollout.read(request))
        await asyncio.sleep(_ASLEEP_S)
        screen.line(f"all memory is awake, and {lifecycle.snapshot().held} streams are held")
        served = [f"{name} was served from discarded weights" for name in rollout.collected.tokens]
        loaded = await lifecycle.reload_weights()
        screen.line(f"reload_weights() in {loaded.seconds:.2f} s; the engine is {lifecycle.state}")
    return served
