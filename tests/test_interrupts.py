"""Ctrl-C at every place where Python can deliver it inside this library, and while an engine call runs.

CPython looks for signals after a call, at the start of a function and at a jump back, and nowhere else.
The sweep stops an operation at each such place in the library's own code (and in `contextlib`, through
which it goes), calls whatever handler is installed, and looks at what is left.
"""

import contextlib
import dis
import gc
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import lifecycle
from lifecycle import EngineFailed, IllegalCall, State
from tests import fault_world as at
from tests import report
from tests.fault_world import OPS

EVERY_STEP = os.environ.get("EVERY_STEP") == "1"
MOST_PLACES = 100_000 if EVERY_STEP else 25
OURS = (str(Path(lifecycle.__file__).parent), contextlib.__file__)
LOOKS_FOR_SIGNALS = frozenset(
    number for number, name in enumerate(dis.opname) if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
)


class Interrupter:
    """Presses Ctrl-C at the `at`-th place, once or more; counts the places otherwise."""

    def __init__(self, at=None, presses=1):
        self.at, self.presses, self.places = at, presses, 0
        self._last = {}

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in LOOKS_FOR_SIGNALS:
                self.places += 1
                if self.places == self.at:
                    sys.settrace(None)
                    for _ in range(self.presses):
                        signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self

    def run(self, act):
        before = sys.gettrace()
        gc.disable()  # finalizers of an earlier lifecycle are library code too, and swallow what they raise
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)
            gc.enable()


def at_the_very_last_token():
    """The next step leaves the engine idle."""
    world = at.World(requests=True).start()
    world.add("only", 2)
    world.step()
    return world


def at_the_last_token():
    """The next step ends a request."""
    world = at.running()
    world.step(4)
    return world


SWEEPS = {
    "step": (at.running, "step"),
    "step that ends a request": (at_the_last_token, "step"),
    "step that ends the last request": (at_the_very_last_token, "step"),
    "step that hands out the mailbox": (partial(at.asleep, 1), "step"),
    "add while awake": (at.running, "add"),
    "add while asleep": (partial(at.asleep, 1), "add"),
    "abort": (at.running, "abort"),
    "generate": (at.running, "generate"),
    "generate, left by an exception": (at.running, "generate, left by an exception"),
    "sleep": (at.running, "sleep(1)"),
    "sleep with abort": (at.running, "sleep(1, abort)"),
    "sleep, rolled back": (at.running, "sleep(1), rolled back"),
    "pause": (at.launching_ahead, "pause"),
    "wake": (partial(at.asleep, 1), "wake_up"),
    "wake, weights only": (partial(at.asleep, 2), "wake_up(weights)"),
    "reload": (at.all_but_valid, "reload_weights"),
    "release": (partial(at.asleep, 0), "release_kv_cache_memory"),
    "recover": (at.failed, "recover"),
    "close": (at.running, "close"),
}


