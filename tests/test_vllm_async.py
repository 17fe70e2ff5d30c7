"""Drain, sleep and wake on a real vLLM from asyncio: every stream is what it would have been.

The same runs as in `tests.test_vllm_drain`, each request a consumer of its own. The engine steps
in a thread of its own while they read, so one output may be several steps' outputs; what was known
after each must have been known after some step of the run that nobody interrupted.
"""

import asyncio
import contextlib
import gc
import os
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest

from lifecycle import (
    AsyncLifecycle,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    RequestAborted,
    State,
)
from tests.engines import (
    DEFAULTS,
    core,
    give_batch_queue,
    keep_plain_weights,
    model_dir,
    take_batch_queue,
)
from tests.vllm_runs import (
    ALONE,
    CRAMPED,
    KINDS,
    LEVELS,
    MIXED,
    REQUESTS,
    Delivered,
    Recorder,
    add,
    assert_all_fates,
    assert_same_but_merged,
    check_aborted,
    check_partial,
    clear,
    fail_after,
    four_samples,
    load_unseen,
    long_prompts,
    params,
    requests,
    started,
    times_scheduled,
)

pytestmark = pytest.mark.vllm

LONGEST_S = 60


class Braked:
    """An engine that calls, after the step of that number, what it finds in `stops`."""

    def __init__(self, engine):
        self.engine = engine
        self.llm = SimpleNamespace(llm_engine=engine.raw)  # for helpers that look inside one
        self.steps = 0
        self.stops = {}

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        outputs = self.engine.step()
        self.steps += 1
        self.stops.pop(self.steps, lambda: None)()
        return outputs

    def shutdown(self):
        self.llm = None
        self.engine.shutdown()


class Lent(Braked):
    """The engine that the tests keep, in the hands of a thread: its end lets it go, cleared."""

    def shutdown(self):
        clear(self.llm)


class Served:
    """An engine behind an `AsyncLifecycle`, its consumers, and a brake on the thread that owns it.

    While the thread stands, what is asked of it queues up in order: that puts a call before an exact step.
    """

    def __init__(self, build):
        self._make = build
        self.life = AsyncLifecycle(self._build, sinks=())
        self.builders = []  # the thread of each build
        self.got = Delivered()
        self.tasks = {}
        self._go = None

    def _build(self):
        self.builders.append(threading.current_thread())
        self.engine = self._make()
        return self.engine

    async def __aenter__(self):
        await self.life.start()
        return self

    async def __aexit__(self, kind, *_):
        if self._go is not None:
            self._go.set()
        for task in self.tasks.values():
            task.cancel()
        async with asyncio.timeout(LONGEST_S):
            await self.life.close(drain=False)
        if kind is None:
            assert self.life._owner.core.check() == []
            assert not self.life._streams
            assert not self.life._owner._streams
            assert set(self.builders) == {self.life._owner.thread}

    # -- the brake --

    def arm(self, after):
        """Have the thread stand after so many steps from now, while it makes none. The future: it stands."""
        loop, go = asyncio.get_running_loop(), threading.Event()
        stands = loop.create_future()

        def stand():
            loop.call_soon_threadsafe(stands.set_result, None)
            go.wait(LONGEST_S)

        if after:
            self.engine.stops[self.engine.steps + after] = stand
        else:
            self.life._owner.submit(stand)
        self._go = go
        return asyncio.wait_for(stands, LONGEST_S)

    async def stand(self, after=0):
        """Have the thread stand at once, or, where it stands, go on for so many steps."""
        if after or self._go is None:
            before = self._go
            stands = self.arm(after)
            if before is not None:
                await asyncio.sleep(0)
                before.set()
            await stands

    async def go(self):
        """Let the thread go on, once every task begun before has asked for what it wants."""
        await asyncio.sleep(0)
        self._go.set()
        self._go = None

    # -- the consumers --

    def consume(self, wanted, reader=None):
        """A task for each of these requests; what they get goes to `got`."""
        for request in wanted:
            self.tasks[request[0]] = asyncio.create_task((reader or self.read)(*request))

    async def read(self, name, prompt, asked):
        async for output in self.life.generate(prompt, asked, name):
            self.got.take([output], buffered=True)

    async def begin(self, wanted, after, reader=None):
        """Admit these together, before the first step of any, and stand before step `after`."""
        self.got, self.tasks = Delivered(), {}
        await self.stand()
        self.consume(wanted, reader)
        await self.stand(after)
        return self.got

    async def finish(self):
        """All streams come to their end."""
        async with asyncio.timeout(LONGEST_S):
            await asyncio.gather(*self.tasks.values())
        self.got.look_again()

    async def fates(self):
        """What each stream ended with, None or an error, once all have ended."""
        async with asyncio.timeout(LONGEST_S):
            ends = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return dict(zip(self.tasks, ends, strict=True))

    async def sleep(self, *asked, **limits):
        """Sleep, asked for while the thread stands."""
        asleep = asyncio.create_task(self.life.sleep(*asked, **limits))
        await self.go()
        async with asyncio.timeout(LONGEST_S):
            return await asleep

    async def wake(self, level, mode):
        life = self.life
        if level == 2:
            assert not await life.wake_up(["weights"])
            if mode == "keep":
                load_unseen(self.engine.llm)  # a load that is seen is refused over kept requests
            else:
                await life.reload_weights()
        assert await life.wake_up(["kv_cache"] if level == 2 else None)


