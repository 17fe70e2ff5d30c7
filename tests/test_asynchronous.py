"""`AsyncLifecycle`: who sees what, when a caller is cancelled, slow, gone, or meets another one.

The engine is simulated and can be made to hang at any call, so each test can put a caller exactly into the
phase that it is about.
"""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import uvloop

from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import (
    AdmissionClosed,
    AsyncLifecycle,
    Closed,
    DrainCancelled,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    RequestAborted,
    State,
    asynchronous,
)
from lifecycle.engine_thread import COMMANDS_A_TURN, Batch
from tests.async_world import Bench

LONG = 200


class Paced(SimulatedEngine):
    """Steps take a while, so that others can come in between."""

    def step(self):
        time.sleep(0.002)
        return super().step()


class House:
    """A lifecycle, the engines that it built, and what was asked of it.

    hang(call): the engine hangs in that call from now on, until the `Event` that it returns is set.
    """

    def __init__(self, **options):
        engine = {"max_num_seqs": 8, **options.pop("engine", {})}
        self.engines = []

        def build():
            self.engines.append(Paced(**engine))
            return self.engines[-1]

        self.life = AsyncLifecycle(build, sinks=(), **options)
        self._hangs = []

    @property
    def engine(self):
        return self.engines[-1]

    def hang(self, call):
        let_go = threading.Event()
        self._hangs.append(let_go)
        self.engine.faults.add(call, hang=let_go)
        return let_go

    async def __aenter__(self):
        await self.life.start()
        return self

    async def __aexit__(self, *_):
        for let_go in self._hangs:
            let_go.set()
        async with asyncio.timeout(10):
            await self.life.close(drain=False)
        assert self.life._owner.core.check() == []
        assert [engine.misuse for engine in self.engines] == [[] for _ in self.engines]
        assert not self.life._streams
        assert not self.life._owner._streams


def ask(name, tokens=6, kind=OutputKind.CUMULATIVE, **more):
    return f"prompt of {name}", SamplingParams(
        max_tokens=tokens, seed=sum(map(ord, name)), output_kind=kind, **more
    )


def right(name, tokens=6):
    return expected_tokens(*ask(name, tokens))


async def read(life, name, tokens=6, kind=OutputKind.CUMULATIVE, *, into=None):
    """The tokens that a consumer ends with, and the reason of the last output."""
    got = [] if into is None else into
    reason = None
    async for output in life.generate(*ask(name, tokens, kind), name):
        sample = output.outputs[0]
        got[:] = [*got, *sample.token_ids] if kind is OutputKind.DELTA else sample.token_ids
        reason = sample.finish_reason
    return got, reason


async def until(true):
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110  (what it looks at belongs to another thread)
            await asyncio.sleep(0.001)


def hangs_in(life, call):
    return until(lambda: life.snapshot().operation == call and life.snapshot().operation_age_s > 0)


# -- generate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OutputKind)
async def test_many_at_once_each_gets_its_own(kind):
    """More streams than the engine has slots, results as they finish, nothing left behind."""
    async with House() as house:
        names = [f"r{number}" for number in range(50)]
        got = await asyncio.gather(*(read(house.life, name, 3 + len(name), kind) for name in names))
        assert got == [(right(name, 3 + len(name)), "length") for name in names]
        assert house.life.state is State.AWAKE
        assert house.life.get_num_unfinished_requests() == 0


async def test_unfinished_requests_are_counted_by_their_samples():
    """As vLLM counts them, from the call on."""
    async with House() as house:
        outputs = house.life.generate(*ask("r", LONG, n=3), "r")
        await anext(outputs)
        assert house.life.get_num_unfinished_requests() == 3
        await outputs.aclose()
        assert house.life.get_num_unfinished_requests() == 0


async def test_what_else_runs_in_the_event_loop_comes_in_between():
    """However many outputs a step has: so many consumers run at most before others get a turn.

    The end of one step's outputs and the beginning of the next's may come into one turn. First outputs are
    not counted: one that comes before its consumer has begun to wait is taken without.
    """
    streams, turns, taken = 300, [], 0

    async def consume(name):
        nonlocal taken
        got = []
        async for output in house.life.generate(*ask(name, 4, OutputKind.DELTA), name):
            taken += bool(got)
            got += output.outputs[0].token_ids
        assert got == right(name, 4)

    async def take_turns():
        nonlocal taken
        while True:
            await asyncio.sleep(0)
            turns.append(taken)
            taken = 0

    async with House(engine={"max_num_seqs": streams}) as house:
        other = asyncio.create_task(take_turns())
        await asyncio.gather(*(consume(f"r{number}") for number in range(streams)))
        other.cancel()
    assert sum(turns) > streams
    assert max(turns) <= 2 * asynchronous._OUTPUTS_A_TURN


async def test_what_interrupts_one_hand_over_does_not_stop_the_next():
    """A Ctrl-C while outputs are given out is raised in the event loop; what comes later still comes."""

    class Interrupted:
        def put(self, output):
            raise KeyboardInterrupt

    async with House() as house:
        batch = Batch()
        batch.outputs.append((Interrupted(), None))
        with pytest.raises(KeyboardInterrupt):
            house.life._receive(batch)
        async with asyncio.timeout(5):
            assert await read(house.life, "a") == (right("a"), "length")


async def test_whoever_waits_for_an_answer_need_not_wait_for_a_step():
    """What a command came to is told before the step that follows it."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "a", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        await house.life.sleep(1, "keep")
        let_go = house.hang("step")
        async with asyncio.timeout(5):
            await house.life.wake_up()
        let_go.set()
        assert await task == (right("a", LONG), "length")


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
async def test_a_slow_consumer_loses_nothing_and_costs_one_output(kind):
    """What comes while it is busy is merged: every token and log probability; one output waits at most."""
    async with House() as house:
        texts, tokens, logprobs, outputs = "", [], [], 0
        prompt, params = ask("slow", 60, kind, logprobs=1)
        async for output in house.life.generate(prompt, params, "slow"):
            sample = output.outputs[0]
            outputs += 1
            if kind is OutputKind.DELTA:
                texts, tokens = texts + sample.text, tokens + sample.token_ids
                logprobs += sample.logprobs
            else:
                texts, tokens, logprobs = sample.text, sample.token_ids, sample.logprobs
            if outputs == 2:
                await until(lambda: not house.life.snapshot().in_flight)
        assert tokens == expected_tokens(prompt, params)
        assert len(logprobs) == 60
        whole, _ = await read(house.life, "slow", 60)
        assert tokens == whole
        assert outputs == 3


async def test_samples_of_a_slow_stream_are_kept_apart():
    """Of a request with n > 1, each sample's tokens are joined with its own."""
    async with House() as house:
        kept = {}
        async for output in house.life.generate(*ask("n", 20, OutputKind.DELTA, n=3), "n"):
            for sample in output.outputs:
                kept.setdefault(sample.index, []).extend(sample.token_ids)
            if len(kept) == 3 and house.life.snapshot().in_flight:
                await until(lambda: not house.life.snapshot().in_flight)
        assert {index: len(tokens) for index, tokens in kept.items()} == {0: 20, 1: 20, 2: 20}
        assert len({tuple(tokens) for tokens in kept.values()}) == 3


