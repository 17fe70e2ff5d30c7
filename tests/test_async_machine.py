"""A Hypothesis machine over `AsyncLifecycle`: calls of many tasks at once, each cancelled at any moment.

The engine's thread and the event loop move only when a rule says so (`tests/async_world.py`), so a run is the
same every time. What each call must come to is judged by the oracle when the thread runs it: the oracle is
told the facts of that moment and says what follows, without the library's table. What a stream brings is
judged as for blocking callers: the tokens of an uninterrupted run, once, to the end; or a beginning of them,
and somebody said why.
"""

import asyncio
import contextlib
import gc
import os
import sys
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine_adapter.simulated import (
    PARAMETERS,
    Garbage,
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    expected_output,
    make_weights,
)
from lifecycle import State
from lifecycle.engine_thread import LATER
from lifecycle.table import RULES
from lifecycle.testing import strategies
from lifecycle.testing.strategies import ScriptedFault
from tests import report
from tests.async_world import Bench
from tests.machine import Reached
from tests.oracle import FINE, INVALID, LATE, NOTHING, REFUSED, Physical, Requests, World

TIMES = int(os.environ.get("MACHINE_TIMES", "1"))
pytestmark = pytest.mark.timeout(600 * TIMES)

REFUSALS = {"IllegalCall", "AdmissionClosed", "WeightsNotValid", "Closed", "EngineFailed"}
BREAKS = {"EngineFailed", "CacheNotReset", "WakeFailed", "ReleaseFailed", "ScriptedFault", "DrainCancelled"}
RAISED = "raised"
HANGS = ("add", "step", "abort", "sleep", "wake_up", "call", "pause_scheduling", "resume_scheduling")
# What happens between this call and the next: nothing, or moves of the loop and of the thread.
MOVES = st.sampled_from(
    [
        (),
        ("tick",),
        ("turn",),
        ("turn", "tick"),
        ("tick", "turn"),
        ("tick", "turn", "tick"),
        ("tick", "turn", "tick", "turn"),
    ]
)
STEP_FAILS = st.builds(
    lambda when: {"call": "step", "when": when, "raises": ScriptedFault("step failed")},
    st.sampled_from(["before", "after"]),
)


def reference(asked, sample, contents, *, stop):
    options = asked.options if stop else {**asked.options, "stop": None}
    return expected_output(asked.prompt, SamplingParams(**options), sample, contents, 64)


class Caller:
    """A task that makes one call. came: what it came to, as an error's name or FINE, once it is over."""

    def __init__(self, name, must, **about):
        self.name = name
        self.must = must  # what the oracle says when the thread runs it
        self.about = about
        self.ran = None  # what came of it in the thread
        self.came = None
        self.why = ""
        self.report = None
        self.task = None

    def __repr__(self):
        return f"{self.name}{self.about}"

    @property
    def kind(self):
        return self.name


class Consumer(Caller):
    """A task that reads one stream.

    how: "closes" (reads to the end, under `aclosing`), "reads" (without it), or how it leaves after `take`
    outputs: "breaks", "raises", "drops" (leaves the iterator to the collector).
    """

    def __init__(self, name, must, how, take, *, slow):
        super().__init__(name, must, how=how, take=take, slow=slow)
        self.how, self.take = how, take
        self.gate = asyncio.Semaphore(0) if slow else None
        self.reads = True  # it waits for the stream, and not for the gate
        self.left = False

    @property
    def kind(self):
        return "generate"


