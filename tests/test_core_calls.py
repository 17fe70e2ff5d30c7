"""The core's own calls, one rule at a time: outputs, sleep, wake, loads, worker methods, recovery, end."""

import contextlib
import weakref
from functools import partial

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine, make_weights
from lifecycle import (
    Closed,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    Lifecycle,
    State,
    WakeFailed,
)
from lifecycle.engine import Capabilities, OutOfDeviceMemory
from lifecycle.errors import InternalError
from tests.conftest import told

SHARDS = list(make_weights().items())
LONG_S = 60  # no call here takes that long, and a clock that was not subtracted reads more


def make(engine=None, **options):
    """A lifecycle around a simulated engine, and the engine."""
    engine = engine or SimulatedEngine(max_num_seqs=2)
    return Lifecycle(engine, sinks=(), **options), engine


def add(lifecycle, *names, tokens=6):
    for name in names:
        lifecycle.add_request(name, f"prompt of {name}", SamplingParams(max_tokens=tokens, seed=1))


def finish(lifecycle):
    """Step to the end. Returns the ids that ended."""
    ended = []
    while lifecycle.has_unfinished_requests():
        ended += [output.request_id for output in lifecycle.step() if output.finished]
    return ended


def sound(lifecycle, engine):
    assert lifecycle.check() == []
    assert engine.misuse == []


class Rebuilt:
    """A lifecycle that builds its engines, and the newest of them."""

    def __init__(self, *builds):
        self.builds = [*builds, *[SimulatedEngine] * 2]
        self.engine = None
        self.lifecycle = Lifecycle(self.build, sinks=())

    def build(self):
        self.engine = self.builds.pop(0)()
        return self.engine

    def fail(self, cause=None):
        """Have the engine fail while the lifecycle is idle or asleep."""
        self.engine.faults.add("reset_caches", raises=cause or RuntimeError("lost"))
        with pytest.raises(EngineFailed):
            self.lifecycle.mark_weights_loaded()


# -- outputs -------------------------------------------------------------------------------------------


class Odd:
    """An output that can't be understood, or not in every place."""

    def __init__(self, request_id, **fields):
        self.request_id = request_id
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "odd",
    [
        [Odd([], finished=True)],
        [Odd("nobody", finished=True), Odd([], finished=True)],
        [Odd("b")],
    ],
    ids=["an id that is none", "one of nobody's beside it", "an end that it can't tell"],
)
def test_who_can_be_understood_loses_nothing_by_an_odd_output(odd):
    """One odd output fails the engine; the others of its step are delivered, strays to nobody."""
    lifecycle, engine = make()
    add(lifecycle, "a", "b")
    real = engine.step
    engine.step = lifecycle._core._step = lambda: [*(o for o in real() if o.request_id == "a"), *odd]
    with pytest.raises(EngineFailed):
        lifecycle.step()
    first, *rest = lifecycle.step()
    assert (first.request_id, len(first.outputs[0].token_ids)) == ("a", 1)
    assert [output.request_id for output in rest if output.finished] == ["a", "b"]
    assert lifecycle.check() == []


def test_an_output_handed_out_twice_is_noted_once():
    """Only the second copy of an output is unexpected; the others of its step are not."""
    lifecycle, engine = make()
    add(lifecycle, "a", "b")
    engine.faults.add("step", effect="output_duplicated")
    assert [output.request_id for output in lifecycle.step()] == ["a", "b"]
    assert [(e["call"], e["count"]) for e in told(lifecycle, "unexpected_output")] == [("b", 1)]
    assert sorted(finish(lifecycle)) == ["a", "b"]
    assert len(told(lifecycle, "unexpected_output")) == 1
    sound(lifecycle, engine)


