"""Drain, sleep and wake on a real vLLM: nothing lost, nothing twice, no token changed.

Every comparison is with a run that nobody interrupted. The worker's sleep destroys what a GPU's
would (`tests.nan_worker`), sampling is seeded, and the outputs differ from each other, so a token
that is lost, doubled, swapped or computed from lost memory shows.
"""

import os
from collections import defaultdict

import pytest

from lifecycle import EngineFailed, IllegalCall, State
from tests.conftest import undo
from tests.engines import core, give_batch_queue, take_batch_queue
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
    assert_same,
    check_aborted,
    check_partial,
    clear,
    fail_after,
    four_samples,
    load_unseen,
    long_prompts,
    params,
    raw,
    started,
    submit,
    times_scheduled,
)

pytestmark = pytest.mark.vllm


def wake(llm, guarded, level, mode):
    if level == 2:
        guarded.wake_up(["weights"])
        if mode == "keep":
            load_unseen(llm)  # a load that is seen is refused over kept requests
        else:
            guarded.reload_weights()
    assert guarded.wake_up(["kv_cache"] if level == 2 else None)


def interrupted(llm, guarded, run, kinds, at, level, mode):
    """A whole run with a sleep and a wake before its step `at`; what came of it and the sleep's report."""
    got = Delivered()
    submit(guarded, kinds, run.stop)
    for _ in range(at):
        got.take(guarded.step())
    report = guarded.sleep(level, mode)
    assert guarded.state is State.SLEEPING
    wake(llm, guarded, level, mode)
    got.finish(guarded)
    assert guarded.state is State.AWAKE
    assert guarded.check() == []
    return got, report


@pytest.fixture
def recorder(llm, guarded, monkeypatch):
    engine = raw(llm)
    client = Recorder(engine.engine_core)
    monkeypatch.setattr(engine, "engine_core", client)
    return client


# -- an engine with two slots and three blocks of KV cache ------------------------------------------


@pytest.fixture
def cramped(house):
    return house.llm(**CRAMPED)


@pytest.fixture
def guarded_cramped(cramped):
    from engine_adapter import attach

    lifecycle = attach(cramped, sinks=())
    yield lifecycle
    assert lifecycle.check() == []
    undo(cramped, lifecycle)


@pytest.mark.parametrize("level", LEVELS)
def test_a_started_request_of_four_samples_is_whole_after_the_drain(cramped, guarded_cramped, level):
    """A request whose samples don't all fit has started as a whole: the drain ends every one of them."""
    add(raw(cramped), four_samples())
    expected = Delivered().finish(raw(cramped))
    assert all(len(set(tokens)) >= 20 for tokens in expected.tokens(ALONE[2]).values() if len(tokens) > 1)

    got = Delivered()
    add(guarded_cramped, four_samples())
    for _ in range(5):
        got.take(guarded_cramped.step())
    assert len(core(cramped).scheduler.waiting) == 3
    report = guarded_cramped.sleep(level, "wait")
    assert report.drained == ("two",)
    assert report.held == ("ant",)
    assert not core(cramped).scheduler.requests
    wake(cramped, guarded_cramped, level, "wait")
    assert_same(got.finish(guarded_cramped), expected)