async def interrupted(served, run, kinds, at, level, mode):
    """A whole run with a sleep and a wake before its step `at`; what came of it and the sleep's report."""
    got = await served.begin(requests(kinds, run.stop), at)
    report = await served.sleep(level, mode)
    assert served.life.state is State.SLEEPING
    await served.wake(level, mode)
    await served.finish()
    assert served.life.state is State.AWAKE
    assert served.life._owner.core.check() == []
    return got, report


@contextlib.asynccontextmanager
async def lend(llm, house):
    """Lend the engine to a thread, and see that it comes back as it was."""
    from engine_adapter import VllmInprocess

    async with Served(lambda: Lent(VllmInprocess(llm))) as served:
        yield served
    scheduler = core(llm).scheduler
    quiet = scheduler.pause_state.name == "UNPAUSED" and not scheduler.has_requests()
    if not quiet or llm.llm_engine.model_executor.is_sleeping:
        house.condemn()


@pytest.fixture
async def served(llm, house):
    async with lend(llm, house) as lent:
        yield lent


@pytest.fixture
def recorder(llm, served, monkeypatch):
    """Lists the calls that get through to the engine core."""
    client = Recorder(llm.llm_engine.engine_core)
    monkeypatch.setattr(llm.llm_engine, "engine_core", client)
    return client


# -- an engine with two slots and three blocks of KV cache ------------------------------------------


@pytest.fixture
def cramped(house):
    return house.llm(**CRAMPED)


@pytest.fixture
async def served_cramped(cramped, house):
    async with lend(cramped, house) as lent:
        yield lent


@pytest.mark.parametrize("level", LEVELS)
async def test_a_started_request_of_four_samples_is_whole_after_the_drain(cramped, served_cramped, level):
    """A request whose samples don't all fit has started as a whole: the drain ends every one of them."""
    served = served_cramped
    add(cramped.llm_engine, four_samples())
    expected = Delivered().finish(cramped.llm_engine)

    got = await served.begin(four_samples(), 5)
    assert len(core(cramped).scheduler.waiting) == 3
    report = await served.sleep(level, "wait")
    assert report.drained == ("two",)
    assert report.held == ("ant",)
    assert not core(cramped).scheduler.requests
    await served.wake(level, "wait")
    await served.finish()
    assert_same_but_merged(got, expected, ALONE[1])  # one final output is as good as a delta


