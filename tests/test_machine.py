"""The machine of `tests/machine.py`, run on each surface."""

import gc
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from engine_adapter import attach
from engine_adapter.simulated import (
    PARAMETERS,
    Garbage,
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    expected_output,
    make_weights,
)
from engine_adapter.simulated_llm import SimulatedLLM
from lifecycle import Lifecycle, State
from lifecycle.testing import strategies
from lifecycle.testing.strategies import ScriptedFault
from tests import report
from tests.audit_runs import Replayed
from tests.conftest import undo
from tests.engines import model_dir, worker
from tests.machine import Machine, Reached
from tests.oracle import EVERYTHING, Physical, Requests, World

# `make test-deep` asks for so many times more; by itself the run is the same every time.
VLLM_PROMPTS = ("the cat sat", "on the mat", "and the dog did not")
VLLM_SEEDS = (1, 2)
VLLM_TOKENS = 8
TIMES = int(os.environ.get("MACHINE_TIMES", "1"))
pytestmark = pytest.mark.timeout(600 * TIMES)


def profile(examples, steps):
    return settings(
        max_examples=examples * TIMES,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def prepare_refit_info(worker):
    """A worker method of the trainer's own, given as a function."""


def reference(asked, sample, contents, *, stop):
    """What the simulated engine gives for a request when nothing interrupts it."""
    options = asked.options if stop else {**asked.options, "stop": None}
    return expected_output(asked.prompt, SamplingParams(**options), sample, contents, 64)


class SimulatedBench:
    """`Lifecycle` on a simulated engine that it builds itself."""

    can_fault = can_update = rebuildable = True
    loads = ("reload", "reload", "rpc", "part", "hole", "fails")

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
        self.told = Replayed()
        self.lifecycle = Lifecycle(self.build, sinks=(sink, self.told), max_held=held)
        self.world = self.found_world(max_held=held)

    def build(self):
        found = self.next_found
        engine = self.engine = self.make_engine(**self.options, dummy_weights=found == "dummy")
        if found == "busy":
            for index in range(3):
                engine.add(
                    engine.prepare(f"found{index}", [1, 2, 3 + index], self.params(self.any_options()), {})
                )
            engine.step()
        elif found != "awake":
            self.put_to_sleep(engine, found)
        return engine

    def make_engine(self, **options):
        return SimulatedEngine(**options)

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
            world.before, world.torn = None, world.tainted

    # -- what the rules draw ---------------------------------------------------------------------------

    def new_id(self):
        self.ids += 1
        return f"r{self.ids}"

    def prompts(self):
        return strategies.prompts()

    def sampling_options(self):
        return strategies.sampling_options()

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

    def lost_by(self, values):
        """A reload of some shards of a fused tensor loses the others."""
        groups = [{f"layers.{layer}.{part}_proj" for part in "qkv"} for layer in (0, 1)]
        return {name for group in groups if group & values.keys() for name in group - values.keys()}

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


class AttachedBench(SimulatedBench):
    """An `LLM` on a simulated engine, attached to; calls go the way that a trainer makes them."""

    rebuildable = False

    def make_engine(self, **options):
        self.llm = SimulatedLLM(**options)
        return self.llm.simulated

    def open(self, sink):
        self.build()
        held = 2 if self.next_found == "small" else None
        self.told = Replayed()
        self.lifecycle = attach(self.llm, sinks=(sink, self.told), max_held=held)
        self.world = self.found_world(max_held=held, rebuildable=False)

    def _add(self, name, prompt, options):
        prompt = {"prompt_token_ids": prompt}
        self.llm.llm_engine.add_request(name, prompt, self.params(options))

    def _step(self):
        return self.llm.llm_engine.step()

    def _abort(self, names):
        self.llm.llm_engine.abort_request(names)

    def _sleep(self, **options):
        return self.llm.sleep(**options)

    def _wake_up(self, tags):
        return self.llm.wake_up(tags)

    def _release_kv(self):
        self.llm.llm_engine.release_kv_cache_memory()

    def _rpc(self, values):
        self.llm.collective_rpc("load_weights", args=(list(values.items()),))

    _part = _rpc

    def _unseen(self, values):
        self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(values.items())

    def _update_begin(self):
        self.llm.start_weight_update()

    def _update_end(self):
        self.llm.finish_weight_update()

    def _reset_prefix_cache(self):
        self.llm.reset_prefix_cache()

    def _rpc_prepare(self):
        self.llm.collective_rpc("prepare_refit_info")

    def _apply_model(self):
        self.llm.apply_model(lambda model: None)

    def _generate(self, prompts, options):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(asked, self.params(options), use_tqdm=False)

    def before_close(self, machine):
        """An attached engine is let go of, and only with nothing held or waiting."""
        names = machine.requests.live()
        self.lifecycle.abort_request(names)
        machine.requests.given_up(names)
        machine.outputs(self.lifecycle.step() if self.lifecycle._core.ledger.mailbox else [])


class VllmBench(AttachedBench):
    """The same on a real vLLM with a tiny model; its weights are right, or lost, or have a hole."""

    can_fault = can_update = False
    loads = ("reload", "reload", "hole", "fails")
    llm: Any = None
    plain: Mapping[Any, Any] = {}

    def open(self, sink):
        self.next_found = "awake"
        self.told = Replayed()
        self.lifecycle = attach(self.llm, sinks=(sink, self.told))
        self.world = World({"k_proj": 1, "rest": 1}, rebuildable=False)
        self.requests = Requests(self.uninterrupted)

    def uninterrupted(self, asked, sample, contents, *, stop):
        outputs = self.plain[asked.prompt, asked.options["seed"]][sample]
        return outputs[asked.options["max_tokens"] - 1]

    @classmethod
    def learn(cls, llm):
        """What the plain engine gives for everything that will be asked."""
        cls.llm, plain = llm, {}
        for index, (prompt, dice) in enumerate(itertools.product(VLLM_PROMPTS, VLLM_SEEDS)):
            options = {"max_tokens": VLLM_TOKENS, "n": 2, "seed": dice, "stop": None, "output_kind": 0}
            llm.llm_engine.add_request(str(index), prompt, cls.params(None, options))
            plain[prompt, dice] = [[], []]
            while llm.llm_engine.has_unfinished_requests():
                for live in (part for output in llm.llm_engine.step() for part in output.outputs):
                    part = replace(live, token_ids=list(live.token_ids), finish_reason="length")
                    plain[prompt, dice][part.index].append(part)
        cls.plain = plain

    def params(self, options):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind(options["output_kind"])
        return SamplingParams(**{**options, "output_kind": kind}, temperature=1.0, ignore_eos=True)

    def prompts(self):
        return st.sampled_from(VLLM_PROMPTS)

    def sampling_options(self):
        tokens = st.integers(1, VLLM_TOKENS)
        return st.builds(
            lambda options, tokens, seed: {**options, "max_tokens": tokens, "seed": seed, "stop": None},
            strategies.sampling_options(most_samples=2),
            tokens,
            st.sampled_from(VLLM_SEEDS),
        )

    def physical(self):
        core = self.llm.llm_engine.engine_core.engine_core
        inside = {
            state.external_req_id for state in self.llm.llm_engine.output_processor.request_states.values()
        }
        resident = EVERYTHING - set(core.model_executor.sleeping_tags)
        return Physical(frozenset(resident), frozenset(inside), core.scheduler.pause_state.name != "UNPAUSED")

    def contents(self):
        holes = any(
            data.is_meta or data.isnan().any() for data in worker(self.llm).get_model().state_dict().values()
        )
        return dict.fromkeys(("k_proj", "rest"), None if holes else 1)

    def misuse(self):
        return []

    def struck(self):
        return False

    def disarm(self):
        """Nothing is scripted here."""

    def values(self, data, kind):
        return {"rest": 1} if kind in ("hole", "part") else {"k_proj": 1, "rest": 1}

    def checkpoint(self):
        return {"k_proj": 1, "rest": 1}

    def lost_by(self, values):
        return {"k_proj"} - values.keys()

    def loaded_before_it_failed(self, values):
        return {"rest": 1}

    def tensors(self, values):
        from safetensors.torch import load_file

        for name, data in load_file(model_dir() / "model.safetensors").items():
            if "k_proj" in values or "k_proj" not in name:
                yield name, data

    def _add(self, name, prompt, options):
        self.llm.llm_engine.add_request(name, prompt or "", self.params(options))

    def _reload(self, values):
        self.lifecycle.reload_weights()

    def _rpc(self, values):
        self.llm.collective_rpc("reload_weights")

    def _hole(self, values):
        self.lifecycle.reload_weights(weights_iterator=self.tensors(values))

    def _fails(self, values):
        def breaks():
            yield from itertools.islice(self.tensors(values), 5)
            raise ScriptedFault("the trainer's iterator broke")

        self.lifecycle.reload_weights(weights_iterator=breaks())

    def _unseen(self, values):
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        model.load_weights(self.tensors(values))

    def _generate(self, prompts, options):
        return self.llm.generate(list(prompts), self.params(options), use_tqdm=False)

    def _rpc_prepare(self):
        self.llm.collective_rpc(prepare_refit_info)

    def _apply_model(self):
        self.lifecycle.apply_model(type)

    def put_away(self):
        """The next run begins with the same engine: awake, empty, its weights loaded."""
        if self.lifecycle.state is State.CLOSED:
            self.lifecycle = attach(self.llm, sinks=())
            self.lifecycle.resume()
            self.lifecycle.wake_up()
            self.lifecycle.reload_weights()
        undo(self.llm, self.lifecycle)


def run(bench, reached, *, examples, steps=50, start=0):
    """Run the machine on this kind of bench; `reached` counts what came of it. start: of the dice."""

    class OnBench(Machine):
        def start(self, options, found):
            return bench(options, found, reached)

    OnBench.reached = reached
    if TIMES == 1:
        seed(start)(OnBench)
    gc.freeze()  # every recovery collects: not what all the other tests have left behind
    try:
        run_state_machine_as_test(OnBench, settings=profile(examples, steps))
    finally:
        gc.unfreeze()


def tell(reached, on):
    """Print which rows were taken, with what in the engine, and how often each guard held and did not."""
    for line in reached.table():
        report.say(f"rows taken on {on}: {reached.examples} runs, {reached.steps} calls", line)


def test_lifecycle():
    """No sequence of calls to a `Lifecycle` loses a request, misuses the engine or is refused falsely."""
    reached = Reached()
    for start in range(3):  # a row that the dice passed by may come yet
        if reached.missing():
            run(SimulatedBench, reached, examples=400, start=start)
    tell(reached, "Lifecycle")
    assert reached.missing() == []


def test_attached():
    """The same holds of the calls that a trainer makes to an `LLM` that a lifecycle is attached to."""
    reached = Reached()
    run(AttachedBench, reached, examples=200)
    tell(reached, "an attached LLM")
    assert reached.steps > 5_000


@pytest.mark.vllm
def test_vllm(llm):
    """The same rules on a real vLLM: nothing is lost, and no legitimate call refused."""
    VllmBench.learn(llm)
    reached = Reached()
    run(VllmBench, reached, examples=60, steps=25)
    tell(reached, "vLLM")
    assert reached.steps > 500