# -- sleep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["sleep", "pause"])
def test_a_refused_sleep_goes_by_the_name_it_was_called(call):
    """`pause` is a sleep inside, and never one in a message."""
    lifecycle, _ = make()
    with pytest.raises(InvalidArgument, match=f"^{call}: mode must be one of") as caught:
        getattr(lifecycle, call)(mode="quickly")
    assert caught.value.call == call
    assert [event["call"] for event in told(lifecycle, "refused")] == [call]


@pytest.mark.parametrize(
    ("capabilities", "arguments", "why"),
    [
        (Capabilities("shallow", {}, levels=(0,)), {"level": 1}, "level 1 needs an engine built with"),
        (Capabilities("ranks", {}, lockstep=True), {"timeout": 5.0}, "use max_steps"),
    ],
    ids=["a level", "a clock"],
)
def test_what_the_engine_was_not_built_for_is_refused(capabilities, arguments, why):
    """A level that the engine has not, and one rank's clock over ranks in lockstep, change nothing."""
    lifecycle, engine = make(SimulatedEngine(capabilities=capabilities))
    with pytest.raises(InvalidArgument, match=why):
        lifecycle.sleep(**arguments)
    assert engine.calls == []
    assert lifecycle.sleep(0, max_steps=5).level == 0
    sound(lifecycle, engine)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("whose", ["its own", "a stranger's"])
def test_unstarted_names_each_request_once_and_none_but_ours(whose, times):
    """An answer of `unstarted` that can't be is a failure, seen before anything is recalled."""
    lifecycle, engine = make()
    add(lifecycle, "a", "b", "c")
    lifecycle.step()
    mine = engine.unstarted(list(engine.parents))
    answer = (mine if whose == "its own" else ["stranger"]) * times
    engine.unstarted = lambda _: answer
    if (whose, times) == ("its own", 1):
        assert lifecycle.sleep(1).held == ("c",)
        return
    with pytest.raises(EngineFailed, match=r"unstarted\(\) returned"):
        lifecycle.sleep(1)
    assert lifecycle.snapshot().held == 0
    assert lifecycle.check() == []


def test_a_recall_that_the_engine_ignored_leaves_nothing_behind():
    """A request that could not be recalled is drained like any other, and no abort of it is remembered."""
    lifecycle, engine = make()
    add(lifecycle, "a", "b", "c")
    lifecycle.step()
    engine.faults.add("abort", effect="ignored")
    assert set(lifecycle.sleep(1).drained) == {"a", "b", "c"}
    assert lifecycle._core.unaborted == {}
    sound(lifecycle, engine)


# -- readmission ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_held_request_that_is_refused_at_the_wake_is_told(kind):
    """Whatever an argument may be refused with costs that request alone, and stands in the log."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    add(lifecycle, "a", "b")
    real = engine.add

    def choosy(call):
        if call.request_id == "a":
            raise kind("the adapter is gone")
        return real(call)

    engine.add = choosy
    report = lifecycle.wake_up()
    assert (report.readmitted, report.rejected) == (("b",), ("a",))
    told_of = [(event["call"], event["error"]) for event in told(lifecycle, "request_rejected")]
    assert told_of == [("a", "the adapter is gone")]
    assert finish(lifecycle) == ["b"]
    sound(lifecycle, engine)


def test_a_readmitted_request_belongs_to_the_epoch_it_is_computed_in():
    """What was held over a load is a request of the new weights."""
    lifecycle, engine = make()
    lifecycle.sleep(2)
    add(lifecycle, "a")
    lifecycle.wake_up()
    epoch = lifecycle.reload_weights().epoch
    assert lifecycle._core.ledger.in_flight["a"].epoch == epoch == 1
    sound(lifecycle, engine)


# -- wake ----------------------------------------------------------------------------------------------


def test_a_wake_measures_memory():
    """The log has what a wake mapped, in bytes."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    report = lifecycle.wake_up()
    woken = [event["bytes"] for event in told(lifecycle, "memory") if event["call"] == "wake_up"]
    assert [(it["device_before"], it["device_after"]) for it in woken] == [
        (report.device_before, report.device_after)
    ]
    sound(lifecycle, engine)


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_that_brought_nothing_back_leaves_the_engine_asleep(level):
    """No memory is back, so it is not partly awake: it still sleeps, as deep as before."""
    lifecycle, engine = make()
    lifecycle.sleep(level)
    engine.faults.add("wake_up", raises=OutOfDeviceMemory("short"))
    with pytest.raises(WakeFailed, match=r"found too little device memory \(short\)"):
        lifecycle.wake_up()
    assert (lifecycle.state, lifecycle.snapshot().level) == (State.SLEEPING, level)
    assert lifecycle.sleep(level).noop
    assert lifecycle.wake_up().resident == {"weights", "kv_cache"}
    sound(lifecycle, engine)