@pytest.mark.parametrize("at", [3, 18, 24])
async def test_a_request_preempted_during_the_drain_is_whole(cramped, served_cramped, monkeypatch, at):
    """Under KV pressure a request that loses its place has started all the same, and is drained."""
    served = served_cramped
    add(cramped.llm_engine, long_prompts())
    expected = Delivered().finish(cramped.llm_engine)

    preemptions = defaultdict(int)
    scheduler = core(cramped).scheduler
    real = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        preemptions[served.life.state] += 1
        return real(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    got = await served.begin(long_prompts(), at)
    before = preemptions[State.RUNNING]
    report = await served.sleep(1, "wait")
    assert before + preemptions[State.DRAINING] == 1
    assert bool(preemptions[State.DRAINING]) == (at == 3)
    assert sorted(report.drained) == ["ant", "bee"]
    assert report.held == ("cow",)
    await served.wake(1, "wait")
    await served.finish()
    assert_same_but_merged(got, expected, ALONE[0])


# -- plain vLLM ---------------------------------------------------------------------------------------


def test_plain_vllm_serves_asyncio_from_another_process_only(llm):
    """Its engine core refuses to live in the process of an event loop, and in-process it can't drain."""
    from vllm.v1.engine.core_client import EngineCoreClient

    config = llm.llm_engine.vllm_config
    with pytest.raises(NotImplementedError, match="asyncio without multiprocessing"):
        EngineCoreClient.make_client(
            multiprocess_mode=False,
            asyncio_mode=True,
            vllm_config=config,
            executor_class=type(llm.llm_engine.model_executor),
            log_stats=False,
        )
    with pytest.raises(ValueError, match="wait"):
        llm.llm_engine.sleep(level=1, mode="wait")


# -- equality -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize("level", LEVELS)
async def test_a_sleep_at_any_step_changes_no_stream(served, run, level, mode):
    """Drained, slept and woken before any step of a run, every stream is what it is without.

    Level 1 is put before every fourth step, the others before every eighth, not the same ones; with
    EVERY_STEP=1 in the environment (`make test-deep`) all before every step. The three kinds of output
    take turns among the requests, so that each kind is there every time, and each request in each kind.
    """
    reports = []
    stride = 1 if "EVERY_STEP" in os.environ else 4 if level == 1 else 8
    moments = [*range(0 if stride == 1 else level, run.steps + 1, stride)]
    for at in moments:
        kinds = MIXED[at // stride % 3]
        got, report = await interrupted(served, run, kinds, at, level, mode)
        assert_same_but_merged(got, run[kinds], kinds)
        assert not report.aborted
        reports.append(report)
    assert_all_fates(reports, mode)


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize("kinds", ALONE, ids=KINDS)
async def test_a_sleep_changes_nothing_for_one_kind_alone(served, run, kinds, mode):
    """Callers who ask for one kind of output only get the same, whatever the level."""
    for at in range(2 if mode == "wait" else 5, run.steps, 17):
        got, _ = await interrupted(served, run, kinds, at, at % 3, mode)
        assert_same_but_merged(got, run[kinds], kinds)


async def test_sleeps_that_follow_each_other_change_nothing(served, run):
    """Many sleeps in one run, of every level and mode, are as harmless as one."""
    kinds = MIXED[0]
    got = await served.begin(requests(kinds, run.stop), 4)
    for level, mode in [(0, "keep"), (1, "keep"), (2, "keep"), (0, "wait"), (1, "keep")]:
        await served.sleep(level, mode)
        stands = served.arm(4)
        await served.wake(level, mode)
        await stands
    await served.sleep(2, "wait")
    await served.wake(2, "wait")
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)


# -- what a drain schedules -----------------------------------------------------------------------------


async def test_a_drain_starts_nothing_new(served, run, scheduled):
    """Between the call and SLEEPING no step schedules a request that had not started before."""
    steps_of_drains = 0
    for at in range(0, run.steps, 9):
        scheduled.clear()
        await served.begin(requests(MIXED[0], run.stop), at)
        before = started(scheduled)
        scheduled.clear()
        report = await served.sleep(0, "wait")
        assert started(scheduled) <= before
        assert before.isdisjoint(report.held)
        assert set(report.held) | before == set(REQUESTS)
        steps_of_drains += sum(bool(step) for step in scheduled)
        await served.life.wake_up()
        await served.finish()
    assert steps_of_drains > 50


async def test_keep_schedules_nothing_at_all(served, run, scheduled):
    """In keep mode not one request is scheduled between the call and the wake."""
    for at in range(1, run.steps, 13):
        await served.begin(requests(MIXED[0], run.stop), at)
        scheduled.clear()
        await served.sleep(1, "keep")
        assert not started(scheduled)
        await served.life.wake_up()
        await served.finish()


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_nothing_is_scheduled_after_its_stop_string(served, run, scheduled, mode):
    """A request is scheduled once for each of its tokens up to the stop string, and never again."""
    tokens = len(run[ALONE[0]].tokens(ALONE[0])["stop", 0])
    for at in range(0, tokens + 2, 9):
        scheduled.clear()
        got = await served.begin(requests(MIXED[1], run.stop), at)
        await served.sleep(0, mode)
        await served.life.wake_up()
        await served.finish()
        assert times_scheduled(scheduled)["stop", 0] == tokens
        assert got.seen["stop", 0][-1][2:] == ("stop", run.stop)


async def test_an_idle_engine_needs_no_drain(served, scheduled, recorder):
    """With nothing in flight a sleep takes no step, in every mode and at every level."""
    for level in (0, 1):
        for mode in ("wait", "wait_all", "abort", "keep"):
            report = await served.life.sleep(level, mode)
            assert (report.steps, report.tokens) == (0, 0)
            assert (report.drained, report.aborted, report.kept, report.held) == ((), (), (), ())
            assert await served.life.wake_up()
    assert not scheduled
    assert recorder.calls.count("sleep") == 8


# -- delivery --------------------------------------------------------------------------------------------


async def test_what_a_drain_finishes_ends_while_the_engine_sleeps(served, run, scheduled):
    """Streams that started end during the drain, without a wake; held ones get nothing before it."""
    kinds = MIXED[2]
    got = await served.begin(requests(kinds, run.stop), 12)
    report = await served.sleep(1, "wait")
    async with asyncio.timeout(LONGEST_S):
        await asyncio.gather(*(served.tasks[name] for name in report.drained))
    assert sorted(report.drained) == sorted(got.finished) == ["ant", "bee", "stop", "two"]
    assert report.held == ("cow", "dog", "elk")
    assert not any(served.tasks[name].done() for name in report.held)
    assert {name for name, _ in got.seen}.isdisjoint(report.held)
    scheduled.clear()
    assert (await served.life.wake_up()).readmitted == report.held
    await served.finish()
    assert started(scheduled) == set(report.held)
    assert_same_but_merged(got, run[kinds], kinds)


async def test_a_partial_wake_does_not_resume(served, run, scheduled):
    """With only the weights back nothing is scheduled, and a new request is held.

    What was asked for asleep and partly awake completes after the full wake with the right tokens.
    """
    kinds = MIXED[0]
    early = [name for name in REQUESTS if name not in ("dog", "elk")]
    got = await served.begin(requests(kinds, run.stop, early), 10)
    await served.sleep(1, "wait")
    scheduled.clear()
    await served.stand()
    served.consume(requests(kinds, run.stop, ["dog"]))
    await served.go()
    assert not await served.life.wake_up(["weights"])
    assert served.life.state is State.PARTIALLY_AWAKE
    await served.stand()
    served.consume(requests(kinds, run.stop, ["elk"]))
    await served.go()
    with pytest.raises(IllegalCall, match="while partially awake"):
        await served.life.call("a_call_of_tomorrow")
    assert served.life.snapshot().held == 3
    assert not scheduled
    report = await served.life.wake_up(["kv_cache"])
    assert report.readmitted == ("cow", "dog", "elk")
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)