async def test_an_engine_that_cannot_merge_costs_one_stream():
    """Its consumer is told, the request is aborted, and nobody else notices."""
    async with House() as house:
        house.life._owner.core.merge_outputs = lambda *_, **__: 1 / 0
        outputs = house.life.generate(*ask("slow", LONG), "slow")
        await anext(outputs)
        other = asyncio.create_task(read(house.life, "other", kind=OutputKind.FINAL_ONLY))
        with pytest.raises(ZeroDivisionError):
            while True:
                await asyncio.sleep(0.01)
                await anext(outputs)
        assert await other == (right("other"), "length")
        await until(lambda: not house.life.snapshot().in_flight)


async def test_an_output_that_cannot_be_merged_is_told_though_the_request_has_ended_since():
    """Only the first end of a stream counts: a good one that comes behind it hides no error."""
    async with House() as house:
        house.life._owner.core.merge_outputs = lambda *_, **__: 1 / 0
        outputs = house.life.generate(*ask("slow", 20), "slow")
        await anext(outputs)
        while house.life.snapshot().in_flight:
            time.sleep(0.001)  # noqa: ASYNC251  (the event loop stands still, and finds all of it at once)
        with pytest.raises(ZeroDivisionError):
            while True:
                await anext(outputs)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("p", SamplingParams(max_tokens=-1), "r"), InvalidArgument),
        (("p" * 1000, SamplingParams(), "r"), InvalidArgument),
        (("p", "no parameters", "r"), TypeError),
        (("p", SamplingParams(), 7), TypeError),
    ],
)
async def test_bad_arguments_are_the_callers_fault(given, error):
    """Told to whoever asked; nothing is admitted."""
    async with House() as house:
        with pytest.raises(error):
            async for _ in house.life.generate(*given):
                pass
        assert house.life.state is State.AWAKE
        assert await read(house.life, "r") == (right("r"), "length")


async def test_a_live_id_is_refused_and_keeps_its_own_stream():
    """The second consumer is refused, and its end does not end the first."""
    async with House() as house:
        first = house.life.generate(*ask("r", LONG), "r")
        await anext(first)
        with pytest.raises(InvalidArgument, match="live"):
            await read(house.life, "r")
        assert house.life.snapshot().in_flight == 1
        assert [output async for output in first][-1].outputs[0].token_ids == right("r", LONG)


# -- a consumer that goes away -----------------------------------------------------------------------------


async def test_cancelled_while_it_is_admitted():
    """The command is on its way: the request is aborted as soon as it was admitted."""
    async with House() as house:
        let_go = house.hang("add")
        task = asyncio.create_task(read(house.life, "r", LONG))
        await hangs_in(house.life, "add_request")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        let_go.set()
        await until(lambda: house.life.state is State.AWAKE and not house.life.snapshot().in_flight)


async def test_cancelled_before_the_thread_saw_it():
    """Another command is in its way: it is admitted after all, and aborted at once."""
    async with House() as house:
        let_go = house.hang("call")
        other = asyncio.create_task(house.life.call("reset_mm_cache"))
        await hangs_in(house.life, "reset_mm_cache")
        task = asyncio.create_task(read(house.life, "r", LONG))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        let_go.set()
        await other
        await until(lambda: not house.life.snapshot().in_flight)
        assert [event["trigger"] for event in house.life._events.tail(2)] == ["admit", "settle"]


@pytest.mark.parametrize("how", ["cancel", "break", "raise"])
async def test_leaving_early_aborts(how):
    """Cancelled, left by a break or by an exception: the engine stops computing it."""
    async with House() as house:

        async def consume():
            async with contextlib.aclosing(house.life.generate(*ask("r", LONG), "r")) as outputs:
                async for _ in outputs:
                    if how == "cancel":
                        asyncio.current_task().cancel()
                    elif how == "break":
                        break
                    else:
                        raise ValueError

        with contextlib.suppress(asyncio.CancelledError, ValueError):
            await asyncio.create_task(consume())
        await until(lambda: house.life.state is State.AWAKE)
        assert await read(house.life, "r") == (right("r"), "length")


async def test_cancelled_while_it_is_held():
    """It never starts, and nothing of it is left after the wake."""
    async with House() as house:
        await house.life.sleep(1)
        task = asyncio.create_task(read(house.life, "r"))
        await until(lambda: house.life.snapshot().held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not house.life.snapshot().held)
        report = await house.life.wake_up()
        assert report.readmitted == ()


async def test_cancelled_during_a_drain():
    """The drain goes on without it."""
    async with House() as house:
        task, other = (asyncio.create_task(read(house.life, name, LONG)) for name in ("r", "other"))
        await until(lambda: house.life.snapshot().in_flight == 2)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        task.cancel()
        report = await sleep
        assert report.drained == ("other",)
        assert await other == (right("other", LONG), "length")


# -- abort -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OutputKind)
async def test_abort_ends_the_stream_with_what_it_has(kind):
    """By any task, in any output kind: the tokens so far, and the reason."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG, kind))
        await until(lambda: house.life.snapshot().in_flight)
        await house.life.abort(["r", "nobody"])
        tokens, reason = await task
        assert reason == "abort"
        assert tokens == right("r", LONG)[: len(tokens)]
        await house.life.abort("r")


async def test_abort_of_a_held_request_is_told():
    """There is no output to end with."""
    async with House() as house:
        await house.life.sleep(1)
        task = asyncio.create_task(read(house.life, "r"))
        await until(lambda: house.life.snapshot().held)
        await house.life.abort("r")
        with pytest.raises(RequestAborted, match="r was aborted"):
            await task


async def test_abort_during_a_drain():
    """It is served between two steps, and the drain is over when nothing else is left."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        await house.life.abort("r")
        assert (await task)[1] == "abort"
        assert (await sleep).drained == ()


