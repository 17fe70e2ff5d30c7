"""What trainers do with their engine, replayed: nothing is refused, and their mistakes are named.

The sequences are those of TRL, NeMo-RL, ms-swift and unsloth, in words of our own: which calls in which
order, in which state of the engine. Each runs as it would on an `LLM`, with `attach` added.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine_adapter import attach
from engine_adapter.simulated import SamplingParams, SimulatedEngine, contents, expected_tokens
from lifecycle import DrainTimeout, IllegalCall, LifecycleError, State, WeightsNotValid

PROMPTS = ["why is the sky blue?", "name three fruits", "what is a prime number?"]
NAMES = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"]
STEPS = 3
# Up to 0.25 vLLM can't wake the KV cache first, nor go back to sleep half awake.
OLDER_VLLM = replace(SimulatedEngine.capabilities, kv_first=False, resleep_partial=False, release_kv=False)


def params(tokens=6):
    return SamplingParams(max_tokens=tokens, seed=11)


def trained(step):
    """The weights after a training step, as arrays under the names of a checkpoint."""
    return {name: np.full((2, 2), step * 100 + place, np.float32) for place, name in enumerate(NAMES)}


def right(step):
    """The tokens of every prompt under the weights of a step; 0: those that the engine was built with."""
    weights = {name: contents(value) for name, value in trained(step).items()}
    return [expected_tokens(prompt, params(), 0, weights) for prompt in PROMPTS]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(engine):
    return engine.model_executor.driver_worker.model_runner.model


# -- sequences that are right ----------------------------------------------------------------------------


def trl(llm, watch):
    """Colocated: found asleep at level 2; weights one by one past the engine; caches reset half awake."""
    llm.sleep(level=2)  # its own set-up, before the caller gets hold of the engine
    attach(llm, sinks=[watch])
    for step in range(1, STEPS):
        llm.wake_up(tags=["weights"])
        for name, value in trained(step).items():
            model_of(llm.llm_engine).load_weights([(name, value)])
        llm.llm_engine.reset_prefix_cache(False, False)  # while the KV cache sleeps
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm.generate(PROMPTS, params(), use_tqdm=False)) == right(step)
        llm.sleep(level=2)


class RefitExtension:
    """NeMo-RL's worker methods: the names come first, the values in a second call."""

    def prepare_refit_info(self, info):
        self.info = info

    def update_weights_via_ipc_handles(self, handles):
        return self.model_runner.model.load_weights((name, handles[name]) for name in self.info)

    def cleanup(self):
        self.info = None


def nemo_rl(llm, watch):
    """Built with dummy weights; refitted through worker methods, prepared while asleep."""
    attach(llm, sinks=[watch])
    for step in range(1, STEPS):
        llm.llm_engine.reset_prefix_cache()
        llm.sleep(level=1)
        llm.collective_rpc("prepare_refit_info", args=(NAMES,))
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("update_weights_via_ipc_handles", args=(trained(step),))
        assert llm.wake_up(tags=["kv_cache"])
        assert tokens(llm.generate(PROMPTS, params())) == right(step)
    llm.sleep(level=1)
    llm.collective_rpc("cleanup")


def ms_swift(llm, watch, level=2):
    """Holds the bare engine, probes it, loads in buckets, adapters after them, and says when it is done."""
    holder = SimpleNamespace(engine=llm.llm_engine)
    lifecycle = attach(holder, attr="engine", weights="declared", sinks=[watch])
    engine = holder.engine
    assert not hasattr(engine, "engine")
    assert "tags" in inspect.signature(engine.wake_up).parameters
    for step in range(1, STEPS):
        engine.sleep(level)
        assert engine.model_executor.is_sleeping
        engine.wake_up(tags=["weights"])
        items = list(trained(step).items())
        for bucket in (items[:3], items[3:]):
            model_of(engine).load_weights(bucket)
        engine.add_lora(SimpleNamespace(lora_int_id=step))
        lifecycle.mark_weights_loaded(version=f"step-{step}")
        engine.reset_prefix_cache()
        engine.wake_up(tags=["kv_cache"])
        outputs = {}
        for place, prompt in enumerate(PROMPTS):
            engine.add_request(f"{step}-{place}", prompt, params())
        while engine.has_unfinished_requests():
            outputs.update({o.request_id: o for o in engine.step() if o.finished})
        assert tokens(outputs[f"{step}-{place}"] for place in range(len(PROMPTS))) == right(step)


def unsloth(llm, watch):
    """Wraps `generate` to wake the engine every time, awake or not, and deletes the executor at the end."""
    attach(llm, sinks=[watch])
    plain = llm.generate

    def generate(*args, **kwargs):
        llm.wake_up()
        return plain(*args, **kwargs)

    llm.generate = generate
    for step in range(1, STEPS):
        model_of(llm.llm_engine).load_weights(trained(step).items())
        llm.reset_prefix_cache()
        for _ in range(2):  # the second time it is awake
            assert tokens(llm.generate(PROMPTS, params(), lora_request=None)) == right(step)
        llm.sleep(1)
        llm.wake_up(tags=["weights"])
    llm.wake_up()
    llm.generate = plain
    del llm.llm_engine.model_executor