@pytest.mark.parametrize("kinds", [*ALONE, MIXED[0]], ids=[*KINDS, "mixed"])
@pytest.mark.parametrize("mode", [None, "wait", "keep"])
async def test_a_slow_consumer_gets_everything_as_one_output(served, run, kinds, mode):
    """What comes while it is busy is merged: ids, text, reasons and log probabilities, of each sample.

    Every consumer takes a few outputs and then none until all is computed, also across a sleep.
    """
    outputs = defaultdict(int)
    patience = dict(zip(REQUESTS, (0, 1, 2, 1, 0, 3, 1), strict=True))
    computed = asyncio.Event()

    async def read_slowly(name, prompt, asked):
        if not patience[name]:
            asked_for = asyncio.ensure_future(anext(stream := served.life.generate(prompt, asked, name)))
            await computed.wait()
            served.got.take([await asked_for], buffered=True)
            outputs[name] += 1
        else:
            stream = served.life.generate(prompt, asked, name)
        async for output in stream:
            served.got.take([output], buffered=True)
            outputs[name] += 1
            if outputs[name] == patience[name]:
                await computed.wait()

    got = await served.begin(requests(kinds, run.stop), 16, read_slowly)
    if mode is None:
        await served.go()
    else:
        await served.sleep(1, mode)
        await served.wake(1, mode)
    async with asyncio.timeout(LONGEST_S):
        while served.life.get_num_unfinished_requests():  # noqa: ASYNC110  (what it waits for has no event)
            await asyncio.sleep(0.001)
    computed.set()
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)
    most = {name: max(taken, 1) + 1 for name, taken in patience.items()}
    assert all(outputs[name] <= most[name] for name in REQUESTS)


