"""Faults that need more than one call: what real systems reported, and what the matrix found.

The matrix in `test_faults.py` has one fault at one call; here a fault shows only later, lasts, comes
with a second one, or meets another thread.
"""

import contextlib
import threading
import time
from functools import partial

import pytest

from engine_adapter.simulated import OutputKind, RequestOutput, SamplingParams, SimulatedEngine
from lifecycle import (
    Closed,
    DrainCancelled,
    DrainStalled,
    DrainTimeout,
    EngineFailed,
    InvalidArgument,
    Lifecycle,
    ReleaseFailed,
    State,
    WakeFailed,
)
from lifecycle.engine import OutOfDeviceMemory
from tests import fault_world as at
from tests.fault_world import World


def one(kind=OutputKind.CUMULATIVE, tokens=5):
    world = at.awake()
    world.add("one", tokens, kind)
    return world


def patient(world, seconds=0.05):
    """The same, with little patience for a drain that stands still."""
    world.core.stall_s = seconds
    return world


# -- an output that never comes ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("batch_queue_size", [1, 2])
def test_a_request_that_finishes_without_an_output(kind, batch_queue_size):
    """The caller's loop does not spin: the engine has nothing left to do, and the error names the request."""
    world = World(batch_queue_size=batch_queue_size).start()
    world.add("one", 1, kind)
    world.engine.faults.add("step", effect="output_dropped")
    with pytest.raises(EngineFailed, match="the engine has no work, but one never ended") as caught:
        world.finish()
    assert caught.value.in_flight == ("one",)
    world.sound()
    assert world.lifecycle.recover() == ()
    world.add("one", 1, kind)
    world.finish()
    assert world.is_right("one")


def test_a_drain_does_not_sleep_over_a_request_without_an_end():
    """The engine says that it is quiet while a request is in flight: no sleep, and the failure names it."""
    world = one()
    world.step()
    world.engine.faults.add("has_work", returns=False)
    with pytest.raises(EngineFailed, match="no work, but one never ended"):
        world.lifecycle.sleep(1)
    assert not [call for call in world.engine.calls if call.startswith("sleep")]


def test_a_blocking_call_is_told_what_it_did_not_get():
    """Its request was lost while another thread's step failed: it raises, and does not return too little."""
    world = at.awake()
    entered, failed = threading.Event(), threading.Event()
    told = []

    def generate():
        with world.lifecycle.scope("generate"):
            world.add("mine", 1)
            entered.set()
            failed.wait(5)
            world.finish()

    def tell():
        try:
            generate()
        except EngineFailed as error:
            told.append(error)

    thread = threading.Thread(target=tell)
    thread.start()
    entered.wait(5)
    world.engine.faults.add("step", effect="output_dropped")
    with contextlib.suppress(EngineFailed):
        for _ in range(3):
            world.lifecycle.step()
    assert world.lifecycle.state is State.FAILED
    failed.set()
    thread.join(5)
    assert [error.in_flight for error in told] == [("mine",)]
    assert world.lifecycle.check() == []


def test_what_was_enqueued_and_lost_is_told_to_who_waits_for_it():
    """`wait_for_completion` does not come back empty-handed without a word."""
    world = at.awake()
    with world.lifecycle.scope("enqueue", enqueues=True):
        world.add("mine", 1)
    world.engine.faults.add("step", effect="output_dropped")
    with pytest.raises(EngineFailed):
        world.finish()
    with (
        pytest.raises(EngineFailed) as caught,
        world.lifecycle.scope("wait_for_completion", claims_enqueued=True),
    ):
        world.finish()
    assert caught.value.in_flight == ("mine",)


def test_a_held_request_that_the_wake_refuses_is_told_to_its_caller():
    """A blocking call that waited for the wake gets the reason, not a shorter list."""
    world = at.awake()
    told = []

    def generate():
        try:
            with world.lifecycle.scope("generate"):
                asleep.wait(5)
                world.add("mine", 3)
                held.set()
                world.finish()
        except InvalidArgument as error:
            told.append(error)

    asleep, held = threading.Event(), threading.Event()
    thread = threading.Thread(target=generate)
    thread.start()
    world.lifecycle.sleep(1)
    asleep.set()
    held.wait(5)
    world.engine.faults.add("add", raises=ValueError("its adapter was removed"))
    assert world.lifecycle.wake_up().rejected == ("mine",)
    thread.join(5)
    assert "its adapter was removed" in str(told[0])
    world.sound()


