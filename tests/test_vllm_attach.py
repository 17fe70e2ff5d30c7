"""`attach` on a real vLLM: what it must not leak, what it must refuse, and whose outputs are whose."""

import gc
import inspect
import json
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from engine_adapter import attach
from engine_adapter.standin import ADDED_NAMES
from lifecycle import (
    Closed,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    State,
    UnsupportedEngine,
    WeightsNotValid,
)
from tests.engines import core, worker
from tests.test_vllm_facts import LENGTH, PROMPTS, add, finish, generate, sampling

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def right(house):
    """The tokens of each prompt from the plain engine, without company."""
    llm = house.llm()
    return [
        list(llm.generate([prompt], sampling(i), use_tqdm=False)[0].outputs[0].token_ids)
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


# -- nothing leaks ---------------------------------------------------------------------------------


def signatures(value, names):
    """Signatures of methods; `mode` without its default, which is attach's to choose."""
    found = {}
    for name in names:
        signature = inspect.signature(getattr(value, name))
        parameters = [
            parameter.replace(default=None) if name == "sleep" and parameter.name == "mode" else parameter
            for parameter in signature.parameters.values()
        ]
        found[name] = signature.replace(parameters=parameters)
    return found


def test_signatures_stay(house, guard):
    """Every method of the `LLM` and of its engine has the signature that it had."""
    plain = house.llm()
    of_llm = [name for name, _ in inspect.getmembers(type(plain), inspect.isfunction)]
    of_engine = [name for name, _ in inspect.getmembers(type(plain.llm_engine), inspect.isroutine)]
    of_engine = [name for name in of_engine if not name.startswith("__")]
    before = signatures(plain, of_llm), signatures(plain.llm_engine, of_engine)
    llm, _ = guard()
    assert "generate" in vars(llm)
    assert (signatures(llm, of_llm), signatures(llm.llm_engine, of_engine)) == before


def test_no_public_name_is_added(house, guard):
    """The stand-in shows the engine's names and the listed few; none is called `engine`."""
    before = {name for name in dir(house.llm().llm_engine) if not name.startswith("_")}
    llm, _ = guard()
    assert {name for name in dir(llm.llm_engine) if not name.startswith("_")} - before == set(ADDED_NAMES)
    public = {name for name in object.__getattribute__(llm.llm_engine, "__dict__") if name[0] != "_"}
    assert public - before == set(ADDED_NAMES)
    assert not hasattr(llm.llm_engine, "engine")


def test_attributes_are_the_engines(house, guard):
    """Getting, setting and deleting an attribute of the stand-in reaches the engine; isinstance holds."""
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = house.llm().llm_engine
    llm, _ = guard()
    standin = llm.llm_engine
    assert standin is not engine
    assert isinstance(standin, LLMEngine)
    assert standin.model_executor is engine.model_executor
    standin.added_by_a_trainer = 1
    assert engine.added_by_a_trainer == 1
    engine.added_by_a_trainer = 2
    assert standin.added_by_a_trainer == 2
    del standin.added_by_a_trainer
    assert not hasattr(engine, "added_by_a_trainer")
    with pytest.raises(AttributeError):
        _ = standin.added_by_a_trainer
    executor = engine.model_executor
    del standin.model_executor
    assert not hasattr(engine, "model_executor")
    standin.model_executor = executor


def test_deleting_the_llm_frees_the_engine(right, house):
    """As in vLLM, `del llm` frees the engine at once, and its core at the next collection."""
    house.condemn()  # an engine that no earlier test, if it failed, still refers to
    llm = house.llm()
    house._llm = None  # its own name for it would keep it alive
    lifecycle = attach(llm, sinks=())
    assert generate(llm, 2) == right[:2]
    llm.sleep(1)
    llm.wake_up()
    engine, engine_core = weakref.ref(lifecycle._core.engine.raw), weakref.ref(core(llm))
    del llm, lifecycle
    freed = [engine() is None]
    gc.collect()
    freed.append(engine_core() is None)
    gc.collect()  # whatever came out, the next engine must find this one gone
    gc.collect()
    assert freed == [True, True]


def test_detach_removes_everything(right, llm):
    """`detach` puts the original engine back and leaves no attribute that was not there."""
    engine, of_llm, of_engine = llm.llm_engine, dict(vars(llm)), set(vars(llm.llm_engine))
    lifecycle = attach(llm, sinks=())
    assert llm.llm_engine is not engine
    assert set(vars(llm)) > set(of_llm)
    generate(llm, 1)
    lifecycle.detach()
    assert llm.llm_engine is engine
    assert vars(llm) == of_llm
    assert set(vars(engine)) == of_engine
    assert lifecycle.state is State.CLOSED
    for call in (lifecycle.step, lifecycle.sleep, lifecycle.wake_up, lambda: add(lifecycle, 1)):
        with pytest.raises(Closed, match="closed or detached"):
            call()
    assert generate(llm, 2) == right[:2]


def test_attaching_twice_is_attaching_once(llm, guarded):
    """A second `attach` returns the same lifecycle and changes nothing; after `detach` there is a new one."""
    standin, attributes = llm.llm_engine, dict(vars(llm))
    assert attach(llm) is guarded
    assert llm.llm_engine is standin
    assert vars(llm) == attributes
    assert attach(Rollout(standin), attr="engine") is guarded
    guarded.detach()
    again = attach(llm, sinks=())
    assert again is not guarded
    again.detach()


class Rollout:
    """Holds a bare `LLMEngine`, as trainers do."""

    def __init__(self, engine):
        self.engine = engine
        self.name = "rollout"


class Slots:
    """Can't be referred to weakly."""

    __slots__ = ("engine",)

    def __init__(self, engine):
        self.engine = engine


@pytest.mark.parametrize("holder_type", [Rollout, Slots])
def test_holder_of_a_bare_engine(right, llm, holder_type):
    """`attr=` names where any object has its `LLMEngine`; only that attribute is replaced."""
    engine, holder = llm.llm_engine, holder_type(llm.llm_engine)
    attributes = {name for name in dir(holder) if name[0] != "_"}
    lifecycle = attach(holder, attr="engine", sinks=())
    assert {name for name in dir(holder) if name[0] != "_"} == attributes
    assert llm.llm_engine is engine
    assert not hasattr(holder.engine, "engine")
    assert list(inspect.signature(holder.engine.wake_up).parameters) == ["tags"]
    holder.engine.sleep(1)
    assert holder.engine.model_executor.is_sleeping
    add(holder.engine, 2)
    holder.engine.wake_up()
    assert finish(holder.engine) == {"0": right[0], "1": right[1]}
    lifecycle.detach()
    assert holder.engine is engine
    with pytest.raises(InvalidArgument, match=r"no 'engine'.*attr="):
        attach(llm, attr="engine")


# -- the engine as it is found -----------------------------------------------------------------------


def test_attach_while_it_sleeps_at_level_2(right, house, guard):
    """An engine found asleep serves nothing until its weights were loaded."""
    house.llm().sleep(2)
    llm, guarded = guard()
    assert guarded.state is State.SLEEPING
    assert guarded.snapshot().weights == "discarded"
    assert not llm.wake_up(["weights"])
    assert not llm.wake_up(["kv_cache"])
    with pytest.raises(WeightsNotValid):
        generate(llm, 1)
    assert guarded.reload_weights()
    assert guarded.state is State.AWAKE
    assert generate(llm, 2) == right[:2]


def test_attach_while_it_is_partly_awake(right, house, guard):
    """An engine found with its KV cache asleep goes on from there; what its weights are, the caller says."""
    house.llm().sleep(1)
    house.llm().wake_up(["weights"])
    llm, guarded = guard()
    assert guarded.state is State.PARTIALLY_AWAKE
    assert guarded.snapshot().resident == {"weights"}
    llm.wake_up(["kv_cache"])
    with pytest.raises(WeightsNotValid, match="mark_weights_loaded"):
        generate(llm, 1)
    guarded.mark_weights_loaded()
    assert guarded.state is State.AWAKE
    assert generate(llm, 2) == right[:2]


def test_attach_while_it_is_paused_with_requests(right, house, guard):
    """An engine found paused sleeps at level 0; its requests go on after the wake."""
    plain = house.llm().llm_engine
    add(plain, 6)
    plain.step()
    plain.sleep(0, mode="keep")
    llm, guarded = guard()
    assert guarded.state is State.SLEEPING
    assert guarded.snapshot().level == 0
    assert guarded.snapshot().in_flight == 6
    with pytest.raises(IllegalCall, match="wake_up"):
        llm.llm_engine.step()
    assert llm.wake_up()
    assert finish(guarded) == {str(i): right[i] for i in range(6)}


def test_attach_while_requests_run(right, house, guard):
    """Requests found in the engine belong to whoever steps it, and a sleep drains them all."""
    plain = house.llm().llm_engine
    for i in range(6):
        plain.add_request(f"found {i}", PROMPTS[i], sampling(i))
    plain.step()
    llm, guarded = guard()
    assert guarded.state is State.RUNNING
    assert generate(llm, 2, max_tokens=3) == [row[:3] for row in right[:2]]
    report = guarded.sleep(1, mode="wait")
    assert report.held == ()
    guarded.wake_up()
    assert finish(guarded) == {f"found {i}": right[i] for i in range(6)}


# -- what is refused -----------------------------------------------------------------------------------


def test_engine_in_another_process_is_refused():
    """A multiprocess client has no engine core of its own: the error says what to set."""
    holder = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    before = holder.llm_engine
    with pytest.raises(UnsupportedEngine, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        attach(holder)
    assert holder.llm_engine is before


def test_data_parallel_engine_is_refused(llm, monkeypatch):
    """In-process data parallelism can't be guarded from one rank; nothing was attached."""
    engine, attributes = llm.llm_engine, dict(vars(llm))
    monkeypatch.setattr(engine.vllm_config.parallel_config, "data_parallel_size", 2)
    with pytest.raises(UnsupportedEngine, match="data parallelism"):
        attach(llm)
    assert llm.llm_engine is engine
    assert vars(llm) == attributes


def test_levels_that_the_engine_was_not_built_for(right, house, monkeypatch, guard):
    """Where the platform has a sleep mode, an engine built without it can only be paused."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda _: True)
    llm, _ = guard()
    for level in (1, 2):
        with pytest.raises(InvalidArgument, match="enable_sleep_mode=True"):
            llm.sleep(level)
    assert not llm.llm_engine.model_executor.is_sleeping
    llm.sleep(0)
    llm.wake_up()
    assert generate(llm, 1) == right[:1]


def test_default_mode(right, llm):
    """`sleep()` without a mode sleeps in `default_mode`, through the `LLM` and through its engine."""
    for mode in ("bogus", None, ""):
        with pytest.raises(InvalidArgument, match="default_mode must be one of"):
            attach(llm, default_mode=mode)
    for default, asked in ((None, "wait"), ("keep", "keep"), ("abort", "abort")):
        options = {"default_mode": default} if default else {}
        lifecycle = attach(llm, sinks=(), **options)
        assert inspect.signature(llm.sleep).parameters["mode"].default == asked
        assert llm.sleep(1).mode == asked
        llm.wake_up()
        assert llm.llm_engine.sleep(1).mode == asked
        llm.wake_up()
        assert llm.sleep(1, "wait_all").mode == "wait_all"
        llm.wake_up()
        lifecycle.detach()
    assert generate(llm, 1) == right[:1]


# -- the end -----------------------------------------------------------------------------------------------


def test_close_leaves_the_engine_alone(right, llm, guarded):
    """`close` of an attached engine only detaches: it goes on serving, unguarded."""
    engine = guarded._core.engine.raw
    guarded.close()
    assert guarded.state is State.CLOSED
    assert llm.llm_engine is engine
    assert generate(llm, 2) == right[:2]


def test_detach_is_refused_while_requests_would_be_lost(right, llm, guarded):
    """Neither a held request nor an output that waits is let go; the refusal changes nothing."""
    add(guarded, 6)
    guarded.step()
    guarded.sleep(1, mode="wait")
    with pytest.raises(IllegalCall, match="2 requests are held and 4 not delivered"):
        guarded.detach()
    guarded.wake_up()
    with pytest.raises(IllegalCall, match="4 not delivered"):
        guarded.close()
    assert finish(guarded) == {str(i): right[i] for i in range(6)}
    guarded.detach()
    assert generate(llm, 1) == right[:1]


def test_interrupt_inside_an_engine_call(right, llm, guarded):
    """A KeyboardInterrupt out of an engine call means FAILED, and a handed-over engine can't be recovered."""
    executor = llm.llm_engine.model_executor
    original, calls = executor.execute_model, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the second is not deferred
        return original(*args, **kwargs)

    executor.execute_model = interrupted
    with pytest.raises(KeyboardInterrupt):
        generate(llm, 2)
    executor.execute_model = original
    assert guarded.state is State.FAILED
    with pytest.raises(EngineFailed):
        generate(llm, 1)
    with pytest.raises(IllegalCall, match="handed over"):
        guarded.recover()
    assert guarded.state is State.FAILED


def outcome(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_forked_child_is_refused(right, llm, guarded):
    """After a fork the child may call nothing, whoever held the lock; the parent goes on."""
    add(guarded, 2)
    guarded.step()
    calls = {
        "add_request": lambda: add(guarded, 3),
        "step": guarded.step,
        "step of the engine": llm.llm_engine.step,
        "abort_request": lambda: guarded.abort_request(["0"]),
        "sleep": guarded.sleep,
        "wake_up": llm.wake_up,
        "collective_rpc": lambda: llm.collective_rpc("get_model_inspection"),
        "apply_model": lambda: llm.apply_model(str),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "generate": lambda: generate(llm, 1),
        "close": guarded.close,
        "detach": guarded.detach,
    }
    reader, writer = os.pipe()
    with guarded._lock:  # as if another thread were inside the engine
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # a call that is not refused may wait for a thread that the child has not
        try:
            os.write(writer, json.dumps({name: outcome(call) for name, call in calls.items()}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        told = answers.read()
    os.waitpid(child, 0)
    assert json.loads(told) == dict.fromkeys(calls, "Closed")
    assert finish(guarded) == {"0": right[0], "1": right[1]}
    assert guarded.sleep(1)
    guarded.wake_up()
    assert generate(llm, 1) == right[:1]


# -- whose outputs are whose -----------------------------------------------------------------------------


def enqueue(llm, first, last, max_tokens=LENGTH):
    return llm.enqueue(
        PROMPTS[first:last], [sampling(i, max_tokens) for i in range(first, last)], use_tqdm=False
    )


def wait(llm):
    return tokens(llm.wait_for_completion(use_tqdm=False))


def test_waiting_takes_what_was_enqueued(right, llm, guarded):
    """`wait_for_completion` returns all that was enqueued and nothing else; `generate` takes none of it."""
    guarded.add_request("by hand", PROMPTS[7], sampling(7))
    enqueue(llm, 0, 2)
    enqueue(llm, 2, 5)
    assert generate(llm, 1) == right[:1]
    assert wait(llm) == right[:5]
    assert wait(llm) == []
    assert finish(guarded) == {"by hand": right[7]}


def test_enqueued_requests_can_be_aborted_by_their_ids(right, llm, guarded):
    """The ids that `enqueue` returns are good for `abort_request`, before and after a sleep."""
    first, second, third = enqueue(llm, 0, 3)
    llm.llm_engine.abort_request([second])
    guarded.sleep(1)
    llm.llm_engine.abort_request([third])
    guarded.wake_up()
    assert wait(llm) == right[:1]
    assert first not in guarded._core.ledger._handles


def test_enqueueing_while_asleep(right, llm, guarded):
    """While asleep `enqueue` holds; what blocks for it raises at once, and is right after the wake."""
    llm.sleep(1)
    enqueue(llm, 0, 3)
    for call in (lambda: wait(llm), lambda: generate(llm, 1)):
        with pytest.raises(IllegalCall, match="while sleeping"):
            call()
    llm.wake_up()
    assert wait(llm) == right[:3]


def test_waiting_for_what_a_drain_finished(right, llm, guarded):
    """Outputs that a drain finished can be waited for while asleep."""
    enqueue(llm, 0, 3)
    llm.llm_engine.step()
    llm.sleep(1, mode="wait_all")
    assert wait(llm) == right[:3]


def test_interrupted_wait_gives_back_what_was_finished(right, llm, guarded):
    """Ctrl-C in `wait_for_completion` aborts what ran; finished outputs come at the next call."""
    enqueue(llm, 0, 2, max_tokens=4)
    enqueue(llm, 2, 4, max_tokens=100)
    executor = llm.llm_engine.model_executor
    original, calls = executor.execute_model, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 12:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    executor.execute_model = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    executor.execute_model = original
    assert guarded.state is State.AWAKE
    assert wait(llm) == [right[0][:4], right[1][:4]]
    assert wait(llm) == []
    assert generate(llm, 1) == right[:1]


def in_threads(*calls):
    """Run the calls at once and return their results, or raise what one raised."""
    results, errors = {}, []

    def run(place, call):
        try:
            results[place] = call()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(place, call), daemon=True) for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(calls))]


def test_generate_in_two_threads(right, llm, guarded):
    """Two calls of `generate` at once each get their own outputs, all of them, right."""
    for _ in range(3):
        first, second = in_threads(lambda: generate(llm, 3), lambda: generate(llm, 6, max_tokens=9))
        assert first == right[:3]
        assert second == [row[:9] for row in right[:6]]
    assert guarded.state is State.AWAKE


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_generate_waits_for_the_wake(right, llm, guarded, mode):
    """A `generate` that another thread's sleep comes upon waits for the wake and completes right."""
    asleep_for = []

    def sleep_and_wake():
        while guarded.snapshot().in_flight < 6:
            time.sleep(0.001)
        guarded.sleep(1, mode=mode)
        time.sleep(0.15)
        asleep_for.append(len(done))
        guarded.wake_up()

    done = []

    def serve():
        done.append(generate(llm, 6))
        return done[0]

    served, _ = in_threads(serve, sleep_and_wake)
    assert asleep_for == [0]
    assert served == right[:6]


def test_aborting_sleep_ends_a_generate(llm, guarded):
    """A `generate` that an aborting sleep comes upon returns what there was, while the engine sleeps."""

    def sleep():
        while guarded.snapshot().in_flight < 3:
            time.sleep(0.001)
        guarded.sleep(1, mode="abort")

    served, _ = in_threads(lambda: generate(llm, 3, max_tokens=200), sleep)
    assert guarded.state is State.SLEEPING
    assert len(served) == 3
    assert all(len(row) < 200 for row in served)


def test_beam_search_beside_other_requests(right, house, guard):
    """`beam_search` is right while others' requests are in the engine, and takes none of their outputs."""
    from vllm.sampling_params import BeamSearchParams

    def beams(holder):
        (found,) = holder.beam_search([{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=6))
        return [list(beam.tokens) for beam in found.sequences]

    expected = beams(house.llm())
    llm, guarded = guard()
    for other in ("0", "1"):  # an id that sorts first, and an end in the midst of the search
        guarded.add_request(other, PROMPTS[5], sampling(5, max_tokens=3))
    guarded.step()
    assert beams(llm) == expected
    assert finish(guarded) == {"0": right[5][:3], "1": right[5][:3]}


def test_batch_with_one_bad_prompt(right, llm, guarded):
    """A batch that vLLM refuses half-way leaves nothing behind, and hurts nobody else's request."""
    from vllm.exceptions import VLLMError
    from vllm.lora.request import LoRARequest

    guarded.add_request("other", PROMPTS[5], sampling(5))
    adapters = [None, None, LoRARequest("no such adapter", 1, "nowhere")]
    with pytest.raises(InvalidArgument, match=r"(?i)lora"):
        llm.generate(PROMPTS[:3], sampling(0), use_tqdm=False, lora_request=adapters)
    with pytest.raises((ValueError, VLLMError), match="256"):
        llm.generate([PROMPTS[0], "x" * 400], sampling(0), use_tqdm=False)
    assert guarded.snapshot().in_flight == 1
    assert len(core(llm).scheduler.requests) == 1
    assert generate(llm, 2) == right[:2]
    assert finish(guarded) == {"other": right[5]}


# -- bad input -----------------------------------------------------------------------------------------------

BAD = {
    "level -1": (lambda g: g.sleep(-1), "level must be 0, 1 or 2, not -1"),
    "level 3": (lambda g: g.sleep(3), "level must be 0, 1 or 2, not 3"),
    "level '1'": (lambda g: g.sleep("1"), "level must be 0, 1 or 2, not '1'"),
    "level True": (lambda g: g.sleep(True), "level must be 0, 1 or 2, not True"),
    "no tags": (lambda g: g.wake_up([]), "empty"),
    "unknown tag": (lambda g: g.wake_up(["bogus"]), "bogus"),
    "tag twice": (lambda g: g.wake_up(["weights", "weights"]), "twice"),
    "tags as a string": (lambda g: g.wake_up("weights"), "not 'weights'"),
    "unknown mode": (lambda g: g.sleep(1, "bogus"), "mode must be one of wait, .*not 'bogus'"),
    "negative timeout": (lambda g: g.sleep(1, timeout=-1), "timeout must be .*not -1"),
    "NaN timeout": (lambda g: g.sleep(1, timeout=float("nan")), "timeout must be .*not nan"),
    "infinite timeout": (lambda g: g.sleep(1, timeout=float("inf")), "timeout must be .*not inf"),
    "negative steps": (lambda g: g.sleep(1, max_steps=-1), "max_steps must be .*not -1"),
    "live id": (lambda g: g.add_request("live", PROMPTS[1], sampling(1)), "'live' is live"),
    "empty prompt": (lambda g: g.add_request("new", "", sampling(1)), "(?i)empty"),
    "no token ids": (lambda g: g.add_request("new", {"prompt_token_ids": []}, sampling(1)), "(?i)empty"),
    "long prompt": (lambda g: g.add_request("new", "x" * 300, sampling(1)), "256"),
    "abort of a string": (lambda g: g.abort_request("live"), "must be a list, not 'live'"),
}


@pytest.fixture
def reached(llm, monkeypatch):
    """The calls that reached vLLM's engine core, its scheduler's queue, its executor or its workers."""
    calls = []
    engine_core = core(llm)
    client = llm.llm_engine.engine_core
    watched = [(client, name) for name, _ in inspect.getmembers(client, inspect.ismethod) if name[0] != "_"]
    watched += [(engine_core.scheduler, "add_request"), (engine_core.scheduler, "set_pause_state")]
    watched += [(engine_core.model_executor, name) for name in ("sleep", "wake_up", "execute_model")]
    watched += [(worker(llm), name) for name in ("sleep", "wake_up")]
    for target, name in watched:
        monkeypatch.setattr(target, name, recording(getattr(target, name), calls))
    return calls


def recording(original, calls):
    def recorded(*args, **kwargs):
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return recorded


def view(lifecycle):
    """The snapshot without what passes with time and with every event."""
    fields = lifecycle.snapshot().to_dict()
    return {name: value for name, value in fields.items() if name not in ("seq", "operation_age_s")}


@pytest.mark.parametrize("asleep", [False, True], ids=["serving", "asleep"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_changes_nothing(right, llm, reached, guarded, bad, asleep):
    """A wrong argument is an InvalidArgument that says so; nothing changed and nothing reached the engine."""
    call, message = BAD[bad]
    if asleep:
        guarded.sleep(1)
    guarded.add_request("live", PROMPTS[0], sampling(0))
    before = view(guarded)
    assert reached != []
    reached.clear()
    with pytest.raises(InvalidArgument, match=message):
        call(guarded)
    assert reached == []
    assert view(guarded) == before
    assert guarded.events(1)[0]["event"] == "refused"
    guarded.wake_up()
    assert finish(guarded) == {"live": right[0]}
    assert generate(llm, 2) == right[:2]