SEQUENCES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "TRL": (trl, {}),
    "TRL on an older vLLM": (trl, {"capabilities": OLDER_VLLM}),
    "NeMo-RL": (nemo_rl, {"dummy_weights": True, "worker_extension_cls": RefitExtension}),
    "ms-swift": (ms_swift, {}),
    "ms-swift at level 1": (lambda llm, watch: ms_swift(llm, watch, level=1), {}),
    "unsloth": (unsloth, {}),
}


@pytest.mark.parametrize("trainer", SEQUENCES)
def test_no_trainer_is_refused(make_simulated_llm, event_recorder, trainer):
    """A trainer's calls in their own order: none is refused, and every rollout has the right weights."""
    sequence, options = SEQUENCES[trainer]
    llm = make_simulated_llm(parameters=NAMES, **options)
    sequence(llm, event_recorder)
    assert event_recorder.named("refused") == []
    assert "sleeping" in event_recorder.states
    assert llm.misuse == []


def test_a_rollout_thread_is_waited_for(make_simulated_llm, event_recorder):
    """A sleep while another thread generates is no mistake: it is drained, and each output is right."""
    llm = make_simulated_llm(parameters=NAMES, max_num_seqs=1)
    model_of(llm.llm_engine).load_weights(trained(1).items())
    attach(llm, sinks=[event_recorder])
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate(PROMPTS, params())))
    thread.start()
    event_recorder.wait_for("transition", dest="running")
    llm.sleep(level=1)
    llm.wake_up()
    thread.join(10)
    assert tokens(results) == right(1)
    assert event_recorder.named("refused") == []


# -- mistakes ----------------------------------------------------------------------------------------------


def wake_kv_before_the_weights(llm):
    """TRL's loop with the two wakes in the wrong order."""
    llm.sleep(level=2)
    llm.wake_up(tags=["kv_cache"])
    model_of(llm.llm_engine).load_weights(trained(1).items())
    llm.wake_up(tags=["weights"])


def roll_out_before_the_sync(llm):
    """All memory is awake, and the rollout begins before the new weights are in."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    llm.generate(PROMPTS, params())
    model_of(llm.llm_engine).load_weights(trained(1).items())


def forget_one_shard(llm):
    """The sync skips a parameter: its rank sent one less."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    items = [item for item in trained(1).items() if "layers.1.self_attn.k_proj" not in item[0]]
    model_of(llm.llm_engine).load_weights(items)
    llm.wake_up(tags=["kv_cache"])
    llm.generate(PROMPTS, params())


def ignore_a_failed_sleep(llm):
    """NeMo-RL's callers ignore that a sleep failed, and refit under another thread's requests."""
    in_another_thread(lambda: llm.enqueue(PROMPTS, params(50)))
    llm.llm_engine.step()
    with suppress(LifecycleError):
        llm.sleep(level=1, **limits(llm))
    llm.collective_rpc("prepare_refit_info", args=(NAMES,))
    llm.collective_rpc("update_weights_via_ipc_handles", args=(trained(1),))


def resume_after_a_failed_update(llm):
    """The resume stands in `finally`, and so comes after an update that failed too."""
    llm.sleep(level=0, mode="keep")
    llm.faults.add("update_weights", raises=ConnectionError("the trainer's rank is gone"))
    with suppress(ConnectionError):
        try:
            llm.start_weight_update()
            llm.update_weights({"update_info": {"names": NAMES}})
            llm.finish_weight_update()
        finally:
            llm.wake_up()
    llm.generate(PROMPTS, params())


def finish_a_failed_update(llm):
    """The same with the end of the update in `finally`: it cures nothing."""
    llm.faults.add("update_weights", raises=ConnectionError("the trainer's rank is gone"))
    with suppress(ConnectionError):
        try:
            llm.start_weight_update()
            llm.update_weights({"update_info": {"names": NAMES}})
        finally:
            llm.finish_weight_update()
    llm.generate(PROMPTS, params())


def forget_the_reload(llm):
    """Awake again after level 2, and straight on to the next rollout."""
    llm.sleep(level=2)
    llm.wake_up()
    llm.generate(PROMPTS, params())


def sleep_under_a_rollout(llm):
    """The engine is put to sleep while another thread has requests in flight."""
    in_another_thread(lambda: llm.enqueue(PROMPTS, params(50)))
    llm.llm_engine.step()
    llm.sleep(level=1, **limits(llm))