# -- sleep and wake ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["wait", "wait_all", "abort", "keep"])
async def test_streams_go_through_a_sleep(level, mode):
    """Whatever the mode does to them, each stream ends as it must, and what is held is served later."""
    async with House(engine={"max_num_seqs": 2}) as house:
        tasks = [asyncio.create_task(read(house.life, f"r{number}", 30)) for number in range(6)]
        await until(lambda: house.life.snapshot().in_flight == 6)
        report = await house.life.sleep(level, mode)
        late = asyncio.create_task(read(house.life, "late"))
        await until(lambda: house.life.snapshot().held > len(report.held))
        if level == 2:
            assert not await house.life.wake_up(["weights"])
            assert await house.life.reload_weights()
        assert await house.life.wake_up()
        for number, (tokens, reason) in enumerate(await asyncio.gather(*tasks)):
            cut = f"r{number}" in report.aborted
            assert reason == ("abort" if cut else "length")
            assert tokens == right(f"r{number}", 30)[: len(tokens) if cut else None]
        assert await late == (right("late"), "length")
        assert (mode == "abort") == bool(report.aborted)


async def test_the_same_sleep_twice_is_one_and_another_is_refused():
    """Equal arguments join and get the same report; others are refused with the name of what is under way."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        first = asyncio.create_task(house.life.sleep(1, "wait"))
        second = asyncio.create_task(house.life.sleep(1, "wait"))
        await house.life.wait_for("draining")
        with pytest.raises(IllegalCall, match=r"sleep\(level=1, mode=wait\) is under way"):
            await house.life.sleep(2)
        with pytest.raises(IllegalCall, match="is under way"):
            await house.life.pause_generation(mode="wait")
        assert await first is await second
        await task


async def test_wake_during_a_drain_is_refused_and_no_wake_is_lost():
    """The sleep that is pending does not fire after a wake: the wake is refused until it is over."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        with pytest.raises(IllegalCall, match=r"sleep.* is under way"):
            await house.life.wake_up()
        await sleep
        assert house.life.state is State.SLEEPING
        assert await house.life.wake_up()
        await task


async def test_a_cancelled_sleep_rolls_its_drain_back():
    """Admission is open again, and what was held during the drain is served."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        late = asyncio.create_task(read(house.life, "late"))
        await until(lambda: house.life.snapshot().held)
        sleep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleep
        await house.life.wait_for("running")
        assert await late == (right("late"), "length")
        assert await task == (right("r", LONG), "length")


async def test_of_two_sleepers_one_may_be_cancelled():
    """The drain goes on for the other."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        first, second = (asyncio.create_task(house.life.sleep(1)) for _ in range(2))
        await house.life.wait_for("draining")
        first.cancel()
        assert (await second).drained == ("r",)
        await task


async def test_a_sleep_cancelled_while_memory_is_released_goes_through():
    """It can't be undone: only the wait is abandoned."""
    async with House() as house:
        let_go = house.hang("sleep")
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        await asyncio.sleep(0.05)
        sleep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleep
        let_go.set()
        await house.life.wait_for("sleeping")
        assert await house.life.wake_up()


@pytest.mark.parametrize(
    ("call", "engine_call", "state"),
    [
        (lambda life: life.wake_up(), "wake_up", State.AWAKE),
        (lambda life: life.collective_rpc("check_health"), "call", State.SLEEPING),
    ],
)
async def test_any_other_call_that_reached_the_engine_comes_to_its_end(call, engine_call, state):
    """Cancelled, it goes through, and the next one finds it done."""
    async with House(rpc_needs={"check_health": "quiet"}) as house:
        await house.life.sleep(1)
        let_go = house.hang(engine_call)
        task = asyncio.create_task(call(house.life))
        await until(lambda: house.life.snapshot().operation is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        let_go.set()
        await until(lambda: house.life.snapshot().operation is None)
        assert house.life.state is state


async def test_a_deadline_rolls_back():
    """As for blocking callers."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        with pytest.raises(DrainTimeout):
            await house.life.sleep(1, max_steps=2)
        assert house.life.state is State.RUNNING
        assert await task == (right("r", LONG), "length")


async def test_a_pause_survives_a_sleep():
    """Until `resume_generation`, whoever sleeps and wakes in between."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        report = await house.life.pause_generation(mode="keep")
        assert report.kept == ("r",)
        assert await house.life.is_paused()
        assert await house.life.is_sleeping()
        await house.life.sleep(1, "keep")
        assert not await house.life.wake_up()
        assert not task.done()
        assert await house.life.resume_generation()
        assert not await house.life.is_paused()
        assert await task == (right("r", LONG), "length")


@pytest.mark.parametrize(
    ("asked", "resets"), [({}, 1), ({"clear_cache": True}, 1), ({"clear_cache": False}, 0)]
)
async def test_a_pause_drops_the_prefix_cache_unless_told_not_to(asked, resets):
    """Where nothing is kept, as AsyncLLM does."""
    async with House() as house:
        await house.life.pause_generation(**asked)
        assert house.engine.calls.count("call(reset_prefix_cache)") == resets


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_weights_are_loaded_under_requests_that_a_pause_keeps(clear_cache):
    """The pause says what becomes of their KV: computed again, or used with the new weights, on record.

    Once the engine serves, its word is over.
    """
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.engine.running)
        await house.life.pause_generation(mode="keep", clear_cache=clear_cache)
        assert house.life.snapshot().in_flight == 1
        assert bool(house.engine.running) is not clear_cache
        for name, value in list(house.engine.checkpoint.items())[:2]:
            await house.life.collective_rpc("update_weight", kwargs={"weights": [(name, value)]})
        stale = [event for event in house.life._events.tail(None) if event["event"] == "stale_kv"]
        assert [event["count"] for event in stale] == ([] if clear_cache else [2])
        misused = [text.split()[0] for text in house.engine.misuse]
        assert misused == ([] if clear_cache else ["update_weight"] * 2)
        house.engine.misuse.clear()
        assert await house.life.resume_generation()
        with pytest.raises(IllegalCall, match="in flight: r"):
            await house.life.collective_rpc("update_weight")
        await house.life.sleep(0, "keep")
        with pytest.raises(IllegalCall, match="in flight: r"):
            await house.life.collective_rpc("update_weight")
        await house.life.wake_up()
        assert await task == (right("r", LONG), "length")