class AsyncMachine(RuleBasedStateMachine):
    reached = Reached()
    cancelled: ClassVar = Counter()

    @initialize(
        options=strategies.engine_options(), held=st.sampled_from([None, None, None, 2]), dummy=st.booleans()
    )
    def begin(self, options, held, dummy):
        self.reached.examples += 1
        self.options, self.max_held = options, held
        self.dummy = dummy and options["max_num_seqs"] == 3
        self.ids = 0
        self.open()

    def open(self):
        self.bench = Bench(self.make_engine, max_held=self.max_held, sinks=(self.reached,))
        self.requests = Requests(reference)
        self.callers = []
        self.consumers = []
        self.by_task = {}
        self.sent = []  # whose work the thread was given
        self.wrong = []
        self.fault = None
        self.struck = 0
        self.failure = None
        self.begun = None, ()  # the last sleep that a caller began, and its arguments
        self.closing = None
        self.aborted = set()
        self.contents_seen = None
        self.hangs_for = 0
        submit = self.bench.owner.submit
        self.bench.owner.submit = lambda work, answer=None: submit(self.judged(work, answer), answer)
        self.bench.run(self.bench.life.start())
        self.contents_seen = self.contents()

    def make_engine(self):
        return SimulatedEngine(**self.options, dummy_weights=self.dummy)

    # -- what the engine is in -------------------------------------------------------------------------

    def contents(self):
        weights = self.bench.engine._aside or self.bench.engine.weights
        return {name: None if type(value) is Garbage else value for name, value in weights.items()}

    def world(self):
        """What a caller knows now who did all the calls."""
        engine, core = self.bench.engine, self.bench.core
        world = World(self.contents(), max_held=0 if self.closing else self.max_held)
        inside = frozenset(parent.request_id for parent in engine.parents.values())
        world.physical = Physical(frozenset(engine.resident), inside, engine.paused)
        world.failed, world.closed = core.state is State.FAILED, core.state is State.CLOSED
        world.level, world.paused = core.level, core.paused
        world.discarded = core.weights.condition.value == "discarded"
        world.tainted = core.weights.condition.value == "tainted"
        return world

    def is_quiet(self):
        return self.bench.baton.rests and not self.bench.baton.hang and not self.bench.loop._ready

    # -- one command, judged in the thread that runs it ------------------------------------------------

    def judged(self, work, answer):
        try:
            caller = self.by_task.get(asyncio.current_task(self.bench.loop))
        except RuntimeError:
            caller = None
        if answer is None or caller is None or caller.ran is not None:
            return work
        self.sent.append(caller)

        def judge():
            self.look_for_faults()
            must, struck = caller.must(self.world()), self.struck
            self.reached.steps += 1
            came, why = FINE, ""
            try:
                result = work()
            except BaseException as error:
                came, why = type(error).__name__, str(error)
                raise
            else:
                return result
            finally:
                self.look_for_faults()
                caller.ran = came
                if struck == self.struck and not _fits(must, came):
                    self.wrong.append(f"{caller} must be {must}, and was {came} {why}")
                if came == FINE and isinstance(caller, Consumer):
                    self.requests.asked[caller.name].lived[:] = [self.contents()]
                if came == FINE and result is LATER:
                    caller.began(self.world())

        judge.__name__ = caller.name
        return judge

    def look_for_faults(self):
        """Whether the scripted fault has struck, and what failed with it."""
        if self.fault is not None and self.fault not in self.bench.engine.faults:
            self.fault = None
            self.struck += 1
        failure = self.bench.core.failure
        if failure is not None and failure is not self.failure:
            assert self.struck, f"it failed of nothing: {failure!r}"
            self.requests.may_end(failure.in_flight, "error")
            self.requests.may_vanish(failure.in_flight)
        self.failure = failure

    def turn(self):
        if self.closing == "impatient" or (self.closing and self.struck):
            self.requests.may_end(self.requests.live(), "abort")
        self.bench.turn()
        self.after_turn()

    def go_on(self):
        self.bench.baton.go_on()
        self.after_turn()

    def after_turn(self):
        self.look_for_faults()
        contents = self.contents()
        if contents != self.contents_seen:
            self.contents_seen = contents
            self.requests.weights_became(contents)

    def move(self, moves):
        for move in moves:
            if self.bench.baton.hang:
                self.hangs_for -= 1
                if self.hangs_for < 0:
                    self.go_on()
            if move == "turn":
                self.turn()
            elif move == "tick":
                self.bench.tick()
            else:
                self.rest()

    def rest(self):
        for _ in range(5_000):
            while self.bench.loop._ready:
                self.bench.tick()
            if self.bench.baton.rests:
                self.collect()
                return
            self.turn()
        raise AssertionError("it never comes to rest")

    # -- tasks -----------------------------------------------------------------------------------------

    def spawn(self, caller, make):
        caller.task = self.bench.spawn(self.live(caller, make))
        self.by_task[caller.task] = caller
        (self.consumers if isinstance(caller, Consumer) else self.callers).append(caller)

    async def live(self, caller, make):
        try:
            caller.report = await make(self.bench.life)
            caller.came = FINE
        except asyncio.CancelledError:
            caller.came = "cancelled"
            raise
        except Exception as error:
            caller.came, caller.why = type(error).__name__, repr(error)

    def call(self, name, must, make, moves=(), **about):
        caller = Caller(name, must, **about)
        self.spawn(caller, make)
        self.move(moves)
        return caller

    def pending(self):
        return [each for each in (*self.callers, *self.consumers) if each.task is not None]

    def collect(self):
        """Judge the tasks that are over, and let go of them."""
        for caller in self.pending():
            if not caller.task.done():
                continue
            if caller.task.cancelled():
                caller.came = "cancelled"
            del self.by_task[caller.task]
            caller.task = None
            self.reached.outcomes[type(caller).__name__, caller.came] += 1
            note(f"{caller} came to {caller.came} {caller.why}")
            if isinstance(caller, Consumer):
                self.judge_stream(caller)
            elif caller.came != "cancelled":
                self.judge_caller(caller)
        self.callers = [caller for caller in self.callers if caller.task is not None]

    def judge_caller(self, caller):
        if caller.ran is None:  # it never came to the thread
            assert caller.name in ("listen", "wait_for") or caller.came in (
                FINE,
                "Closed",
                "InvalidArgument",
            ), caller.why
            assert caller.came != "Closed" or self.bench.life._gone, f"{caller}: {caller.why}"
        elif caller.name in ("sleep", "pause") and caller.ran == FINE:
            self.judge_sleeper(caller)
        elif caller.name == "close":
            assert caller.came == FINE, f"{caller} came to {caller.why}"
            assert self.bench.baton.over
        else:
            assert caller.came == caller.ran, (
                f"{caller} was {caller.ran} in the thread, and came to {caller.why}"
            )

    def judge_sleeper(self, caller):
        about = caller.about
        anothers = f"{caller} came to the end of another: {caller.why or caller.report}"
        if caller.came == FINE:
            assert caller.report.noop or caller.report.level == about["level"], anothers
            assert caller.report.mode in (about["mode"], about.get("on_timeout")), anothers
        elif caller.came == "DrainTimeout":
            assert about.keys() & {"timeout", "max_steps"}, anothers
            assert about["on_timeout"] == "raise", anothers
        elif caller.came == "Closed":
            assert self.closing, f"{caller} came to {caller.why}"
        else:
            assert self.struck, f"{caller} came to {caller.why}"
            assert caller.came in BREAKS, f"{caller} came to {caller.why}"

    def judge_stream(self, consumer):
        name, came = consumer.name, consumer.came
        asked = self.requests.asked[name]
        if consumer.left or came == "cancelled":
            self.requests.given_up([name])
            assert came in (FINE, "cancelled", "ValueError"), f"{consumer} came to {consumer.why}"
        elif came == FINE:
            assert asked.over, f"{name} ended without an end"
            reasons = {sample.reason for sample in asked.samples}
            assert "error" not in reasons, f"{name} ended with an error that nobody was told"
        else:
            if came == "EngineFailed":
                assert self.struck, consumer.why
            elif came == "Closed":
                assert self.closing, consumer.why
            elif came == "RequestAborted":
                assert name in self.aborted, consumer.why
            else:
                assert came == consumer.ran, f"{consumer} came to {consumer.why}"
            self.requests.given_up([name])

    # -- requests --------------------------------------------------------------------------------------

    def must_admit(self, world):
        held = self.bench.core.snapshot().held
        if self.bench.core.transition is not None:
            return REFUSED if world.max_held is not None and held >= world.max_held else FINE
        return world.may_add(held)

    @rule(
        data=st.data(),
        count=st.integers(1, 4),
        how=st.sampled_from(["closes", "closes", "closes", "reads", "breaks", "raises", "drops"]),
        slow=st.sampled_from([False, False, True]),
        moves=MOVES,
    )
    def generate(self, data, count, how, slow, moves):
        for _ in range(count):
            options = data.draw(strategies.sampling_options())
            self.ask_new(data.draw(strategies.prompts()), options, how, slow)
        self.move(moves)

    def ask_new(self, prompt, options, how="closes", slow=False):
        self.ids += 1
        self.ask(f"r{self.ids}", prompt, options, how, slow)

    def ask(self, name, prompt, options, how="closes", slow=False):
        consumer = Consumer(name, self.must_admit, how, self.ids % 3 + 1, slow=slow)
        self.requests.ask(name, prompt, options, self.contents())
        params = SamplingParams(**{**options, "output_kind": OutputKind(options["output_kind"])})
        self.spawn(consumer, lambda life: self.consume(consumer, prompt, params))
        return consumer

    async def consume(self, consumer, prompt, params):
        outputs = self.bench.life.generate(prompt, params, consumer.name)
        if consumer.how in ("reads", "drops"):
            return await self.read(consumer, outputs)
        async with contextlib.aclosing(outputs):
            return await self.read(consumer, outputs)

    async def read(self, consumer, outputs):
        count, last, as_it_was = 0, None, None
        async for output in outputs:
            assert as_it_was == _copy(last), f"an output of {consumer.name} changed after it was handed out"
            last, as_it_was = output, _copy(output)
            self.requests.take([output])
            count += 1
            if consumer.how in ("breaks", "raises", "drops") and count == consumer.take:
                consumer.left = True
                if consumer.how == "raises":
                    raise ValueError
                return
            if consumer.gate is not None:
                consumer.reads = False
                await consumer.gate.acquire()
                consumer.reads = True
        assert as_it_was == _copy(last), f"an output of {consumer.name} changed after it was handed out"

    @rule(data=st.data(), moves=MOVES)
    def again(self, data, moves):
        """An id whose stream is over may be used again at once."""
        free = [each for each in self.consumers if each.task is None and each.how not in ("reads", "drops")]
        if free:
            old = data.draw(st.sampled_from(free))
            self.consumers.remove(old)
            asked = self.requests.asked[old.name]
            self.ask(old.name, asked.prompt, asked.options)
        self.move(moves)

    @precondition(lambda self: any(each.task for each in self.consumers))
    @rule(data=st.data(), between=st.sampled_from([["tick"], ["tick", "tick"], ["tick", "turn", "tick"]]))
    def change_of_mind(self, data, between):
        """A caller is cancelled, and asks anew by the same id, perhaps before the thread moves."""
        self.ask_anew(data.draw(st.sampled_from([each for each in self.consumers if each.task])), between)

    def ask_anew(self, old, between):
        self.cancel_one([old])
        self.move(between)
        self.collect()
        if old.task is None and old.how not in ("reads", "drops"):
            self.consumers.remove(old)
            self.ask(old.name, [7, 8, 9], self.requests.asked[old.name].options)
            self.move(between)

    @precondition(lambda self: any(each.task and each.gate for each in self.consumers))
    @rule(data=st.data())
    def let_read(self, data):
        slow = [each for each in self.consumers if each.task and each.gate]
        data.draw(st.sampled_from(slow)).gate.release()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), moves=MOVES)
    def abort(self, data, moves):
        live = [each.name for each in self.consumers if each.task]
        known = st.sampled_from(live * 3 + [each.name for each in self.consumers])
        ids = data.draw(st.lists(known, min_size=1, max_size=3))
        self.requests.may_end(ids, "abort")
        self.aborted.update(ids)
        self.call("abort", _unless_closed, lambda life: life.abort([*ids, "nobody"]), moves, ids=ids)

    # -- time ------------------------------------------------------------------------------------------

    @rule(turns=st.sampled_from([1, 2, 3, 5, 8, None]))
    def time_passes(self, turns):
        """So much, or until there is nothing left to do."""
        self.move(["rest"] if turns is None else ["turn", "tick"] * turns)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), most=st.integers(1, 3), moves=MOVES)
    def cancel(self, data, most, moves):
        """Any task, wherever it stands."""
        for _ in range(most):
            kinds = sorted({each.kind for each in self.pending() if not each.task.done()})
            if not kinds:
                break
            kind = data.draw(st.sampled_from(kinds))
            self.cancel_one(
                [data.draw(st.sampled_from([each for each in self.pending() if each.kind == kind]))]
            )
        self.move(moves)

    def last_of(self, callers, kind):
        """The last of them that goes on, if any does."""
        return [each for each in callers if each.kind == kind and each.task and not each.task.done()][-1:]

    def cancel_one(self, callers):
        for caller in callers:
            if caller.task.cancel():
                self.cancelled[caller.kind] += 1
                self.reached.outcomes["cancelled while", self.bench.life.state.value] += 1

    # -- sleep and wake --------------------------------------------------------------------------------

    def asked(self):
        """The arguments of the sleep under way; none of one by which a close drains."""
        sleep, asked = self.begun
        return asked if sleep is self.bench.core.transition else ()

    def sleep_as(self, name, make, moves, *, pause, **options):
        asked = (pause, *sorted(options.items()))
        limited = bool(options.keys() & {"timeout", "max_steps"})

        def must(world):
            if world.alive and self.bench.core.transition is not None:
                return FINE if asked == self.asked() else REFUSED
            return world.may_sleep(options["level"], options["mode"], limited=limited, pause=pause)

        def began(world):
            if self.closing:  # what it leaves in flight will be cut off
                self.requests.may_end(self.requests.live(), "abort")
            self.begun = self.bench.core.transition, asked

        def aborts(world):
            if "abort" in (options["mode"], options.get("on_timeout")):
                inside = {*world.physical.inside, *self.bench.core.ledger.undelivered}
                self.requests.may_end(inside, "abort")
            return must(world)

        caller = Caller(name, aborts, **options)
        caller.began = began
        self.spawn(caller, make)
        self.move(moves)

    @rule(
        options=strategies.sleeps(),
        times=st.sampled_from([1, 1, 1, 2, 3]),
        left=st.sampled_from([None, None, ("tick",), ("tick", "turn"), ("tick", "tick")]),
        moves=MOVES,
    )
    def sleep(self, options, times, left, moves):
        """Perhaps asked for several times: it is one. Perhaps the last caller leaves, after these moves."""
        for _ in range(times):
            between = moves if left is None else left
            self.sleep_as("sleep", lambda life: life.sleep(**options), between, pause=False, **options)
        if left is not None:
            self.cancel_one(self.callers[-1:])
            self.move(moves)

    @precondition(lambda self: not (self.bench.life._gone or self.bench.baton.hang))
    @rule(
        mode=st.sampled_from(["wait", "wait_all"]),
        level=st.sampled_from([0, 1, 1, 2]),
        limit=st.sampled_from([{}, {}, {"max_steps": 4, "on_timeout": "raise"}]),
        seed=st.integers(0, 7),
        then=st.one_of(
            st.just(["join", "cancel"]),
            st.just(["visit", "anew"]),
            st.lists(st.sampled_from(["join", "cancel", "close", "visit", "anew", "wake"]), max_size=4),
        ),
    )
    def drain(self, mode, level, limit, seed, then):
        """A drain of several requests that just began, and what may come to it."""
        if self.bench.life.state not in (State.AWAKE, State.RUNNING):
            self.rest()
            self.serve_again()
        options = {"max_tokens": 20, "n": 1, "seed": seed, "stop": None, "output_kind": seed % 3}
        for _ in range(3):
            self.ask_new([1, 2, seed + 1], options)
        self.move(["tick", "turn", "tick"])
        asked = {"level": level, "mode": mode, **limit}

        def sleep(*moves):
            self.sleep_as("sleep", lambda life: life.sleep(**asked), moves, pause=False, **asked)

        happens = {
            "join": lambda: sleep("tick", "turn"),
            "cancel": lambda: self.cancel_one(self.last_of(self.callers, "sleep")),
            "close": lambda: self.close_once(drain=True, timeout=None, moves=["tick", "turn"]),
            "visit": lambda: self.ask_new([1, 2, 3], options),
            "anew": lambda: [
                self.ask_anew(old, ["tick"]) for old in self.last_of(self.consumers, "generate")
            ],
            "wake": lambda: self.wake(order=(None,), moves=("tick", "turn")),
        }
        sleep("tick", "turn")
        for what in then:
            happens[what]()
            self.move(["turn", "tick", "turn"])
            self.sound()  # before the drain is over

    @precondition(lambda self: self.bench.core.level == 0 or self.bench.life.state is State.PARTIALLY_AWAKE)
    @rule(level=st.sampled_from([1, 2]), mode=st.sampled_from(["abort", "keep"]), moves=MOVES)
    def sleep_deeper(self, level, mode, moves):
        """It needs no drain, so that it can't be rolled back, though its only caller leaves at once."""
        asked = {"level": level, "mode": mode}
        self.sleep_as("sleep", lambda life: life.sleep(**asked), ("tick",), pause=False, **asked)
        self.cancel_one(self.callers[-1:])
        self.move(moves)

    @rule(mode=st.sampled_from(["wait", "wait_all", "abort", "keep"]), clear=st.booleans(), moves=MOVES)
    def pause(self, mode, clear, moves):
        options = {"level": 0, "mode": mode}
        self.sleep_as(
            "pause",
            lambda life: life.pause_generation(mode=mode, clear_cache=clear),
            moves,
            pause=True,
            **options,
        )

    @rule(order=strategies.wake_orders(), moves=MOVES)
    def wake(self, order, moves):
        for tags in order:
            self.call(
                "wake_up", self.unless_busy(World.may_wake), lambda life, tags=tags: life.wake_up(tags), moves
            )

    @rule(moves=MOVES)
    def resume(self, moves):
        self.call("resume", self.unless_busy(World.may_wake), lambda life: life.resume_generation(), moves)

    def unless_busy(self, may):
        """While a sleep is under way everything else is refused."""
        return lambda world: REFUSED if self.bench.core.transition is not None else may(world)

    # -- weights and the rest --------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["reload", "checkpoint", "part", "fails", "begin", "end", "mark"]),
        version=st.integers(0, 3),
        part=st.sets(st.sampled_from(PARAMETERS), min_size=1),
        moves=MOVES,
    )
    def load(self, kind, version, part, moves):
        """Or say that it is done, where that is true."""
        values, world = make_weights(version), self.world()
        if kind == "mark" and not (self.is_quiet() and world.loaded and not world.tainted):
            return

        def breaks():
            yield from list(values.items())[:2]
            raise ScriptedFault("the trainer's iterator broke")

        def make(life):
            if kind == "reload":
                return life.reload_weights(weights_iterator=iter(values.items()))
            if kind == "checkpoint":
                return life.reload_weights()
            if kind == "mark":
                return life.mark_weights_loaded("v")
            if kind == "part":
                some = [(name, values[name]) for name in PARAMETERS if name in part]
                return life.collective_rpc("load_weights", args=(some,))
            if kind == "fails":
                return life.reload_weights(weights_iterator=breaks())
            return life.collective_rpc("start_weight_update" if kind == "begin" else "finish_weight_update")

        def must(world):
            may = self.unless_busy(World.may_mark if kind == "mark" else World.may_load)(world)
            return RAISED if kind == "fails" and may == FINE else may

        self.call(kind, must, make, ["rest"] if kind == "mark" else moves)

    @rule(which=st.integers(0, 11), moves=MOVES)
    def other(self, which, moves):
        """The rest of the surface; and what is never legal, whatever was done before."""
        name, must, make = [
            (
                "release_kv",
                self.unless_busy(World.may_release_kv),
                lambda life: life.release_kv_cache_memory(),
            ),
            ("reset", self.unless_busy(World.may_wake), lambda life: life.reset_prefix_cache()),
            (
                "prepare",
                self.unless_busy(World.may_wake),
                lambda life: life.collective_rpc("prepare_refit_info"),
            ),
            (
                "apply",
                self.unless_busy(World.may_touch_weights),
                lambda life: life.call("apply_model", len),
            ),
            ("wake_up", INVALID, lambda life: life.wake_up([])),
            ("wake_up", INVALID, lambda life: life.wake_up(["weights", "weights"])),
            ("wake_up", INVALID, lambda life: life.wake_up(["bogus"])),
            ("bad sleep", INVALID, lambda life: life.sleep(3)),
            ("bad sleep", INVALID, lambda life: life.sleep(1, "nicely")),
            ("bad close", INVALID, lambda life: life.close(timeout=-1)),
            ("rpc sleep", REFUSED, lambda life: life.collective_rpc("sleep", args=(1,))),
            ("call sleep", REFUSED, lambda life: life.call("sleep", 1)),
        ][which]
        self.call(name, must if callable(must) else lambda world: must, make, moves)

    @rule(what=st.sampled_from([None, 0, *State]), moves=MOVES)
    def watch(self, what, moves):
        """The events from now on or from the first, or a state."""

        async def listen(life):
            last = what
            async for event in life.events(what):
                if event["event"] == "missed":
                    last += event["count"]
                else:
                    assert last is None or event["seq"] == last + 1
                    last = event["seq"]

        if isinstance(what, State):
            self.call("wait_for", None, lambda life: life.wait_for(what), moves)
        else:
            self.call("listen", None, listen, moves)

    # -- what goes wrong -------------------------------------------------------------------------------

    @precondition(lambda self: self.fault is None and not self.bench.baton.hang and not self.closing)
    @rule(script=st.one_of(strategies.faults(), STEP_FAILS), moves=MOVES)
    def break_later(self, script, moves):
        self.fault = self.bench.engine.faults.add(**script)
        self.move(moves)

    @precondition(lambda self: not self.bench.baton.hang)
    @rule(call=st.sampled_from(HANGS), when=st.sampled_from(["before", "after"]), lasts=st.integers(1, 9))
    def hang_later(self, call, when, lasts):
        """For so many moves."""
        self.bench.engine.faults.add(call, when=when, hang=self.bench.baton)
        self.hangs_for = lasts

    @precondition(lambda self: self.bench.core.state is State.FAILED)
    @rule(moves=MOVES)
    def recover(self, moves):
        self.call("recover", self.must_recover, lambda life: life.recover(), moves)

    def must_recover(self, world):
        if world.may_recover() == FINE:  # what was armed struck nothing in the engine that is gone
            self.fault = None
        return self.unless_busy(World.may_recover)(world)

    @rule(
        drain=st.booleans(),
        timeout=st.sampled_from([None, None, 0.0, 3600.0]),
        wanted=st.integers(0, 5),
        moves=MOVES,
    )
    def close(self, drain, timeout, wanted, moves):
        if wanted:
            return
        for _ in range(1 + self.ids % 2):
            self.close_once(drain, timeout, moves)

    def close_once(self, drain, timeout, moves):
        def must(world):
            if not world.closed:
                patient = drain and timeout != 0.0
                core, asked = self.bench.core, dict(self.asked()[1:])
                waits = (
                    asked.get("mode") in ("wait", "wait_all") and asked.get("on_timeout", "raise") == "raise"
                )
                drains = core.state in (State.AWAKE, State.RUNNING) or (
                    core.state is State.DRAINING and waits
                )
                if not (patient and (drains or self.closing)):
                    self.closing = "impatient"
                self.closing = self.closing or "patient"
                if self.closing == "impatient":
                    self.requests.may_end(self.requests.live(), "abort")
            return REFUSED if world.closed else FINE

        caller = Caller("close", must, drain=drain, timeout=timeout)
        caller.began = lambda world: None
        self.spawn(caller, lambda life: life.close(drain=drain, timeout=timeout))
        self.move(moves)

    @precondition(lambda self: self.bench.life._gone)
    @rule()
    def begin_again(self):
        self.rest()
        self.end()
        self.open()

    # -- what holds always, and in the end -------------------------------------------------------------

    @invariant()
    def sound(self):
        if not hasattr(self, "bench"):
            return
        self.collect()
        assert not self.wrong, self.wrong[0]
        broken = self.bench.broken()
        assert not broken, broken[0]
        if self.is_quiet():
            self.nobody_waits_in_vain()

    def nobody_waits_in_vain(self):
        core, life = self.bench.core, self.bench.life
        skipped = [each for each in self.sent if each.ran is None]
        assert not skipped, f"{skipped[0]} was sent to the thread, and never came to its end there"
        self.sent.clear()
        waits = [each for each in self.callers if each.name not in ("listen", "wait_for") or life._gone]
        assert not waits, f"the thread has nothing to do, and nobody answers {waits[0]}"
        serving = core.state in (State.AWAKE, State.RUNNING)
        for each in self.consumers:
            if each.task is None or not each.reads:
                continue
            frozen = each.name in core.ledger.in_flight and not serving
            assert each.name in core.ledger.held or frozen, f"nobody will end {each}"
        open_ones = [each for each in self.consumers if each.task is not None]
        assert len(life._streams) <= len(open_ones) + len(
            [e for e in self.consumers if e.how in ("reads", "drops")]
        )

    def teardown(self):
        """However a run ends: the way back to service is open, and everybody comes to an end.

        Of a run that failed nothing more is asked: what went wrong first is what is to be told.
        """
        if not hasattr(self, "bench"):
            return
        if sys.exc_info()[1] is not None:
            with contextlib.suppress(Exception):
                self.bench.put_away()
            return
        try:
            self.end()
            self.reached.outcomes["runs", "to the end"] += 1
        finally:
            self.bench.put_away()

    def end(self):
        bench, life = self.bench, self.bench.life
        for engine in bench.engines:
            engine.faults.clear()
        self.fault = None
        self.go_on()
        self.rest()
        self.sound()
        last = None
        if not life._gone:
            self.serve_again()
            assert bench.core.state in (State.AWAKE, State.RUNNING), bench.core.snapshot()
            last = self.ask(
                "last", [1, 2, 3], {"max_tokens": 3, "n": 1, "seed": 1, "stop": None, "output_kind": 0}
            )
        for each in self.consumers:
            if each.gate is not None:
                for _ in range(100):
                    each.gate.release()
        self.rest()
        self.sound()
        if last is not None:
            assert last.came == FINE, (last.came, last.why)
        endless = [each for each in self.consumers if each.task is not None]
        assert not endless, f"{endless[0]} never ends"
        lost = self.requests.lost()
        assert not lost or self.closing, f"nobody was told of the end of {lost}"
        if life._streams:  # of iterators that were dropped
            gc.collect()
            self.rest()
        assert not life._streams
        assert life.get_num_unfinished_requests() == 0
        if not life._gone:
            self.close_once(drain=True, timeout=None, moves=["rest"])
        self.rest()
        self.sound()
        assert bench.baton.over
        assert self.pending() == []
        assert bench.owner._streams == {}
        assert [each for each in bench.baton.inbox.commands if each.answer is not None] == []
        bench.put_away()

    def serve_again(self):
        core = self.bench.core
        if core.state is State.FAILED:
            self.call("recover", self.must_recover, lambda life: life.recover(), ["rest"])
        self.call("resume", self.unless_busy(World.may_wake), lambda life: life.resume_generation(), ["rest"])
        self.call("wake_up", self.unless_busy(World.may_wake), lambda life: life.wake_up(), ["rest"])
        if core.state is State.PARTIALLY_AWAKE:
            self.call(
                "reload", self.unless_busy(World.may_load), lambda life: life.reload_weights(), ["rest"]
            )
        if core.state is State.SLEEPING:
            self.call("wake_up", self.unless_busy(World.may_wake), lambda life: life.wake_up(), ["rest"])


