"""The edges of `Lifecycle`'s surface: with no handler of Ctrl-C, forked, as a context manager, in reports."""

import contextlib
import gc
import json
import os
import signal
import threading
import time
import weakref

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine, make_weights
from lifecycle import (
    Closed,
    DrainCancelled,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    Lifecycle,
    LifecycleError,
    State,
    blocking,
    cli,
)
from lifecycle.engine import SleepReport, WakeReport
from lifecycle.table import Trigger


def busy(**options):
    lifecycle = Lifecycle(SimulatedEngine(**options), sinks=())
    lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=4))
    return lifecycle


@pytest.fixture
def ctrl_c():
    """Sets what Ctrl-C does, and puts it back."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_ctrl_c_that_is_ignored_stays_ignored(ctrl_c, handler):
    """Where no Python handler is installed, none is put in its place while the library works."""
    ctrl_c(handler)
    lifecycle = busy()
    seen = []
    lifecycle.sleep(1, progress=lambda _: seen.append(signal.getsignal(signal.SIGINT)))
    with pytest.raises(IllegalCall), lifecycle.scope("generate"):
        pass
    lifecycle.wake_up()
    with lifecycle.scope("generate"):
        seen.append(signal.getsignal(signal.SIGINT))
    assert set(seen) == {handler}
    assert signal.getsignal(signal.SIGINT) is handler


def test_whoever_handed_the_engine_over_keeps_it_if_nothing_comes_of_it():
    """Bad options: an engine that was built for this is shut down, one that was given is left alone."""
    built = []

    def build():
        built.append(SimulatedEngine())
        return built[-1]

    with pytest.raises(InvalidArgument):
        Lifecycle(build, weights="nonsense", sinks=())
    assert "shutdown" in built[0].calls
    given = SimulatedEngine()
    with pytest.raises(InvalidArgument):
        Lifecycle(given, weights="nonsense", sinks=())
    assert "shutdown" not in given.calls


def test_a_forgotten_lifecycle_lets_go_of_its_engine_and_leaves_it_running():
    """The engine may be in use elsewhere: it is not shut down, only no longer referenced."""
    engine = SimulatedEngine()
    core = weakref.ref(Lifecycle(engine, sinks=())._core)
    gc.collect()
    assert core() is None
    assert "shutdown" not in engine.calls


def test_a_ctrl_c_out_of_a_sink_at_the_beginning_leaves_no_engine_behind():
    """The first event is told before anybody has the lifecycle: what was built for it is shut down."""
    built = []

    def sink(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lifecycle(lambda: built.append(SimulatedEngine()) or built[0], sinks=[sink])
    assert "shutdown" in built[0].calls


def test_options_left_out_are_what_the_reference_says():
    """Rank 0, 120 seconds until a drain has stalled, 60 until a call has, 4,096 events."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    assert lifecycle.events()[0]["rank"] == 0
    assert lifecycle._core.stall_s == 120
    with lifecycle.watch() as watchdog:
        assert watchdog._limit_s == 60
    for number in range(5000):
        lifecycle._core.events.emit("closed", count=number)
    assert len(lifecycle.events()) == 4096


def fails_by_a_step_in_turn(lifecycle):
    """With another thread waiting, the step is interrupted: FAILED, and the lock is free."""
    lifecycle._lock.turnstile.acquire()
    threading.Timer(0.05, lifecycle._lock.turnstile.release).start()
    with pytest.raises(KeyboardInterrupt):
        lifecycle.step()
    assert lifecycle.state is State.FAILED
    assert lifecycle.check() == []


def test_a_step_in_turn_that_is_interrupted_fails_and_lets_go():
    """Ctrl-C out of the engine's step, while another thread waits for its turn."""
    lifecycle = busy()
    lifecycle._core.engine.faults.add("step", raises=KeyboardInterrupt())
    fails_by_a_step_in_turn(lifecycle)


def test_a_sinks_ctrl_c_in_a_step_in_turn_fails():
    """The outputs are lost with the return, so the engine has failed."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=1))

    def sink(_):
        lifecycle._core.events.sinks.clear()
        raise KeyboardInterrupt

    lifecycle._core.events.sinks.append(sink)
    fails_by_a_step_in_turn(lifecycle)


def test_a_call_from_inside_a_step_is_refused_and_a_later_one_is_not():
    """The engine's own step calls back: refused at once, not waited for for ever."""
    lifecycle = busy()
    refused = []

    def step():
        with pytest.raises(IllegalCall, match="from inside") as caught:
            lifecycle.abort_request(["r"])
        refused.append(caught.value)
        return []

    real, lifecycle._core._step = lifecycle._core._step, step
    assert lifecycle.step() == []
    assert len(refused) == 1
    assert lifecycle._lock.holder == 0
    lifecycle._core._step = real
    lifecycle.abort_request(["r"])
    assert not lifecycle.has_unfinished_requests()


