"""The stand-in for `LLM`: plain it has vLLM's surface and hazards; attached it is guarded like one."""

import enum
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine_adapter import SimulatedLLM, attach
from engine_adapter.simulated import (
    OutputKind,
    SamplingParams,
    contents,
    encode,
    expected_output,
    make_weights,
)
from engine_adapter.simulated_llm import SimulatedLLMEngine
from lifecycle import Closed, IllegalCall, InvalidArgument, LifecycleError, State, WeightsNotValid
from tests.test_contract import simulated_params, vllm_params

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["a prompt", "another", "and a third one, which is longer"]


@pytest.fixture
def llm():
    return SimulatedLLM()


def params(tokens=8, **options):
    return SamplingParams(max_tokens=tokens, seed=3, **options)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def right(prompts=PROMPTS, weights=None, **options):
    """What an undisturbed run gives."""
    return [expected_output(prompt, params(**options), 0, weights).token_ids for prompt in prompts]


def add(holder, request_id="r", prompt="a prompt", tokens=8, **options):
    return holder.llm_engine.add_request(request_id, prompt, params(tokens, **options))


# -- plain: generation ---------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """`generate` returns one finished output a prompt, in order, whoever is finished first."""
    each = [params(9), params(2), params(5)]
    outputs = llm.generate(PROMPTS, each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finished for output in outputs)
    assert llm.misuse == []


@pytest.mark.parametrize(
    "prompt",
    ["a prompt", encode("a prompt"), {"prompt": "a prompt"}, {"prompt_token_ids": encode("a prompt")}],
)
def test_kinds_of_prompts(llm, prompt):
    """A str, token ids, or a dict with either, alone or in a list, give the same tokens."""
    wanted = right(["a prompt"])
    assert tokens(llm.generate(prompt, params())) == wanted
    assert tokens(llm.generate([prompt, prompt], params())) == wanted * 2


def test_only_last_outputs_are_made(llm):
    """As in vLLM the parameters that were given are told to be final only; `n` samples come as one output."""
    mine = params(n=3, output_kind=OutputKind.DELTA)
    (output,) = llm.generate("a prompt", mine)
    assert mine.output_kind is OutputKind.FINAL_ONLY
    assert [sample.index for sample in output.outputs] == [0, 1, 2]


def test_text_is_what_the_tokenizer_decodes(llm):
    """The tokenizer, the engine's text and the chat template agree."""
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, params())
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert output.prompt_token_ids == prompt
    assert tokenizer.decode(prompt) == output.prompt == "<user>hello\n<assistant>"
    assert len(llm.chat([messages, messages], params())) == 2


def test_enqueue_and_wait(llm):
    """What was enqueued, prompts or conversations, is waited for together."""
    assert len(llm.enqueue(PROMPTS, params())) == 3
    llm.enqueue_chat([{"role": "user", "content": "hello"}], params())
    assert tokens(llm.wait_for_completion())[:3] == right()
    assert llm.wait_for_completion() == []


def test_logprobs_have_vllms_names(llm):
    """Each token's log probability is found by token, and is a number and an object."""
    (output,) = llm.generate("a prompt", params(logprobs=0))
    entry = output.outputs[0].logprobs[2]
    assert list(entry) == [output.outputs[0].token_ids[2]]
    value = next(iter(entry.values()))
    assert value.logprob == value <= 0
    assert value.rank == 1


def test_batch_with_a_bad_prompt_leaves_nothing_behind(llm):
    """One prompt that can't be served takes its batch back out."""
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["a", ""], params())
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(ValueError, match=r"lengths of prompts \(2\) and params \(1\)"):
        llm.generate(["a", "b"], [params()])


def test_parameters_of_another_make():
    """Anything with vLLM's fields is taken as parameters; what has none of them is a TypeError."""
    kinds = enum.Enum("kinds", {"CUMULATIVE": 0, "DELTA": 1, "FINAL_ONLY": 2})
    foreign = SimpleNamespace(
        n=1,
        max_tokens=4,
        seed=3,
        temperature=0.5,
        stop=["zzzz"],
        output_kind=kinds.DELTA,
        logprobs=None,
        ignore_eos=True,
        min_p=0.1,
    )
    llm = SimulatedLLM()
    assert tokens(llm.generate(PROMPTS, foreign)) == right(tokens=4)
    assert foreign.output_kind is kinds.FINAL_ONLY
    with pytest.raises(TypeError, match="SimpleNamespace"):
        llm.llm_engine.add_request("r", "a", SimpleNamespace(task="embed"))