async def test_generate_after_a_wake_is_generate(served, run):
    """Rollouts with a sleep of every level between them have the same tokens."""
    names = ("ant", "bee", "cow")
    expected = run[ALONE[0]].tokens(ALONE[0])
    for level in LEVELS:
        got = served.got = Delivered()
        served.consume(requests(ALONE[2], run.stop, names))
        await served.finish()
        assert got.tokens(ALONE[2]) == {(name, 0): expected[name, 0] for name in names}
        assert (await served.life.sleep(level)).drained == ()
        await served.wake(level, "wait")


async def test_a_pause_holds_until_it_is_resumed(served, run):
    """Through a sleep and a wake; its streams go on after it as if nothing had been."""
    kinds, life = MIXED[1], served.life
    got = await served.begin(requests(kinds, run.stop), 9)
    pausing = asyncio.create_task(life.pause_generation(mode="keep"))
    await served.go()
    report = await pausing
    assert set(report.kept) == set(REQUESTS)
    await life.sleep(1, "keep")
    assert not await life.wake_up()
    assert await life.is_paused()
    assert await life.resume_generation()
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_drain_that_is_given_up_changes_nothing(served, run, how):
    """Rolled back, its caller cancelled or its deadline past, it leaves no trace in any stream."""
    kinds = MIXED[0]
    got = await served.begin(requests(kinds, run.stop), 8)
    if how == "late":
        with pytest.raises(DrainTimeout):
            await served.sleep(1, "wait", max_steps=3)
    else:
        asleep = asyncio.create_task(served.life.sleep(1, "wait"))
        await served.stand(3)
        assert served.life.state is State.DRAINING
        asleep.cancel()
        await served.go()
        with pytest.raises(asyncio.CancelledError):
            await asleep
    await served.finish()
    assert served.life.state is State.AWAKE
    assert not await served.life.is_sleeping()
    assert_same_but_merged(got, run[kinds], kinds)


# -- batches launched ahead ---------------------------------------------------------------------------


@pytest.fixture
def queued(llm, served):
    give_batch_queue(llm)
    yield served
    clear(llm)  # the last batch may outlive the last request, as in vLLM
    take_batch_queue(llm)


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (1, "wait"), (1, "keep"), (2, "wait"), (2, "keep")])
async def test_launched_batches_are_stepped_out(llm, queued, run, level, mode):
    """Batches launched when the sleep is called are finished before it, and their tokens delivered."""
    launched, real = 0, queued.engine.sleep

    def sleep(level):
        assert not core(llm).batch_queue
        real(level)

    queued.engine.sleep = sleep
    for at in range(1, run.steps, 15):
        kinds = MIXED[at % 3]
        got = await queued.begin(requests(kinds, run.stop), at)
        launched += bool(core(llm).batch_queue)
        await queued.sleep(level, mode)
        assert not core(llm).batch_queue
        await queued.wake(level, mode)
        await queued.finish()
        assert_same_but_merged(got, run[kinds], kinds)
    assert launched >= 3