async def test_a_sleep_that_keeps_says_nothing_of_loads():
    """Asleep with its memory, kept requests refuse a load that no pause has spoken of, pause or not."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.engine.running)
        await house.life.sleep(0, "keep")
        with pytest.raises(IllegalCall, match="in flight: r"):
            await house.life.reload_weights()
        await house.life.pause_generation(mode="keep")  # it sleeps already, and now the pause holds
        await house.life.reload_weights()
        await house.life.resume_generation()
        assert await task == (right("r", LONG), "length")


# -- admission while it is closed --------------------------------------------------------------------------


async def test_generate_is_held_in_every_phase_and_no_more_than_max_held():
    """During the drain, asleep and partly awake; one too many is refused, and those held are all served."""
    async with House(max_held=3) as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        held = [asyncio.create_task(read(house.life, "drain"))]
        await until(lambda: house.life.snapshot().held == 1)
        await sleep
        held.append(asyncio.create_task(read(house.life, "asleep")))
        await until(lambda: house.life.snapshot().held == 2)
        await house.life.wake_up(["weights"])
        held.append(asyncio.create_task(read(house.life, "partial")))
        await until(lambda: house.life.snapshot().held == 3)
        with pytest.raises(AdmissionClosed, match="max_held=3"):
            await read(house.life, "too many")
        await house.life.wake_up()
        assert [tokens for tokens, _ in await asyncio.gather(*held)] == [
            right("drain"),
            right("asleep"),
            right("partial"),
        ]
        await task


# -- failure -----------------------------------------------------------------------------------------------


async def test_a_failing_step_reaches_every_stream():
    """Each of 200 keeps what it had and raises EngineFailed with the cause; `recover` serves again."""
    async with House(engine={"max_num_seqs": 64}) as house:
        kept = [[] for _ in range(200)]
        await house.life.pause_generation()
        tasks = [
            asyncio.create_task(read(house.life, f"r{number}", LONG, OutputKind.DELTA, into=kept[number]))
            for number in range(200)
        ]
        await until(lambda: house.life.snapshot().held == 200)
        broken = RuntimeError("broken")
        house.engine.faults.add("step", at=5, raises=broken)
        await house.life.resume_generation()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results):
            assert isinstance(result, EngineFailed)
            assert result.__cause__ is broken
            assert kept[number] == right(f"r{number}", LONG)[: len(kept[number])]
        assert all(kept[:64])
        assert len(results[0].in_flight) == 200
        assert house.life.state is State.FAILED
        with pytest.raises(EngineFailed):
            await read(house.life, "anew")
        assert await house.life.recover() == ()
        assert await read(house.life, "anew") == (right("anew"), "length")
        assert len(house.engines) == 2


async def test_a_failure_while_some_are_held():
    """A wake that fails: the held streams stay open, are named, and end well after `recover`."""
    async with House() as house:
        await house.life.sleep(1)
        held = [asyncio.create_task(read(house.life, f"r{number}")) for number in range(3)]
        await until(lambda: house.life.snapshot().held == 3)
        house.engine.faults.add("wake_up", raises=RuntimeError("no"))
        with pytest.raises(EngineFailed) as failed:
            await house.life.wake_up()
        assert failed.value.held == ("r0", "r1", "r2")
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in held)
        assert await house.life.recover() == ("r0", "r1", "r2")
        assert [tokens for tokens, _ in await asyncio.gather(*held)] == [right(f"r{n}") for n in range(3)]


async def test_a_held_request_that_is_refused_at_the_wake_is_told():
    """Its stream raises what the engine said; the others are served."""
    async with House() as house:
        await house.life.sleep(1)
        bad, good = (asyncio.create_task(read(house.life, name)) for name in ("bad", "good"))
        await until(lambda: house.life.snapshot().held == 2)
        house.engine.faults.add("add", raises=ValueError("its adapter is gone"))
        report = await house.life.wake_up()
        assert report.rejected == ("bad",)
        with pytest.raises(InvalidArgument, match="adapter is gone"):
            await bad
        assert await good == (right("good"), "length")


async def test_a_drain_that_fails_tells_its_caller_and_the_streams():
    """Both get EngineFailed."""
    async with House() as house:
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        sleep = asyncio.create_task(house.life.sleep(1))
        await house.life.wait_for("draining")
        house.engine.faults.add("step", raises=RuntimeError("broken"))
        for each in (sleep, task):
            with pytest.raises(EngineFailed):
                await each


@pytest.mark.parametrize("place", ["_collect", "_give"])
async def test_the_thread_dies(place):
    """A bug of this library, in a step or after it: everybody is told, and the engine is shut down."""
    house = House()
    await house.life.start()
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    setattr(house.life._owner, place, lambda *_: 1 / 0)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await task
    await until(lambda: house.life._gone)
    assert "shutdown" in house.engine.calls
    with pytest.raises(Closed):
        await house.life.wake_up()
    with pytest.raises(Closed):
        await read(house.life, "anew")
    await house.life.close()


async def test_an_engine_call_that_hangs_is_seen_and_nobody_is_blocked():
    """Its name and age in the snapshot; the loop goes on; a caller with a deadline of its own gets out."""
    async with House() as house:
        let_go = house.hang("step")
        task = asyncio.create_task(read(house.life, "r"))
        await hangs_in(house.life, "step")
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await house.life.wake_up()
        assert time.monotonic() - started < 1
        assert house.life.snapshot().operation_age_s > 0.04
        let_go.set()
        assert await task == (right("r"), "length")


# -- the beginning and the end -----------------------------------------------------------------------------


async def test_what_the_build_raises_is_raised_and_nothing_is_left():
    """No thread, no engine; and it can't be started again."""

    def build():
        raise OSError("no such model")

    life = AsyncLifecycle(build, sinks=())
    with pytest.raises(OSError, match="no such model"):
        await life.start()
    life._owner.thread.join(5)
    assert not life._owner.thread.is_alive()
    with pytest.raises(IllegalCall, match="started before"):
        await life.start()
    await life.close()


async def test_a_cancelled_start_shuts_down_what_it_built():
    """The build can't be stopped; what comes of it is closed."""
    built, go_on = [], threading.Event()

    def build():
        go_on.wait(5)
        built.append(SimulatedEngine())
        return built[0]

    life = AsyncLifecycle(build, sinks=())
    task = asyncio.create_task(life.start())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await until(lambda: not life._owner.thread.is_alive())
    assert "shutdown" in built[0].calls