@pytest.mark.vllm
def test_vllms_own_parameters():
    """Parameters of vLLM's own give the tokens of ours with the same fields."""
    llm = SimulatedLLM()
    ours = tokens(llm.generate(PROMPTS, simulated_params(7)))
    assert tokens(llm.generate(PROMPTS, vllm_params(7))) == ours


# -- plain: vLLM's hazards -------------------------------------------------------------------------------


def test_mode_wait_is_refused_by_the_engine(llm):
    """`sleep(mode="wait")` is a ValueError, and nothing was touched."""
    llm.enqueue(PROMPTS, params())
    for mode in ("wait", "bogus"):
        with pytest.raises(ValueError, match=mode):
            llm.sleep(mode=mode)
    assert not llm.llm_engine.is_sleeping()
    assert tokens(llm.wait_for_completion()) == right()
    assert llm.misuse == []


@pytest.mark.parametrize("level", [0, 1, 2])
def test_default_sleep_loses_requests(llm, level):
    """The default mode drops what is in flight, unfinished for ever; here that is noted, and ends."""
    add(llm)
    llm.llm_engine.step()
    llm.sleep(level)
    llm.wake_up()
    assert llm.llm_engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match=r"spin here for ever.*1 requests are unfinished"):
        llm.wait_for_completion()
    assert f"sleep({level}, mode='abort') with requests in flight: 1 requests lost" in llm.misuse


def test_keep_freezes_requests(llm):
    """Mode "keep" freezes what is in flight, and it goes on after the wake."""
    llm.enqueue(PROMPTS, params())
    llm.llm_engine.step()
    llm.sleep(1, mode="keep")
    assert llm.wake_up() is True
    assert tokens(llm.wait_for_completion()) == right()
    assert llm.misuse == []


def test_adding_asleep_is_accepted_and_stepping_does_nothing(llm):
    """Asleep a request is taken and never served; the engine takes note of both."""
    llm.sleep(1)
    add(llm)
    assert llm.llm_engine.step() == []
    assert llm.misuse == [
        "add(r) while memory is asleep; accepted",
        "step while paused or asleep: nothing happens",
    ]


def test_garbage_is_served_after_level_2(llm):
    """Nobody loaded the weights after level 2: tokens come, and they are not the right ones."""
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm.generate(PROMPTS, params())) != right()
    assert "weights not loaded" in llm.misuse[0]


@pytest.mark.parametrize(
    ("tags", "asleep", "awake"),
    [
        (None, set(), True),
        (["weights"], {"kv_cache"}, False),
        (["kv_cache", "weights"], set(), True),
        (["scheduling"], {"weights", "kv_cache"}, False),
        ([], {"weights", "kv_cache"}, False),
        (["bogus"], {"weights", "kv_cache"}, False),
    ],
)
def test_wakes(llm, tags, asleep, awake):
    """A wake maps what it names, says whether all is back, and ignores what it does not know."""
    llm.sleep(1)
    assert llm.wake_up(tags) is awake
    assert llm.llm_engine.model_executor.sleeping_tags == asleep
    assert llm.llm_engine.model_executor.is_sleeping is bool(asleep)
    assert llm.llm_engine.is_sleeping() is not awake


def test_tag_given_twice(llm):
    """As in vLLM the memory is woken and a KeyError follows."""
    llm.sleep(1)
    with pytest.raises(KeyError, match="weights"):
        llm.wake_up(["weights", "weights"])
    assert llm.llm_engine.model_executor.sleeping_tags == {"kv_cache"}


def test_any_wake_ends_a_pause(llm):
    """At level 0 whatever tags end the pause, an empty list too."""
    for tags in (None, [], ["kv_cache"], ["scheduling"]):
        llm.sleep(0)
        assert llm.llm_engine.is_sleeping()
        assert llm.wake_up(tags) is True
        assert not llm.llm_engine.is_sleeping()
    assert llm.misuse == []