# -- abort -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
async def test_abort_keeps_the_tokens_so_far(served, run, scheduled, kinds):
    """A sleep in abort mode ends every stream at once, with exactly the tokens it had, in each kind."""
    for at in (0, 1, 9, 27, 35):
        scheduled.clear()
        got = await served.begin(requests(kinds, run.stop), at)
        count = times_scheduled(scheduled)
        report = await served.sleep(1, "abort")
        await served.finish()
        assert count == times_scheduled(scheduled)
        assert set(report.aborted) <= set(REQUESTS)
        check_aborted(got, run, kinds, count)
        assert await served.life.wake_up()
        assert served.life.state is State.AWAKE


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
@pytest.mark.parametrize("drains", [False, True])
async def test_abort_and_cancel_end_only_whom_they_name(llm, served, run, scheduled, kinds, drains):
    """Running, of two samples, or waiting: an abort keeps the tokens, a cancel frees the engine.

    The streams of all others are what they are without, also if it happens in a drain.
    """
    whole = run[kinds].tokens(kinds)
    got = await served.begin(requests(kinds, run.stop), 9)
    asleep = asyncio.create_task(served.life.sleep(0, "wait")) if drains else None
    await served.stand(4)
    count = times_scheduled(scheduled)
    gone = ("bee", "two") if drains else ("bee", "two", "dog")
    aborts = asyncio.create_task(served.life.abort(["two", "nobody", *gone[2:]]))
    served.tasks["bee"].cancel()
    await served.go()
    await aborts
    if asleep is not None:
        assert set((await asleep).drained) == {"ant", "stop"}
        assert await served.life.wake_up()
    fates = await served.fates()
    assert isinstance(fates.pop("bee"), asyncio.CancelledError)
    assert set(fates.values()) == {None}
    tokens = got.tokens(kinds)
    for key in whole:
        if key[0] == "bee":
            assert tokens.get(key, []) == whole[key][: len(tokens.get(key, []))]
            assert times_scheduled(scheduled)[key] == count[key]
        elif key[0] in gone:
            assert tokens[key] == whole[key][: count[key]]
            assert got.seen[key][-1][2] == "abort"
            assert times_scheduled(scheduled)[key] == count[key]
        else:
            assert tokens[key] == whole[key]
    assert not core(llm).scheduler.requests


async def test_an_abort_of_a_held_request_is_told(served, run):
    """It never started, so there is no output to end with; the wake does not bring it back."""
    await served.life.sleep(1)
    await served.stand()
    served.consume(requests(MIXED[0], run.stop, ["ant", "bee"]))
    await served.go()
    await served.life.abort("ant")
    with pytest.raises(RequestAborted):
        await served.tasks.pop("ant")
    assert (await served.life.wake_up()).readmitted == ("bee",)
    await served.finish()


# -- refusals ----------------------------------------------------------------------------------------------


async def to_level_1(life):
    await life.sleep(1)


async def to_level_2(life):
    await life.sleep(2)


async def to_kv_cache_only(life):
    await life.sleep(1)
    await life.wake_up(["kv_cache"])


# Each would touch memory that is not there, or go behind the machine.
UNSAFE = {
    "step": lambda life: life.call("step"),
    "add_request": lambda life: life.call("add_request", "a", "a", None),
    "abort_request": lambda life: life.call("abort_request", ["a"]),
    "add_lora": lambda life: life.call("add_lora", None),
    "remove_lora": lambda life: life.call("remove_lora", 1),
    "apply_model": lambda life: life.call("apply_model", len),
    "reload": lambda life: life.reload_weights(),
    "rpc reload_weights": lambda life: life.collective_rpc("reload_weights"),
    "rpc update_weights": lambda life: life.collective_rpc("update_weights", args=({},)),
    "rpc sleep": lambda life: life.collective_rpc("sleep", args=(1,)),
    "rpc wake_up": lambda life: life.collective_rpc("wake_up"),
    "rpc discard": lambda life: life.collective_rpc("discard", args=(("kv_cache",),)),
    "sleep by name": lambda life: life.call("sleep", 1),
    "wake by name": lambda life: life.call("wake_up"),
    "another level": lambda life: life.sleep(3 - (life.snapshot().level or 1)),
    "release": lambda life: life.release_kv_cache_memory(),
    "unknown": lambda life: life.call("a_call_of_tomorrow"),
}