async def test_calls_before_the_start_and_from_another_loop_are_refused():
    """With the reason; nothing hangs."""
    house = House()
    for call in (
        house.life.wake_up,
        house.life.sleep,
        house.life.is_sleeping,
        house.life.close_on_signal,
        house.life.abort("r").__await__,
    ):
        with pytest.raises(IllegalCall, match=r"start\(\) first"):
            result = call()
            await result if asyncio.iscoroutine(result) else next(result)
    for outputs in (house.life.generate(*ask("r"), "r"), house.life.events()):
        with pytest.raises(IllegalCall, match=r"start\(\) first"):
            await anext(outputs)
    async with house:
        with pytest.raises(IllegalCall, match="another event loop"):
            await asyncio.to_thread(asyncio.run, house.life.wake_up())


async def test_close_drains_and_admits_nothing_more():
    """Streams in flight end well, a new one is refused, a held one is told."""
    house = House()
    await house.life.start()
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    closing = asyncio.create_task(house.life.close())
    await house.life.wait_for("draining")
    with pytest.raises(AdmissionClosed):
        await read(house.life, "late")
    again = asyncio.create_task(house.life.close())
    await closing
    await again
    assert await task == (right("r", LONG), "length")
    await asyncio.to_thread(house.life._owner.thread.join, 5)
    assert not house.life._owner.thread.is_alive()
    with pytest.raises(Closed):
        await read(house.life, "after")
    for call in (house.life.sleep, house.life.wake_up, house.life.recover):
        with pytest.raises(Closed):
            await call()
    await house.life.close()


@pytest.mark.parametrize("limits", [{"drain": False}, {"timeout": 0.0}])
async def test_close_without_patience_keeps_the_tokens(limits):
    """What is in flight ends now, with what it has; what is held ends with Closed."""
    house = House()
    await house.life.start()
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    await house.life.close(**limits)
    tokens, reason = await task
    assert reason == "abort"
    assert tokens == right("r", LONG)[: len(tokens)]


async def test_close_while_asleep_tells_the_held():
    """They will not be served any more."""
    house = House()
    await house.life.start()
    await house.life.sleep(1)
    task = asyncio.create_task(read(house.life, "r"))
    await until(lambda: house.life.snapshot().held)
    await house.life.close()
    with pytest.raises(Closed, match="r did not come to its end"):
        await task


@pytest.mark.parametrize(("limits", "ends"), [({}, False), ({"drain": False}, True)])
async def test_close_during_a_drain_waits_for_it_or_ends_it(limits, ends):
    """The sleeper gets its report, or is told."""
    house = House()
    await house.life.start()
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    sleep = asyncio.create_task(house.life.sleep(1))
    await house.life.wait_for("draining")
    await house.life.close(**limits)
    [result] = await asyncio.gather(sleep, return_exceptions=True)
    assert isinstance(result, Closed) if ends else result.drained == ("r",)
    assert (await task)[1] == ("abort" if ends else "length")


async def test_a_drain_that_can_not_end_does_not_keep_it_open():
    """The engine computes nothing: the close gives up draining, and ends."""
    house = House(stall_s=0.05)
    await house.life.start()
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    house.engine.step = list
    house.life._owner.core._step = list
    async with asyncio.timeout(5):
        await house.life.close()
    assert (await task)[1] == "abort"


async def test_left_by_an_exception_the_block_does_not_drain():
    """`async with`: whoever fails does not wait for others' requests."""
    house = House()
    with pytest.raises(ValueError, match="mine"):
        async with house.life:
            task = asyncio.create_task(read(house.life, "r", LONG))
            await until(lambda: house.life.snapshot().in_flight)
            raise ValueError("mine")
    assert (await task)[1] == "abort"


async def test_sigterm_drains_and_closes():
    """With a deadline; the handler is gone afterwards."""
    house = House()
    await house.life.start()
    house.life.close_on_signal(signal.SIGTERM, timeout=5)
    task = asyncio.create_task(read(house.life, "r", LONG))
    await until(lambda: house.life.snapshot().in_flight)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    await house.life.wait_for("closed", timeout=5)
    assert await task == (right("r", LONG), "length")
    await house.life.close()
    assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


def test_the_event_loop_closes():
    """Nobody takes what the engine has to give: it is shut down, and the thread ends."""
    house = House()

    async def begin():
        await house.life.start()
        asyncio.get_running_loop().outputs = house.life.generate(*ask("r", LONG), "r")
        await anext(asyncio.get_running_loop().outputs)
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    house.life._owner.thread.join(5)
    assert not house.life._owner.thread.is_alive()
    assert "shutdown" in house.engine.calls


async def test_a_forgotten_lifecycle_is_closed():
    """Nobody holds it, nothing runs: its engine does not outlive it."""
    engines = []

    async def use():
        life = AsyncLifecycle(lambda: engines.append(SimulatedEngine()) or engines[0], sinks=())
        await life.start()
        return life._owner.thread

    thread = await use()
    gc.collect()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
    assert "shutdown" in engines[0].calls


