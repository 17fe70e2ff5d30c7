"""The core, rule by rule: how an engine is found, what is refused and in which words, what events say."""

import itertools
import threading
import time
from dataclasses import replace

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import (
    Closed,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    Lifecycle,
    State,
    WakeFailed,
    WeightsNotValid,
)
from lifecycle.engine import Capabilities, Condition, Operation, OutOfDeviceMemory
from lifecycle.requests import Scope
from lifecycle.table import MEMORY_TAGS, Trigger, Weights
from tests.conftest import told


def make(engine=None, **options):
    """A lifecycle, and its engine."""
    engine = engine or SimulatedEngine()
    return Lifecycle(engine, sinks=(), **options), engine


def add(lifecycle, *names, tokens=4, **params):
    for name in names:
        lifecycle.add_request(name, f"prompt of {name}", SamplingParams(max_tokens=tokens, **params))


def fail(lifecycle, engine, cause):
    """Break a step, and return what its caller gets."""
    if not lifecycle.snapshot().in_flight:
        add(lifecycle, "r")
    engine.faults.add("step", raises=cause)
    with pytest.raises(EngineFailed) as caught:
        lifecycle.step()
    return caught.value


# -- attach --------------------------------------------------------------------------------------------


class Mute(SimulatedEngine):
    """It can't tell the level of a sleep, nor what that did to the weights."""

    def condition(self):
        return replace(super().condition(), level=None, weights=Weights.VALID)


def test_a_pause_whose_level_cannot_be_read_is_level_0():
    """All memory is there and scheduling stands still: that is a pause, whatever the engine can tell."""
    engine = Mute()
    engine.pause_scheduling()
    lifecycle, _ = make(engine)
    assert (lifecycle.state, lifecycle.snapshot().level) == (State.SLEEPING, 0)
    assert lifecycle.snapshot().weights == "valid"
    assert lifecycle.resume()
    assert lifecycle.state is State.AWAKE


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_whose_level_cannot_be_read_lost_the_weights(level):
    """Memory is asleep and nobody knows how: nothing is believed of the weights, though they may be there."""
    engine = Mute()
    engine.pause_scheduling()
    engine.sleep(level)
    lifecycle, _ = make(engine)
    snapshot = lifecycle.snapshot()
    assert (snapshot.state, snapshot.level, snapshot.weights) == ("sleeping", 2, "discarded")


@pytest.mark.parametrize(
    ("policy", "state"),
    [("unchecked", "awake"), ("checked", "partially_awake"), ("declared", "partially_awake")],
)
def test_weights_that_nobody_checks_are_good_as_they_are_found(policy, state):
    """A dummy load is served under `unchecked` alone; the others wait for a load."""
    lifecycle, _ = make(SimulatedEngine(dummy_weights=True), weights=policy)
    assert lifecycle.snapshot().state == state


def test_an_engine_in_no_condition_of_the_table_is_refused():
    """All memory awake and a level above 0 contradict each other: nobody guesses which of them is true."""
    engine = SimulatedEngine()
    engine.faults.add("condition", returns=Condition(MEMORY_TAGS, paused=False, level=1))
    with pytest.raises(InternalError, match="no row of the table fits"):
        make(engine)


@pytest.mark.parametrize("costs", [(), ("nobody sees a half-loaded model",)])
def test_attached_says_what_the_engine_cannot_do(costs):
    """The first event names the costs of missing capabilities; where none is missing it has no such field."""
    lifecycle, _ = make(SimulatedEngine(capabilities=Capabilities("simulated", costs=costs)))
    (attached,) = told(lifecycle, "attached")
    assert attached.get("costs") == (costs or None)


def test_a_new_engine_may_have_other_capabilities():
    """What `recover` builds is asked anew what it can do."""
    engines = [SimulatedEngine(capabilities=Capabilities("simulated", levels=ls)) for ls in ((0, 1, 2), (0,))]
    built = iter(engines)
    lifecycle = Lifecycle(lambda: next(built), sinks=())
    fail(lifecycle, engines[0], RuntimeError("broken"))
    lifecycle.recover()
    assert lifecycle.capabilities is engines[1].capabilities
    with pytest.raises(InvalidArgument, match="enable_sleep_mode"):
        lifecycle.sleep(1)


