"""Every await point of `lifecycle/asynchronous.py`, and a task cancelled at each of them.

The points are read from the source, so a new one is swept or named in `NEVER` before this passes. Each
scenario is run again and again, and its task cancelled one move of the loop or of the thread later each time
(`tests/async_world.py`), until it comes to its end first: so it is cancelled everywhere that it ever stands.
What must hold after each: the task is over, nothing of it is left (no stream, no request in the engine, no
command, no drain), a bystander's stream brings its own tokens, and the lifecycle serves and closes.
"""

import asyncio
import contextlib
import gc
import itertools
from collections import Counter
from functools import partial

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import State
from tests import report
from tests.async_world import Bench, await_points, point_of, stands_at

# Points at which no task can be suspended, and why: what they enter and leave awaits nothing.
NEVER = {
    ("AsyncLifecycle.generate", "async for own in output.outputs():"): "only where the engine drives itself",
    ("AsyncLifecycle.generate", "yield own"): "likewise",
    ("AsyncLifecycle.generate", "yield output.final"): "likewise",
    ("AsyncLifecycle.encode", "async with contextlib.aclosing("): "the end of `generate` awaits nothing",
    ("AsyncLifecycle.wait_for", "async with asyncio.timeout(timeout):"): "it only looks at the clock",
    ("AsyncLifecycle.wait_for", "async with contextlib.aclosing(self.events(seq)) as events:"): "the end of "
    "`events` awaits nothing",
}
TOKENS = 9


def ask(name, tokens=TOKENS):
    return f"prompt of {name}", SamplingParams(max_tokens=tokens, seed=len(name))


async def read(life, name, *, by="generate", slow=False):
    """The tokens of a stream; slow: it does something else between two outputs."""
    tokens = []
    async with contextlib.aclosing(getattr(life, by)(*ask(name), name)) as outputs:
        async for output in outputs:
            tokens = output.outputs[0].token_ids
            if slow:
                await asyncio.sleep(0)
    return tokens


async def block(life):
    async with life:
        await read(life, "victim")


async def listen(life):
    async with contextlib.aclosing(life.events(0)) as events:
        async for _ in events:
            await asyncio.sleep(0)


async def closes(life, **options):
    await life.close(**options)


# -- where a scenario begins -----------------------------------------------------------------------------


def serving(bench):
    """The bystander's request is in flight."""
    bench.run(bench.life.start())
    other = bench.spawn(read(bench.life, "other"))
    for _ in range(2):
        bench.tick()
        bench.turn()
    assert bench.life.state is State.RUNNING
    return other


def asleep(level, bench):
    """The bystander's is frozen, or never started."""
    other = serving(bench)
    task = bench.spawn(
        bench.life.pause_generation(mode="keep") if level is None else bench.life.sleep(level, "keep")
    )
    bench.rest()
    task.result()
    return other


def quiet_pause(bench):
    """Nothing is in the engine: the bystander waits outside."""
    bench.run(bench.life.start())
    bench.run(bench.life.pause_generation())
    other = bench.spawn(read(bench.life, "other"))
    bench.rest()
    return other


def weights_awake(bench):
    bench.run(bench.life.start())
    bench.run(bench.life.sleep(2))
    bench.run(bench.life.wake_up(["weights"]))
    other = bench.spawn(read(bench.life, "other"))
    bench.rest()
    return other


def failed(bench):
    """A wake failed; the bystander is held."""
    other = weights_awake(bench)
    bench.engine.faults.add("wake_up", raises=RuntimeError("no"))
    task = bench.spawn(bench.life.wake_up())
    bench.rest()
    assert task.exception() is not None
    assert bench.life.state is State.FAILED
    return other


def noisy(bench):
    """More events than the log keeps."""
    other = serving(bench)
    bench.rest()
    for _ in range(3):
        bench.run(bench.life.sleep(0))
        bench.run(bench.life.wake_up())
    return other


def not_started(bench):
    return None


def with_victim(bench):
    other = serving(bench)
    bench.victim = bench.spawn(read(bench.life, "victim"))
    bench.tick()
    bench.turn()
    return other