def test_the_interpreter_exits_with_streams_open():
    """It does not hang, and the engine is shut down."""
    code = """
import asyncio, sys
from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import AsyncLifecycle

class Engine(SimulatedEngine):
    def shutdown(self):
        print("shut down", flush=True)

life = AsyncLifecycle(Engine, sinks=())
loop = asyncio.new_event_loop()
loop.run_until_complete(life.start())
stream = life.generate("p", SamplingParams(max_tokens=10**6), "r")
loop.run_until_complete(anext(stream))
sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "shut down\n"


async def test_a_forked_child_is_refused():
    """The thread is not there: every call is refused at once, and the parent goes on."""
    async with House() as house:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(5)
                for coroutine in (house.life.wake_up(), house.life.sleep(), read(house.life, "r")):
                    with pytest.raises(Closed, match="belongs to the parent"):
                        coroutine.send(None)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await read(house.life, "r") == (right("r"), "length")


# -- several commands in one turn of the thread ------------------------------------------------------------


@pytest.fixture
def bench():
    """Its loop and its thread move only when a test says so: what is asked at once comes in one turn."""
    with_lifecycle = Bench()
    yield with_lifecycle
    with_lifecycle.rest()
    assert with_lifecycle.broken() == []
    with_lifecycle.put_away()


def at_once(bench, *coroutines):
    """What comes of these, asked in this order before the thread has seen the first."""
    tasks = [bench.spawn(coroutine) for coroutine in coroutines]
    bench.rest()
    assert all(task.done() for task in tasks)
    return [task.exception() or task.result() for task in tasks]


def in_flight(bench, name="r", tokens=20):
    """A stream whose request is in the engine."""
    task = bench.spawn(read(bench.life, name, tokens))
    for _ in range(2):
        bench.tick()
        bench.turn()
    assert bench.life.state is State.RUNNING
    return task


def test_a_sleep_with_nothing_to_do_is_not_answered_with_the_next(bench):
    """Each gets the report of what it asked for, however close they come."""
    bench.run(bench.life.start())
    bench.run(bench.life.sleep(0))
    same, deeper = at_once(bench, bench.life.sleep(0), bench.life.sleep(1))
    assert (same.noop, same.level) == (True, 0)
    assert (deeper.noop, deeper.level) == (False, 1)


def test_nobody_joins_a_sleep_that_is_over(bench):
    """Another command ended it: its own callers are told, and the next is a new one."""
    bench.run(bench.life.start())
    task = in_flight(bench)
    sleep = bench.spawn(bench.life.sleep(1))
    bench.tick()
    bench.turn()
    assert bench.life.state is State.DRAINING
    bench.engine.faults.add("abort", raises=RuntimeError("broken"))
    aborted, _, anew = at_once(bench, bench.life.abort("r"), bench.life.recover(), bench.life.sleep(1))
    assert isinstance(aborted, EngineFailed)
    assert isinstance(sleep.exception(), DrainCancelled)
    assert (anew.noop, anew.level) == (False, 1)
    assert task.done()


def test_a_failure_is_told_even_if_recovery_follows_at_once(bench):
    """The stream raises it, though no turn of the thread ended in FAILED."""
    bench.run(bench.life.start())
    task, other = in_flight(bench), bench.spawn(read(bench.life, "other", LONG))
    bench.tick()
    bench.turn()
    bench.engine.faults.add("abort", raises=RuntimeError("broken"))
    at_once(bench, bench.life.abort("r"), bench.life.recover())
    assert bench.life.state is State.AWAKE
    assert isinstance(other.exception(), EngineFailed)
    assert task.done()


def test_an_id_is_used_again_in_the_turn_in_which_it_was_given_up(bench):
    """The end of the first is not that of the second."""
    bench.run(bench.life.start())
    first = in_flight(bench)
    first.cancel()
    bench.tick()
    [again] = at_once(bench, read(bench.life, "r"))
    assert again == (right("r"), "length")


def test_a_flood_of_commands_does_not_starve_what_is_in_flight(bench):
    """Between so many of them there is a step, whoever else is still waiting for an answer."""
    bench.run(bench.life.start())
    in_flight(bench)
    calls = [bench.spawn(bench.life.abort("unknown")) for _ in range(2 * COMMANDS_A_TURN)]
    bench.tick()
    step, steps = bench.core._step, []
    bench.core._step = lambda: steps.append(1) or step()
    bench.turn()
    while bench.loop._ready:
        bench.tick()
    assert sum(call.done() for call in calls) == COMMANDS_A_TURN
    assert len(steps) == 1


def test_nobody_joins_the_drain_of_a_close(bench):
    """It is refused, though it is what was asked for last: that one was over long ago."""
    bench.run(bench.life.start())
    bench.run(bench.life.sleep(1))
    bench.run(bench.life.wake_up())
    in_flight(bench)
    closing = bench.spawn(bench.life.close())
    bench.tick()
    bench.turn()
    sleep = bench.spawn(bench.life.sleep(1))
    bench.rest()
    assert isinstance(sleep.exception(), IllegalCall)
    assert closing.done()


def test_the_deadline_of_a_sleep_is_not_that_of_a_close(bench):
    """The sleep is rolled back, and the close goes on draining by itself."""
    bench.run(bench.life.start())
    task = in_flight(bench)
    sleep = bench.spawn(bench.life.sleep(1, max_steps=2))
    bench.tick()
    bench.turn()
    closing = bench.spawn(bench.life.close())
    bench.rest()
    assert isinstance(sleep.exception(), DrainTimeout)
    assert closing.done()
    assert task.result() == (right("r", 20), "length")


def test_a_sleep_that_comes_too_late_is_refused(bench):
    """The thread has ended with the same one under way, and the loop does not know it yet."""
    bench.run(bench.life.start())
    in_flight(bench)
    first, closing = bench.spawn(bench.life.sleep(1)), bench.spawn(bench.life.close(drain=False))
    bench.tick()
    late = bench.spawn(bench.life.sleep(1))
    while not bench.baton.over:
        bench.turn()
    bench.rest()
    assert isinstance(first.exception(), Closed)
    assert isinstance(late.exception(), Closed)
    assert closing.done()


def test_a_close_during_a_start_that_fails(bench):
    """There is nothing to close."""
    bench.build_fault = OSError("no such model")
    start, close = at_once(bench, bench.life.start(), bench.life.close())
    assert isinstance(start, OSError)
    assert close is None


def test_the_engines_own_sleep_by_name_is_refused_when_closed(bench):
    """As closed, and not with a hint at what is not there any more."""
    bench.run(bench.life.start())
    bench.run(bench.life.close())
    for call in (bench.life.call("sleep", 1), bench.life.collective_rpc("sleep", args=(1,))):
        [refused] = at_once(bench, call)
        assert isinstance(refused, Closed)


# -- events ------------------------------------------------------------------------------------------------


async def test_events_come_as_they_happen_and_end_with_the_engine():
    """From now on, or from a `seq` on; dense and in order."""
    house = House()
    await house.life.start()

    async def listen(since):
        return [event async for event in house.life.events(since)]

    whole, rest = asyncio.create_task(listen(0)), asyncio.create_task(listen(None))
    await asyncio.sleep(0.01)
    await house.life.sleep(1)
    await house.life.wake_up()
    await house.life.close()
    events = await whole
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["event"] == "attached"
    assert events[-1]["event"] == "closed"
    assert await rest == events[1:]


async def test_a_slow_reader_is_told_how_much_it_missed():
    """The log is bounded: what fell out is counted, not passed over in silence."""
    async with House(event_capacity=8) as house:
        events = house.life.events(0)
        await anext(events)
        for _ in range(5):
            await house.life.sleep(0)
            await house.life.wake_up()
        seen, missed = 1, 0
        async for event in events:
            if event["event"] == "missed":
                missed += event["count"]
                seen += event["count"]
            else:
                assert event["seq"] == seen + 1
                seen = event["seq"]
            if seen == house.life.snapshot().seq:
                break
        await events.aclose()
        assert seen == house.life.snapshot().seq
        assert missed > 10


async def test_wait_for_a_state():
    """Now, later, never, and not one that there is."""
    async with House() as house:
        await house.life.wait_for(State.AWAKE)
        waits = asyncio.create_task(house.life.wait_for("sleeping"))
        await asyncio.sleep(0.01)
        await house.life.sleep(1)
        await waits
        with pytest.raises(TimeoutError):
            await house.life.wait_for("running", timeout=0.02)
        with pytest.raises(InvalidArgument, match="asleep"):
            await house.life.wait_for("asleep")
        never = asyncio.create_task(house.life.wait_for("running"))
        await asyncio.sleep(0.01)
        await house.life.close()
        with pytest.raises(Closed):
            await never


# -- the rest ----------------------------------------------------------------------------------------------


async def test_what_comes_out_of_a_sink_is_the_callers_answer():
    """A Ctrl-C, or anything else that is no Exception, does not end the thread."""
    async with House() as house:

        def sink(_):
            house.life._events.sinks.clear()
            raise KeyboardInterrupt

        house.life._events.sinks.append(sink)
        with pytest.raises(IllegalCall, match="own sleep"):
            await house.life.call("sleep")
        assert await read(house.life, "r") == (right("r"), "length")


async def test_the_rest_of_the_engines_surface():
    """By name, through the same funnel."""
    async with House() as house:
        assert await house.life.reset_prefix_cache() is True
        assert await house.life.call("has_unfinished_requests") is False
        assert (await house.life.reload_weights("v2")).version == "v2"
        assert (await house.life.mark_weights_loaded("v3")).version == "v3"
        with pytest.raises(IllegalCall, match="own sleep"):
            await house.life.collective_rpc("sleep")
        await house.life.pause_generation()
        await house.life.release_kv_cache_memory()
        assert house.life.snapshot().resident == {"weights"}


def test_under_uvloop():
    """Another event loop, the same story."""

    async def story():
        async with House() as house:
            tasks = [asyncio.create_task(read(house.life, f"r{number}", 30)) for number in range(20)]
            await until(lambda: house.life.snapshot().in_flight == 20)
            await house.life.sleep(1)
            await house.life.wake_up()
            assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == [
                right(f"r{number}", 30) for number in range(20)
            ]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


# -- edges -------------------------------------------------------------------------------------------------


async def test_encode_is_generate_for_pooling():
    """The same stream under AsyncLLM's name, aborted in the same way."""
    async with House() as house:
        outputs = [output async for output in house.life.encode(*ask("r"), "r")]
        assert outputs[-1].outputs[0].token_ids == right("r")
        early = house.life.encode(*ask("early", LONG), "early")
        await anext(early)
        await early.aclose()
        await until(lambda: not house.life.snapshot().in_flight)