def test_a_wake_that_returned_without_all_of_it_says_so():
    """An engine that returned is not said to have been short of memory."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    engine.faults.add("wake_up", effect="tag_stays_asleep")
    with pytest.raises(WakeFailed, match=r"\]\) returned, and \['kv_cache'\] did not come back") as caught:
        lifecycle.wake_up()
    assert (caught.value.tags, caught.value.missing_bytes) == (("kv_cache",), None)
    assert lifecycle.wake_up()
    sound(lifecycle, engine)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_tags_come_in_any_collection(kind):
    """A list, a tuple or a set of tags is understood; a word is none."""
    lifecycle, engine = make()
    lifecycle.sleep(1)
    assert lifecycle.wake_up(kind(["weights"])).resident == {"weights"}
    with pytest.raises(InvalidArgument, match="tags must be a list of"):
        lifecycle.wake_up("kv_cache")
    assert lifecycle.wake_up(kind(["kv_cache", "scheduling"]))
    sound(lifecycle, engine)


def test_unchecked_weights_are_believed_once_everything_is_back():
    """Waking is enough for policy "unchecked", and half of a wake is none."""
    lifecycle, engine = make(weights="unchecked")
    lifecycle.sleep(2)
    assert not lifecycle.wake_up(["weights"])
    assert (lifecycle.snapshot().weights, lifecycle.snapshot().epoch) == ("discarded", 0)
    assert lifecycle.wake_up(["kv_cache"])
    assert (lifecycle.snapshot().weights, lifecycle.snapshot().epoch) == ("valid", 1)
    sound(lifecycle, engine)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_lasts_until_the_engine_serves(level):
    """Half awake, or all of it without its weights, it is still at the level it slept at; then at none."""
    lifecycle, engine = make()
    lifecycle.sleep(level)
    seen = [lifecycle.snapshot().level]
    for tags in [["weights"], ["kv_cache"]] if level else []:
        lifecycle.wake_up(tags)
        seen.append(lifecycle.snapshot().level)
    expected = {0: [0], 1: [1, 1, None], 2: [2, 2, 2]}
    assert seen == expected[level]
    if level != 1:
        lifecycle.reload_weights() if level else lifecycle.wake_up()
    assert (lifecycle.state, lifecycle.snapshot().level) == (State.AWAKE, None)
    sound(lifecycle, engine)


def test_half_awake_is_asleep():
    """`is_sleeping` answers as vLLM does: until all of it is back, a pause too."""
    lifecycle, engine = make()
    seen = [lifecycle.is_sleeping()]
    for change in (
        lambda: lifecycle.sleep(1),
        lambda: lifecycle.wake_up(["weights"]),
        lifecycle.wake_up,
        lifecycle.pause,
        lifecycle.resume,
    ):
        change()
        seen.append(lifecycle.is_sleeping())
    assert seen == [False, True, True, False, True, False]
    sound(lifecycle, engine)


def test_a_load_after_a_pause_that_ended_comes_back_to_no_pause():
    """Once awake from a pause, a load that failed and was made good goes on serving."""
    lifecycle, engine = make()
    lifecycle.pause()
    lifecycle.resume()
    with pytest.raises(RuntimeError, match="torn"):
        lifecycle.collective_rpc(refuse_weights("load_weights", RuntimeError("torn")))
    assert lifecycle.state is State.PARTIALLY_AWAKE
    assert lifecycle.reload_weights()
    assert lifecycle.state is State.AWAKE
    sound(lifecycle, engine)


def refuse_weights(name, error):
    """A worker method of this name that raises."""

    def method(_):
        raise error

    method.__name__ = name
    return method


def test_resume_ends_a_pause_and_wakes_nothing():
    """Asleep at level 2, `resume` is a no-op of its own name: it looks at no weights and admits nobody."""
    lifecycle, engine = make()
    lifecycle.sleep(2)
    lifecycle.wake_up()
    engine.load_weights(SHARDS)
    assert lifecycle.resume().noop
    assert lifecycle.state is State.PARTIALLY_AWAKE
    assert [event["call"] for event in told(lifecycle, "noop")] == ["resume"]
    assert lifecycle.wake_up()
    sound(lifecycle, engine)


# -- the KV cache alone --------------------------------------------------------------------------------


def test_a_release_of_the_kv_cache_is_told_for_what_it_is():
    """It begins and ends in the log, and the transition has its own trigger."""
    lifecycle, engine = make()
    lifecycle.pause()
    lifecycle.release_kv_cache_memory()
    assert lifecycle.snapshot().resident == {"weights"}
    assert told(lifecycle, "transition")[-1]["trigger"] == "release_kv"
    for event in ("operation_begin", "operation_end"):
        assert "release_kv_cache_memory" in [record["call"] for record in told(lifecycle, event)]
    sound(lifecycle, engine)


def test_an_engine_that_cannot_release_its_kv_cache_is_not_asked():
    """A missing capability refuses the call; the engine goes on."""
    lifecycle, engine = make(SimulatedEngine(capabilities=Capabilities("old", {}, release_kv=False)))
    lifecycle.pause()
    with pytest.raises(IllegalCall, match="this vLLM can't"):
        lifecycle.release_kv_cache_memory()
    assert lifecycle.resume()
    sound(lifecycle, engine)


# -- loads ---------------------------------------------------------------------------------------------


def test_a_load_begins_and_ends_in_the_log():
    """It can hang, so its beginning is said before it does."""
    lifecycle, engine = make()
    report = lifecycle.reload_weights()
    for event in ("operation_begin", "operation_end"):
        assert [record["call"] for record in told(lifecycle, event)] == ["reload_weights"]
    assert 0 <= report.seconds < LONG_S
    sound(lifecycle, engine)


def test_a_reload_in_parts_serves_with_its_last():
    """The call that filled the last hole says so itself; nobody has to ask for a step first."""
    lifecycle, engine = make()
    lifecycle.sleep(2)
    lifecycle.wake_up()
    halves = [[shard for shard in SHARDS if ("layers.1" in shard[0]) is second] for second in (False, True)]
    assert not lifecycle.reload_weights(weights_iterator=halves[0])
    assert lifecycle.reload_weights(weights_iterator=halves[1])
    assert lifecycle.state is State.AWAKE
    sound(lifecycle, engine)


def test_a_load_that_failed_with_the_error_of_another_engine_taints():
    """Weights that come from another guarded engine may fail with its error: these are torn all the same."""
    lifecycle, engine = make()
    other = EngineFailed("the other one failed", call="step", in_flight=(), held=(), restart=False)
    with pytest.raises(EngineFailed, match="the other one"):
        lifecycle.collective_rpc(refuse_weights("update_weights_from_it", other))
    assert (lifecycle.state, lifecycle.snapshot().weights) == (State.PARTIALLY_AWAKE, "tainted")
    assert lifecycle.reload_weights()
    sound(lifecycle, engine)


# -- worker methods ------------------------------------------------------------------------------------


@pytest.fixture
def emptied():
    """Awake after level 2 with nothing loaded, where only a whole load that was seen is believed."""
    lifecycle, engine = make(weights="declared")
    lifecycle.sleep(2)
    lifecycle.wake_up()
    yield lifecycle
    sound(lifecycle, engine)


def test_a_whole_reload_through_rpc_is_whole(emptied):
    """`reload_weights` of the workers loads everything, as the lifecycle's own does."""
    emptied.collective_rpc("reload_weights")
    assert emptied.state is State.AWAKE