# -- outputs that nobody can use -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "sleep", "generate"])
@pytest.mark.parametrize("rubbish", [None, 7, object()])
def test_good_outputs_beside_rubbish_are_delivered(where, rubbish):
    """Last outputs that came in the same step as something unreadable reach their callers all the same."""
    world = at.awake()
    for kind in OutputKind:
        world.add(kind.name, 2, kind)
    world.step()
    step = world.engine.step
    world.core._step = lambda: [*step(), rubbish]
    with pytest.raises(EngineFailed):
        if where == "step":
            world.step()
        elif where == "sleep":
            world.lifecycle.sleep(1)
        else:
            with world.lifecycle.scope("generate"):
                world.add("mine")
                world.step()
    world.finish()
    assert all(world.is_right(kind.name) for kind in OutputKind)
    world.asked.pop("mine", None)
    world.sound()


def test_the_same_output_twice_in_one_step():
    """Each is delivered once, last or not, cumulative or not."""
    world = at.running()
    step = world.engine.step
    world.core._step = lambda: [output for output in step() for _ in range(2)]
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    world.sound()


def test_a_last_output_again_in_a_later_step():
    """What ended has ended: the second one reaches nobody and is recorded."""
    world = one(tokens=2)
    world.add("other", 6)
    seen = []
    step = world.engine.step

    def again():
        outputs = step()
        seen.extend(output for output in outputs if output.finished)
        return [*outputs, *(output for output in seen if output not in outputs)]

    world.core._step = again
    world.finish()
    assert world.is_right("one")
    assert world.is_right("other")
    assert any(event["event"] == "unexpected_output" for event in world.lifecycle.events())


# -- an abort that is ignored --------------------------------------------------------------------------


def test_the_id_of_an_aborted_request_that_goes_on_is_refused():
    """Outputs carry the caller's id alone: a new request of that name would get the old one's tokens."""
    world = one(tokens=6)
    world.step()
    world.engine.faults.add("abort", effect="ignored")
    world.lifecycle.abort_request(["one"])
    with pytest.raises(InvalidArgument, match="belongs to an aborted request that the engine goes on with"):
        world.add("one", 4)
    while world.engine.has_work():
        assert world.lifecycle.step() == []
    world.add("one", 4)
    world.finish()
    assert world.is_right("one")
    world.sound()


@pytest.mark.parametrize("mode", ["wait", "wait_all", "abort"])
def test_a_drain_does_not_wait_for_ever_for_what_nobody_wants(mode):
    """The engine goes on for ever with an aborted request: no progress of ours, so it is rolled back."""
    world = patient(never_ending())
    world.engine.faults.add("abort", effect="ignored")
    world.lifecycle.abort_request(["one"])
    with pytest.raises(DrainStalled, match="nothing of ours"):
        world.lifecycle.sleep(1, mode, timeout=5)
    assert world.lifecycle.state is State.AWAKE
    assert world.lifecycle.sleep(1, "keep").level == 1
    world.sound()


def test_a_recall_that_is_ignored_drains_the_request():
    """What could not be taken back is finished first, and comes out once."""
    world = at.running()
    world.engine.faults.add("abort", effect="ignored")
    report = world.lifecycle.sleep(1)
    assert report.held == ()
    assert sorted(report.drained) == sorted(world.asked)
    world.finish()
    assert all(world.is_right(name) for name in world.asked)


# -- a drain that never ends ---------------------------------------------------------------------------


def never_ending():
    world = one(tokens=200)
    (request,) = world.engine.requests.values()
    request.limit = world.engine.free_blocks = 10**9
    world.step()
    return world


def test_a_request_that_never_ends_is_bounded_by_the_deadline():
    """It makes progress for ever; `max_steps` and `timeout` end the drain, and nothing is lost by that."""
    world = never_ending()
    with pytest.raises(DrainTimeout) as caught:
        world.lifecycle.sleep(1, timeout=0.02)
    assert caught.value.remaining == ("one",)
    assert world.lifecycle.sleep(1, max_steps=5, on_timeout="abort").aborted == ("one",)
    world.sound()


def test_an_endless_drain_is_seen_and_ended_from_another_thread():
    """The snapshot says what goes on and for how long; an abort of the request lets the drain finish."""
    world = never_ending()
    reports = []
    thread = threading.Thread(target=lambda: reports.append(world.lifecycle.sleep(1)))
    thread.start()
    until(lambda: world.lifecycle.state is State.DRAINING)
    until(lambda: (world.lifecycle.snapshot().operation_age_s or 0) > 0)
    assert world.lifecycle.snapshot().in_flight == 1
    world.lifecycle.abort_request(["one"])
    thread.join(5)
    assert reports[0].level == 1
    world.sound()