async def test_in_a_report_it_says_where_it_is():
    """Before the start, and after it."""
    house = House()
    assert repr(house.life) == "<AsyncLifecycle, not started>"
    async with house:
        assert repr(house.life) == "<AsyncLifecycle awake, 0 in flight, 0 held, 0 streams>"


@pytest.mark.parametrize("wrong", [None, SimulatedEngine()])
def test_build_is_a_callable(wrong):
    """An engine that exists already was built in another thread."""
    with pytest.raises(InvalidArgument, match="callable"):
        AsyncLifecycle(wrong)


@pytest.mark.parametrize("wrong", [-1, "soon", float("nan"), True])
async def test_a_timeout_of_close_is_a_number_of_seconds(wrong):
    """Anything else is refused, and nothing is closed."""
    async with House() as house:
        with pytest.raises(InvalidArgument, match="timeout"):
            await house.life.close(timeout=wrong)
        assert house.life.state is State.AWAKE


async def test_closed_before_it_was_started():
    """There is nothing to close, and it can't be started any more."""
    house = House()
    await house.life.close()
    with pytest.raises(IllegalCall, match="started before"):
        await house.life.start()
    assert house.engines == []


async def test_a_build_that_the_core_refuses_is_shut_down():
    """An engine was built, but the options are wrong: nobody else has it."""
    house = House(weights="nonsense")
    with pytest.raises(InvalidArgument):
        await house.life.start()
    assert "shutdown" in house.engine.calls


async def test_a_call_that_comes_as_the_thread_ends_is_answered():
    """Submitted after the last command that it ran, before the loop knew: refused like any later one."""
    house = House()
    await house.life.start()

    async def late(call):
        time.sleep(0.1)  # noqa: ASYNC251  (the loop must not see the end of the thread first)
        return await call()

    closing = asyncio.create_task(house.life.close())
    late_ones = [
        asyncio.create_task(late(call))
        for call in (house.life.wake_up, house.life.sleep, house.life.reset_prefix_cache, house.life.close)
    ]
    results = await asyncio.gather(*late_ones, return_exceptions=True)
    await closing
    assert [type(result) for result in results] == [Closed, Closed, Closed, type(None)]


async def test_a_withdrawal_that_comes_too_late_is_no_error():
    """The request has just ended by itself when its consumer leaves."""
    async with House() as house:
        outputs = house.life.generate(*ask("r", 3), "r")
        await anext(outputs)
        time.sleep(0.05)  # noqa: ASYNC251  (its end is on the way and not yet seen)
        await outputs.aclose()
        await house.life.call("has_unfinished_requests")
        assert house.life.state is State.AWAKE