@pytest.mark.parametrize("how", ["by position", "by keyword"])
def test_a_reload_of_some_weights_through_rpc_is_not_whole(emptied, how):
    """An iterator may give only some, wherever the engine's call carries it."""
    inner = {"weights_iterator": SHARDS[:3]}
    if how == "by position":
        emptied.collective_rpc("reload_weights", None, (), inner)
    else:
        emptied.collective_rpc("reload_weights", kwargs=inner)
    assert (emptied.state, emptied.snapshot().weights) == (State.PARTIALLY_AWAKE, "discarded")
    emptied.reload_weights()


def test_an_update_that_came_to_its_end_is_whole(emptied):
    """Begun over nothing and finished, an update has brought every parameter."""
    emptied.collective_rpc("start_weight_update")
    emptied.collective_rpc("update_weights", None, (SHARDS,))
    assert emptied.snapshot().weights == "tainted"
    emptied.collective_rpc("finish_weight_update")
    assert (emptied.state, emptied.snapshot().weights) == (State.AWAKE, "valid")


@pytest.mark.parametrize("done", [True, False])
def test_a_prefix_cache_that_stays_is_recorded_and_one_that_goes_is_not(done):
    """Requests that use it keep it; the caller is told so, and so is the log."""
    lifecycle, engine = make()
    if not done:
        add(lifecycle, "r")
        lifecycle.step()
    assert lifecycle.reset_prefix_cache() is done
    noted = [(event["call"], event["error"]) for event in told(lifecycle, "noop")]
    assert noted == ([] if done else [("reset_prefix_cache", "returned False")])
    sound(lifecycle, engine)