@pytest.mark.parametrize("fall_asleep", [to_level_1, to_level_2, to_kv_cache_only])
async def test_unsafe_calls_never_reach_the_engine(served, recorder, fall_asleep):
    """With the weights asleep every unsafe call is refused, changes nothing and reaches nothing."""
    await fall_asleep(served.life)
    before = served.life.snapshot()
    for name, call in UNSAFE.items():
        recorder.calls.clear()
        with pytest.raises(IllegalCall):
            await call(served.life)
        assert recorder.calls == [], name
    after = served.life.snapshot()
    assert (after.state, after.level, after.resident) == (before.state, before.level, before.resident)
    for tags in ([], ["bogus"], ["weights", "weights"], ["weights", "bogus"], "weights"):
        with pytest.raises(InvalidArgument, match="tag"):
            await served.life.wake_up(tags)
    for level in (-1, 3, 7, True, None):
        with pytest.raises(InvalidArgument, match="level"):
            await served.life.sleep(level)
    assert recorder.calls == []
    if before.level == 2:
        await served.wake(2, "wait")
    else:
        await served.life.wake_up()


async def test_during_a_drain_only_the_drain_touches_the_engine(served, run, recorder):
    """All that is unsafe is refused between its steps, a wake too; a new request is held."""
    early = [name for name in REQUESTS if name != "elk"]
    kinds = MIXED[0]
    got = await served.begin(requests(kinds, run.stop, early), 8)
    asleep = asyncio.create_task(served.life.sleep(1, "wait"))
    await served.stand(2)
    recorder.calls.clear()
    served.consume(requests(kinds, run.stop, ["elk"]))
    meddling = [asyncio.create_task(call(served.life)) for call in UNSAFE.values()]
    meddling.append(asyncio.create_task(served.life.wake_up()))
    await served.stand(1)
    assert recorder.calls == ["get_output", "abort_requests"]  # what a step calls
    assert served.life.snapshot().held == 3
    await served.go()
    refusals = await asyncio.gather(*meddling, return_exceptions=True)
    assert {type(refusal) for refusal in refusals} == {IllegalCall}
    assert (await asleep).held == ("cow", "dog", "elk")
    await served.life.wake_up()
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)


def bad_requests():
    from vllm import SamplingParams

    good = SamplingParams(max_tokens=3)
    return {
        "too long": (InvalidArgument, "x" * 1000, good),
        "nothing": (InvalidArgument, {"prompt_token_ids": []}, good),
        "not in the vocabulary": (InvalidArgument, {"prompt_token_ids": [10**6]}, good),
        "too many log probabilities": (InvalidArgument, "x", SamplingParams(logprobs=10**6)),
        "no parameters": (TypeError, "x", None),
    }


@pytest.mark.parametrize("asleep", [False, True])
async def test_bad_input_is_told_to_whoever_gave_it(served, run, asleep):
    """At the call, awake or asleep, and to nobody else: the others' streams are what they were."""
    kinds, life = MIXED[2], served.life
    got = await served.begin(requests(kinds, run.stop), 5)
    if asleep:
        await served.sleep(1, "keep")
    bad = [
        (error, asyncio.create_task(anext(life.generate(prompt, asked, name))))
        for name, (error, prompt, asked) in bad_requests().items()
    ]
    bad += [
        (TypeError, asyncio.create_task(anext(life.generate("x", params("ant", "DELTA"), 7)))),
        (InvalidArgument, asyncio.create_task(anext(life.generate("x", params("ant", "DELTA"), "ant")))),
    ]
    if not asleep:
        await served.go()
    for error, task in bad:
        with pytest.raises(error):
            await asyncio.wait_for(task, LONGEST_S)
    if asleep:
        await life.wake_up()
    await served.finish()
    assert_same_but_merged(got, run[kinds], kinds)