def test_releasing_kv_memory_needs_a_pause(llm):
    """`release_kv_cache_memory` raises unless paused, quiet and resident."""
    with pytest.raises(RuntimeError, match="pause"):
        llm.release_kv_cache_memory()
    llm.sleep(0)
    llm.release_kv_cache_memory()
    assert llm.llm_engine.model_executor.sleeping_tags == {"kv_cache"}
    with pytest.raises(RuntimeError, match="resident"):
        llm.release_kv_cache_memory()
    assert llm.wake_up(["kv_cache"]) is True
    assert llm.misuse == []


def test_aborting_by_either_id(llm):
    """A request is aborted by its caller's id, or by the engine's with `internal`; no output follows."""
    engine_id = add(llm, "one")
    add(llm, "two", n=2)
    llm.llm_engine.abort_request([engine_id])  # the wrong kind of id aborts nothing
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    llm.llm_engine.abort_request([engine_id], internal=True)
    llm.llm_engine.abort_request(["two"])
    assert not llm.llm_engine.has_unfinished_requests()


def test_prefix_cache(llm):
    """It can't be dropped under running requests, unless these are to be computed anew."""
    llm.enqueue(PROMPTS, params())
    llm.llm_engine.step()
    assert llm.reset_prefix_cache() is False
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    assert tokens(llm.wait_for_completion()) == right()
    assert llm.reset_prefix_cache() is True


# -- plain: weights --------------------------------------------------------------------------------------


def model_of(llm):
    """The way that trainers go."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


NEW = make_weights(5)


class Extension:
    """Worker methods of a trainer's own."""

    def refit(self, weights):
        return self.model_runner.model.load_weights(weights)


@pytest.mark.parametrize(
    "load",
    [
        lambda llm: model_of(llm).load_weights(NEW.items()),
        lambda llm: llm.llm_engine.model_executor.driver_worker.worker.get_model().load_weights(NEW.items()),
        lambda llm: llm.collective_rpc("load_weights", args=(NEW.items(),)),
        lambda llm: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": NEW.items()}),
        lambda llm: llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(NEW.items())),
        lambda llm: llm.apply_model(lambda model: model.load_weights(NEW.items())),
        lambda llm: llm.collective_rpc("refit", args=(NEW.items(),)),
    ],
)
def test_ways_to_load(load):
    """Whichever way they go in, new weights give the new tokens."""
    llm = SimulatedLLM(worker_extension_cls=Extension)
    load(llm)
    assert dict(model_of(llm).named_parameters()) == NEW
    assert tokens(llm.generate(PROMPTS, params())) == right(weights=NEW)
    assert llm.misuse == []


def test_load_while_another_thread_steps_is_noted(llm):
    """The model object is memory: writing to it under a running step is noted, whoever does it."""
    inside, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=llm.collective_rpc, args=(lambda worker: (inside.set(), go.wait(5)),))
    thread.start()
    assert inside.wait(5)
    model_of(llm).load_weights(NEW.items())
    go.set()
    thread.join()
    assert llm.misuse == ["load_weights while another call is inside the engine"]


def test_real_arrays_are_values(llm):
    """Tensors and arrays count by their contents: equal ones are the same weights, others are not."""
    zeros, ones = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    names = [name for name, _ in model_of(llm).named_parameters()]
    runs = []
    for value in (zeros, ones, zeros.copy()):
        model_of(llm).load_weights((name, value) for name in names)
        llm.reset_prefix_cache()
        runs.append(tokens(llm.generate(PROMPTS, params())))
    assert runs[0] == runs[2] != runs[1]
    assert contents(7) == 7
    assert contents("text") != contents("other")


@pytest.mark.vllm
def test_torch_tensors_are_values():
    """Tensors of any type, with or without a gradient, count by their numbers."""
    import torch

    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        assert contents(torch.ones(4, dtype=dtype)) == contents(np.ones(4))
    assert contents(torch.nn.Parameter(torch.ones(4))) == contents(np.ones(4))
    assert contents(torch.ones(4)) != contents(torch.zeros(4))