def test_a_callable_goes_by_its_name():
    """Whoever gives a function is asked for what a method of that name needs; a nameless one is harmless."""
    lifecycle, engine = make()

    def update_weights_mine(worker):
        return worker.load_into_model(SHARDS[:1])

    add(lifecycle, "a")
    with pytest.raises(IllegalCall, match="cannot update_weights_mine while running"):
        lifecycle.collective_rpc(update_weights_mine)
    assert lifecycle.collective_rpc(partial(lambda _: 7)) == [7]
    finish(lifecycle)
    lifecycle.collective_rpc(update_weights_mine)
    assert lifecycle.snapshot().epoch == 1
    sound(lifecycle, engine)


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_what_goes_behind_the_machine_is_pointed_to_its_own_method(method):
    """Through collective_rpc it is refused by that word in every state, and closed is closed."""
    lifecycle, engine = make()
    for _ in range(2):
        with pytest.raises(IllegalCall, match=rf"go behind the machine.*own {method}"):
            lifecycle.collective_rpc(method)
        lifecycle.sleep(1)
    lifecycle.close()
    with pytest.raises(Closed):
        lifecycle.collective_rpc(method)
    sound(lifecycle, engine)


@pytest.mark.parametrize("name", ["load_weights", "collective_rpc", "sleep", "step"])
def test_the_lifecycles_own_calls_are_not_passed_on_by_name(name):
    """Through `call` they would go behind it."""
    lifecycle, engine = make()
    with pytest.raises(IllegalCall, match=f"behind the machine; use the lifecycle's own {name}"):
        lifecycle.call(name)
    sound(lifecycle, engine)


# Where each need of a caller's own is met: awake, running, paused, asleep.
OWN_NEEDS = {
    "quiet": (True, True, True, True),
    "weights": (True, True, True, False),
    "loading": (True, False, True, False),
    "serving": (True, True, False, False),
}