@pytest.mark.parametrize("at", [3, 18, 24])
def test_a_request_preempted_during_the_drain_is_whole(cramped, guarded_cramped, monkeypatch, at):
    """Under KV pressure a request that loses its place has started all the same, and is drained."""
    add(raw(cramped), long_prompts())
    expected = Delivered().finish(raw(cramped))

    preemptions = defaultdict(int)
    scheduler = core(cramped).scheduler
    real = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        preemptions[guarded_cramped.state] += 1
        return real(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    got = Delivered()
    add(guarded_cramped, long_prompts())
    for _ in range(at):
        got.take(guarded_cramped.step())
    before = preemptions[State.RUNNING]
    report = guarded_cramped.sleep(1, "wait")
    assert before + preemptions[State.DRAINING] == 1
    assert bool(preemptions[State.DRAINING]) == (at == 3)
    assert sorted(report.drained) == ["ant", "bee"]
    assert report.held == ("cow",)
    wake(cramped, guarded_cramped, 1, "wait")
    assert_same(got.finish(guarded_cramped), expected)


# -- plain vLLM ---------------------------------------------------------------------------------------


def test_plain_vllm_cannot_wait(llm):
    """In-process vLLM refuses `mode="wait"`, which is why this library drains by itself."""
    with pytest.raises(ValueError, match="wait"):
        llm.llm_engine.sleep(level=1, mode="wait")
    assert core(llm).scheduler.pause_state.name == "UNPAUSED"


def test_the_reference_can_tell_tokens_apart(run):
    """The uninterrupted run has at least 20 different ids in every output, no two outputs alike."""
    for kinds in (*MIXED, *ALONE):
        tokens = run[kinds].tokens(kinds)
        assert all(len(set(ids)) >= 20 for ids in tokens.values())
        assert len({tuple(ids[:10]) for ids in tokens.values()}) == len(tokens) == len(REQUESTS) + 1
        assert run[kinds].seen["stop", 0][-1][2:] == ("stop", run.stop)
        assert tokens == run[ALONE[0]].tokens(ALONE[0])


# -- equality -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_sleep_at_any_step_changes_nothing(llm, guarded, run, level, mode):
    """Drained, slept and woken before any step of a run, every request's outputs are those without.

    Level 1 is put at every step, the others at every fifth, not the same ones; with EVERY_STEP=1 in the
    environment (`make test-deep`) all at every step. The three kinds of output take turns among the
    requests, so that each kind is there every time, and each request in each kind.
    """
    reports = []
    every = level == 1 or "EVERY_STEP" in os.environ
    moments = range(run.steps + 1) if every else range(level, run.steps + 1, 5)
    for at in moments:
        kinds = MIXED[at % 3]
        got, report = interrupted(llm, guarded, run, kinds, at, level, mode)
        assert_same(got, run[kinds])
        assert not report.aborted
        reports.append(report)
    assert_all_fates(reports, mode)


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize("kinds", ALONE, ids=KINDS)
def test_a_sleep_changes_nothing_for_one_kind_alone(llm, guarded, run, kinds, mode):
    """A caller who asks for one kind of output only gets the same, whatever the level."""
    for at in range(2 if mode == "wait" else 5, run.steps, 11):
        got, _ = interrupted(llm, guarded, run, kinds, at, at % 3, mode)
        assert_same(got, run[kinds])


def test_sleeps_that_follow_each_other_change_nothing(llm, guarded, run):
    """Many sleeps in one run, of every level and mode, are as harmless as one."""
    kinds = MIXED[0]
    submit(guarded, kinds, run.stop)
    got = Delivered()
    for level, mode in [(0, "keep"), (1, "keep"), (2, "keep"), (0, "wait"), (1, "keep"), (2, "wait")]:
        for _ in range(4):
            got.take(guarded.step())
        guarded.sleep(level, mode)
        wake(llm, guarded, level, mode)
    assert_same(got.finish(guarded), run[kinds])


# -- what a drain schedules -----------------------------------------------------------------------------


def test_a_drain_starts_nothing_new(guarded, run, scheduled):
    """Between the call and SLEEPING no step schedules a request that had not started before."""
    steps_of_drains = 0
    for at in range(0, run.steps, 6):
        scheduled.clear()
        submit(guarded, MIXED[0], run.stop)
        for _ in range(at):
            guarded.step()
        before = started(scheduled)
        scheduled.clear()
        report = guarded.sleep(0, "wait")
        assert started(scheduled) <= before
        assert before.isdisjoint(report.held)
        steps_of_drains += sum(bool(step) for step in scheduled)
        guarded.wake_up()
        Delivered().finish(guarded)
    assert steps_of_drains > 50


def test_keep_schedules_nothing_at_all(guarded, run, scheduled):
    """In keep mode not one request is scheduled between the call and the wake."""
    for at in range(1, run.steps, 9):
        submit(guarded, MIXED[0], run.stop)
        for _ in range(at):
            guarded.step()
        scheduled.clear()
        guarded.sleep(1, "keep")
        assert not started(scheduled)
        guarded.wake_up()
        Delivered().finish(guarded)


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_nothing_is_scheduled_after_its_stop_string(guarded, run, scheduled, mode):
    """A request is scheduled once for each of its tokens up to the stop string, and never again."""
    tokens = len(run[ALONE[0]].tokens(ALONE[0])["stop", 0])
    for at in range(0, tokens + 2, 4):
        scheduled.clear()
        submit(guarded, MIXED[1], run.stop)
        for _ in range(at):
            guarded.step()
        guarded.sleep(0, mode)
        guarded.wake_up()
        Delivered().finish(guarded)
        assert times_scheduled(scheduled)["stop", 0] == tokens


def test_an_idle_engine_needs_no_drain(guarded, scheduled, recorder):
    """With nothing in flight a sleep takes no step, in every mode and at every level."""
    for level in (0, 1):
        for mode in ("wait", "wait_all", "abort", "keep"):
            report = guarded.sleep(level, mode)
            assert (report.steps, report.tokens) == (0, 0)
            assert (report.drained, report.aborted, report.kept, report.held) == ((), (), (), ())
            assert guarded.wake_up()
    assert not scheduled
    assert recorder.calls.count("sleep") == 8


# -- delivery --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awake", [False, True])
def test_what_a_drain_produced_comes_once_and_first(guarded, run, scheduled, awake):
    """Outputs of the drain come at the first step, asleep or awake, before the engine is stepped again."""
    kinds = MIXED[2]
    got = Delivered()
    submit(guarded, kinds, run.stop)
    for _ in range(12):
        got.take(guarded.step())
    report = guarded.sleep(1, "wait")
    assert guarded.snapshot().undelivered == len(report.drained) == 4
    scheduled.clear()
    if awake:
        guarded.wake_up()
    first = guarded.step()
    assert not scheduled
    assert {output.request_id for output in first} == {"ant", "bee", "stop", "two"}
    assert sorted(output.request_id for output in first if output.finished) == sorted(report.drained)
    got.take(first, buffered=True)
    if not awake:
        with pytest.raises(IllegalCall):
            guarded.step()
        assert not scheduled
        guarded.wake_up()
    rest = guarded.step()
    assert scheduled
    assert not {output.request_id for output in rest} & set(report.drained)
    got.take(rest)
    assert_same(got.finish(guarded), run[kinds])


def test_a_partial_wake_does_not_resume(guarded, run, scheduled):
    """With only the weights back nothing is scheduled: a step is refused, a new request is held.

    What was submitted asleep and partly awake completes after the full wake with the right tokens.
    """
    kinds = MIXED[0]
    got = Delivered()
    submit(guarded, kinds, run.stop, [name for name in REQUESTS if name not in ("dog", "elk")])
    for _ in range(10):
        got.take(guarded.step())
    guarded.sleep(1, "wait")
    submit(guarded, kinds, run.stop, ["dog"])
    assert guarded.snapshot().held == 2
    scheduled.clear()
    assert not guarded.wake_up(["weights"])
    assert guarded.state is State.PARTIALLY_AWAKE
    submit(guarded, kinds, run.stop, ["elk"])
    assert guarded.snapshot().held == 3
    got.take(guarded.step(), buffered=True)
    with pytest.raises(IllegalCall, match="step"):
        guarded.step()
    assert not scheduled
    report = guarded.wake_up(["kv_cache"])
    assert report.readmitted == ("cow", "dog", "elk")
    assert_same(got.finish(guarded), run[kinds])


def test_generate_after_a_wake_is_generate(llm, guarded, run):
    """`LLM.generate`, with sleeps of every level between the calls, returns the same tokens."""
    prompts = [f"the story of the {name} begins" for name in ("ant", "bee", "cow")]
    asked = [params(name, "FINAL_ONLY", **REQUESTS[name]) for name in ("ant", "bee", "cow")]
    expected = run[ALONE[0]].tokens(ALONE[0])
    for level in LEVELS:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [expected[name, 0] for name in ("ant", "bee", "cow")]
        assert llm.sleep(level).drained == ()
        wake(llm, guarded, level, "wait")


# -- batches launched ahead ---------------------------------------------------------------------------


@pytest.fixture
def queued(llm, guarded):
    give_batch_queue(llm)
    yield guarded
    while core(llm).batch_queue:  # the last one may outlive the last request, as in vLLM
        guarded.step()
    take_batch_queue(llm)


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (1, "wait"), (1, "keep"), (2, "wait"), (2, "keep")])
def test_launched_batches_are_stepped_out(llm, queued, run, monkeypatch, level, mode):
    """Batches launched when the sleep is called are finished before it, and their tokens delivered."""
    launched = 0
    real = queued._core.engine.sleep

    def sleep(level):
        assert not core(llm).batch_queue
        real(level)

    monkeypatch.setattr(queued._core.engine, "sleep", sleep)
    for at in range(1, 2 * run.steps, 13):
        kinds = MIXED[at % 3]
        got = Delivered()
        submit(queued, kinds, run.stop)
        for _ in range(at):
            got.take(queued.step())
        launched += bool(core(llm).batch_queue)
        queued.sleep(level, mode)
        assert not core(llm).batch_queue
        wake(llm, queued, level, mode)
        assert_same(got.finish(queued), run[kinds])
    assert launched >= 3