def test_a_scheduler_that_computes_nothing_is_stalled_whatever_it_says():
    """It has work and its steps return nothing, `progress` says always the same: rolled back, not hung."""
    world = patient(one())
    world.step()
    world.core._step = list
    with pytest.raises(DrainStalled, match="computed nothing"):
        world.lifecycle.sleep(1)
    assert world.lifecycle.state is State.RUNNING


def until(condition, seconds=1.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


# -- two faults at once --------------------------------------------------------------------------------


def test_a_failed_engine_that_cannot_even_tell():
    """The step fails and so does every read of last outputs: nothing hangs, and the error names them all."""
    world = at.running()
    asked = set(world.asked)
    world.engine.faults.add("step", raises=RuntimeError("lost"))
    for _ in asked:
        world.engine.faults.add("last_outputs", raises=OSError("gone"))
    with pytest.raises(EngineFailed) as caught:
        world.step()
    assert set(caught.value.in_flight) == asked
    assert not world.lifecycle.has_unfinished_requests()
    assert world.lifecycle.check() == []


@pytest.mark.parametrize("rubbish", [None, [], [None], [RequestOutput("x", None, [], [], finished=True)]])
def test_a_failed_engine_that_tells_rubbish(rubbish):
    """What it gives as last outputs is none: the request ends without one, the others get theirs."""
    world = at.running()
    world.engine.faults.add("step", raises=RuntimeError("lost"))
    world.engine.faults.add("last_outputs", returns=rubbish)
    with pytest.raises(EngineFailed):
        world.step()
    world.finish()
    assert sum(bool(world.last(name)) for name in world.asked) == len(world.asked) - 1
    assert world.lifecycle.check() == []


def test_an_interrupt_while_it_fails_is_not_swallowed():
    """Ctrl-C out of the last read of a failing engine: FAILED, and the KeyboardInterrupt comes out."""
    world = at.running()
    world.engine.faults.add("step", raises=RuntimeError("lost"))
    world.engine.faults.add("last_outputs", raises=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.step()
    assert world.lifecycle.state is State.FAILED
    assert world.lifecycle.check() == []


def test_a_recover_that_fails_can_be_tried_again_and_again():
    """The new engine fails too, at each of its first calls: FAILED each time, the held still held."""
    world = at.failed()
    held = set(world.core.ledger.held)
    for call in ("condition", "forget_media", "add"):
        world.at_birth = [(call, {"raises": RuntimeError(call)})]
        with pytest.raises(EngineFailed, match=call):
            world.lifecycle.recover()
        assert world.lifecycle.state is State.FAILED
        assert world.lifecycle.check() == []
    world.at_birth = []
    assert set(world.lifecycle.recover()) == held
    world.finish()
    assert all(world.is_right(name) for name in held)
    assert [engine.closed for engine in world.engines] == [True] * 4 + [False]


def test_an_engine_that_cannot_be_looked_at_is_shut_down_again():
    """Nobody else could: the lifecycle that built it never came to be."""
    world = World()
    world.at_birth = [("condition", {"raises": RuntimeError("driver gone")})]
    with pytest.raises(EngineFailed, match=r"attach failed inside the engine: .*driver gone"):
        world.start()
    assert world.engine.closed


# -- memory --------------------------------------------------------------------------------------------


def test_memory_that_ran_out_half_way_is_seen_as_it_is():
    """The engine mapped the weights and then had no memory: partly awake, and the rest can be had later."""
    world = at.asleep(1)
    fault = {"when": "after", "effect": "tag_stays_asleep", "raises": OutOfDeviceMemory("short", 4096)}
    world.engine.faults.add("wake_up", **fault)
    with pytest.raises(
        WakeFailed, match=r"too little device memory.*'kv_cache'.*did not come back"
    ) as caught:
        world.lifecycle.wake_up()
    assert (caught.value.tags, caught.value.missing_bytes) == (("kv_cache",), 4096)
    assert world.lifecycle.state is State.PARTIALLY_AWAKE
    assert world.lifecycle.snapshot().resident == {"weights"}
    assert world.lifecycle.wake_up()
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    world.sound()


def test_a_wake_that_takes_memory_away_is_a_failure():
    """What was resident is not any more: nobody knows what its contents are."""
    world = at.partly(1, "weights")
    world.core.engine.wake_up = lambda _: (
        world.engine.resident.clear(),
        world.engine.resident.add("kv_cache"),
    )
    with pytest.raises(EngineFailed, match="took away"):
        world.lifecycle.wake_up()


@pytest.mark.parametrize("strict", [False, True])
def test_a_sleep_that_frees_nothing(strict):
    """It sleeps and freed nothing: a warning in the report, or an error if that was asked for."""
    world = World(options={"strict_release": strict}).start()
    world.engine.faults.add("sleep", effect="frees_nothing")
    if strict:
        with pytest.raises(ReleaseFailed) as caught:
            world.lifecycle.sleep(1)
        report = caught.value.report
    else:
        report = world.lifecycle.sleep(1)
    assert report.released_bytes == 0
    assert "released 0 bytes" in report.warnings[0]
    assert world.lifecycle.state is State.SLEEPING
    assert world.lifecycle.wake_up()


def test_weights_that_were_not_filled_are_not_taken_for_loaded():
    """`discard_weights` did nothing, so nothing is missing: that is no proof that they were loaded."""
    world = at.asleep(2)
    world.engine.faults.add("discard_weights", returns=None)
    with pytest.raises(EngineFailed, match="filled nothing"):
        world.lifecycle.wake_up()


# -- another thread ------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [at.deepening, at.resleeping, at.draining, at.draining_to_keep])
def test_closing_between_two_phases_of_a_sleep(build):
    """Whoever was putting it to sleep is told that it was closed, and nothing more reaches the engine."""
    world = build()
    world.lifecycle.close()
    log = list(world.engine.log)
    with pytest.raises(Closed):
        world.sleep.advance()
    assert world.engine.log == log
    assert world.sleep.cancel() is False
    assert world.lifecycle.check() == []


@pytest.mark.parametrize("build", [at.deepening, at.draining, at.draining_to_keep])
def test_a_failure_between_two_phases_of_a_sleep(build):
    """Another thread's abort fails: the sleeper is told, and steps no engine that failed."""
    world = build()
    world.engine.faults.add("abort", raises=RuntimeError("lost"))
    with pytest.raises(EngineFailed):
        world.lifecycle.abort_request(["started-delta"])
    log = list(world.engine.log)
    with pytest.raises(EngineFailed, match="lost"):
        world.sleep.advance()
    assert world.engine.log == log


def test_a_drain_that_was_rolled_back_does_not_go_on():
    """Its object was cancelled: to advance it is refused by name, and does nothing."""
    world = at.draining()
    assert world.sleep.cancel()
    with pytest.raises(DrainCancelled):
        world.sleep.advance()
    assert world.lifecycle.state is State.RUNNING


def test_a_load_that_nobody_saw_does_not_end_a_sleep_under_way():
    """Going back to sleep from partly awake: another thread's request is held, and does not start serving."""
    world = at.loaded_unseen()
    sleep = world.core.begin_sleep(1, "wait")
    world.add("late")
    assert world.lifecycle.snapshot().held == 4
    while sleep.advance() is None:
        pass
    world.sound()
    world.serve()
    world.finish()
    assert world.is_right("late")


def test_the_engine_that_a_callable_builds_hangs_visibly():
    """A recover whose factory does not return is seen as `recover`, with its age."""
    building, let_go = threading.Event(), threading.Event()
    first = SimulatedEngine()

    def build():
        if building.is_set() or lifecycle_is_up.is_set():
            building.set()
            let_go.wait(5)
            return SimulatedEngine()
        return first

    lifecycle_is_up = threading.Event()
    lifecycle = Lifecycle(build, sinks=())
    lifecycle_is_up.set()
    first.faults.add("step", raises=RuntimeError("lost"))
    lifecycle.add_request("r", "p", SamplingParams())
    with pytest.raises(EngineFailed):
        lifecycle.step()
    thread = threading.Thread(target=lifecycle.recover)
    thread.start()
    building.wait(5)
    until(lambda: lifecycle.snapshot().operation_age_s)
    assert lifecycle.snapshot().operation == "recover"
    let_go.set()
    thread.join(5)
    assert lifecycle.state is State.AWAKE


def test_a_progress_callback_that_raises_cancels():
    """The drain is rolled back, and the callback's own exception is the cause."""
    world = at.running()
    with pytest.raises(DrainCancelled) as caught:
        world.lifecycle.sleep(1, progress=partial(int, "no number", 0))
    assert caught.value.__cause__ is not None
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    world.sound()
