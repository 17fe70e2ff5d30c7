"""What plain vLLM does in-process, and what the lifecycle makes of it: one test for each known fact.

Each test first shows plain vLLM's behaviour, where that is cheap, and then the guarded one.
"""

import contextlib
import gc
import os
import pickle
import random
import signal
import threading
import weakref

import pytest

from engine_adapter import VllmInprocess, attach
from lifecycle import (
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    Lifecycle,
    State,
    WeightsNotValid,
)
from lifecycle.table import TAGS
from tests.engines import (
    DEFAULTS,
    core,
    give_batch_queue,
    keep_plain_weights,
    model_dir,
    take_batch_queue,
    worker,
)

pytestmark = pytest.mark.vllm

LENGTH = 24
PROMPTS = [f"prompt number {i}" for i in range(8)]


def sampling(seed, max_tokens=LENGTH, **more):
    from vllm import SamplingParams

    return SamplingParams(seed=seed, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, **more)


def kind(name):
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def add(engine, count, max_tokens=LENGTH, **more):
    for i in range(count):
        engine.add_request(str(i), PROMPTS[i], sampling(i, max_tokens, **more))


def generate(llm, count, max_tokens=LENGTH):
    """The tokens of the first prompts, by `LLM.generate`."""
    outputs = llm.generate(PROMPTS[:count], [sampling(i, max_tokens) for i in range(count)], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def finish(engine, most=1000):
    """Step until nothing is unfinished; the last tokens by request id."""
    done = {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return done
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = list(output.outputs[0].token_ids)
    pytest.fail(f"unfinished after {most} steps")


def spins(engine, steps=100):
    """Whether the engine says that it has work and does nothing at all."""
    return engine.has_unfinished_requests() and not any(engine.step() for _ in range(steps))


def checkpoint():
    from safetensors.torch import load_file

    return load_file(model_dir() / "model.safetensors")


@pytest.fixture(scope="module")
def right(house):
    """The tokens that each prompt gets from the plain engine, alone in it."""
    llm = house.llm()
    return [
        list(llm.generate([prompt], sampling(i), use_tqdm=False)[0].outputs[0].token_ids)
        for i, prompt in enumerate(PROMPTS)
    ]


def test_the_reference_outputs_differ_from_each_other(right):
    """Outputs differ between prompts and within one, or lost and swapped tokens would go unseen."""
    assert len({tuple(tokens) for tokens in right}) == len(PROMPTS)
    assert all(len(set(tokens)) > LENGTH // 2 for tokens in right)


def test_fact_01_waiting_sleep(right, house, guard):
    """Plain: `sleep(mode="wait")` is refused. Guarded: what started ends, the rest is held, all right."""
    with pytest.raises(ValueError, match="not supported in inproc"):
        house.llm().sleep(mode="wait")
    llm, guarded = guard()
    add(llm.llm_engine, 6)
    for _ in range(3):
        assert len(llm.llm_engine.step()) == 4
    report = llm.sleep(level=1, mode="wait")
    assert sorted(report.drained) == ["0", "1", "2", "3"]
    assert report.held == ("4", "5")
    assert guarded.state is State.SLEEPING
    assert llm.wake_up()
    assert finish(llm.llm_engine) == {str(i): right[i] for i in range(6)}


def test_fact_02_aborting_sleep(right, house, guard):
    """Plain: a default sleep loses what is in flight, unfinished for ever. Guarded: each ends once."""
    plain = house.llm().llm_engine
    ids = [plain.add_request(str(i), PROMPTS[i], sampling(i)) for i in range(6)]
    plain.step()
    plain.sleep()
    plain.wake_up()
    assert spins(plain)
    plain.abort_request(ids, internal=True)

    llm, guarded = guard()
    add(guarded, 6)
    for _ in range(3):
        guarded.step()
    assert sorted(llm.sleep(mode="abort").aborted) == ["0", "1", "2", "3", "4", "5"]
    outputs = guarded.step()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 6
    assert {output.request_id: list(output.outputs[0].token_ids) for output in outputs} == {
        str(i): right[i][:3] if i < 4 else [] for i in range(6)
    }
    assert not guarded.has_unfinished_requests()
    guarded.wake_up()
    assert generate(llm, 3) == right[:3]


def fail_next_execution(llm, error):
    """The next forward pass raises."""
    executor = llm.llm_engine.model_executor
    original = executor.execute_model

    def failing(*args, **kwargs):
        executor.execute_model = original
        raise error

    executor.execute_model = failing


def test_fact_03_failed_step(right, house, guard):
    """Plain: after one failed pass every step returns nothing. Guarded: FAILED, each request ends."""
    plain = house.llm()
    add(plain.llm_engine, 3)
    plain.llm_engine.step()
    fail_next_execution(plain, RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        plain.llm_engine.step()
    assert spins(plain.llm_engine)
    house.condemn()
    del plain

    llm, guarded = guard()
    add(guarded, 6)
    for _ in range(2):
        guarded.step()
    fail_next_execution(llm, cause := RuntimeError("lost"))
    with pytest.raises(EngineFailed) as failed:
        guarded.step()
    assert failed.value.__cause__ is cause
    assert failed.value.in_flight == ("0", "1", "2", "3", "4", "5")
    assert guarded.state is State.FAILED
    assert finish(guarded) == {str(i): right[i][:2] if i < 4 else [] for i in range(6)}
    for call in (guarded.step, guarded.sleep, guarded.wake_up, lambda: generate(llm, 1)):
        with pytest.raises(EngineFailed, match="lost"):
            call()


def raise_signal_in_next_execution(llm):
    """Ctrl-C arrives in the middle of the next forward pass."""
    executor = llm.llm_engine.model_executor
    original = executor.execute_model

    def interrupted(*args, **kwargs):
        executor.execute_model = original
        signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    executor.execute_model = interrupted


def test_fact_04_interrupted_generate(right, house, guard, monkeypatch):
    """Plain: Ctrl-C leaves the batch of `generate` in the engine. Guarded: the next one is right."""
    plain = house.llm()
    with monkeypatch.context() as patched:
        patched.setattr(plain.llm_engine, "step", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            generate(plain, 3)
    assert plain.llm_engine.get_num_unfinished_requests() == 3
    assert len(generate(plain, 2)) == 5  # the next caller gets them

    llm, guarded = guard()
    raise_signal_in_next_execution(llm)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, 3)
    assert guarded.state is State.AWAKE
    assert llm.llm_engine.output_processor.get_num_unfinished_requests() == 0
    assert generate(llm, 3) == right[:3]


def test_fact_05_steps_while_asleep(right, house, guard):
    """Plain: a step while asleep does nothing, and requests are taken. Guarded: refused, and held."""
    plain = house.llm()
    plain.sleep(1)
    add(plain.llm_engine, 1)
    assert spins(plain.llm_engine)
    plain.llm_engine.abort_request(["0"])
    plain.wake_up()

    llm, guarded = guard()
    guarded.sleep(1)
    add(llm.llm_engine, 2)
    assert core(llm).scheduler.get_num_unfinished_requests() == 0
    with pytest.raises(IllegalCall, match=r"cannot step while sleeping .*legal now: .*wake_up"):
        llm.llm_engine.step()
    guarded.wake_up(["weights"])
    with pytest.raises(IllegalCall, match="cannot step while partially awake"):
        llm.llm_engine.step()
    guarded.wake_up()
    assert finish(llm.llm_engine) == {"0": right[0], "1": right[1]}
    guarded.sleep(0)
    with pytest.raises(IllegalCall, match="cannot step while sleeping"):
        llm.llm_engine.step()


def test_fact_06_wake_tags(house, guard):
    """Plain: odd tags wake nothing, or half. Guarded: refused, and a tag that is back is left out."""
    plain = house.llm()
    asleep = plain.llm_engine.model_executor.sleeping_tags
    plain.sleep(1)
    assert not plain.wake_up(["bogus"])
    assert not plain.wake_up([])
    plain.wake_up(["weights"])
    assert not plain.wake_up(["weights", "kv_cache"])
    assert asleep == {"kv_cache"}
    plain.wake_up()
    plain.sleep(1)
    with pytest.raises(KeyError):
        plain.wake_up(["weights", "weights"])
    plain.wake_up(["kv_cache"])

    llm, guarded = guard()
    assert llm.wake_up().noop
    llm.sleep(1)
    for tags in (["bogus"], [], ["weights", "weights"]):
        with pytest.raises(InvalidArgument, match=r"wake_up: .*tag"):
            llm.wake_up(tags)
        assert llm.llm_engine.model_executor.sleeping_tags == {"weights", "kv_cache"}
    assert llm.wake_up(["scheduling"]).noop
    assert not llm.wake_up(["weights"])
    assert llm.wake_up(["weights", "kv_cache"]).tags == ("kv_cache",)
    assert guarded.state is State.AWAKE
    llm.sleep(0)
    assert not llm.wake_up(["kv_cache"])
    assert guarded.state is State.SLEEPING
    assert llm.wake_up(["scheduling"])


def test_fact_07_sleep_while_partly_asleep(house, guard):
    """Plain: sleep while the weights sleep frees nothing, silently. Guarded: it happens or is refused."""
    plain = house.llm()
    plain.sleep(1)
    plain.wake_up(["kv_cache"])
    plain.sleep(1)
    assert plain.llm_engine.model_executor.sleeping_tags == {"weights"}
    plain.wake_up()

    llm, guarded = guard()
    guarded.sleep(1)
    with pytest.raises(IllegalCall, match=r"level 1.*: wake_up\(\) first"):
        guarded.sleep(2)
    guarded.wake_up(["kv_cache"])
    with pytest.raises(IllegalCall, match=r"wake_up\(\['weights'\]\) first"):
        guarded.sleep(1)
    guarded.wake_up(["weights"])
    guarded.sleep(1)
    guarded.wake_up(["weights"])
    guarded.sleep(1)
    assert llm.llm_engine.model_executor.sleeping_tags == {"weights", "kv_cache"}
    assert guarded.state is State.SLEEPING


def test_fact_08_levels(right, house, guard):
    """Plain: any number is a level, and one above 2 loses the weights. Guarded: 0, 1 or 2."""
    plain = house.llm()
    plain.sleep(-1)
    plain.wake_up()
    plain.sleep(7)
    plain.wake_up()
    assert generate(plain, 1) != right[:1]
    plain.collective_rpc("reload_weights")
    plain.sleep(1)  # the KV cache has NaN in it by now
    plain.wake_up()

    llm, guarded = guard()
    for level in (-1, 3, 7):
        with pytest.raises(InvalidArgument, match="level must be 0, 1 or 2"):
            llm.sleep(level)
    assert guarded.state is State.AWAKE
    assert generate(llm, 1) == right[:1]


def test_fact_09_half_done_sleep_and_wake(right, house, guard):
    """Plain: a sleep or wake that raised half-way is forgotten. Guarded: FAILED, nothing serves."""
    plain = house.llm()
    worker(plain).fail_next_sleep = RuntimeError("no sleep")
    with pytest.raises(RuntimeError, match="no sleep"):
        plain.sleep(1)
    assert core(plain).is_scheduler_paused()
    assert plain.wake_up()
    plain.sleep(1)
    worker(plain).fail_next_wake = RuntimeError("no wake")
    with pytest.raises(RuntimeError, match="no wake"):
        plain.wake_up()
    assert plain.llm_engine.model_executor.sleeping_tags == {"weights", "kv_cache"}
    plain.wake_up()

    llm, guarded = guard()
    guarded.sleep(1)
    add(guarded, 1)
    worker(llm).fail_next_wake = RuntimeError("no wake")
    with pytest.raises(EngineFailed, match="no wake") as failed:
        llm.wake_up()
    assert failed.value.held == ("0",)
    assert guarded.state is State.FAILED
    with pytest.raises(EngineFailed, match="no wake"):
        llm.wake_up()


def test_fact_10_ids_of_an_abort(house, guard):
    """Plain: an internal id aborts nothing unless it is said to be one. Guarded: either kind does."""
    plain = house.llm().llm_engine
    internal = plain.add_request("a", PROMPTS[0], sampling(0))
    plain.abort_request([internal])
    assert plain.has_unfinished_requests()
    plain.abort_request(["a"])
    assert not plain.has_unfinished_requests()

    llm, guarded = guard()
    internal = llm.llm_engine.add_request("a", PROMPTS[0], sampling(0))
    assert internal != "a"
    llm.llm_engine.abort_request([internal])
    llm.llm_engine.add_request("b", PROMPTS[0], sampling(0, n=2))
    llm.llm_engine.abort_request(["b", "nobody"])
    assert guarded.state is State.AWAKE
    assert core(llm).scheduler.get_num_unfinished_requests() == 0
    assert not llm.llm_engine.output_processor.parent_requests


def test_fact_11_id_given_twice(right, house, guard):
    """Plain: a live id used again gives two last outputs under one id. Guarded: it is refused."""
    plain = house.llm().llm_engine
    add(plain, 1, max_tokens=3)
    add(plain, 1, max_tokens=3)
    ends = 0
    while plain.has_unfinished_requests():
        ends += sum(output.finished for output in plain.step())
    assert ends == 2

    _, guarded = guard()
    add(guarded, 1)
    with pytest.raises(InvalidArgument, match="'0' is live"):
        add(guarded, 1)
    assert finish(guarded) == {"0": right[0]}
    add(guarded, 1)  # its output was taken: free again
    assert finish(guarded) == {"0": right[0]}


def test_fact_12_outputs_of_an_abort(right, house, guard):
    """Plain: an abort gives no output. Guarded: nor does the caller's; a sleep's gives the tokens so far."""
    plain = house.llm().llm_engine
    add(plain, 1)
    plain.step()
    plain.abort_request(["0"])
    assert not any(plain.step() for _ in range(3))

    llm, guarded = guard()
    for i, name in enumerate(("CUMULATIVE", "DELTA", "FINAL_ONLY")):
        guarded.add_request(str(i), PROMPTS[i], sampling(i, output_kind=kind(name)))
    guarded.add_request("mine", PROMPTS[3], sampling(3))
    for _ in range(3):
        guarded.step()
    guarded.abort_request(["mine"])
    guarded.sleep(1, mode="abort")
    outputs = {output.request_id: output for output in guarded.step()}
    assert sorted(outputs) == ["0", "1", "2"]
    assert all(output.finished for output in outputs.values())
    assert list(outputs["0"].outputs[0].token_ids) == right[0][:3]
    assert list(outputs["1"].outputs[0].token_ids) == []  # a delta: all three were handed out
    assert list(outputs["2"].outputs[0].token_ids) == right[2][:3]
    guarded.wake_up()

    guarded.add_request("n", PROMPTS[0], sampling(0, n=3, output_kind=kind("FINAL_ONLY")))
    guarded.step()
    guarded.step()
    guarded.sleep(1, mode="abort")
    (output,) = guarded.step()
    assert [len(sample.token_ids) for sample in output.outputs] == [2, 2, 2]
    assert not llm.llm_engine.output_processor.parent_requests
    assert not llm.llm_engine.output_processor.request_states


def test_fact_13_started_samples_stay_together(house, guard):
    """Plain: pausing splits a started `n=6`, nothing is delivered. Guarded: a drain finishes all of it."""
    from vllm.v1.core.sched.interface import PauseState

    llm = house.llm()
    plain, scheduler = llm.llm_engine, core(llm).scheduler
    params = sampling(0, max_tokens=6, n=6, output_kind=kind("FINAL_ONLY"))
    plain.add_request("n", PROMPTS[0], params)
    plain.step()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not any(plain.step() for _ in range(20))
    assert len(scheduler.waiting) == 2
    scheduler.set_pause_state(PauseState.UNPAUSED)
    (expected,) = [output for _ in range(20) for output in plain.step()]

    llm, guarded = guard()
    guarded.add_request("n", PROMPTS[0], params)
    guarded.step()
    report = guarded.sleep(1, mode="wait")
    assert report.drained == ("n",)
    assert report.held == ()
    (output,) = guarded.step()
    samples = [list(sample.token_ids) for sample in output.outputs]
    assert samples == [list(sample.token_ids) for sample in expected.outputs]
    assert [len(sample) for sample in samples] == [6] * 6


def test_fact_14_cache_kept_while_requests_run(right, house, guard):
    """Plain: no reset of the prefix cache while requests run. Guarded: recorded, and no load over them."""
    plain = house.llm().llm_engine
    add(plain, 1)
    plain.step()
    assert plain.reset_prefix_cache() is False
    plain.abort_request(["0"])
    plain.step()

    llm, guarded = guard()
    add(guarded, 1)
    guarded.step()
    assert llm.llm_engine.reset_prefix_cache() is False
    assert guarded.events(1)[0]["call"] == "reset_prefix_cache"
    assert guarded.events(1)[0]["error"] == "returned False"
    with pytest.raises(IllegalCall, match="nothing in flight"):
        guarded.reload_weights()
    guarded.sleep(0, mode="keep")
    with pytest.raises(IllegalCall, match="nothing in flight"):
        llm.collective_rpc("reload_weights")
    guarded.wake_up()
    assert finish(guarded) == {"0": right[0]}


@pytest.fixture
def launching_ahead(house):
    llm = house.llm()
    give_batch_queue(llm)
    yield llm
    take_batch_queue(llm)


def test_fact_15_batches_launched_ahead(right, launching_ahead, guard):
    """Plain: a sleep leaves a launched batch in the queue. Guarded: it is stepped out first."""
    plain = launching_ahead.llm_engine
    add(plain, 3)
    for _ in range(4):
        plain.step()
    plain.sleep(1, mode="keep")
    assert core(launching_ahead).batch_queue
    plain.wake_up()
    plain.abort_request(["0", "1", "2"])
    while core(launching_ahead).scheduler.has_requests() or core(launching_ahead).batch_queue:
        plain.step()

    llm, guarded = guard()
    for mode in ("keep", "wait"):
        add(guarded, 6)
        for _ in range(5):
            guarded.step()
        guarded.sleep(1, mode=mode)
        assert not core(llm).batch_queue
        guarded.wake_up()
        assert finish(guarded) == {str(i): right[i] for i in range(6)}


def test_fact_16_sleep_that_asserts(right, guard):
    """Plain: sleep asserts that nobody took memory meanwhile. Guarded: FAILED, partial tokens kept."""
    llm, guarded = guard()
    add(guarded, 2)
    for _ in range(3):
        guarded.step()
    worker(llm).fail_next_sleep = AssertionError("Memory usage increased after sleeping.")
    with pytest.raises(EngineFailed, match="Memory usage increased") as failed:
        guarded.sleep(1, mode="keep")
    assert isinstance(failed.value.__cause__, AssertionError)
    assert failed.value.in_flight == ("0", "1")
    assert guarded.state is State.FAILED
    outputs = guarded.step()
    assert {output.request_id: list(output.outputs[0].token_ids) for output in outputs} == {
        "0": right[0][:3],
        "1": right[1][:3],
    }
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}


@pytest.fixture(scope="module")
def recovered(right, house):
    """A lifecycle that built its engine, lost it in a wake with a request held, and recovered."""
    import torch

    house.close()
    keep_plain_weights()
    parts = {}

    told = {"alive at build": []}

    def build():
        told["alive at build"].append([name for name, part in parts.items() if part() is not None])
        engine = VllmInprocess(model=str(model_dir()), **DEFAULTS)
        executor = engine.raw.model_executor
        parts["engine"] = weakref.ref(engine.raw)
        parts["core"] = weakref.ref(engine.raw.engine_core.engine_core)
        parts["model"] = weakref.ref(executor.driver_worker.worker.model_runner.model)
        return engine

    lifecycle = Lifecycle(build, sinks=())
    lifecycle.sleep(1)
    add(lifecycle, 2)
    lifecycle._core.engine.raw.model_executor.driver_worker.worker.fail_next_wake = RuntimeError("no wake")
    with contextlib.suppress(EngineFailed):
        lifecycle.wake_up()
    told["readmitted"] = lifecycle.recover()
    told["distributed"] = torch.distributed.is_initialized()
    told["served"] = finish(lifecycle)
    told["slept"] = lifecycle.sleep(2)
    lifecycle.wake_up()
    lifecycle.reload_weights()
    add(lifecycle, 2)
    told["served again"] = finish(lifecycle)
    lifecycle.close()
    told["distributed at the end"] = torch.distributed.is_initialized()
    return told


def test_fact_17_one_engine_at_a_time(recovered):
    """Plain: one sleep-mode engine a process. Guarded: recover drops the old one, then builds the new."""
    assert recovered["alive at build"] == [[], []]


def test_fact_18_live_lists(right, house, guard):
    """Plain: the list in a cumulative output grows after the step. Guarded: what waits is a snapshot."""
    plain = house.llm().llm_engine
    add(plain, 1, max_tokens=6)
    outputs = [output for _ in range(6) for output in plain.step()]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 6

    _, guarded = guard()
    add(guarded, 2, max_tokens=6, logprobs=0)
    guarded.step()
    guarded.sleep(1, mode="wait")
    outputs = [output.outputs[0] for output in guarded.step() if output.request_id == "1"]
    assert [list(output.token_ids) for output in outputs] == [right[1][:count] for count in range(2, 7)]
    assert [len(output.logprobs) for output in outputs] == [2, 3, 4, 5, 6]


def interrupt_after(seconds):
    thread = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    thread.start()
    return thread


def test_fact_19_interrupts_at_any_moment(right, llm, guarded):
    """Plain: Ctrl-C inside a step poisons the engine. Guarded: 60 of 60 times the next call is right."""
    moments = random.Random(19)
    wrong = []
    for attempt in range(60):
        timer = interrupt_after(moments.uniform(0.001, 0.04))
        with pytest.raises(KeyboardInterrupt):
            generate(llm, 3, max_tokens=200)
        timer.join()
        if generate(llm, 3, max_tokens=5) != [tokens[:5] for tokens in right[:3]]:
            wrong.append(attempt)
    assert wrong == []
    assert guarded.state is State.AWAKE
    assert not llm.llm_engine.output_processor.request_states


def test_fact_20_calls_take_each_others_outputs(right, house, guard):
    """Plain: `generate` returns others' requests and fails on their ids. Guarded: each gets its own."""
    plain = house.llm()
    add(plain.llm_engine, 1, max_tokens=3)
    assert len(generate(plain, 2)) == 3
    plain.llm_engine.add_request("mine", PROMPTS[5], sampling(5, 3))
    with pytest.raises(ValueError, match="invalid literal for int"):
        generate(plain, 2)

    llm, guarded = guard()
    llm.llm_engine.add_request("mine", PROMPTS[5], sampling(5))
    llm.llm_engine.add_request("mine too", PROMPTS[6], sampling(6))
    assert generate(llm, 3) == right[:3]
    assert finish(guarded) == {"mine": right[5], "mine too": right[6]}


def test_fact_21_new_engine_after_a_failure(recovered, right):
    """Plain: an engine's end takes `torch.distributed` along. Guarded: recover serves and sleeps."""
    assert recovered["readmitted"] == ("0", "1")
    assert recovered["distributed"]
    assert recovered["served"] == {"0": right[0], "1": right[1]}
    assert recovered["slept"].level == 2
    assert recovered["served again"] == recovered["served"]
    assert not recovered["distributed at the end"]


def test_fact_22_repr_pickling_and_the_end(house):
    """Plain: `repr(llm)` asks the workers, no pickle, `del llm` frees the engine. Guarded: the same."""
    house.condemn()  # an engine that no earlier test, if it failed, still refers to
    llm = house.llm()
    shown = repr(llm)
    house._llm = None  # its own name for it would keep it alive
    lifecycle = attach(llm, sinks=())
    lifecycle.sleep(1)
    llm._cached_repr = None
    assert repr(llm) == shown
    assert "guarded" in repr(llm.llm_engine)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(llm)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(llm.llm_engine)
    engine, engine_core = weakref.ref(lifecycle._core.engine.raw), weakref.ref(core(llm))
    del llm, lifecycle
    freed = [engine() is None]
    gc.collect()
    freed.append(engine_core() is None)
    gc.collect()  # whatever came out, the next engine must find this one gone
    gc.collect()
    assert freed == [True, True]


def reload_by_rpc(llm, weights):
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def load_into_the_model(llm, weights):
    """As TRL does: past every call that could be watched."""
    worker(llm).model_runner.model.load_weights(weights.items())


@pytest.mark.parametrize("load", [reload_by_rpc, load_into_the_model])
def test_fact_23_holes_in_a_load(right, house, guard, load):
    """Plain: a load without a `k_proj` is accepted in silence. Guarded: it is named and not served."""
    holes = {name: data for name, data in checkpoint().items() if "layers.1.self_attn.k_proj" not in name}
    assert len(holes) == len(checkpoint()) - 1
    load(house.llm(), holes)  # no error
    load(house.llm(), checkpoint())

    llm, guarded = guard()
    guarded.sleep(2)
    assert not guarded.wake_up(["weights"])
    load(llm, holes)
    assert not guarded.wake_up()
    assert guarded.state is State.PARTIALLY_AWAKE
    with pytest.raises(WeightsNotValid, match=r"layers\.1\.self_attn\.qkv_proj") as refused:
        generate(llm, 1)
    assert refused.value.missing == ("model.layers.1.self_attn.qkv_proj.weight",)
    with pytest.raises(WeightsNotValid):
        guarded.mark_weights_loaded()
    load(llm, checkpoint())
    assert guarded.wake_up()
    assert generate(llm, 3) == right[:3]


def test_fact_24_cache_of_the_old_weights(house, guard):
    """Plain: a prefix cached with old weights gives tokens of neither model. Guarded: of the new one."""
    prompt = "a prompt that is long enough to fill a block of the cache " * 3
    greedy = sampling(None, max_tokens=8)
    greedy.temperature = 0.0
    new = {name: data.roll(1, 0) for name, data in checkpoint().items()}

    def tokens(holder):
        return list(holder.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    plain = house.llm()
    old_tokens = tokens(plain)
    plain.sleep(0)
    reload_by_rpc(plain, new)
    plain.wake_up()
    mixed = tokens(plain)
    plain.reset_prefix_cache()
    new_tokens = tokens(plain)
    assert mixed not in (old_tokens, new_tokens)
    reload_by_rpc(plain, checkpoint())
    plain.reset_prefix_cache()

    llm, guarded = guard()
    for asleep in (True, False):
        assert tokens(llm) == old_tokens
        if asleep:
            guarded.sleep(0)
        reload_by_rpc(llm, new)
        guarded.wake_up()
        assert tokens(llm) == new_tokens
        reload_by_rpc(llm, checkpoint())
    assert tokens(llm) == old_tokens


def test_every_tag_that_vllm_knows_is_known():
    """The tags of the table are those that vLLM's executor puts to sleep, and `scheduling`."""
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert set(SLEEP_TAGS) | {"scheduling"} == TAGS