@pytest.mark.parametrize("need", list(OWN_NEEDS))
def test_a_need_of_the_callers_own_means_what_it_says(need):
    """Each word of `rpc_needs` is taken, and decides where that method is legal."""
    arrangements = (
        lambda _: None,
        lambda lifecycle: add(lifecycle, "a"),
        lambda lifecycle: lifecycle.pause(),
        lambda lifecycle: lifecycle.sleep(1),
    )
    for arrange, legal in zip(arrangements, OWN_NEEDS[need], strict=True):
        lifecycle, engine = make(rpc_needs={"mine": need})
        arrange(lifecycle)
        with contextlib.nullcontext() if legal else pytest.raises(IllegalCall, match="mine"):
            lifecycle.collective_rpc("mine")
        sound(lifecycle, engine)


def test_a_wrong_need_is_named_alone():
    """Of the caller's words only those that are none are in the message, with all that there are."""
    with pytest.raises(InvalidArgument) as caught:
        make(rpc_needs={"good": "weights", "bad": "machine", "worse": "never"})
    said = str(caught.value)
    assert "good" not in said
    assert "'bad': 'machine', 'worse': 'never'" in said
    assert all(word in said for word in OWN_NEEDS)


# -- recovery ------------------------------------------------------------------------------------------


class Breaks(SimulatedEngine):
    """Its step raises; the exception, and those behind it, went through frames that hold the engine."""

    how = "at once"

    def step(self):
        try:
            self.work()
        except ValueError as inner:
            if self.how == "at once":
                raise
            if self.how == "because of another":
                raise RuntimeError("lost") from inner
            raise RuntimeError("lost")  # noqa: B904  (while another was handled: that is the case)

    def work(self):
        raise ValueError(f"lost by {len(self.requests)}")


@pytest.mark.parametrize("how", ["at once", "because of another", "while another was handled"])
def test_nothing_is_left_of_the_old_engine_when_the_new_one_is_built(how):
    """Its shutdown takes down what the new one needs, so the failure's own frames must not hold it."""
    made, left = [], []

    def build():
        left.extend(old for old in made if old() is not None)
        engine = Breaks()
        engine.how = how
        made.append(weakref.ref(engine))
        return engine

    lifecycle = Lifecycle(build, sinks=())
    add(lifecycle, "a")
    with pytest.raises(EngineFailed) as caught:
        lifecycle.step()
    lifecycle.recover()
    assert (len(made), left) == (2, [])
    assert caught.value.__cause__ is not None  # the failure itself can still be read
    assert lifecycle.check() == []


def test_a_recovery_is_told_and_leaves_no_cause():
    """It begins in the log, it takes seconds, and what had failed is over."""
    bench = Rebuilt()
    bench.fail()
    assert "lost" in bench.lifecycle.snapshot().cause
    bench.lifecycle.recover()
    begun = [event["call"] for event in told(bench.lifecycle, "operation_begin")]
    assert begun[-2:] == ["recover", "shutdown"]  # of the old engine
    transition = told(bench.lifecycle, "transition")[-1]
    assert transition["trigger"] == "recover"
    assert 0 <= transition["duration_s"] < LONG_S
    assert bench.lifecycle.snapshot().cause is None
    sound(bench.lifecycle, bench.engine)


def test_a_shutdown_that_fails_is_told_and_does_not_stop_a_recovery():
    """Of an engine that is known to be broken nothing more is expected."""
    bench = Rebuilt()
    bench.fail()
    bench.engine.faults.add("shutdown", raises=RuntimeError("not even that"))
    bench.lifecycle.recover()
    ends = [event for event in told(bench.lifecycle, "operation_end") if event["call"] == "shutdown"]
    assert [event["error"] for event in ends] == ["RuntimeError('not even that')"]
    assert bench.lifecycle.state is State.AWAKE