def test_all_of_the_memory_can_be_put_back_to_sleep():
    """An engine that can't sleep from a part of its memory still can from all of it, before a load too."""
    engine = SimulatedEngine(capabilities=Capabilities("simulated", resleep_partial=False))
    lifecycle, _ = make(engine)
    lifecycle.sleep(2)
    assert not lifecycle.wake_up()
    assert lifecycle.state is State.PARTIALLY_AWAKE
    assert lifecycle.sleep(2).level == 2
    assert (lifecycle.state, engine.misuse) == (State.SLEEPING, [])


def test_there_is_no_engine_after_the_end():
    """Whatever asks for the engine after `close` has found a bug of ours, and says so."""
    lifecycle, _ = make()
    lifecycle.close()
    with pytest.raises(InternalError, match="no engine"):
        _ = lifecycle._core.engine
    with pytest.raises(InternalError, match="without an engine"):
        lifecycle._core._step()


# -- invariants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "spoil", "promise"),
    [
        (State.DRAINING, None, "a drain has an owner"),
        (State.AWAKE, lambda core: core.ledger.admit(call("r"), "r-1", None, 0), "awake means"),
        (State.RUNNING, None, "running means that something is in flight"),
        (State.AWAKE, lambda core: setattr(core, "resident", frozenset()), "all memory is back"),
        (State.AWAKE, lambda core: core.weights.found(Weights.DISCARDED), "all memory is back"),
        (State.AWAKE, lambda core: core.ledger.hold(call("r"), None, 0), "nothing is held"),
        (State.FAILED, lambda core: core.ledger.admit(call("r"), "r-1", None, 0), "after the end"),
        (State.AWAKE, lambda core: setattr(core.ledger, "scoped", 1), "blocking calls are counted"),
    ],
)
def test_check_names_each_broken_promise(state, spoil, promise):
    """The machine's invariants and the ledger's can fail: one kind of damage, one promise named."""
    lifecycle, _ = make()
    assert lifecycle.check() == []
    lifecycle._core.state = state
    if spoil is not None:
        spoil(lifecycle._core)
    (broken,) = lifecycle.check()
    assert promise in broken


def call(name):
    return SimulatedEngine().prepare(name, "prompt", SamplingParams(), {})


# -- refusals ------------------------------------------------------------------------------------------


def test_a_forked_child_may_call_nothing():
    """In the child every call is refused, whatever the state, and no other one is offered instead."""
    lifecycle, engine = make()
    lifecycle._forget_parent()
    reached = list(engine.calls)
    for refused in (
        lifecycle.step,
        lifecycle.wake_up,
        lifecycle.sleep,
        lifecycle.close,
        lambda: add(lifecycle, "r"),
    ):
        with pytest.raises(Closed, match="parent process") as caught:
            refused()
        assert caught.value.legal == ()
    assert engine.calls == reached


def test_a_forked_child_waits_for_no_lock_of_its_parents_threads_to_tell():
    """A thread that is gone may have been telling an event when the process forked."""
    lifecycle, _ = make()
    refused = []

    def in_the_child():
        with pytest.raises(Closed) as caught:
            lifecycle.wake_up()
        refused.append(caught.value)

    with lifecycle._core.events._lock:
        lifecycle._forget_parent()
        child = threading.Thread(target=in_the_child, daemon=True)
        child.start()
        child.join(5)
        assert len(refused) == 1


def test_while_a_call_is_inside_the_engine_only_reading_is_legal():
    """What needs no more than an engine that is not closed is legal; all else is refused, and says why."""
    lifecycle, _ = make()
    core = lifecycle._core
    core.operation = Operation("wake_up", time.monotonic())
    core.require("get_metrics")
    for refused in ("add_request", "abort_request", "sleep", "step"):
        with pytest.raises(IllegalCall, match="wake_up is under way") as caught:
            core.require(refused)
        assert caught.value.operation == "wake_up"