@pytest.fixture(autouse=True)
def _quick_collections(monkeypatch):
    """`recover` collects garbage each time: let it not go through all that a test run has loaded."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("name", SWEEPS)
def test_ctrl_c_at_each_place(name, presses):
    """Once or twice: the lock is free, the handler back, the ledger whole, and what is held can be served."""
    build, what = SWEEPS[name]
    counting = Interrupter()
    world = build()
    counting.run(lambda: OPS[what](world))
    stride = max(1, -(-counting.places // MOST_PLACES))
    pressed = 0
    for place in range(1, counting.places + 1, stride):
        world = build()
        interrupter = Interrupter(place, presses)
        interrupted = False
        try:
            interrupter.run(lambda world=world: OPS[what](world))
        except KeyboardInterrupt:
            interrupted = True
        except EngineFailed as error:
            interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        assert interrupted, f"{name}: a Ctrl-C at place {place} was swallowed"
        try:
            nothing_is_left_half_done(world)
        except AssertionError as error:
            error.add_note(f"{name}: Ctrl-C {presses} times at place {place} of {counting.places}")
            raise
        pressed += 1
    report.say("Ctrl-C inside the library", f"{name}, {presses}x: {pressed} of {counting.places} places")


def nothing_is_left_half_done(world):
    life = world.lifecycle
    assert not life._lock.lock.locked()
    assert not life._lock.turnstile.locked()
    assert life._scope() is None
    assert (life._interrupt._depth, life._interrupt._inside) == (0, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert life.snapshot().operation is None
    world.sound()
    if life.state is State.CLOSED:
        return
    assert life._core.ledger.scoped == 0  # no call is left that could take it
    held = set(life._core.ledger.held)
    if life.state is State.FAILED:
        with contextlib.suppress(EngineFailed):
            world.finish()
    world.serve()
    world.finish()
    world.add_of_all_kinds("anew", 3)
    world.finish()
    world.sound()
    for name in world.asked:
        assert len(world.last(name)) <= 1, name
        if name in held or name.startswith("anew"):
            assert world.is_right(name), name


# -- a real signal while an engine call runs --------------------------------------------------------


@contextlib.contextmanager
def ctrl_c_in(world, call, times=1):
    """The engine hangs in this call until the main thread was sent SIGINT so many times."""
    let_go = threading.Event()
    world.engine.faults.add(call, hang=let_go)

    def press():
        deadline = time.monotonic() + 5
        while world.lifecycle.snapshot().operation is None and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.01)
        let_go.set()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        let_go.set()
        thread.join(5)


def test_ctrl_c_in_a_step_of_a_scope_waits_for_its_end():
    """The step comes to its end, the scope's requests are aborted, the engine is as good as before."""
    world = at.running()
    with ctrl_c_in(world, "step"), pytest.raises(KeyboardInterrupt), world.lifecycle.scope("generate"):
        world.add("mine")
        world.step()
    del world.asked["mine"]
    assert world.lifecycle.state is State.RUNNING
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    nothing_is_left_half_done(world)


@pytest.mark.parametrize("call", ["add", "abort", "step", "apply_model"])
def test_ctrl_c_in_a_call_of_a_scope_is_raised_by_that_call(call):
    """It waits for the end of the engine call, and not until the scope is left."""
    world = at.running()
    calls = {
        "add": lambda: world.add("mine"),
        "abort": lambda: world.lifecycle.abort_request(["mine"]),
        "step": world.step,
        "apply_model": lambda: world.lifecycle.apply_model(len),
    }
    with pytest.raises(KeyboardInterrupt, match=call), world.lifecycle.scope("generate"):
        if call != "add":
            world.add("mine")
        with ctrl_c_in(world, call):
            try:
                calls[call]()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(call) from None
        pytest.fail("the call returned")
    world.asked.pop("mine", None)
    assert world.lifecycle.state is State.RUNNING
    nothing_is_left_half_done(world)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_ctrl_c_in_our_own_code_at_the_end_of_a_scope_aborts_what_it_owns(error):
    """Nothing is called after it that could raise it: the scope is left by it like by any other exception.

    One by which it is left already does not keep the requests from being aborted either.
    """
    world = at.awake()
    look = world.lifecycle.has_unfinished_requests
    Interrupter().run(look)  # CPython 3.12 traces the opcodes of a function from its second call on
    with pytest.raises(KeyboardInterrupt), world.lifecycle.scope("enqueue", enqueues=True):
        world.add("mine")
        Interrupter(1).run(look)
        if error:
            raise error
    del world.asked["mine"]
    assert not world.lifecycle.has_unfinished_requests()
    nothing_is_left_half_done(world)


def test_ctrl_c_in_the_look_at_whether_a_scope_may_begin_is_raised_before_its_block():
    """The engine is asked for weights that nobody saw being loaded; the block never runs."""
    world = at.loaded_unseen()
    with (
        ctrl_c_in(world, "missing_weights"),
        pytest.raises(KeyboardInterrupt),
        world.lifecycle.scope("generate"),
    ):
        pytest.fail("the block runs")
    assert world.lifecycle.state is State.RUNNING
    nothing_is_left_half_done(world)


def test_ctrl_c_in_a_drain_rolls_it_back():
    """The step in progress ends, then admission is open again."""
    world = at.running()
    with ctrl_c_in(world, "step"), pytest.raises(KeyboardInterrupt):
        world.lifecycle.sleep(1)
    assert world.lifecycle.state is State.RUNNING
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    nothing_is_left_half_done(world)