def test_names_of_a_model_of_ones_own():
    """`parameters` are the names that the model has, and no others."""
    llm = SimulatedLLM(parameters=["model.embed.weight", "model.norm.weight"])
    assert [name for name, _ in model_of(llm).named_parameters()] == [
        "model.embed.weight",
        "model.norm.weight",
    ]
    with pytest.raises(ValueError, match=r"no parameter named 'lm_head'; `parameters=`"):
        model_of(llm).load_weights([("lm_head", 1)])


def test_update_calls(llm):
    """Between start and finish the weights are torn; named parameters get values that nobody had before."""
    names = list(make_weights())
    before = tokens(llm.generate(PROMPTS, params()))
    llm.init_weight_transfer_engine({"init_info": {}})
    runs = []
    for version in ("one", "two"):
        llm.start_weight_update()
        assert llm.simulated.torn
        llm.update_weights({"update_info": {"names": names}})
        llm.finish_weight_update(version)
        assert not llm.simulated.torn
        assert llm.get_weight_version() == version
        llm.reset_prefix_cache()
        runs.append(tokens(llm.generate(PROMPTS, params())))
    llm.shutdown_weight_transfer_engine()
    llm.start_draft_weight_update()
    llm.update_weight_version("three")
    assert llm.get_weight_version() == "three"
    assert before != runs[0] != runs[1] != before
    assert llm.misuse == []


def test_what_trainers_read(llm):
    """The few attributes of the configuration that trainers read are there."""
    engine = llm.llm_engine
    assert engine.vllm_config.parallel_config.world_size == llm.get_world_size() == 1
    assert engine.vllm_config.load_config.load_format == "auto"
    assert engine.model_config.max_model_len == llm.model_config.max_model_len == 4096
    assert engine.get_supported_tasks() == ("generate",)
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_metrics() == []
    assert engine.add_lora("adapter")
    assert engine.pin_lora(1)
    assert engine.remove_lora(1)
    assert engine.list_loras() == set()
    for quiet in (llm.start_profile, llm.stop_profile, llm.reset_mm_cache, engine.reset_encoder_cache):
        quiet()
    engine.do_log_stats()
    assert not hasattr(engine, "engine")
    assert not hasattr(engine, "engine_core")
    assert llm.misuse == []


# -- attached --------------------------------------------------------------------------------------------


def test_attached_it_is_guarded(llm):
    """The calls that lose or hang a plain one are drained or refused."""
    lifecycle = attach(llm)
    llm.enqueue(PROMPTS, params())
    llm.llm_engine.step()
    report = llm.sleep(2)
    assert report.drained == ("0", "1", "2")
    with pytest.raises(IllegalCall, match="cannot generate while sleeping"):
        llm.generate("more")
    assert not llm.wake_up()
    with pytest.raises(WeightsNotValid, match="never loaded: embed_tokens"):
        llm.generate("more")
    model_of(llm).load_weights(NEW.items())
    assert tokens(llm.generate(PROMPTS, params())) == right(weights=NEW)
    assert tokens(llm.wait_for_completion()) == right()
    assert lifecycle.state is State.AWAKE
    assert llm.misuse == []


def test_signatures_stay_and_detach_removes_everything(llm):
    """As on vLLM: signatures and attributes stay, and `detach` leaves nothing."""

    def signatures():
        names = [name for name, _ in inspect.getmembers(SimulatedLLMEngine, inspect.isfunction)]
        found = {name: inspect.signature(getattr(llm.llm_engine, name)) for name in names if name[0] != "_"}
        return {name: list(signature.parameters) for name, signature in found.items()}

    engine, of_llm, of_engine, before = (
        llm.llm_engine,
        dict(vars(llm)),
        set(vars(llm.llm_engine)),
        signatures(),
    )
    lifecycle = attach(llm)
    assert isinstance(llm.llm_engine, SimulatedLLMEngine)
    assert signatures() == before
    llm.generate("a", params())
    lifecycle.detach()
    assert llm.llm_engine is engine
    assert vars(llm) == of_llm
    assert set(vars(engine)) == of_engine
    with pytest.raises(Closed):
        lifecycle.step()
    assert tokens(llm.generate(PROMPTS, params())) == right()