def test_a_pause_ends_with_the_engine_it_was_said_to():
    """The new engine serves, and no later wake stops at the old one's pause."""
    bench = Rebuilt()
    bench.lifecycle.pause()
    bench.fail()
    bench.lifecycle.recover()
    assert (bench.lifecycle.state, bench.lifecycle.snapshot().paused) == (State.AWAKE, False)
    bench.lifecycle.sleep(1)
    assert bench.lifecycle.wake_up()
    sound(bench.lifecycle, bench.engine)


def paused_engine():
    engine = SimulatedEngine()
    engine.paused = True
    return engine


@pytest.mark.parametrize(
    ("build", "found", "on"),
    [
        (paused_engine, State.SLEEPING, lambda lifecycle: lifecycle.wake_up()),
        (
            partial(SimulatedEngine, dummy_weights=True),
            State.PARTIALLY_AWAKE,
            lambda lifecycle: lifecycle.reload_weights(),
        ),
    ],
    ids=["paused", "without weights"],
)
def test_nothing_is_admitted_into_a_new_engine_that_does_not_serve(build, found, on):
    """What is held stays so until the engine that recover found paused, or empty, serves."""
    bench = Rebuilt(SimulatedEngine, build)
    bench.lifecycle.sleep(1)
    add(bench.lifecycle, "a")
    bench.engine.faults.add("wake_up", raises=RuntimeError("lost"))
    with pytest.raises(EngineFailed):
        bench.lifecycle.wake_up()
    assert bench.lifecycle.recover() == ()
    assert (bench.lifecycle.state, bench.lifecycle.snapshot().held) == (found, 1)
    assert on(bench.lifecycle)
    assert finish(bench.lifecycle) == ["a"]
    sound(bench.lifecycle, bench.engine)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_a_lost_device_context_is_not_recovered(words):
    """No engine can be built in such a process any more; the failure and the refusal both say so."""
    bench = Rebuilt()
    bench.engine.faults.add("step", raises=RuntimeError(words))
    add(bench.lifecycle, "a")
    with pytest.raises(EngineFailed, match="restart the process") as caught:
        bench.lifecycle.step()
    assert caught.value.restart
    old = bench.engine
    with pytest.raises(IllegalCall, match="the device context is lost: restart the process"):
        bench.lifecycle.recover()
    assert bench.engine is old
    assert not old.closed


def test_only_a_failed_engine_is_recovered():
    """The core asks its own table before it takes a healthy engine away, whoever calls it."""
    bench = Rebuilt()
    healthy = bench.engine
    with pytest.raises(IllegalCall, match="cannot recover while awake"):
        bench.lifecycle._core.recover(bench.build)
    assert bench.engine is healthy
    sound(bench.lifecycle, healthy)


# -- the end -------------------------------------------------------------------------------------------


def test_the_end_is_told_with_what_was_never_served():
    """`close` and `detach` each have an event of their name, with the number of held requests."""
    closed, _ = make()
    closed.sleep(1)
    add(closed, "a", "b")
    closed.close()
    assert [event["counts"] for event in told(closed, "closed")] == [{"unserved": 2}]
    assert told(closed, "detached") == []
    detached, engine = make()
    detached.detach()
    assert [event["counts"] for event in told(detached, "detached")] == [{"unserved": 0}]
    assert told(detached, "closed") == []
    assert not engine.closed


def test_a_forked_child_does_not_close_its_parents_engine():
    """The engine belongs to the parent process: the child may not even end it."""
    lifecycle, engine = make()
    lifecycle._forget_parent()
    with pytest.raises(Closed, match="belongs to the parent process"):
        lifecycle.close()
    assert not engine.closed


def test_a_step_without_an_engine_is_our_bug():
    """After the end nothing of the engine is left to step, and to try it anyway is told from a failure."""
    lifecycle, _ = make()
    lifecycle.close()
    with pytest.raises(InternalError, match="without an engine"):
        lifecycle._core._step()