def test_a_refusal_names_the_operation_under_way():
    """A drain is named with its level and mode; with nothing under way there is no name."""
    lifecycle, _ = make()
    add(lifecycle, "r")
    sleep = lifecycle._core.begin_sleep(1, "wait_all")
    with pytest.raises(IllegalCall) as caught:
        lifecycle.step()
    assert caught.value.operation == "sleep(level=1, mode=wait_all)"
    sleep.cancel()
    with pytest.raises(IllegalCall) as caught:
        lifecycle.release_kv_cache_memory()
    assert caught.value.operation is None


def test_weights_are_the_reason_only_where_nothing_else_is():
    """Asleep, what needs a serving engine is illegal; with all memory back only the weights are missing."""
    lifecycle, _ = make()
    lifecycle.sleep(2)
    for wake, kind in (((), IllegalCall), (["weights"], IllegalCall), (["kv_cache"], WeightsNotValid)):
        if wake:
            lifecycle.wake_up(wake)
        with pytest.raises(IllegalCall) as caught:
            lifecycle.step()
        assert type(caught.value) is kind, wake


def test_a_refused_load_names_the_requests_in_its_way():
    """Requests in flight are named where they are the reason, and nowhere else."""
    lifecycle, _ = make()
    add(lifecycle, "a", "b")
    with pytest.raises(IllegalCall, match=r"\(in flight: a, b\)"):
        lifecycle.reload_weights()
    lifecycle.sleep(0, "keep")
    with pytest.raises(IllegalCall) as caught:
        lifecycle.step()
    assert "(in flight" not in str(caught.value)
    lifecycle.sleep(1, "abort")
    with pytest.raises(IllegalCall, match="weights that are resident") as caught:
        lifecycle.reload_weights()
    assert "(in flight" not in str(caught.value)


@pytest.mark.parametrize("built", [False, True])
def test_recover_is_offered_only_where_it_can_be_done(built):
    """After a failure the messages offer `recover` for an engine that was built here, else a new one."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle((lambda: engine) if built else engine, sinks=())
    error = fail(lifecycle, engine, RuntimeError("broken"))
    hint = "recover() or close()" if built else "close(), and build a new one"
    assert str(error).endswith(f"; {hint}")
    assert not error.restart
    with pytest.raises(EngineFailed) as caught:
        lifecycle.wake_up()
    legal = str(caught.value).partition("legal now: ")[2].split(", ")
    assert ("recover" in legal, "close" in legal) == (built, True)


@pytest.mark.parametrize(
    "words",
    [
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "unspecified launch failure",
    ],
)
def test_a_lost_device_context_needs_a_new_process(words):
    """Each of CUDA's words for it is understood: the hint is to restart, and `recover` is refused."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(lambda: engine, sinks=())
    error = fail(lifecycle, engine, RuntimeError(f"CUDA error: {words}"))
    assert error.restart
    assert "restart the process" in str(error)
    with pytest.raises(IllegalCall, match="restart the process"):
        lifecycle.recover()


@pytest.mark.parametrize("begin", ["start_weight_update", "start_draft_weight_update"])
def test_whatever_begins_an_update_taints(begin):
    """From the beginning of an update to its end nothing is served, whichever model it is of."""
    lifecycle, _ = make()
    lifecycle.collective_rpc(begin)
    assert (lifecycle.state, lifecycle.snapshot().weights) == (State.PARTIALLY_AWAKE, "tainted")
    lifecycle.collective_rpc("finish_weight_update")
    assert (lifecycle.state, lifecycle.snapshot().weights) == (State.AWAKE, "valid")


def test_nothing_is_aborted_after_the_end():
    """After a failure `abort_request` is legal; after `close` it is refused like everything else."""
    lifecycle, engine = make()
    fail(lifecycle, engine, RuntimeError("broken"))
    lifecycle.abort_request(["r"])
    lifecycle.close()
    with pytest.raises(Closed):
        lifecycle.abort_request(["r"])