def test_holder_of_the_bare_engine(llm):
    """Whatever holds the bare engine can be attached to, and finds the same lifecycle."""
    holder = SimpleNamespace(engine=llm.llm_engine)
    lifecycle = attach(holder, attr="engine", default_mode="keep")
    assert attach(llm) is lifecycle
    holder.engine.add_request("r", "a prompt", params())
    holder.engine.step()
    assert holder.engine.sleep().kept == ("r",)
    assert lifecycle.state is State.SLEEPING


def test_attach_finds_it_as_it_is(llm):
    """Asleep, partly awake, busy: it is taken over in the condition that it is in."""
    llm.sleep(2)
    llm.wake_up(["weights"])
    lifecycle = attach(llm)
    assert lifecycle.state is State.PARTIALLY_AWAKE
    model_of(llm).load_weights(NEW.items())
    llm.wake_up(["kv_cache"])
    assert lifecycle.snapshot().resident == {"weights", "kv_cache"}
    lifecycle.mark_weights_loaded()
    assert tokens(llm.generate(PROMPTS, params())) == right(weights=NEW)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"max_held": 3}, "max_held=None.*max_held=3"),
        ({"max_held": 3}, {"max_held": 4}, "max_held=3.*max_held=4"),
        ({}, {"weights": "declared"}, "weights='checked'.*weights='declared'"),
        ({"weights": "unchecked"}, {"weights": "checked"}, "weights='unchecked'.*weights='checked'"),
        ({}, {"default_mode": "abort"}, "default_mode='wait'.*default_mode='abort'"),
        ({"default_mode": "abort"}, {"default_mode": "wait"}, "default_mode='abort'.*default_mode='wait'"),
        ({}, {"sinks": ()}, "sinks=.*sinks="),
        ({"name": "mine"}, {"name": "yours"}, "name='mine'.*name='yours'"),
        ({}, {"no_such_option": 1}, "no_such_option"),
    ],
)
def test_second_attach_with_other_options_is_refused(llm, first, second, named):
    """Options are never silently ignored: the error names what stands, what was asked, and the way out."""
    lifecycle = attach(llm, **first)
    with pytest.raises(InvalidArgument, match=rf"attached already, with {named}.*detach\(\) first"):
        attach(llm, **second)
    lifecycle.detach()
    if "no_such_option" not in second:
        assert attach(llm, **second) is not lifecycle


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"weights": "checked", "max_held": None, "default_mode": "wait", "name": "llm"}),
        ({"max_held": 3, "weights": "declared"}, {"weights": "declared"}),
        ({"default_mode": "keep", "max_held": 3}, {}),
    ],
)
def test_second_attach_with_the_same_options_is_the_same(llm, first, second):
    """Options that say what already holds, and none at all, find the same lifecycle."""
    lifecycle = attach(llm, **first)
    assert attach(llm, **second) is lifecycle


def test_needs_no_vllm():
    """Building, attaching, sleeping and generating import neither vLLM nor torch nor numpy."""
    code = """
import sys
sys.modules.update(vllm=None, torch=None, numpy=None)
from engine_adapter import SimulatedLLM, attach
llm = SimulatedLLM()
attach(llm, sinks=())
llm.sleep(1)
llm.wake_up()
assert len(llm.generate(["a", "b"])) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- beside the real one -------------------------------------------------------------------------------


def public_methods(kind):
    return {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def plain(function):
    """A signature without types."""
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.vllm
def test_signatures_are_vllms():
    """Every public method has the parameters, kinds and defaults of vLLM's method of that name."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for ours, theirs in ((SimulatedLLM, LLM), (SimulatedLLMEngine, LLMEngine)):
        real = public_methods(theirs)
        for name, function in public_methods(ours).items():
            assert plain(function) == plain(real[name]), name