def in_another_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def limits(llm):
    """Where it is guarded, the sleep may take a few steps only; a plain one takes no such argument."""
    return {"max_steps": 3} if hasattr(llm.llm_engine, "lifecycle") else {}


class Mistake(NamedTuple):
    """Who makes it, what is done, the error that it ends in once guarded, and what that says."""

    trainer: str
    do: Callable[[Any], None]
    error: type[LifecycleError]
    says: str
    attach: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    llm: dict[str, Any] = {}  # noqa: RUF012  (never changed)


NEMO_RL = {"worker_extension_cls": RefitExtension}
MISTAKES = [
    Mistake(
        "TRL",
        wake_kv_before_the_weights,
        IllegalCall,
        r"cannot wake_up while sleeping \(level 2\): this vLLM corrupts the model's buffers if the KV cache "
        r"wakes first: wake_up\(\['weights'\]\)",
        llm={"capabilities": OLDER_VLLM},
    ),
    Mistake(
        "TRL",
        roll_out_before_the_sync,
        WeightsNotValid,
        r"cannot generate while partially awake \(.*weights discarded\): load the weights; never loaded: "
        r"model.layers.0.self_attn.q_proj.weight, .* and 3 more",
    ),
    Mistake(
        "TRL",
        forget_one_shard,
        WeightsNotValid,
        r"load the weights; never loaded: model.layers.1.self_attn.k_proj.weight; legal now: reload_weights",
    ),
    Mistake(
        "NeMo-RL",
        ignore_a_failed_sleep,
        IllegalCall,
        r"cannot update_weights_via_ipc_handles while running: it needs weights that are resident, and "
        r"nothing in flight that pause_generation does not keep \(in flight: 0, 1, 2\); legal now: .*step",
        llm=NEMO_RL,
    ),
    Mistake(
        "NeMo-RL",
        resume_after_a_failed_update,
        WeightsNotValid,
        r"cannot generate while partially awake .*: update_weights failed \(ConnectionError.*is gone.*\), "
        r"so they are neither the old nor the new; reload_weights\(\)",
        llm=NEMO_RL,
    ),
    Mistake(
        "NeMo-RL",
        finish_a_failed_update,
        WeightsNotValid,
        r"update_weights failed \(ConnectionError\(.*\)\), so they are neither the old nor the new",
        llm=NEMO_RL,
    ),
    Mistake(
        "ms-swift",
        forget_the_reload,
        WeightsNotValid,
        r"nobody has said that they were loaded since; reload_weights\(\), or load them yourself and then "
        r"mark_weights_loaded\(\)",
        attach={"weights": "declared"},
    ),
    Mistake("unsloth", forget_the_reload, WeightsNotValid, r"load the weights; never loaded: model.layers.0"),
    Mistake(
        "unsloth",
        sleep_under_a_rollout,
        DrainTimeout,
        r"sleep\(level=1, mode=wait\) was rolled back: the engine was not quiet after 3 steps; "
        r"3 requests remain: 0, 1, 2",
    ),
]


def ids(mistake):
    return f"{mistake.trainer}: {mistake.do.__name__}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=ids)
def test_mistake_is_named(make_simulated_llm, mistake):
    """A trainer's mistake ends in an error that names it. The engine never saw it, and goes on right."""
    llm = make_simulated_llm(parameters=NAMES, **mistake.llm)
    lifecycle = attach(llm, **mistake.attach)
    with pytest.raises(mistake.error, match=mistake.says):
        mistake.do(llm)
    assert llm.misuse == []
    if lifecycle.snapshot().in_flight:  # nobody's requests were lost by it
        assert [len(output.outputs[0].token_ids) for output in llm.wait_for_completion()] == [50] * 3
    make_good(llm, lifecycle)
    assert tokens(llm.generate(PROMPTS, params())) == right(2)


def make_good(llm, lifecycle):
    """What should have been done: the memory, the weights, all of them, and a word about it."""
    llm.faults.clear()
    llm.wake_up(tags=["weights"])
    model_of(llm.llm_engine).load_weights(trained(2).items())
    lifecycle.mark_weights_loaded()
    llm.wake_up()
    assert lifecycle.state is State.AWAKE


@pytest.mark.parametrize("mistake", MISTAKES, ids=ids)
def test_the_same_mistake_is_seen_without_a_guard(make_simulated_llm, mistake):
    """On a plain engine nobody raises; the stand-in has noted what happened, and its fixture would fail."""
    llm = make_simulated_llm(parameters=NAMES, **mistake.llm)
    mistake.do(llm)
    assert llm.misuse != []
    llm.misuse.clear()


def test_every_trainer_and_every_mistake_has_a_row():
    """Each trainer has a sequence that is right and a mistake."""
    trainers = {"TRL", "NeMo-RL", "ms-swift", "unsloth"}
    assert {mistake.trainer for mistake in MISTAKES} == trainers
    assert trainers <= set(SEQUENCES)