# -- failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
async def test_a_failing_step_reaches_every_stream(llm, served, run, scheduled, recorder, monkeypatch, kinds):
    """Each gets its tokens, then EngineFailed with the cause; no sleep gets through; `recover` serves."""
    fail_after(llm, monkeypatch, 20)
    got = await served.begin(requests(kinds, run.stop), 19)
    await served.go()
    fates = await served.fates()
    got.look_again()
    assert {type(fate) for fate in fates.values()} == {EngineFailed}
    for fate in fates.values():
        assert isinstance(fate.__cause__, RuntimeError)
        assert fate.in_flight == tuple(REQUESTS)
    assert served.life.state is State.FAILED
    for call in (served.life.sleep, served.life.wake_up, lambda: anext(served.life.generate("a", None, "a"))):
        with pytest.raises(EngineFailed):
            await call()
    assert "sleep" not in recorder.calls
    check_partial(got, run, kinds, times_scheduled(scheduled[:20]), REQUESTS)

    assert await served.life.recover() == ()
    assert served.life.state is State.AWAKE
    again = await served.begin(requests(kinds, run.stop), 1)
    await served.go()
    await served.finish()
    assert_same_but_merged(again, run[kinds], kinds)


@pytest.mark.parametrize("mode", ["wait", "wait_all"])
async def test_a_step_that_fails_during_the_drain(llm, served, run, scheduled, recorder, monkeypatch, mode):
    """The sleep raises EngineFailed without having slept; tokens are kept; `recover` admits the held."""
    kinds = MIXED[1]
    fail_after(llm, monkeypatch, 20)
    got = await served.begin(requests(kinds, run.stop), 14)
    running = started(scheduled)
    with pytest.raises(EngineFailed) as caught:
        await served.sleep(1, mode)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert served.life.state is State.FAILED
    assert "sleep" not in recorder.calls
    held = tuple(name for name in REQUESTS if name not in running) if mode == "wait" else ()
    assert caught.value.held == held
    waiting = {name: served.tasks.pop(name) for name in held}
    fates = await served.fates()
    assert {type(fate) for fate in fates.values()} == {EngineFailed}
    assert all(fate is caught.value for fate in fates.values())
    check_partial(got, run, kinds, times_scheduled(scheduled[:20]), set(REQUESTS) - set(held))

    assert not any(task.done() for task in waiting.values())
    assert await served.life.recover() == held
    served.tasks = waiting
    await served.finish()
    tokens, whole = got.tokens(kinds), run[kinds].tokens(kinds)
    assert {key: tokens[key] for key in whole if key[0] in held} == {
        key: whole[key] for key in whole if key[0] in held
    }


# -- an engine of the thread's own, last: it ends the one that the tests keep ------------------------------


async def test_an_engine_built_in_its_thread(house, run, monkeypatch):
    """Built, stepped, put to sleep, rebuilt by `recover` and shut down in one thread, it is as right."""
    from engine_adapter import VllmInprocess

    house.close()
    keep_plain_weights()
    kinds = MIXED[0]
    async with Served(lambda: Braked(VllmInprocess(model=str(model_dir()), **DEFAULTS))) as served:
        for at, level, mode in ((10, 2, "wait"), (20, 1, "keep")):
            got, _ = await interrupted(served, run, kinds, at, level, mode)
            assert_same_but_merged(got, run[kinds], kinds)

        fail_after(served.engine.llm, monkeypatch, 20)
        got = await served.begin(requests(kinds, run.stop), 14)
        with pytest.raises(EngineFailed) as caught:
            await served.sleep(1, "wait")
        monkeypatch.undo()
        del caught
        held = ("cow", "dog", "elk")
        assert await served.life.recover() == held
        assert len(served.builders) == 2
        served.tasks = {name: served.tasks[name] for name in held}
        await served.finish()
        whole = run[kinds].tokens(kinds)
        assert [got.tokens(kinds)[name, 0] for name in held] == [whole[name, 0] for name in held]
        got, _ = await interrupted(served, run, kinds, 30, 2, "keep")
        assert_same_but_merged(got, run[kinds], kinds)
    gc.collect()  # nothing of it may be left when the next one is built