# -- what is told --------------------------------------------------------------------------------------


def test_every_refusal_is_told_once_and_counted():
    """A refused call, a wrong argument, a call after a failure: one event each, with the error in words."""
    lifecycle, engine = make()
    for _ in range(2):
        with pytest.raises(IllegalCall):
            lifecycle.release_kv_cache_memory()
        with pytest.raises(InvalidArgument):
            lifecycle.sleep(9)
    fail(lifecycle, engine, RuntimeError("broken"))
    with pytest.raises(EngineFailed):
        lifecycle.wake_up()
    refused = told(lifecycle, "refused")
    assert [(event["call"], event["state"], event["count"]) for event in refused] == [
        ("release_kv_cache_memory", "awake", 2),
        ("sleep", "awake", 2),
        ("wake_up", "failed", 1),
    ]
    kinds = [event["error"].partition(":")[0] for event in refused]
    assert kinds == ["IllegalCall", "InvalidArgument", "EngineFailed"]


def test_the_cause_of_a_failure_is_kept_and_told():
    """The snapshot has no cause before, and its words after; `failed` says which call it was."""
    lifecycle, engine = make()
    assert lifecycle.snapshot().cause is None
    fail(lifecycle, engine, RuntimeError("broken"))
    assert lifecycle.snapshot().cause == "RuntimeError('broken')"
    (failed,) = told(lifecycle, "failed")
    assert (failed["call"], failed["error"]) == ("step", "RuntimeError: broken")


def test_only_what_can_block_is_announced():
    """The end of such a call says how long it took and has no error; adding and stepping say nothing."""
    lifecycle, _ = make()
    add(lifecycle, "r")
    lifecycle.step()
    lifecycle.reset_mm_cache()
    assert told(lifecycle, "operation_begin") == told(lifecycle, "operation_end") == []
    lifecycle.sleep(1, "abort")
    lifecycle.wake_up()
    for name in ("sleep", "wake_up"):
        assert told(lifecycle, "operation_begin", call=name), name
        (end,) = told(lifecycle, "operation_end", call=name)
        assert "error" not in end
        assert 0 <= end["duration_s"] < 5
    assert [event["call"] for event in told(lifecycle, "operation_begin")] == [
        "sleep(level=1, mode=abort)",
        "sleep",
        "wake_up",
    ]


def test_the_end_of_a_call_tells_its_error():
    """An exception that is the caller's to see is in `operation_end` too."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    engine.faults.add("wake_up", raises=OutOfDeviceMemory("no room"))
    with pytest.raises(WakeFailed):
        lifecycle.wake_up()
    (end,) = told(lifecycle, "operation_end", call="wake_up")
    assert end["error"].startswith("OutOfDeviceMemory(")


def test_a_failure_is_told_once_however_deep_it_was_raised():
    """An interrupt of an engine call, inside of a look at the engine, is one failure and stays itself."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    engine.faults.add("wake_up", raises=KeyboardInterrupt("now"))
    with pytest.raises(KeyboardInterrupt):
        lifecycle.wake_up()
    assert lifecycle.state is State.FAILED
    assert [event["call"] for event in told(lifecycle, "failed")] == ["wake_up"]


def test_a_request_without_a_last_output_is_told():
    """A broken engine that can't even say what a request has: the request ends, and an event names it."""
    lifecycle, engine = make()
    add(lifecycle, "r")
    engine.faults.add("last_outputs", raises=RuntimeError("gone"))
    error = fail(lifecycle, engine, RuntimeError("broken"))
    assert error.in_flight == ("r",)
    (rejected,) = told(lifecycle, "request_rejected")
    assert (rejected["call"], rejected["error"]) == ("r", "RuntimeError('gone')")
    assert (lifecycle.has_unfinished_requests(), lifecycle.check()) == (False, [])


# -- an interrupt in our own code ----------------------------------------------------------------------


