"""A Hypothesis machine that calls a lifecycle in every way, and the oracle beside it.

One set of rules for three surfaces: `Lifecycle` itself, an `LLM` that it is attached to, and
both on the simulated engine or on vLLM; a `Bench` holds what differs. Each rule asks the
oracle's `World` what must come of the call, makes it, and compares: a refusal of something
legitimate fails as surely as a lost request. Most rules are drawn legal; `misuse` makes only
calls that must be refused, and `fault` scripts one that strikes a later call.

Once a fault has struck, what comes of that one call is the library's to say; the oracle
reads where it left the engine and goes on judging from there.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import (
    DrainCancelled,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    LifecycleError,
)
from lifecycle.table import GUARDS, RULES, Facts, State, Trigger, Weights
from lifecycle.testing import strategies
from lifecycle.testing.strategies import ScriptedFault
from tests.oracle import (
    FINE,
    INVALID,
    LATE,
    NOTHING,
    REFUSED,
    WEIGHTS,
    Requests,
    World,
)

NEVER_ENDS = 5_000  # steps after which a run that should end has not
# What an engine is in when the lifecycle gets hold of it. "small" may hold two requests only.
FOUND = ("awake", "asleep 1", "asleep 2", "paused", "dummy", "half", "busy", "small")
LOADS = frozenset({"reload", "rpc", "part", "hole", "fails", "update_begin", "update_end", "unseen", "mark"})


# -- what was reached ----------------------------------------------------------------------------------


@dataclass
class Reached:
    """Which rows were taken, with what in the engine, and which guards were seen to hold and not."""

    taken: Counter = field(default_factory=Counter)
    guards: Counter = field(default_factory=Counter)
    steps: int = 0
    examples: int = 0
    outcomes: Counter = field(default_factory=Counter)

    def __call__(self, event):
        """A sink: find the row of each transition by the facts that the event tells.

        An explicit pause is not among them; where a wake stops in SLEEPING there was one.
        """
        if event["event"] not in ("transition", "attached"):
            return
        trigger = Trigger(event.get("trigger", "attach"))
        source = State(event["source"]) if "source" in event else None
        counts = event["counts"]
        facts = Facts(
            resident=frozenset(event["resident"]),
            level=event.get("level"),
            weights=Weights(event["weights"]),
            paused=event["dest"] == "sleeping" and trigger in (Trigger.WAKE, Trigger.WEIGHTS_VALID),
            in_flight=counts["in_flight"],
            held=counts["held"],
        )
        load = "in flight" if counts["in_flight"] else "held" if counts["held"] else "idle"
        for row in RULES:
            if row.trigger is trigger and row.source is source:
                holds = GUARDS[row.guard][0](facts)
                self.guards[row, holds] += 1
                if holds:
                    assert row.dest.value == event["dest"], (row, event)
                    self.taken[row, load] += 1
                    return

    def missing(self):
        """Rows never taken."""
        seen = {row for row, _ in self.taken}
        return [row for row in RULES if row not in seen]

    def table(self):
        """A line for each row: how often it was taken, by what was in the engine."""
        for row in RULES:
            loads = ", ".join(
                f"{load} {self.taken[row, load]}"
                for load in ("in flight", "held", "idle")
                if self.taken[row, load]
            )
            source = row.source.value if row.source else "(start)"
            guard = f" [{row.guard}: held {self.guards[row, True]}, did not {self.guards[row, False]}]"
            yield f"{row.trigger.value:16}{source:16}-> {row.dest.value:16}{loads}{guard}"


# -- the machine ---------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """The rules. A subclass says in `start` on what they run."""

    reached = Reached()

    def start(self, options, found):
        """Return a new bench: an engine, its lifecycle, and the world as it was found."""
        raise NotImplementedError

    @initialize(options=strategies.engine_options(), found=st.sampled_from(["awake", "awake", *FOUND]))
    def begin(self, options, found):
        self.reached.examples += 1
        self._begin(options, found)

    def _begin(self, options, found):
        self.options = options
        self.bench = self.start(options, found)
        self.world: World = self.bench.world
        self.requests: Requests = self.bench.requests
        self.armed = False
        self.look()

    # -- one call, judged ------------------------------------------------------------------------------

    def look(self):
        self.world.physical = self.bench.physical()

    def call(self, must, name, *args, **kwargs):
        """Make a call that must come to `must`. Returns (whether it took effect, its result)."""
        self.look()
        before = self.bench.lifecycle.snapshot()
        inside = self.world.physical.inside
        if name == "add":  # the library looks first whether somebody loaded the weights unseen
            self.world.looks_before_serving()
        result = error = None
        try:
            result = self.bench.make(name, *args, **kwargs)
        except (LifecycleError, ScriptedFault) as raised:
            error = raised
        self.reached.steps += 1
        if self.bench.struck():
            self.after_fault(name, error, result)
            if "abort" in kwargs.values():  # it may have come as far as that
                self.requests.may_end(inside, "abort")
            return False, result
        came = _kind(error)
        self.reached.outcomes[name, came] += 1
        if came == FINE and getattr(result, "noop", False):
            came = NOTHING
        expected = {LATE: (FINE, "too late")}.get(must, (must,))
        assert came in expected, f"{name}{args}{kwargs} must be {must}, and was {came}: {error!r}"
        if came in (REFUSED, INVALID):
            after = self.bench.lifecycle.snapshot()
            fields = ("state", "level", "resident", "weights", "epoch", "in_flight", "held", "paused")
            changed = [name for name in fields if getattr(before, name) != getattr(after, name)]
            looked = before.weights == "discarded" and after.weights == "valid"
            assert not changed or looked, f"a refused {name} changed {changed}"
        self.look()
        return came == FINE, result

    def after_fault(self, name, error, result):
        """A fault struck: what the library says now is where the oracle goes on from."""
        note(f"the fault struck in {name}: {error!r}")
        self.armed = False
        snapshot = self.bench.lifecycle.snapshot()
        seen = error
        while seen is not None and not isinstance(seen, EngineFailed):
            seen = seen.__cause__
        if isinstance(seen, EngineFailed):
            assert snapshot.state == "failed"
            self.requests.may_end(seen.in_flight, "error")
            if seen.call == "step":
                self.requests.may_vanish(seen.in_flight)
        self.look()
        self.bench.resync(snapshot, loading=name in LOADS)

    def outputs(self, result):
        self.requests.take(result or ())

    # -- requests --------------------------------------------------------------------------------------

    def add(self, prompt, options, *, by="add"):
        held = self.bench.lifecycle.snapshot().held
        must = self.world.may_add(held)
        name = self.bench.new_id()
        took, _ = self.call(must, by, name, prompt, options)
        if took:
            self.requests.ask(name, prompt, options, self.world.contents)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), count=st.integers(1, 4))
    def submit(self, data, count):
        self.submit_some(data, count)

    @precondition(lambda self: self.world.serving)
    @rule(data=st.data(), count=st.integers(1, 4), times=st.integers(0, 3))
    def submit_and_step(self, data, count, times):
        """Most of a rollout is this."""
        self.submit_some(data, count)
        for _ in range(times):
            self.step_once()

    def submit_some(self, data, count):
        for _ in range(count):
            if self.world.may_add(self.bench.lifecycle.snapshot().held) == FINE:
                self.add(data.draw(self.bench.prompts()), data.draw(self.bench.sampling_options()))

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.step_once()

    def step_once(self):
        """While serving a step is legal; else it hands out what waits, or is refused."""
        waits = bool(self.bench.lifecycle._core.ledger.mailbox)
        if not waits:
            self.look()
            self.world.looks_before_serving()
        must = FINE if waits or self.world.serving else REFUSED
        _, result = self.call(must, "step")
        if waits:
            assert result, "outputs waited and none came"
        self.outputs(result)

    @precondition(lambda self: self.world.alive and hasattr(self.bench, "_generate"))
    @rule(data=st.data(), count=st.integers(1, 3))
    def generate(self, data, count):
        """A blocking call beside the others: it returns its own outputs in order, and no others."""
        options = {**data.draw(self.bench.sampling_options()), "output_kind": 2, "n": 1}
        prompts = [data.draw(self.bench.prompts()) for _ in range(count)]
        self.look()
        self.world.looks_before_serving()
        inside = self.world.physical.inside
        took, outputs = self.call(FINE if self.world.serving else REFUSED, "generate", prompts, options)
        if took:
            for prompt, output in zip(prompts, outputs, strict=True):
                self.requests.ask(output.request_id, prompt, options, self.world.contents)
            self.outputs(outputs)
            assert inside <= self.world.physical.inside | set(self.requests.asked)

    @precondition(lambda self: not self.world.closed and self.requests.live())
    @rule(data=st.data())
    def abort(self, data):
        names = data.draw(st.lists(st.sampled_from(self.requests.live()), min_size=1, max_size=3))
        took, _ = self.call(FINE, "abort", [*names, "nobody-has-this-id"])
        if took:
            self.requests.given_up(names)
        elif self.world.alive or self.world.failed:
            self.requests.may_vanish(names)  # a fault struck: the engine may have forgotten them or not

    # -- sleep and wake --------------------------------------------------------------------------------

    def _sleep(self, by, pause, **options):
        limited = "max_steps" in options or "timeout" in options
        limited = limited and options.get("on_timeout", "raise") == "raise"
        level = 0 if pause else options["level"]
        must = self.world.may_sleep(level, options["mode"], limited=limited, pause=pause)
        aborts = "abort" in (options["mode"], options.get("on_timeout"))
        took, report = self.call(must, by, **options)
        if took and report is not None:
            assert aborts or not report.aborted
            self.requests.may_end(report.aborted, "abort")
            self.world.slept(level, pause=pause)
        elif must == NOTHING and pause:
            self.world.paused = True

    @precondition(lambda self: self.world.alive)
    @rule(options=strategies.sleeps())
    def sleep(self, options):
        self.sleep_legally(options)

    def sleep_legally(self, options):
        self.look()
        limited = "max_steps" in options or "timeout" in options
        must = self.world.may_sleep(options["level"], options["mode"], limited=limited, pause=False)
        if must != REFUSED:
            self._sleep("sleep", False, **options)

    @precondition(lambda self: self.world.serving and self.world.physical.inside and not self.armed)
    @rule(
        mode=st.sampled_from(["wait", "wait_all"]),
        level=st.sampled_from([0, 1, 2]),
        at=st.sampled_from([1, 2, 4, None]),
        visit=st.sampled_from(["add", "abort", "wake", "raise", "close"]),
        data=st.data(),
    )
    def sleep_with_a_visitor(self, mode, level, at, visit, data):
        """During the drain (at None: at its end) another thread comes, or the progress callback raises."""
        if visit == "close" and not self.bench.rebuildable:
            visit = "wake"  # an attached engine is only let go of, and not while something is held
        visitor = getattr(self, f"visit_and_{visit}")
        lifecycle, held = self.bench.lifecycle, None

        def come(view):
            nonlocal held
            if held is not None or (view.remaining if at is None else view.steps < at):
                return
            snapshot = lifecycle.snapshot()
            assert snapshot.state == "draining"
            assert snapshot.operation.startswith("sleep")
            held = snapshot.held
            visitor(data, held)

        error = _error(lambda: lifecycle.sleep(level, mode, progress=come))
        came = held is not None
        self.reached.outcomes[f"sleep, visited to {visit if came else 'nothing'}", _kind(error)] += 1
        self.look()
        if came and visit == "raise":
            assert isinstance(error, DrainCancelled), error
        elif came and visit == "close":
            assert _kind(error) == REFUSED, error
            self.closed(held)
        else:
            assert error is None, error
            self.world.slept(level, pause=False)

    @precondition(lambda self: self.world.serving and self.world.physical.inside and not self.armed)
    @rule(at=st.sampled_from([1, None]), visit=st.sampled_from(["raise", "raise", "close"]), data=st.data())
    def drain_given_up(self, at, visit, data):
        """In its middle, or when nothing is left but to flush."""
        self.sleep_with_a_visitor("wait_all", 1, at, visit, data)

    @precondition(lambda self: self.world.serving and self.world.physical.inside and not self.armed)
    @rule(when=st.sampled_from(["before", "after"]))
    def drain_fails(self, when):
        if self.bench.can_fault:
            self.bench.arm({"call": "step", "when": when, "raises": ScriptedFault("step failed")})
            self.armed = True
            self.sleep_legally({"level": 1, "mode": "wait_all"})

    def visit_and_raise(self, data, held):
        raise ScriptedFault("the caller's own callback")

    def visit_and_add(self, data, held):
        options = data.draw(self.bench.sampling_options())
        prompt, name = data.draw(self.bench.prompts()), self.bench.new_id()
        full = self.world.max_held is not None and held >= self.world.max_held
        error = _in_a_thread(lambda: self.bench.make("add", name, prompt, options))
        assert _kind(error) == (REFUSED if full else FINE)
        if not full:
            self.requests.ask(name, prompt, options, self.world.contents)

    def visit_and_abort(self, data, held):
        victim = data.draw(st.sampled_from(self.requests.live()))
        assert _in_a_thread(lambda: self.bench.make("abort", [victim])) is None
        self.requests.given_up([victim])

    def visit_and_wake(self, data, held):
        error = _in_a_thread(self.bench.lifecycle.wake_up)
        assert _kind(error) == REFUSED
        assert "sleep" in error.operation

    def visit_and_close(self, data, held):
        self.requests.may_end(self.bench.physical().inside, "abort")
        assert _in_a_thread(lambda: self.bench.make("close")) is None

    @precondition(lambda self: self.world.alive)
    @rule(
        mode=st.sampled_from(["wait", "wait_all", "abort", "keep"]),
        then=st.sampled_from([None, None, 1, 2]),
    )
    def pause(self, mode, then):
        """A pause, and perhaps a deeper sleep on top of it, as a trainer does that holds all replicas."""
        self._sleep("pause", True, mode=mode)
        if then and self.world.alive:
            self.sleep_legally({"level": then, "mode": "keep"})

    @precondition(lambda self: self.world.serving)
    @rule(level=st.sampled_from([1, 2]), mode=st.sampled_from(["wait", "keep"]))
    def pause_slept_through(self, level, mode):
        """A pause survives a sleep on top of it and the wake from that."""
        self._sleep("pause", True, mode=mode)
        if self.world.alive:
            self.sleep_legally({"level": level, "mode": "keep"})
        if self.world.alive:
            self.wake_tags(None)

    @precondition(lambda self: self.world.alive)
    @rule()
    def resume(self):
        self.look()
        ends = self.world.mapped and self.world.level == 0
        took, _ = self.call(FINE if ends else NOTHING, "resume")
        if took or not ends:
            self.world.paused = False
        if took:
            self.world.woke(completes=True)

    @precondition(lambda self: self.world.alive)
    @rule(order=strategies.wake_orders())
    def wake(self, order):
        for tags in order:
            if self.world.alive:
                self.wake_tags(tags)

    @precondition(lambda self: self.world.alive)
    @rule(tags=st.sampled_from([["weights"], ["kv_cache"], ["scheduling"], ["scheduling", "weights"]]))
    def wake_some(self, tags):
        self.wake_tags(tags)

    def wake_tags(self, tags):
        self.look()
        does, completes = self.world.wakes(tags)
        took, report = self.call(FINE if does else NOTHING, "wake_up", tags)
        if took:
            self.world.woke(completes=completes)
            assert bool(report) is self.world.serving, report

    @precondition(lambda self: self.world.may_release_kv() == FINE)
    @rule()
    def release_kv(self):
        self.call(FINE, "release_kv")

    # -- weights ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.may_load() == FINE)
    @rule(data=st.data())
    def load(self, data):
        kind = data.draw(st.sampled_from(self.bench.loads), label="kind")
        values = self.bench.values(data, kind)
        took, _ = self.call("raised" if kind == "fails" else FINE, kind, values)
        if kind == "fails" and self.world.alive:
            self.world.contents.update(self.bench.loaded_before_it_failed(values))
            self.world.update_failed()
        elif took:
            self.world.loaded_some(values, whole=kind == "reload")
            if kind in ("rpc", "part") and self.world.valid:
                self.world.cured()
            if kind == "hole":
                self.world.lost_some(self.bench.lost_by(values))
                self.world.looks_before_serving()
        self.requests.weights_became(self.bench.contents())

    @precondition(lambda self: self.world.may_load() == FINE and self.bench.can_update)
    @rule(what=st.sampled_from(["update_begin", "update_end"]))
    def update(self, what):
        took, _ = self.call(FINE, what)
        if took and what == "update_begin":
            self.world.update_opened()
        elif took:
            self.world.update_closed()

    @precondition(lambda self: self.world.discarded and WEIGHTS in self.world.resident and self.world.alive)
    @rule(data=st.data(), whole=st.booleans())
    def load_unseen(self, data, whole):
        """A broadcast, or a trainer that reaches through to the model."""
        values = self.bench.values(data, "reload" if whole else "part")
        took, _ = self.call(FINE, "unseen", values)
        if took:
            self.world.loaded_some(values, whole=False)
        self.requests.weights_became(self.bench.contents())

    @precondition(lambda self: self.world.can_say_loaded)
    @rule()
    def mark(self):
        took, _ = self.call(FINE, "mark")
        if took:
            self.world.cured()

    # -- the rest --------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.alive)
    @rule(name=st.sampled_from(["reset_prefix_cache", "rpc_prepare", "apply_model"]))
    def other(self, name):
        if name != "apply_model" or self.world.may_touch_weights() == FINE:
            self.call(FINE, name)

    @rule(data=st.data())
    def misuse(self, data):
        """Only calls that must be refused, whatever was done before."""
        world = self.world
        self.look()
        calls = [
            ("wake_up", INVALID, ([],), {}),
            ("wake_up", INVALID, (["weights", "weights"],), {}),
            ("wake_up", INVALID, (["bogus"],), {}),
            ("sleep", INVALID, (), {"level": 3, "mode": "wait"}),
            ("sleep", INVALID, (), {"level": 1, "mode": "nicely"}),
            ("sleep", INVALID, (), {"level": 1, "mode": "wait", "max_steps": -1}),
            ("rpc_sleep", REFUSED, (), {}),
            ("behind", REFUSED, (), {}),
        ]
        if world.may_add(self.bench.lifecycle.snapshot().held) == FINE:
            calls.append(("add", INVALID, (self.bench.new_id(), [], self.bench.any_options()), {}))
            calls += [
                ("add", INVALID, (name, [1], self.bench.any_options()), {})
                for name in self.requests.live()[:1]
            ]
        refused = [
            ("reload", world.may_load(), (self.bench.checkpoint(),)),
            ("rpc", world.may_load(), (self.bench.checkpoint(),)),
            ("mark", world.may_mark(), ()),
            ("release_kv", world.may_release_kv(), ()),
            ("apply_model", world.may_touch_weights(), ()),
            ("recover", world.may_recover(), ()),
        ]
        calls += [(name, REFUSED, args, {}) for name, must, args in refused if must == REFUSED]
        for level, mode in ((0, "keep"), (1, "wait"), (2, "abort")):
            if world.may_sleep(level, mode, limited=False, pause=False) == REFUSED:
                calls.append(("sleep", REFUSED, (), {"level": level, "mode": mode}))
        if not world.alive:
            calls += [("wake_up", REFUSED, (None,), {}), ("resume", REFUSED, (), {})]
            calls.append(("add", REFUSED, ("late", [1], self.bench.any_options()), {}))
        name, must, args, kwargs = data.draw(st.sampled_from(calls))
        self.call(must, name, *args, **kwargs)

    @precondition(lambda self: self.world.alive and not self.armed and self.bench.can_fault)
    @rule(script=strategies.faults())
    def fault(self, script):
        self.bench.arm(script)
        self.armed = True

    @precondition(lambda self: self.world.serving and not self.armed and self.bench.can_fault)
    @rule(when=st.sampled_from(["before", "after"]))
    def step_fails(self, when):
        self.bench.arm({"call": "step", "when": when, "raises": ScriptedFault("step failed")})
        self.armed = True
        self.step_once()

    @precondition(lambda self: self.world.failed)
    @rule(found=st.sampled_from(["awake", "asleep 1", "asleep 2", "paused", "dummy", "half"]))
    def recover(self, found):
        if self.bench.rebuildable:
            self.bench.next_found = found
            self.call(FINE, "recover")
            self.bench.recovered()
            self.requests.weights_became(self.bench.contents())
        else:
            self.call(REFUSED, "recover")
            self.close()

    @rule(wanted=st.integers(0, 7))
    def close_and_begin_again(self, wanted):
        if wanted == 0:
            self.close()

    def close(self):
        """What is in flight ends with what it has; what is held is given up."""
        self.bench.disarm()
        self.armed = False
        self.bench.before_close(self)
        self.look()
        self.requests.may_end(self.world.physical.inside, "abort")
        held = self.bench.lifecycle.snapshot().held
        self.call(FINE, "close")
        self.closed(held)

    def closed(self, held):
        self.world.closed = True
        while self.bench.lifecycle.has_unfinished_requests():
            self.outputs(self.bench.lifecycle.step())
        assert _kind(_error(self.bench.lifecycle.step)) == REFUSED
        assert len(self.requests.lost()) <= held, f"lost: {self.requests.lost()}"
        self.bench.put_away()
        self._begin(self.options, "awake")

    # -- what holds always, and in the end -------------------------------------------------------------

    @invariant()
    def sound(self):
        if not hasattr(self, "bench"):
            return
        lifecycle, world = self.bench.lifecycle, self.world
        assert lifecycle.check() == []
        assert self.bench.misuse() == []
        assert self.bench.told.check(lifecycle._core) == []
        self.look()
        snapshot = lifecycle.snapshot()
        assert snapshot.state == world.state, (snapshot, world)
        assert snapshot.operation is None
        if world.alive:
            assert snapshot.resident == world.resident, (snapshot, world)
            assert (snapshot.weights == "valid") is world.valid, (snapshot, world)
            assert snapshot.in_flight == len(world.physical.inside), (snapshot, world)
            assert lifecycle.is_sleeping() is not world.serving
        if world.serving:
            assert not world.physical.paused, "serving, and the scheduler is paused"
            assert snapshot.held == 0
            assert self.bench.contents() == world.contents

    def teardown(self):
        """However a run ends, the way back to service is open and nobody was lost."""
        if not hasattr(self, "bench"):
            return
        if self.world.failed and self.bench.rebuildable:
            self.bench.next_found = "awake"
            self.call(FINE, "recover")
            self.bench.recovered()
            self.requests.weights_became(self.bench.contents())
        self.bench.disarm()
        self.armed = False
        if self.world.alive:
            self.serve_again()
            for _ in range(NEVER_ENDS):
                if not self.bench.lifecycle.has_unfinished_requests():
                    break
                self.step_once()
            self.sound()
            assert self.requests.lost() == []
        self.bench.put_away()

    def serve_again(self):
        self.resume()
        if not self.world.mapped:
            self.wake_tags(None)
        if not self.world.valid:
            self.call(FINE, "reload", self.bench.checkpoint())
            self.world.loaded_some(self.bench.checkpoint(), whole=True)
            self.requests.weights_became(self.bench.contents())
        self.look()
        if not self.world.serving:  # a pause that nobody said again after it was slept through
            self.wake_tags(None)
        assert self.world.serving, self.world


def _error(call):
    """What a call raises, or None."""
    try:
        call()
    except (LifecycleError, ScriptedFault) as error:
        return error
    return None


def _in_a_thread(call):
    """Make a call in another thread, to its end. Returns what it raised, or None."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_error, call).result(timeout=30)


def _kind(error):
    """What came of a call."""
    if error is None:
        return FINE
    if isinstance(error, InvalidArgument):
        return INVALID
    if isinstance(error, DrainTimeout):
        return "too late"
    if isinstance(error, (IllegalCall, EngineFailed)):
        return REFUSED
    if isinstance(error, ScriptedFault):
        return "raised"
    return f"an unexpected {type(error).__name__}"