def with_sleeper(mode, bench):
    """Somebody else waits for the same sleep."""
    other = serving(bench)
    bench.sleeper = bench.spawn(bench.life.sleep(1, mode))
    bench.tick()
    return other


def hanging(call, bench):
    """The engine will hang in this call."""
    other = serving(bench)
    bench.engine.faults.add(call, hang=bench.baton)
    return other


# name: (where it begins, the call whose task is cancelled)
SCENARIOS = {
    "start": (not_started, lambda life: life.start()),
    "async with": (not_started, block),
    "generate": (serving, lambda life: read(life, "victim")),
    "generate, slowly": (serving, lambda life: read(life, "victim", slow=True)),
    "generate, held": (partial(asleep, 1), lambda life: read(life, "victim")),
    "generate, the engine hangs": (partial(hanging, "add"), lambda life: read(life, "victim")),
    "encode": (serving, lambda life: read(life, "victim", by="encode")),
    "encode, slowly": (serving, lambda life: read(life, "victim", by="encode", slow=True)),
    "abort": (with_victim, lambda life: life.abort("victim")),
    **{
        f"sleep({level}, {mode})": (serving, lambda life, level=level, mode=mode: life.sleep(level, mode))
        for level in (0, 1, 2)
        for mode in ("wait", "wait_all", "abort", "keep")
    },
    "sleep, deeper": (partial(asleep, 0), lambda life: life.sleep(1, "keep")),
    "sleep, with a deadline": (serving, lambda life: life.sleep(1, max_steps=2)),
    "sleep, joined": (partial(with_sleeper, "wait"), lambda life: life.sleep(1, "wait")),
    "sleep, the engine hangs": (partial(hanging, "sleep"), lambda life: life.sleep(1)),
    "sleep, a step hangs": (partial(hanging, "step"), lambda life: life.sleep(1)),
    "pause_generation": (serving, lambda life: life.pause_generation()),
    "pause_generation, waiting": (serving, lambda life: life.pause_generation(mode="wait")),
    "wake_up": (partial(asleep, 1), lambda life: life.wake_up()),
    "wake_up, after level 2": (partial(asleep, 2), lambda life: life.wake_up()),
    "resume_generation": (partial(asleep, None), lambda life: life.resume_generation()),
    "release_kv_cache_memory": (quiet_pause, lambda life: life.release_kv_cache_memory()),
    "reload_weights": (weights_awake, lambda life: life.reload_weights()),
    "mark_weights_loaded": (quiet_pause, lambda life: life.mark_weights_loaded()),
    "collective_rpc": (serving, lambda life: life.collective_rpc("prepare_refit_info")),
    "reset_prefix_cache": (serving, lambda life: life.reset_prefix_cache()),
    "call": (serving, lambda life: life.call("reset_mm_cache")),
    "call, the engine hangs": (partial(hanging, "call"), lambda life: life.call("reset_mm_cache")),
    "recover": (failed, lambda life: life.recover()),
    "events": (noisy, listen),
    "wait_for": (serving, lambda life: life.wait_for("closed")),
    "close": (serving, closes),
    "close, asleep": (partial(asleep, 1), closes),
    "close, now": (serving, partial(closes, drain=False)),
}