def interrupt(lifecycle, *, stepped=False):
    """A Ctrl-C came out of the library's own code."""
    lifecycle._core.interrupted(KeyboardInterrupt(), stepped=stepped)


def test_an_interrupt_that_left_nothing_half_done_is_no_failure():
    """Everything is in order and no step was under way: the engine goes on."""
    lifecycle, _ = make()
    interrupt(lifecycle)
    assert (lifecycle.state, told(lifecycle, "failed")) == (State.AWAKE, [])


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupted_step_fails_though_nothing_looks_broken(busy):
    """Its outputs may be lost, and nobody knows what the requests have."""
    lifecycle, _ = make()
    if busy:
        add(lifecycle, "r")
    interrupt(lifecycle, stepped=True)
    assert lifecycle.state is State.FAILED
    assert [event["call"] for event in told(lifecycle, "failed")] == ["step"]


def test_the_failure_that_an_interrupt_left_has_it_as_its_cause():
    """Whoever is told later, a stream for one, sees why."""
    lifecycle, _ = make()
    cause = KeyboardInterrupt()
    lifecycle._core.interrupted(cause, stepped=True)
    assert lifecycle._core.failure.__cause__ is cause


def test_an_interrupt_that_broke_the_ledger_fails_and_mends_it():
    """A request is in two places and another was never counted: each ends once, and nothing is under way."""
    lifecycle, _ = make()
    add(lifecycle, "r", "uncounted")
    core = lifecycle._core
    core.ledger.held["r"] = core.ledger.in_flight["r"]
    core.ledger.anybody.live -= 1
    core.operation, core.step_started = Operation("wake_up", time.monotonic()), time.monotonic()
    interrupt(lifecycle)
    assert lifecycle.snapshot().operation is None
    assert (lifecycle.state, lifecycle.check()) == (State.FAILED, [])
    assert [event["call"] for event in told(lifecycle, "failed")] == ["an interrupted call"]
    ended = [(output.request_id, output.finished) for output in lifecycle.step()]
    assert ended == [("r", True), ("uncounted", True)]
    assert not lifecycle.has_unfinished_requests()


def test_an_interrupt_between_the_two_halves_of_a_move_fails():
    """The machine had moved and the state had not: what is not told would never be."""
    lifecycle, _ = make()
    add(lifecycle, "r")
    lifecycle._core.state = State.AWAKE
    interrupt(lifecycle)
    assert (lifecycle.state, lifecycle.check()) == (State.FAILED, [])


def test_an_interrupt_in_the_middle_of_a_failure_closes_the_way_of_a_step():
    """The machine had failed, nobody had noted it yet: no step passes by what is refused."""
    lifecycle, engine = make()
    lifecycle._core._cursor.trigger(Trigger.FAIL)
    interrupt(lifecycle)
    stepped = list(engine.calls)
    with pytest.raises(EngineFailed):
        lifecycle.step()
    assert engine.calls == stepped


def test_an_interrupt_that_came_out_of_the_engine_fails_once():
    """It was seen where it was raised."""
    lifecycle, engine = make()
    add(lifecycle, "r")
    engine.faults.add("step", raises=KeyboardInterrupt("now"))
    with pytest.raises(KeyboardInterrupt):
        lifecycle.step()
    assert len(told(lifecycle, "failed")) == 1


def test_an_interrupt_after_the_end_changes_nothing():
    """Closed stays closed."""
    lifecycle, _ = make()
    lifecycle.close()
    interrupt(lifecycle, stepped=True)
    assert (lifecycle.state, told(lifecycle, "failed")) == (State.CLOSED, [])


# -- requests ------------------------------------------------------------------------------------------


def test_the_samples_of_a_request_end_one_by_one():
    """Aborted with three samples live, it has three last outputs, and only the third ends it."""
    lifecycle, _ = make()
    add(lifecycle, "r", n=3, tokens=9)
    lifecycle.step()
    assert lifecycle.sleep(0, "abort").aborted == ("r",)
    assert [output.finished for output in lifecycle.step()] == [False, False, True]
    assert lifecycle.check() == []