@pytest.mark.vllm
def test_nothing_that_a_trainer_calls_is_left_out():
    """What vLLM has and the stand-in has not is listed here: pooling, search, and what needs a real core."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    pooling = {"encode", "embed", "classify", "score", "reward"}
    missing = set(public_methods(LLM)) - set(public_methods(SimulatedLLM))
    assert missing <= pooling | {"beam_search"}
    missing = set(public_methods(LLMEngine)) - set(public_methods(SimulatedLLMEngine))
    assert missing == {"has_unfinished_requests_dp", "do_log_stats_with_interval"}


def script(make):
    """A trainer's session on an attached `LLM`, as (name, call) pairs."""
    bad = "x" * 4_000  # longer than either model takes

    def reload(llm):
        llm.collective_rpc("reload_weights")

    return [
        ("generate", lambda llm: llm.generate(["one", "two", "three"], make(5), use_tqdm=False)),
        ("generate n", lambda llm: llm.generate("one", make(3, n=2), use_tqdm=False)),
        ("bad prompt", lambda llm: llm.generate(["one", bad * 3], make(3), use_tqdm=False)),
        ("enqueue", lambda llm: llm.enqueue(["one", "two"], make(6), use_tqdm=False) and None),
        ("step", lambda llm: llm.llm_engine.step()),
        ("reload over requests", reload),
        ("sleep", lambda llm: llm.sleep(level=2)),
        ("generate asleep", lambda llm: llm.generate("one", make(3), use_tqdm=False)),
        ("enqueue asleep", lambda llm: llm.enqueue("three", make(4), use_tqdm=False) and None),
        ("collect", lambda llm: llm.llm_engine.step()),
        ("bad level", lambda llm: llm.sleep(level=7)),
        ("bad tags", lambda llm: llm.wake_up(["bogus"])),
        ("wake weights", lambda llm: llm.wake_up(tags=["weights"])),
        ("reset cache", lambda llm: llm.reset_prefix_cache()),
        ("wake kv", lambda llm: llm.wake_up(tags=["kv_cache"])),
        ("generate unloaded", lambda llm: llm.generate("one", make(3), use_tqdm=False)),
        ("rpc sleep", lambda llm: llm.collective_rpc("sleep")),
        ("reload", reload),
        ("wait", lambda llm: llm.wait_for_completion(use_tqdm=False)),
        ("pause", lambda llm: llm.sleep(level=0)),
        ("release kv", lambda llm: llm.release_kv_cache_memory()),
        ("resume", lambda llm: llm.wake_up()),
        ("generate again", lambda llm: llm.generate(["one", "two"], make(4), use_tqdm=False)),
    ]


def replay(llm, lifecycle, make):
    """After each call: the state, the kind of refusal, the counts, and how many tokens came out."""
    seen = []
    for name, call in script(make):
        error, outputs = None, None
        try:
            outputs = call(llm)
        except Exception as refusal:
            error = type(refusal).__name__
            # A bad prompt is found by vLLM's renderer, before the engine is asked, or by the engine.
            if not isinstance(refusal, LifecycleError) or isinstance(refusal, InvalidArgument):
                error = "bad argument"
        came = [
            [(sample.index, len(sample.token_ids), sample.finish_reason) for sample in output.outputs]
            for output in (outputs if isinstance(outputs, list) else [])
            if hasattr(output, "outputs")
        ]
        view = lifecycle.snapshot()
        counts = (view.in_flight, view.held, view.undelivered, llm.llm_engine.get_num_unfinished_requests())
        seen.append((name, view.state, error, counts, view.weights, came))
        assert lifecycle.check() == []
    return seen


@pytest.mark.vllm
def test_one_session_on_both(llm, house):
    """The same session on a guarded `LLM` and on a guarded stand-in: equal states, refusals and counts."""
    real_llm = house.llm()
    lifecycle = attach(real_llm, sinks=())
    real = replay(real_llm, lifecycle, vllm_params)
    lifecycle.detach()
    simulated = SimulatedLLM(max_num_seqs=4, max_model_len=256)
    ours = replay(simulated, attach(simulated, sinks=()), simulated_params)
    for mine, theirs in zip(ours, real, strict=True):
        assert mine == theirs
    assert len([error for _, _, error, *_ in ours if error]) >= 7
    assert simulated.misuse == []
