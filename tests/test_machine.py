"""The machine of `tests/machine.py`, run on each surface."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from engine_adapter.simulated import (
    PARAMETERS,
    Garbage,
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    expected_output,
    make_weights,
)
from lifecycle import Lifecycle
from lifecycle.testing import strategies
from lifecycle.testing.strategies import ScriptedFault
from tests import report
from tests.machine import Machine, Reached
from tests.oracle import Physical, Requests, World

# `make test-deep` asks for more; by itself the run is the same every time.
EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "0"))


def profile(examples, steps):
    return settings(
        max_examples=EXAMPLES or examples,
        stateful_step_count=steps,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def reference(asked, sample, contents, *, stop):
    """What the simulated engine gives for a request when nothing interrupts it."""
    options = asked.options if stop else {**asked.options, "stop": None}
    return expected_output(asked.prompt, SamplingParams(**options), sample, contents, 64)


class SimulatedBench:
    """`Lifecycle` on a simulated engine that it builds itself."""

    can_fault = rebuildable = True

    def __init__(self, options, found, sink):
        self.options = options
        self.next_found = found
        self.ids = 0
        self.fault = None
        self.requests = Requests(reference)
        self.open(sink)
        self.ask_for_what_was_found()

    def open(self, sink):
        held = 2 if self.next_found == "small" else None
        self.lifecycle = Lifecycle(self.build, sinks=(sink,), max_held=held)
        self.world = self.found_world(max_held=held)

    def build(self):
        found = self.next_found
        engine = self.engine = SimulatedEngine(**self.options, dummy_weights=found == "dummy")
        if found == "busy":
            for index in range(3):
                engine.add(
                    engine.prepare(f"found{index}", [1, 2, 3 + index], self.params(self.any_options()), {})
                )
            engine.step()
        elif found != "awake":
            self.put_to_sleep(engine, found)
        return engine

    def put_to_sleep(self, engine, found):
        level = {"asleep 1": 1, "asleep 2": 2, "half": 1, "paused": 0}.get(found)
        if level is not None:
            engine.sleep(level)
        if found == "half":
            engine.wake_up(["weights"])

    def ask_for_what_was_found(self):
        for name in self.physical().inside:
            prompt = [1, 2, 3 + int(name[-1])]
            self.requests.ask(name, prompt, self.any_options(), self.world.contents)

    def found_world(self, **options):
        found = self.next_found
        world = World(self.contents(), **options)
        world.discarded = found in ("dummy", "asleep 2")
        world.level = {"asleep 1": 1, "asleep 2": 2, "half": 1, "paused": 0}.get(found)
        return world

    def recovered(self):
        """The world is that of the new engine."""
        self.world.__dict__.update(self.found_world(max_held=self.world.max_held).__dict__)
        self.world.physical = self.physical()
        self.disarm()

    # -- the engine, from outside the library ----------------------------------------------------------

    def physical(self):
        engine = self.engine
        inside = frozenset(parent.request_id for parent in engine.parents.values())
        return Physical(frozenset(engine.resident), inside, engine.paused)

    def contents(self):
        weights = self.engine._aside or self.engine.weights
        return {name: None if type(value) is Garbage else value for name, value in weights.items()}

    def misuse(self):
        return self.engine.misuse

    def arm(self, script):
        self.fault = self.engine.faults.add(**script)

    def disarm(self):
        self.engine.faults.clear()
        self.fault = None

    def struck(self):
        if self.fault is None or self.fault in self.engine.faults:
            return False
        self.fault = None
        return True

    def resync(self, snapshot, *, loading):
        """After a fault: the library's word for the state, the engine's for the contents."""
        world = self.world
        world.failed = snapshot.state == "failed"
        world.level, world.paused = snapshot.level, snapshot.paused
        world.contents = self.contents()
        world.discarded = snapshot.weights == "discarded"
        world.tainted = snapshot.weights == "tainted"
        if loading or not world.tainted:
            world.before = None

    # -- what the rules draw ---------------------------------------------------------------------------

    def new_id(self):
        self.ids += 1
        return f"r{self.ids}"

    def prompts(self):
        return strategies.prompts()

    def any_options(self):
        return {"max_tokens": 6, "n": 1, "seed": 1, "stop": None, "output_kind": 0}

    def params(self, options):
        return SamplingParams(**{**options, "output_kind": OutputKind(options["output_kind"])})

    def checkpoint(self):
        return dict(self.engine.checkpoint)

    def values(self, data, kind):
        whole = make_weights(data.draw(st.integers(0, 3), label="version"))
        if kind in ("reload", "rpc"):
            return whole
        names = st.sets(st.sampled_from(PARAMETERS), min_size=1, max_size=len(PARAMETERS) - 1)
        chosen = data.draw(names, label="parameters")
        return {name: whole[name] for name in PARAMETERS if name in chosen}

    def loaded_before_it_failed(self, values):
        return dict(list(values.items())[: len(values) // 2])

    # -- the calls -------------------------------------------------------------------------------------

    def make(self, name, *args, **kwargs):
        return getattr(self, f"_{name}")(*args, **kwargs)

    def _add(self, name, prompt, options):
        self.lifecycle.add_request(name, prompt, self.params(options))

    def _step(self):
        return self.lifecycle.step()

    def _abort(self, names):
        self.lifecycle.abort_request(names)

    def _sleep(self, **options):
        return self.lifecycle.sleep(**options)

    def _pause(self, **options):
        return self.lifecycle.pause(**options)

    def _resume(self):
        return self.lifecycle.resume()

    def _wake_up(self, tags):
        return self.lifecycle.wake_up(tags)

    def _release_kv(self):
        self.lifecycle.release_kv_cache_memory()

    def _reload(self, values):
        self.engine.checkpoint = dict(values)
        self.lifecycle.reload_weights()

    def _rpc(self, values):
        self.lifecycle.collective_rpc("load_weights", None, (list(values.items()),))

    _part = _rpc

    def _hole(self, values):
        self.lifecycle.reload_weights(weights_iterator=iter(values.items()))

    def _fails(self, values):
        def breaks():
            yield from self.loaded_before_it_failed(values).items()
            raise ScriptedFault("the trainer's iterator broke")

        self.lifecycle.reload_weights(weights_iterator=breaks())

    def _unseen(self, values):
        self.engine.load_weights(values.items())

    def _update_begin(self):
        self.lifecycle.collective_rpc("start_weight_update")

    def _update_end(self):
        self.lifecycle.collective_rpc("finish_weight_update")

    def _mark(self):
        self.lifecycle.mark_weights_loaded()

    def _reset_prefix_cache(self):
        self.lifecycle.reset_prefix_cache()

    def _rpc_prepare(self):
        self.lifecycle.collective_rpc("prepare_refit_info")

    def _apply_model(self):
        self.lifecycle.apply_model(len)

    def _rpc_sleep(self):
        self.lifecycle.collective_rpc("sleep", 1)

    def _behind(self):
        self.lifecycle.call("sleep", 1)

    def _recover(self):
        self.lifecycle.recover()

    def _close(self):
        self.lifecycle.close()

    def before_close(self, machine):
        """Nothing: whatever is open may be closed."""

    def put_away(self):
        """The next run has an engine of its own."""


def run(bench, reached, *, examples, steps=50):
    """Run the machine on this kind of bench; `reached` counts what came of it."""

    class OnBench(Machine):
        def start(self, options, found):
            return bench(options, found, reached)

    OnBench.reached = reached
    run_state_machine_as_test(OnBench, settings=profile(examples, steps))


def test_lifecycle():
    """No sequence of calls to a `Lifecycle` loses a request, misuses the engine or is refused falsely."""
    reached = Reached()
    run(SimulatedBench, reached, examples=400)
    for line in reached.table():
        report.say(f"Rows taken: {reached.examples} runs, {reached.steps} calls", line)
    assert reached.missing() == []