class Sweep:
    """Cancels the task of one scenario after 0, 1, 2, ... moves. at: how often at each point."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.begin, self.call = SCENARIOS[scenario]
        self.at = Counter()
        self.moments = 0
        self.points = await_points()

    def run(self):
        for moment in itertools.count():
            bench = Bench(partial(SimulatedEngine, max_num_seqs=3), event_capacity=16)
            try:
                if not self.cancel_at(moment, bench):
                    return
            finally:
                bench.put_away()

    def cancel_at(self, moment, bench):
        """Returns False once a later moment would be none: the task was over, or nothing moves any more."""
        other = self.begin(bench)
        task = bench.spawn(self.call(bench.life))
        moves = itertools.cycle([bench.tick, bench.tick, bench.turn])
        for move in itertools.islice(moves, moment):
            move()
        if task.done():
            return False
        moves_on = bool(bench.loop._ready) or not bench.baton.rests
        self.last = stands_at(task)
        for place in self.last:
            point = point_of(place, self.points)
            assert point is not None, place
            self.at[point] += 1
        self.before = bench.life._owner.core and bench.life.state
        self.hung = bool(bench.baton.hang)
        task.cancel()
        bench.rest()
        assert task.done(), f"a cancelled {self.scenario} does not end"
        self.judge(bench, task, other)
        self.moments += 1
        return moves_on

    def judge(self, bench, task, other):
        life, owner = bench.life, bench.life._owner
        for engine in bench.engines:  # what was armed need not have struck
            engine.faults.clear()
        bench.baton.go_on()
        bench.rest()
        assert bench.broken() == []
        assert bench.baton.rests
        if self.scenario in ("start", "async with") or self.scenario.startswith("close"):
            self.judge_end(bench, task, other)
            return
        assert task.cancelled()
        assert life.state is not State.DRAINING
        assert [name for name in owner._streams if name != "other"] == []
        assert [record for record in owner.core.ledger.records() if record.request_id != "other"] == []
        assert {parent.request_id for parent in bench.engine.parents.values()} <= {"other"}
        if self.scenario.startswith(("sleep(", "pause")) and self.before is State.DRAINING:
            assert life.state in (State.AWAKE, State.RUNNING), "the drain was not rolled back"
        if self.scenario == "sleep, joined":
            assert bench.sleeper.result().level == 1
        if self.scenario == "sleep, the engine hangs" and self.hung:
            assert life.state is State.SLEEPING, "it can't be undone"
        self.serve_again(bench)
        tokens = bench.run(read(life, "another"))
        assert tokens == expected_tokens(*ask("another"))
        kept = other.result()
        whole = expected_tokens(*ask("other"))
        cut = self.scenario == "pause_generation" or "abort)" in self.scenario
        assert kept == (whole[: len(kept)] if cut else whole)
        self.close(bench)

    def serve_again(self, bench):
        life = bench.life
        if life.state is State.FAILED:
            bench.run(life.recover())
        bench.run(life.resume_generation())
        bench.run(life.wake_up())
        if life.state is State.PARTIALLY_AWAKE:
            bench.run(life.reload_weights())
        if life.state is State.SLEEPING:
            bench.run(life.wake_up())
        assert life.state in (State.AWAKE, State.RUNNING)

    def judge_end(self, bench, task, other):
        """A start that was cancelled shuts down what it built; a close goes on without its caller."""
        assert task.cancelled()
        if self.last:  # it had begun
            assert bench.baton.over
        self.close(bench)
        if other is not None:
            kept, whole = other.result(), expected_tokens(*ask("other"))
            assert kept == whole if self.scenario == "close" else kept == whole[: len(kept)]

    def close(self, bench):
        bench.run(bench.life.close())
        assert bench.baton.over or bench.baton.thread.ident is None
        assert all(engine.closed for engine in bench.engines)
        assert not bench.life._streams
        assert not bench.life._owner._streams
        assert [command for command in bench.baton.inbox.commands if command.answer is not None] == []
        assert bench.broken() == []


@pytest.fixture(scope="module")
def swept():
    """What was cancelled where, by scenario."""
    gc.freeze()  # every recovery collects: not what all the other tests have left behind
    yield {}
    gc.unfreeze()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_cancelled_at_every_moment(scenario, swept):
    """Wherever it stands: nothing of it is left, and nobody else notices."""
    swept[scenario] = sweep = Sweep(scenario)
    sweep.run()
    assert sweep.moments > 1


def test_no_await_point_was_missed(swept):
    """Each was cancelled at, but for those of `NEVER`, where nobody ever stands."""
    if swept.keys() != SCENARIOS.keys():
        pytest.skip("it counts what all the scenarios did")
    at = Counter()
    for sweep in swept.values():
        at += sweep.at
    moments = sum(sweep.moments for sweep in swept.values())
    section = f"await points: {moments} cancellations in {len(SCENARIOS)} scenarios"
    for point in await_points():
        function, _, what, line = point
        why = NEVER.get((function, what), "")
        report.say(section, f"{line:4} {function:40} {what[:60]:62} {at[point] or 'never: ' + why}")
        assert bool(at[point]) is not bool(why), point