@pytest.mark.parametrize(
    ("build", "what", "call", "state"),
    [
        (at.running, "sleep(1)", "sleep", State.SLEEPING),
        (partial(at.asleep, 1), "wake_up", "wake_up", State.RUNNING),
        (partial(at.asleep, 1), "wake_up", "add", State.RUNNING),
        (at.idle_after_work, "reload_weights", "reload_weights", State.AWAKE),
        (at.idle_after_work, "add", "add", State.RUNNING),
        (at.running, "abort", "abort", State.RUNNING),
        (at.idle_after_work, "apply_model", "apply_model", State.AWAKE),
        (at.running, "close", "shutdown", State.CLOSED),
    ],
)
def test_ctrl_c_in_any_other_call_waits_for_its_end(build, what, call, state):
    """What can't be stopped half-way comes to its end, and then the caller gets the Ctrl-C."""
    world = build()
    with ctrl_c_in(world, call), pytest.raises(KeyboardInterrupt):
        OPS[what](world)
    assert world.lifecycle.state is state
    nothing_is_left_half_done(world)


def test_a_second_ctrl_c_is_not_held_back():
    """Whoever presses twice gets out of a hang at once; the engine failed."""
    world = at.running()
    with ctrl_c_in(world, "step", times=2), pytest.raises(KeyboardInterrupt):
        world.lifecycle.sleep(1)
    assert world.lifecycle.state is State.FAILED
    nothing_is_left_half_done(world)


def test_ctrl_c_in_a_plain_step_is_not_held_back():
    """A caller's own loop pays nothing for a handler, so the step is cut and the engine failed."""
    world = at.running()
    with ctrl_c_in(world, "step"), pytest.raises(KeyboardInterrupt):
        world.step()
    assert world.lifecycle.state is State.FAILED
    nothing_is_left_half_done(world)


@contextlib.contextmanager
def another_thread_waits(world):
    """For the engine, so that a step takes its turn behind it."""
    fair = world.lifecycle._lock
    fair.turnstile.acquire()
    let_go = threading.Timer(0.1, fair.turnstile.release)
    let_go.start()
    yield
    let_go.join(5)


def test_ctrl_c_in_a_step_that_took_its_turn_fails_it_too():
    """What it put out would be lost with its return, and nobody would know."""
    world = at.running()
    with another_thread_waits(world), ctrl_c_in(world, "step"), pytest.raises(KeyboardInterrupt):
        world.step()
    assert world.lifecycle.state is State.FAILED
    nothing_is_left_half_done(world)


def test_ctrl_c_while_a_step_waits_for_its_turn_comes_before_it():
    """The engine is not stepped at all, and is as good as before."""
    world = at.running()
    stepped = world.engine.log.count("step")

    def press():
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with another_thread_waits(world), pytest.raises(KeyboardInterrupt):
        world.step()
    presser.join(5)
    assert (world.lifecycle.state, world.engine.log.count("step")) == (State.RUNNING, stepped)
    world.finish()
    assert all(world.is_right(name) for name in world.asked)
    nothing_is_left_half_done(world)


def test_ctrl_c_while_the_mailbox_is_handed_out_is_a_failure(monkeypatch):
    """What was taken out of it is lost with the return of the step, asleep as well as awake."""
    world = at.asleep(1)
    take = world.core.ledger.take
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            world.core.ledger, "take", lambda owner: (take(owner), signal.raise_signal(signal.SIGINT))[0]
        )
        world.step()
    assert world.lifecycle.state is State.FAILED
    nothing_is_left_half_done(world)


def test_ctrl_c_in_an_engine_call_is_not_raised_by_a_call_from_inside_it():
    """That one is refused, and the engine's own call comes to its end first."""
    world = at.awake()
    refused = []

    def calls_back(_):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(IllegalCall) as caught:
            world.lifecycle.abort_request(["r"])
        refused.append(caught.value)

    with pytest.raises(KeyboardInterrupt):
        world.lifecycle.apply_model(calls_back)
    assert (world.lifecycle.state, len(refused)) == (State.AWAKE, 1)
    nothing_is_left_half_done(world)