async def test_cancelled_sleepers_of_a_sleep_that_is_over():
    """The report is on its way when its caller is cancelled: nothing is rolled back any more."""
    async with House() as house:
        task = asyncio.create_task(house.life.sleep(1))
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251  (it sleeps, and the answer is not yet seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await house.life.call("has_unfinished_requests")
        assert house.life.state is State.SLEEPING


async def test_a_copy_that_the_engine_cannot_make_fails_it_and_nobody_loses_a_token():
    """The others of the same step have theirs; all are told."""
    async with House() as house:
        kept = [[], []]
        tasks = [
            asyncio.create_task(read(house.life, name, LONG, kind, into=kept[place]))
            for place, (name, kind) in enumerate([("a", OutputKind.CUMULATIVE), ("b", OutputKind.DELTA)])
        ]
        await until(lambda: all(kept))
        house.engine.faults.add("copy_output", raises=RuntimeError("can't"))
        for task in tasks:
            with pytest.raises(EngineFailed, match="can't"):
                await task
        assert [right("a", LONG)[: len(kept[0])], right("b", LONG)[: len(kept[1])]] == kept


async def test_at_the_interpreters_exit_it_is_closed():
    """What `atexit` calls: the engine is shut down without the event loop's help."""
    house = House()
    await house.life.start()
    asynchronous._at_exit()
    assert "shutdown" in house.engine.calls
    await until(lambda: house.life._gone)
    house.life._leave()


async def test_a_fork_is_told_to_all_that_live():
    """What runs in the child: everything is refused from then on."""
    house = House()
    await house.life.start()
    engine_thread = house.life._owner
    asynchronous._after_fork()
    for call in (house.life.wake_up, house.life.sleep):
        with pytest.raises(Closed, match="belongs to the parent"):
            await call()
    with pytest.raises(Closed, match="belongs to the parent"):
        await read(house.life, "r")
    engine_thread.core.forked = False
    asynchronous._abandon(engine_thread)
    await asyncio.to_thread(engine_thread.thread.join, 5)


async def test_a_recovery_waits_for_nothing_of_the_old_engine():
    """Streams that live through it keep no reference to the engine that failed."""
    async with House() as house:
        await house.life.sleep(1)
        held = asyncio.create_task(read(house.life, "r"))
        await until(lambda: house.life.snapshot().held)
        house.engine.faults.add("wake_up", raises=RuntimeError("no"))
        with pytest.raises(EngineFailed):
            await house.life.wake_up()
        old = weakref.ref(house.engines.pop())
        await house.life.recover()
        gc.collect()
        assert old() is None
        assert await held == (right("r"), "length")


async def test_a_request_that_is_made_already_speaks_for_itself():
    """Its own parameters say what its outputs are, not those given beside it: no token is lost."""

    class Ready(Paced):
        def prepare(self, request_id, prompt, params, options):
            return super().prepare(request_id, *prompt, options)

    life = AsyncLifecycle(Ready, sinks=())
    async with life:
        tokens = []
        async for output in life.generate(ask("r", 40, OutputKind.DELTA, n=1), None, "r"):
            tokens += output.outputs[0].token_ids
            if len(tokens) < 5:
                await until(lambda: not life.snapshot().in_flight)
        assert tokens == right("r", 40)


def with_a_request():
    engine = Paced()
    engine.add(engine.prepare("theirs", *ask("theirs", 20), {}))
    return engine


async def test_requests_that_the_engine_came_with_are_stepped_to_their_end():
    """Nobody takes their outputs, and nothing else waits for that."""
    async with AsyncLifecycle(with_a_request, sinks=()) as life:
        assert life.state is State.RUNNING
        assert await read(life, "r") == (right("r"), "length")
        await until(lambda: life.state is State.AWAKE)
        await life.sleep(1)


async def test_requests_that_the_engine_came_with_are_drained():
    """Like any other; what comes of it is nobody's, and waits for nobody afterwards."""
    async with AsyncLifecycle(with_a_request, sinks=()) as life:
        assert (await life.sleep(1)).drained == ("theirs",)
        assert life.snapshot().undelivered == 0
        assert await life.wake_up()
        assert await read(life, "r") == (right("r"), "length")


async def test_a_sink_that_is_broken_from_the_beginning_is_the_sinks_own_trouble():
    """Whatever comes out of it, in the engine's thread: the engine is there, and closed at the end."""
    engines = []

    def sink(_):
        raise SystemExit

    life = AsyncLifecycle(lambda: engines.append(Paced()) or engines[0], sinks=[sink])
    async with life:
        assert await read(life, "r") == (right("r"), "length")
    life._owner.thread.join(5)
    assert not life._owner.thread.is_alive()
    assert engines[0].calls.count("shutdown") == 1


async def test_close_from_another_event_loop_is_refused():
    """As every call is; it stays open."""
    async with House() as house:
        with pytest.raises(IllegalCall, match="another event loop"):
            await asyncio.to_thread(asyncio.run, house.life.close())
        assert await read(house.life, "r") == (right("r"), "length")


# -- what is passed on -------------------------------------------------------------------------------------


async def test_every_option_of_a_request_is_passed_on():
    """The engine gets what the caller gave, under vLLM's names, and vLLM's defaults for the rest."""
    seen = []

    class Noting(Paced):
        def prepare(self, request_id, prompt, params, options):
            seen.append(dict(options))
            return super().prepare(request_id, prompt, params, {})

    given = {
        "arrival_time": 5.0,
        "lora_request": "an adapter",
        "tokenization_kwargs": {"a": 1},
        "trace_headers": {"b": "2"},
        "priority": 7,
    }
    async with AsyncLifecycle(Noting, sinks=()) as life:
        async for _ in life.generate(*ask("r", 1), "r", **given, extra="passed too"):
            pass
        async for _ in life.generate(*ask("plain", 1), "plain"):
            pass
    assert seen[0] == {**given, "extra": "passed too"}
    assert seen[1] == {**dict.fromkeys(given), "priority": 0}


@pytest.mark.parametrize("limits", [{"max_steps": 2}, {"timeout": 0.01}])
@pytest.mark.parametrize("pauses", [False, True])
async def test_every_limit_of_a_drain_is_passed_on(limits, pauses):
    """Where it ends, and what happens then: rolled back, or all in flight is cut."""
    async with House() as house:
        begin = house.life.pause_generation if pauses else house.life.sleep
        task = asyncio.create_task(read(house.life, "r", LONG))
        await until(lambda: house.life.snapshot().in_flight)
        with pytest.raises(DrainTimeout):
            await begin(mode="wait_all", **limits)
        report = await begin(mode="wait_all", on_timeout="abort", **limits)
        assert report.aborted == ("r",)
        assert report.level == (0 if pauses else 1)
        assert (await task)[1] == "abort"


async def test_options_left_out_are_those_of_the_blocking_surface():
    """Rank 0, 120 seconds until a drain has stalled, 4,096 events."""
    async with House() as house:
        assert house.life._events.tail(1)[0]["rank"] == 0
        assert house.life._owner.core.stall_s == 120
        for number in range(5000):
            house.life._events.emit("closed", count=number)
        assert len(house.life._events) == 4096


async def test_a_worker_method_gets_its_arguments():
    """As AsyncLLM's own `collective_rpc` takes them."""
    async with House(rpc_needs={"note": "quiet"}) as house:

        def note(_, *args, **kwargs):
            return args, kwargs

        assert await house.life.collective_rpc(note, args=(1, 2), kwargs={"a": 3}) == [((1, 2), {"a": 3})]
        assert await house.life.collective_rpc(note) == [((), {})]