class Waiting:
    """A thread in a blocking call whose step waits for another thread, with nothing but what it is told."""

    def __init__(self, lifecycle):
        self.lifecycle = lifecycle
        self.ended = []  # the outputs that it got, and the error
        self._added, self._go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._generate, daemon=True)
        self.thread.start()
        assert self._added.wait(5)

    def _generate(self):
        try:
            with self.lifecycle.scope("generate"):
                self.lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=4))
                self._added.set()
                self._go.wait(5)
                while self.lifecycle.has_unfinished_requests():
                    self.ended += [output.outputs[0].finish_reason for output in self.lifecycle.step()]
        except LifecycleError as error:
            self.ended.append(type(error))

    def begin(self, *_):
        """It steps from now on; if it has to wait, it waits."""
        self._go.set()
        time.sleep(0.05)


def fails(lifecycle):
    lifecycle._core.engine.faults.add("wake_up", raises=RuntimeError("half"))
    with pytest.raises(EngineFailed):
        lifecycle.wake_up()


def is_let_go(lifecycle):
    lifecycle.disown(lambda: None)
    lifecycle.detach()


def loads_unseen(lifecycle, call):
    lifecycle._core.engine.load_weights(make_weights().items())
    call()


def asleep_without_weights(lifecycle):
    lifecycle.sleep(2)
    lifecycle.wake_up()