def test_ctrl_c_in_a_progress_callback_rolls_back():
    """It is the caller's own code: no waiting, and the KeyboardInterrupt is what comes out."""
    world = at.running()
    with pytest.raises(KeyboardInterrupt):
        world.lifecycle.sleep(1, progress=lambda _: signal.raise_signal(signal.SIGINT))
    assert world.lifecycle.state is State.RUNNING
    nothing_is_left_half_done(world)


def test_ctrl_c_is_not_lost_behind_another_error():
    """Pressed during a call that then fails: both are told."""
    world = at.running()
    world.engine.faults.add("sleep", raises=RuntimeError("half"))
    with ctrl_c_in(world, "memory"), pytest.raises(KeyboardInterrupt) as caught:
        world.lifecycle.sleep(1, "keep")
    assert isinstance(caught.value.__context__, EngineFailed)
    nothing_is_left_half_done(world)


# -- whose Ctrl-C it is ------------------------------------------------------------------------------------


@pytest.fixture
def pressed():
    """A handler of the caller's that only notes; yields what it noted."""
    before = signal.getsignal(signal.SIGINT)
    noted = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    yield noted
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 2])
def test_the_callers_own_handler_is_called_once_for_what_was_held_back(pressed, times):
    """The first waits for the end of the call; with a second both are one. The handler stays installed."""
    own = signal.getsignal(signal.SIGINT)
    world = at.idle_after_work()
    with ctrl_c_in(world, "add", times):
        world.add("mine")
    assert [number for number, _ in pressed] == [signal.SIGINT]
    world.add("another")
    world.finish()
    world.lifecycle.sleep(1)
    assert len(pressed) == 1
    assert signal.getsignal(signal.SIGINT) is own
    assert world.is_right("mine")


def test_calls_of_another_thread_change_nothing_for_ctrl_c():
    """Only the main thread gets signals: what others call neither holds one back nor lets one through."""
    world = at.idle_after_work()

    def work():
        with world.lifecycle.scope("generate"):
            world.add("theirs")
            world.finish()
        world.lifecycle.sleep(1)
        world.lifecycle.wake_up()

    other = threading.Thread(target=work)
    other.start()
    other.join(5)
    with pytest.raises(KeyboardInterrupt), world.lifecycle.scope("generate"):
        world.add("mine")
        signal.raise_signal(signal.SIGINT)
        pytest.fail("outside of any engine call there is nothing to wait for")
    del world.asked["mine"]
    assert world.lifecycle.state is State.AWAKE
    with ctrl_c_in(world, "add"), pytest.raises(KeyboardInterrupt):
        world.add("anew")
    assert world.lifecycle.state is State.RUNNING
    nothing_is_left_half_done(world)


def test_a_second_ctrl_c_ends_the_wait_for_a_hung_engine():
    """Another thread's call hangs: whoever waits for the engine behind it gets out by pressing twice."""
    world = at.running()
    let_go = threading.Event()
    world.engine.faults.add("step", hang=let_go)
    other = threading.Thread(target=world.step)
    other.start()
    fair = world.lifecycle._lock

    def press():
        deadline = time.monotonic() + 5
        while not fair.turnstile.locked() and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
        time.sleep(0.5)
        let_go.set()

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            world.lifecycle.abort_request(["nobody"])
        assert not let_go.is_set()
    finally:
        let_go.set()
        presser.join(5)
        other.join(5)
    assert world.lifecycle.state is State.RUNNING
    nothing_is_left_half_done(world)


@pytest.mark.parametrize("name", SWEEPS)
def test_ctrl_c_out_of_a_sink(name):
    """A sink is the caller's code: what comes out of it at any event leaves nothing half done either."""
    build, what = SWEEPS[name]
    world = build()
    events = []
    world.lifecycle._core.events.sinks.append(events.append)
    OPS[what](world)
    for at_event in range(len(events)):
        world = build()
        left = [at_event]

        def sink(_, left=left):
            left[0] -= 1
            if left[0] < 0:
                left[0] = 1 << 30
                raise KeyboardInterrupt

        world.lifecycle._core.events.sinks.append(sink)
        with pytest.raises((KeyboardInterrupt, EngineFailed)):
            OPS[what](world)
        # The outputs of a step are lost with its return, and nobody knows what its requests have.
        assert (world.lifecycle.state is State.FAILED) == (what == "step")
        nothing_is_left_half_done(world)