def test_an_abort_that_comes_after_the_end_leaves_the_last_output_to_be_taken():
    """Where its outputs are still waited for, a request that ended is not aborted any more."""
    lifecycle, _ = make()
    add(lifecycle, "r", tokens=1)
    lifecycle.sleep(1, "wait_all")
    lifecycle._core.abort_request(["r"], tell=True)
    assert [output.outputs[0].finish_reason for output in lifecycle.step()] == ["length"]


def test_an_id_is_free_once_the_engine_has_let_it_go():
    """The engine goes on with an aborted request: its id is refused until that ended, then forgotten."""
    lifecycle, engine = make()
    add(lifecycle, "r")
    engine.faults.add("abort", effect="ignored")
    lifecycle.abort_request(["r"])
    (noop,) = told(lifecycle, "noop")
    assert noop["call"] == "abort_request"
    with pytest.raises(InvalidArgument, match="belongs to an aborted request"):
        add(lifecycle, "r")
    while engine.has_work():
        lifecycle.step()
    add(lifecycle, "r")
    assert lifecycle._core.unaborted == {}


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_arguments_that_the_engine_would_not_take_are_the_callers_fault(kind):
    """The engine complains of an argument, by either type: the call fails, and the engine does not."""
    lifecycle, engine = make()
    engine.faults.add("add", raises=kind("not this one"))
    with pytest.raises(kind, match="not this one"):
        add(lifecycle, "r")
    assert lifecycle.state is State.AWAKE
    assert (lifecycle.has_unfinished_requests(), lifecycle.check()) == (False, [])


def test_an_engine_may_raise_our_own_errors():
    """An `InvalidArgument` of the adapter reaches the caller as it was raised, in its own words."""
    lifecycle, engine = make()
    ours = InvalidArgument("this adapter takes no prompts of pictures")
    engine.faults.add("prepare", raises=ours)
    with pytest.raises(InvalidArgument) as caught:
        add(lifecycle, "r")
    assert caught.value is ours


def test_a_step_of_a_serving_engine_asks_no_table(monkeypatch):
    """Serving, a step goes straight to the engine; where the engine does not serve, the table is asked."""
    lifecycle, _ = make()
    add(lifecycle, "r", tokens=2)
    asked = []
    real = lifecycle._core.require
    monkeypatch.setattr(lifecycle._core, "require", lambda *call: (asked.append(call), real(*call)))
    while lifecycle.has_unfinished_requests():
        lifecycle.step()
    assert asked == []
    lifecycle.sleep(0)
    with pytest.raises(IllegalCall):
        lifecycle.step()
    assert ("step",) in asked


def test_a_step_that_is_all_its_callers_is_passed_on_as_it_is():
    """Where nobody else may take any of them, the outputs are the engine's own list: a step costs no copy."""

    class Remembers(SimulatedEngine):
        def step(self):
            self.last = super().step()
            return self.last

    lifecycle, engine = make(Remembers())
    add(lifecycle, "a", tokens=2)
    add(lifecycle, "b", tokens=3)
    while lifecycle.has_unfinished_requests():
        assert lifecycle.step() is engine.last
    assert lifecycle.check() == []


def test_a_step_by_hand_takes_nothing_of_a_blocking_call():
    """Two requests, one of them a blocking call's: each gets its own outputs, whoever steps."""
    lifecycle, engine = make()
    core, scope = lifecycle._core, Scope("generate")
    for name, owner in (("mine", None), ("theirs", scope)):
        core.add_request(name, "prompt", SamplingParams(max_tokens=3), {}, owner)
    got = {None: [], scope: []}
    for owner in itertools.islice(itertools.cycle((None, scope)), 12):
        if core.ledger.busy(owner):
            got[owner] += [(output.request_id, output.finished) for output in core.step(owner)]
    assert [name for name, _ in got[None]] == ["mine"] * 3
    assert [name for name, _ in got[scope]] == ["theirs"] * 3
    assert lifecycle.check() == engine.misuse == []