SERVED = [None, None, None, "length"]
CHANGES = {
    "an abort": (lambda life: life.sleep(1), lambda life: life.abort_request(["r"]), []),
    "a wake": (lambda life: life.sleep(1), lambda life: life.wake_up(), SERVED),
    "a wake that fails": (lambda life: life.sleep(1), fails, [EngineFailed]),
    "the end of a pause": (lambda life: life.pause("wait"), lambda life: life.resume(), SERVED),
    "a reload": (asleep_without_weights, lambda life: life.reload_weights(), SERVED),
    "a load by the workers": (
        asleep_without_weights,
        lambda life: life.collective_rpc("reload_weights"),
        SERVED,
    ),
    "the caller's word": (
        asleep_without_weights,
        lambda life: loads_unseen(life, life.mark_weights_loaded),
        SERVED,
    ),
    "a load that an admission finds": (
        asleep_without_weights,
        lambda life: loads_unseen(life, lambda: life.add_request("s", "a prompt", SamplingParams())),
        SERVED,
    ),
    "a load that a step finds": (
        asleep_without_weights,
        lambda life: loads_unseen(life, life.step),
        SERVED,
    ),
    "a deeper sleep": (lambda life: life.sleep(0, "keep"), lambda life: life.sleep(1, "abort"), ["abort"]),
    "a detachment": (lambda life: life.sleep(1, "keep"), is_let_go, [Closed]),
    "the end": (lambda life: life.sleep(1), lambda life: life.close(), [Closed]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_waits_is_told_of_every_change(monkeypatch, change):
    """Whatever another thread's call changes is not found by looking again after a while."""
    monkeypatch.setattr(blocking, "_LOOK_AGAIN_S", 60)
    falls_asleep, changes, ended = CHANGES[change]
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    waiting = Waiting(lifecycle)
    falls_asleep(lifecycle)
    waiting.begin()
    assert (waiting.thread.is_alive(), waiting.ended) == (True, [])
    changes(lifecycle)
    waiting.thread.join(5)
    assert not waiting.thread.is_alive()
    assert waiting.ended == ended
    assert lifecycle.check() == []


@pytest.mark.parametrize("rolled_back", [False, True])
def test_whoever_waits_for_a_drain_is_told_of_its_end(monkeypatch, rolled_back):
    """What it finished can be taken then; after a rollback the call goes on by itself."""
    monkeypatch.setattr(blocking, "_LOOK_AGAIN_S", 60)
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    waiting = Waiting(lifecycle)

    def progress(_):
        waiting.begin()
        if rolled_back:
            raise ZeroDivisionError

    with pytest.raises(DrainCancelled) if rolled_back else contextlib.nullcontext():
        lifecycle.sleep(1, "wait_all", progress=progress)
    waiting.thread.join(5)
    assert not waiting.thread.is_alive()
    assert waiting.ended == SERVED


def test_a_scope_in_a_scope_is_the_outer_one():
    """A blocking call that is made of another one (`chat` of `generate`) owns all that both admit."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.add_request("somebody else's", "a prompt", SamplingParams(max_tokens=2))
    with lifecycle.scope("chat"):
        with lifecycle.scope("generate"):
            lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=2))
        assert lifecycle.has_unfinished_requests()
        outputs = []
        while lifecycle.has_unfinished_requests():
            outputs += lifecycle.step()
        assert {output.request_id for output in outputs} == {"r"}
    assert lifecycle.has_unfinished_requests()


def test_a_forked_child_is_refused_everything():
    """The engine belongs to the parent: in the child every call is refused at once, whatever was locked."""
    lifecycle = busy()
    locked, forked = threading.Event(), threading.Event()

    def hold():
        with lifecycle._lock, lifecycle._changed, lifecycle._core.events._lock:
            locked.set()
            forked.wait(5)

    other = threading.Thread(target=hold)
    other.start()
    assert locked.wait(5)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)  # where it would wait for ever
            for call in (lifecycle.step, lifecycle.wake_up, lifecycle.close):
                with pytest.raises(Closed, match="belongs to the parent"):
                    call()
            os._exit(0)
        finally:
            os._exit(1)
    forked.set()
    other.join(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lifecycle.sleep(1, "wait_all")


def test_a_fork_reaches_every_lifecycle_that_lives(monkeypatch):
    """In the child, each lifecycle learns at once that it is not there any more, and waits for no lock."""
    lifecycles = [busy(), busy()]
    monkeypatch.setattr(blocking, "_living", weakref.WeakSet(lifecycles))
    locked, done = threading.Event(), threading.Event()

    def hold():
        with lifecycles[0]._lock, lifecycles[0]._changed, lifecycles[0]._core.events._lock:
            locked.set()
            done.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert locked.wait(5)
    blocking._after_fork()
    for lifecycle in lifecycles:
        for call in (lifecycle.step, lifecycle.close):
            with pytest.raises(Closed, match="legal now: nothing"):
                call()
    done.set()
    other.join(5)


def test_both_caches_are_reset_by_name():
    """The encoder's and the multimodal cache are the engine's, reached through the funnel."""
    lifecycle = busy()
    lifecycle.reset_encoder_cache()
    lifecycle.reset_mm_cache()
    assert lifecycle._core.engine.calls[-2:] == ["call(reset_encoder_cache)", "call(reset_mm_cache)"]


def test_a_with_block_closes_and_shows_its_own_exception_first():
    """Leaving the block closes; what close refuses is told only where nothing else went wrong."""
    with busy() as lifecycle:
        pass
    assert lifecycle.state is State.CLOSED
    attached = busy()
    attached.disown(lambda: None)
    attached.sleep(1)  # holds the request that never started: detach is refused
    with pytest.raises(IllegalCall, match="cannot detach"), attached:
        pass
    with pytest.raises(ZeroDivisionError), attached:
        _ = 1 / 0
    assert attached.state is State.SLEEPING


def test_a_move_without_a_row_is_our_own_mistake():
    """A trigger that no row fits is told as a bug of this library, and moves nothing."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with pytest.raises(InternalError, match="no row for admit from awake"):
        lifecycle._core.fire(Trigger.ADMIT)
    assert lifecycle.state is State.AWAKE


def test_a_second_last_output_in_one_step_reaches_nobody():
    """An engine that ends a request twice in one step: the caller sees one end, the log has the other."""
    lifecycle = busy()
    engine = lifecycle._core.engine
    plain = lifecycle._core._step
    lifecycle._core._step = lambda: [
        output
        for once in plain()
        for output in ([once, engine.copy_output(once)] if once.finished else [once])
    ]
    outputs = []
    while lifecycle.has_unfinished_requests():
        outputs += lifecycle.step()
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert [event["call"] for event in lifecycle.events() if event["event"] == "unexpected_output"] == ["r"]
    assert lifecycle.check() == []


def test_reports_of_nothing_done_say_so():
    """A report of a call that found things as asked is one short line; bytes unknown stay unknown."""
    assert str(SleepReport(1, "wait", noop=True)) == "sleep(level=1): already there"
    assert str(WakeReport(awake=False, state="sleeping (level 1)", noop=True)).endswith("sleeping (level 1)")
    assert SleepReport(1, "wait", device_before=8).released_bytes is None
    partly = WakeReport(awake=False, state="partially awake", tags=("weights",), missing=("lm_head",))
    assert str(partly).endswith("1 parameters not loaded")


def test_a_snapshot_is_plain_values():
    """A snapshot goes into a log as it is: sets are sorted lists."""
    snapshot = busy().snapshot().to_dict()
    assert snapshot["resident"] == ["kv_cache", "weights"]
    assert snapshot["state"] == "running"


def test_a_report_is_plain_values():
    """So is a report: what a program writes into its own log."""
    report = WakeReport(awake=True, state="running", tags=("weights",), resident=frozenset({"weights"}))
    plain = report.to_dict()
    assert (plain["awake"], plain["state"], plain["resident"]) == (True, "running", ["weights"])
    assert list(json.loads(json.dumps(plain))["tags"]) == ["weights"]


def test_the_command_line_hands_the_demo_its_exit_status(monkeypatch):
    """`lifecycle demo` ends with the demo's own status."""
    import engine_adapter.demo

    def run(*, simulated, asynchronous):
        return 7 + simulated + 2 * asynchronous

    monkeypatch.setattr(engine_adapter.demo, "run", run)
    assert cli.main(["demo"]) == 7
    assert cli.main(["demo", "--simulated"]) == 8
    assert cli.main(["demo", "--async"]) == 9
    assert cli.main(["demo", "--async", "--simulated"]) == 10