def _copy(output):
    return output and [(part.index, list(part.token_ids), part.text) for part in output.outputs]


def _unless_closed(world):
    return REFUSED if world.closed else FINE


def _fits(must, came):
    if must in (FINE, NOTHING, LATE):
        return came == FINE
    if must == RAISED:
        return came == "ScriptedFault"
    return came in (REFUSALS if must == REFUSED else {"InvalidArgument"})


def run(reached, *, examples, steps, start=0, **options):
    class Seeded(AsyncMachine):
        pass

    Seeded.reached = reached
    if TIMES == 1:
        seed(start)(Seeded)
    profile = settings(
        max_examples=examples * TIMES,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    gc.freeze()
    try:
        run_state_machine_as_test(Seeded, settings=profile)
    finally:
        gc.unfreeze()


def test_any_calls_by_many_tasks_at_once():
    """No interleaving of calls and cancellations loses a token, orphans a drain or leaves anything behind."""
    reached = Reached()
    AsyncMachine.cancelled.clear()
    run(reached, examples=100, steps=50)
    assert reached.outcomes["runs", "to the end"] >= 100 * TIMES
    section = f"asynchronous machine: {reached.examples} runs, {reached.steps} commands"
    taken = len(RULES) - len(reached.missing())
    report.say(section, f"rows of the table taken: {taken} of {len(RULES)}")
    for kind in ("Consumer", "Caller"):
        ends = {came: count for (what, came), count in reached.outcomes.items() if what == kind}
        told = ", ".join(f"{came} {count}" for came, count in sorted(ends.items()))
        report.say(section, f"{kind.lower()}s: {told}")
    cancelled = ", ".join(f"{name} {count}" for name, count in sorted(AsyncMachine.cancelled.items()))
    report.say(section, f"cancelled: {cancelled}")
