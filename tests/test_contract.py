"""One contract, two engines; and one script replayed on both."""

import pytest

from engine_adapter.simulated import OutputKind, SimulatedEngine
from engine_adapter.simulated import SamplingParams as SimulatedParams
from lifecycle import Lifecycle, LifecycleError
from lifecycle.testing.contract import (
    CUMULATIVE,
    DELTA,
    FINAL_ONLY,
    NEEDS,
    PROMPTS,
    Bench,
    EngineContract,
)


def simulated_params(tokens, kind=CUMULATIVE, n=1, stop=None):
    return SimulatedParams(n=n, max_tokens=tokens, seed=7, output_kind=OutputKind(kind), stop=stop)


def vllm_params(tokens, kind=CUMULATIVE, n=1, stop=None):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        max_tokens=tokens,
        seed=7,
        temperature=1.0,
        ignore_eos=True,
        output_kind=RequestOutputKind(kind),
        stop=stop,
    )


class TestSimulatedEngine(EngineContract):
    """The simulated engine keeps the contract, and records no misuse while it does."""

    launches_ahead = False

    @pytest.fixture
    def bench(self, request):
        engine = SimulatedEngine(max_num_seqs=4, batch_queue_size=2 if self.launches_ahead else 1)
        yield Bench(engine, simulated_params, launches_ahead=self.launches_ahead)
        on_purpose = request.node.originalname == "test_nothing_is_scheduled_while_paused"
        assert bool(engine.misuse) is on_purpose, engine.misuse


class TestSimulatedEngineThatLaunchesAhead(TestSimulatedEngine):
    """The same with asynchronous scheduling."""

    launches_ahead = True


@pytest.mark.vllm
class TestVllm(EngineContract):
    """Behind its adapter vLLM keeps the contract, and is idle and awake after each rule."""

    @pytest.fixture
    def bench(self, llm):
        from engine_adapter import VllmInprocess

        bench = Bench(VllmInprocess(llm), vllm_params)
        yield bench
        assert not bench.engine.has_work()
        assert bench.engine.condition().requests == ()


def test_what_is_skipped_on_the_simulated_engine():
    """Only launching ahead is left out, where it does not launch ahead."""
    assert set(Bench(SimulatedEngine(), None).lacking()) == {"test_a_launched_batch_is_seen"}
    assert Bench(SimulatedEngine(batch_queue_size=2), None, launches_ahead=True).lacking() == {}


@pytest.mark.vllm
def test_what_is_skipped_on_vllm(llm):
    """On a CPU there is no device memory to measure, and no launching ahead; a GPU has both."""
    from engine_adapter import VllmInprocess

    lacking = set(Bench(VllmInprocess(llm), vllm_params).lacking())
    assert lacking == {"test_device_memory_is_released", "test_a_launched_batch_is_seen"}


def test_what_may_be_lacking_is_a_rule():
    """Each entry of `NEEDS` names a rule of the contract and says why it is skipped."""
    rules = {name for name in vars(EngineContract) if name.startswith("test_")}
    assert set(NEEDS) <= rules
    assert all(reason for _, reason in NEEDS.values())


# -- one script, two engines ---------------------------------------------------------------------------


def script(params):
    """A session with everything in it, as (name, call) pairs on a `Lifecycle`."""

    def add(name, tokens, **options):
        prompt = PROMPTS[len(name) % len(PROMPTS)]
        return (
            f"add {name}",
            lambda life: life.add_request(name, prompt, params(tokens, **options)) and None,
        )

    def steps(count):
        return [("step", lambda life: life.step())] * count

    return [
        *[add(f"r{index}", 6 + index, kind=index % 3) for index in range(6)],
        add("wide", 5, n=2),
        *steps(3),
        ("reload over requests", lambda life: life.reload_weights()),
        ("sleep too soon", lambda life: life.sleep(1, max_steps=1)),
        ("sleep wait", lambda life: life.sleep(1)),
        *steps(2),
        add("asleep", 4),
        ("id again", lambda life: life.add_request("asleep", PROMPTS[0], params(3))),
        ("sleep deeper", lambda life: life.sleep(2)),
        ("wake kv", lambda life: life.wake_up(["kv_cache"])),
        ("sleep from half", lambda life: life.sleep(1)),
        ("apply", lambda life: life.apply_model(lambda _: None) and None),
        ("wake weights", lambda life: life.wake_up(["weights"])),
        *steps(4),
        ("pause", lambda life: life.pause()),
        *steps(1),
        ("sleep 2 keep", lambda life: life.sleep(2, "keep")),
        ("wake", lambda life: life.wake_up()),
        *steps(1),
        ("reload", lambda life: life.reload_weights()),
        ("resume", lambda life: life.resume()),
        *steps(3),
        ("abort one", lambda life: life.abort_request(["asleep"])),
        ("sleep abort", lambda life: life.sleep(0, "abort")),
        *steps(2),
        ("bad tags", lambda life: life.wake_up(["bogus"])),
        ("rpc sleep", lambda life: life.collective_rpc("sleep")),
        ("wake again", lambda life: life.wake_up()),
        add("last", 3, kind=FINAL_ONLY),
        *steps(6),
    ]


def trace(lifecycle, params):
    """What a caller sees: the state and refusal after each call, and each request's outcome."""
    seen, outcomes = [], {}
    for name, call in script(params):
        error = None
        try:
            outputs = call(lifecycle)
        except LifecycleError as refusal:
            error, outputs = type(refusal).__name__, None
        seen.append(
            (name, lifecycle.state.value, error, lifecycle.snapshot().held, lifecycle.snapshot().in_flight)
        )
        for output in outputs if isinstance(outputs, list) else ():
            for sample in output.outputs:
                entry = outcomes.setdefault((output.request_id, sample.index), [0, 0, None])
                entry[0] += 1
                is_delta = output.request_id[0] == "r" and int(output.request_id[1]) % 3 == DELTA
                entry[1] = len(sample.token_ids) + (entry[1] if is_delta else 0)
                entry[2] = sample.finish_reason
        assert lifecycle.check() == []
    return seen, outcomes


@pytest.mark.vllm
def test_one_script_gives_equal_traces_on_both_engines(guarded):
    """States, refusals, counts and every request's outputs, tokens and reason agree, call by call."""
    engine = SimulatedEngine(max_num_seqs=4)
    simulated = trace(Lifecycle(engine, sinks=()), simulated_params)
    real = trace(guarded, vllm_params)
    for ours, theirs in zip(simulated[0], real[0], strict=True):
        assert ours == theirs
    assert simulated[1] == real[1]
    assert engine.misuse == []
    refusals = [error for _, _, error, *_ in real[0] if error]
    assert len(refusals) >= 8