# -- abort -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
def test_abort_keeps_the_tokens_so_far(guarded, run, scheduled, kinds):
    """A sleep in abort mode ends every request at once, with exactly the tokens it had, in each kind."""
    for at in (0, 1, 9, 27, 35):
        scheduled.clear()
        got = Delivered()
        submit(guarded, kinds, run.stop)
        for _ in range(at):
            got.take(guarded.step())
        count = times_scheduled(scheduled)
        done = set(got.finished)
        report = guarded.sleep(1, "abort")
        assert set(report.aborted) == set(REQUESTS) - done
        got.take(guarded.step())
        assert not guarded.has_unfinished_requests()
        check_aborted(got, run, kinds, count)
        assert guarded.wake_up()
        assert guarded.state is State.AWAKE


# -- refusals ----------------------------------------------------------------------------------------------


def to_level_1(guarded):
    guarded.sleep(1)


def to_level_2(guarded):
    guarded.sleep(2)


def to_kv_cache_only(guarded):
    guarded.sleep(1)
    guarded.wake_up(["kv_cache"])


# Each would touch memory that is not there, or go behind the machine.
UNSAFE = {
    "step": lambda llm: llm.llm_engine.step(),
    "generate": lambda llm: llm.generate("a", use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
    "add_lora": lambda llm: llm.llm_engine.add_lora(None),
    "remove_lora": lambda llm: llm.llm_engine.remove_lora(1),
    "apply_model": lambda llm: llm.apply_model(len),
    "reload": lambda llm: llm.collective_rpc("reload_weights"),
    "rpc update_weights": lambda llm: llm.collective_rpc("update_weights", args=({},)),
    "rpc load": lambda llm: llm.llm_engine.lifecycle.reload_weights(),
    "rpc sleep": lambda llm: llm.collective_rpc("sleep", args=(1,)),
    "rpc wake_up": lambda llm: llm.collective_rpc("wake_up"),
    "rpc discard": lambda llm: llm.collective_rpc("discard", args=(("kv_cache",),)),
    "another level": lambda llm: llm.sleep(3 - llm.llm_engine.lifecycle.snapshot().level),
    "release": lambda llm: llm.llm_engine.release_kv_cache_memory(),
    "unknown": lambda llm: llm.llm_engine.lifecycle.call("a_call_of_tomorrow"),
}


@pytest.mark.parametrize("fall_asleep", [to_level_1, to_level_2, to_kv_cache_only])
def test_unsafe_calls_never_reach_the_engine(llm, guarded, recorder, fall_asleep):
    """With the weights asleep every unsafe call is refused, changes nothing and reaches nothing."""
    fall_asleep(guarded)
    before = guarded.snapshot()
    for name, call in UNSAFE.items():
        recorder.calls.clear()
        with pytest.raises(IllegalCall):
            call(llm)
        assert recorder.calls == [], name
    after = guarded.snapshot()
    assert (after.state, after.level, after.resident) == (before.state, before.level, before.resident)
    assert guarded.snapshot().in_flight == 0


def test_arguments_that_vllm_would_misread_never_reach_it(guarded, recorder):
    """Levels and tags that vLLM takes in silence, or half takes, are refused before anything is touched."""
    guarded.sleep(1)
    recorder.calls.clear()
    for tags in ([], ["bogus"], ["weights", "weights"], ["weights", "bogus"], "weights"):
        with pytest.raises(ValueError, match="tag"):
            guarded.wake_up(tags)
    for level in (-1, 3, 7, True, None):
        with pytest.raises(ValueError, match="level"):
            guarded.sleep(level)
    assert recorder.calls == []
    assert guarded.state is State.SLEEPING


def test_during_a_drain_only_the_drain_touches_the_engine(llm, guarded, run, recorder):
    """While the drain is under way everything unsafe is refused, and the drain goes on."""
    reached = []

    def meddle(_):
        calls = len(recorder.calls)
        if guarded._core.ledger.mailbox:  # what the drain produced may be taken meanwhile
            got.take(guarded.step(), buffered=True)
        for call in UNSAFE.values():
            with pytest.raises(IllegalCall):
                call(llm)
        with pytest.raises(IllegalCall):
            guarded.wake_up()
        reached.extend(recorder.calls[calls:])

    got = Delivered()
    submit(guarded, MIXED[0], run.stop)
    for _ in range(20):
        got.take(guarded.step())
    # The level is not yet one to differ from.
    UNSAFE["another level"], another = (lambda llm: llm.sleep(2)), UNSAFE["another level"]
    try:
        report = guarded.sleep(1, "wait", progress=meddle)
    finally:
        UNSAFE["another level"] = another
    assert report.steps > 5
    assert reached == []
    guarded.wake_up()
    assert_same(got.finish(guarded), run[MIXED[0]])


# -- failure ------------------------------------------------------------------------------------------------


def repair(llm, guarded):
    guarded.detach()
    clear(llm)


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
def test_a_failing_step_reaches_the_caller_before_any_sleep(
    llm, guarded, run, scheduled, recorder, monkeypatch, kinds
):
    """The step raises EngineFailed, the tokens so far come at the next step, and no sleep gets through."""
    fail_after(llm, monkeypatch, 20)
    got = Delivered()
    submit(guarded, kinds, run.stop)
    for _ in range(20):
        got.take(guarded.step())
    with pytest.raises(EngineFailed) as caught:
        guarded.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.in_flight == tuple(REQUESTS)
    assert guarded.state is State.FAILED
    for call in (guarded.sleep, guarded.wake_up, lambda: llm.generate("a", use_tqdm=False)):
        with pytest.raises(EngineFailed):
            call()
    assert "sleep" not in recorder.calls
    got.take(guarded.step())
    check_partial(got, run, kinds, times_scheduled(scheduled[:20]), REQUESTS)
    assert not guarded.has_unfinished_requests()
    with pytest.raises(EngineFailed):
        guarded.step()
    repair(llm, guarded)


@pytest.mark.parametrize("mode", ["wait", "wait_all"])
def test_a_step_that_fails_during_the_drain_reaches_the_caller(
    llm, guarded, run, scheduled, recorder, monkeypatch, mode
):
    """The sleep raises EngineFailed, never having slept; partial tokens are delivered, held ones listed."""
    kinds = MIXED[1]
    fail_after(llm, monkeypatch, 20)
    got = Delivered()
    submit(guarded, kinds, run.stop)
    for _ in range(14):
        got.take(guarded.step())
    running = started(scheduled)
    with pytest.raises(EngineFailed) as caught:
        guarded.sleep(1, mode)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert guarded.state is State.FAILED
    assert "sleep" not in recorder.calls
    held = tuple(name for name in REQUESTS if name not in running) if mode == "wait" else ()
    assert caught.value.held == held
    assert guarded.snapshot().held == len(held)
    got.take(guarded.step())
    check_partial(got, run, kinds, times_scheduled(scheduled[:20]), set(REQUESTS) - set(held))
    with pytest.raises(EngineFailed):
        guarded.step()
    assert guarded.snapshot().held == len(held)
    assert guarded.has_unfinished_requests() == bool(held)
    guarded.abort_request(held)
    repair(llm, guarded)


def test_after_a_repair_the_engine_is_right(guarded, run):
    """The tests above left the engine as they found it."""
    submit(guarded, MIXED[0], run.stop)
    assert_same(Delivered().finish(guarded), run[MIXED[0]])
