"""The simulated engine itself: what it computes, how it takes misuse, and what it records."""

import threading

import pytest

from engine_adapter.simulated import (
    NAN,
    PARAMETERS,
    NullEngine,
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    encode,
    expected_output,
    expected_tokens,
    make_weights,
)
from lifecycle.engine import Engine, OutOfDeviceMemory
from lifecycle.table import KV_CACHE, WEIGHTS, Weights

PROMPTS = [f"a prompt, number {number}" for number in range(12)]
KINDS = list(OutputKind)


def add(engine, name, prompt="a prompt", options=None, **params):
    params = SamplingParams(**params)
    return engine.add(engine.prepare(name, prompt, params, options or {}))


def drain(engine, limit=2_000):
    """Step until there is no work, and return snapshots of all outputs in order."""
    outputs = []
    for _ in range(limit):
        if not engine.has_work():
            return outputs
        outputs += [engine.copy_output(output) for output in engine.step()]
    raise AssertionError("the engine never came to rest")


def tokens_of(outputs, delta=False):
    """All tokens by request id and sample, put together as their kind says."""
    found = {}
    for output in outputs:
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            found[key] = (found.get(key, []) if delta else []) + completion.token_ids
    return found


def run_all(engine, prompts=PROMPTS, **params):
    """Add every prompt under its place with a seed of its own, drain, and compare with what is expected."""
    for place, prompt in enumerate(prompts):
        add(engine, str(place), prompt, seed=place, **params)
    outputs = drain(engine)
    kind = params.get("output_kind", OutputKind.CUMULATIVE)
    expected = {
        (str(place), sample): expected_tokens(
            prompt, SamplingParams(seed=place, **params), sample, engine.weights, engine.max_model_len
        )
        for place, prompt in enumerate(prompts)
        for sample in range(params.get("n", 1))
    }
    assert tokens_of(outputs, kind is OutputKind.DELTA) == expected
    finals = [output.request_id for output in outputs if output.finished]
    assert sorted(finals) == sorted(str(place) for place in range(len(prompts)))
    assert engine.misuse == []
    return outputs


class TestTokens:
    def test_distinct(self):
        """Prompt, seed, sample and weights each change the tokens; the same ones repeat them."""
        params = SamplingParams(seed=1)
        runs = [
            expected_tokens("a", params),
            expected_tokens("b", params),
            expected_tokens("a", SamplingParams(seed=2)),
            expected_tokens("a", SamplingParams(seed=1, n=2), sample=1),
            expected_tokens("a", params, weights=make_weights(1)),
        ]
        assert len({tuple(run) for run in runs}) == len(runs)
        assert expected_tokens(encode("a"), params) == runs[0]
        assert expected_tokens({"prompt_token_ids": encode("a")}, params) == runs[0]
        assert expected_tokens({"prompt": "a"}, params) == runs[0]

    def test_one_parameter_matters(self):
        """A single parameter with other contents changes the tokens."""
        plain = expected_tokens("a", SamplingParams())
        for name in PARAMETERS:
            assert expected_tokens("a", SamplingParams(), weights={**make_weights(), name: 5}) != plain

    def test_is_an_engine(self):
        """It has every method of the protocol."""
        assert isinstance(SimulatedEngine(), Engine)
        assert isinstance(NullEngine(), Engine)

    @pytest.mark.parametrize(
        ("prompt", "params"),
        [
            ("", {}),
            ([], {}),
            ("x" * 256, {}),
            ("x", {"n": 0}),
            ("x", {"max_tokens": 0}),
            ("x", {"stop": ""}),
        ],
    )
    def test_bad_arguments(self, prompt, params):
        """What vLLM refuses is refused by validate and add alike, and leaves no trace."""
        engine = SimulatedEngine()
        call = engine.prepare("r", prompt, SamplingParams(**params), {})
        for method in (engine.validate, engine.add):
            with pytest.raises(ValueError):
                method(call)
        assert not engine.has_work()
        assert not engine.condition().requests

    def test_bad_types(self):
        """A wrong type is a TypeError."""
        engine = SimulatedEngine()
        with pytest.raises(TypeError):
            engine.prepare("r", "x", {"n": 1}, {})
        with pytest.raises(TypeError):
            engine.add(engine.prepare("r", 5, SamplingParams(), {}))
        with pytest.raises(TypeError):
            engine.prepare(7, "x", SamplingParams(), {})

    def test_too_few_blocks(self):
        """An engine that could never hold one whole request is not built."""
        with pytest.raises(ValueError):
            SimulatedEngine(max_model_len=64, block_size=4, num_blocks=15)

    def test_model_length(self):
        """A request ends where the model does."""
        engine = SimulatedEngine(max_model_len=32)
        run_all(engine, ["x" * 30, "y" * 31, "z"], max_tokens=None)

    def test_snapshots(self):
        """Equal parameters share one snapshot, which later changes do not reach."""
        engine = SimulatedEngine()
        params = SamplingParams(stop=["x"])
        first = engine.prepare("a", "p", params, {})
        assert engine.prepare("b", "p", SamplingParams(stop="x"), {}).params is first.params
        params.stop.append("y")
        params.max_tokens = 3
        assert first.params == SamplingParams(stop=["x"])


class TestScheduling:
    @pytest.mark.parametrize("batch_queue_size", [1, 2, 3])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize(
        "sizes",
        [
            {},
            {"max_num_seqs": 2},
            {"max_num_batched_tokens": 7},
            {"max_model_len": 48, "num_blocks": 14},
            {"max_model_len": 48, "num_blocks": 14, "policy": "priority", "max_num_batched_tokens": 9},
        ],
        ids=["roomy", "two slots", "chunked prefill", "few blocks", "priority"],
    )
    def test_tokens_do_not_depend_on_the_schedule(self, batch_queue_size, kind, n, sizes):
        """Slots, chunks, preemption, samples and the batch queue change no token and lose no output."""
        engine = SimulatedEngine(batch_queue_size=batch_queue_size, **sizes)
        blocks = engine.free_blocks
        run_all(engine, n=n, output_kind=kind, max_tokens=20)
        assert engine.free_blocks == blocks
        assert not engine.launched
        assert not engine.requests
        assert not engine.live_ids

    def test_slots(self):
        """No more than max_num_seqs run; the others wait in order."""
        engine = SimulatedEngine(max_num_seqs=2)
        ids = [add(engine, str(place)) for place in range(4)]
        engine.step()
        assert [request.request_id for request in engine.running] == ids[:2]
        assert engine.unstarted(ids) == ids[2:]

    def test_preemption(self):
        """When blocks run out the last in is preempted, goes to the front, and is not unstarted."""
        engine = SimulatedEngine(max_model_len=40, num_blocks=12, max_num_seqs=3)
        ids = [add(engine, str(place), "x" * 12, max_tokens=20) for place in range(4)]
        while not any(request.num_preemptions for request in engine.waiting):
            engine.step()
        assert [request.request_id for request in engine.waiting] == ids[2:]
        assert engine.waiting[0].num_computed == engine.waiting[0].blocks == 0
        assert engine.unstarted(ids) == ids[3:]

    def test_chunked_prefill(self):
        """A long prompt is computed in pieces; no output comes before the last."""
        engine = SimulatedEngine(max_num_batched_tokens=8)
        add(engine, "r", "x" * 20)
        computed = []
        for _ in range(3):
            outputs = engine.step()
            computed.append(engine.progress().computed)
        assert computed == [8, 16, 20]
        assert len(outputs) == 1

    def test_batch_queue(self):
        """The first step only launches; outputs come one step later."""
        engine = SimulatedEngine(batch_queue_size=2)
        add(engine, "r", max_tokens=2)
        assert engine.step() == []
        assert engine.has_launched()
        assert len(engine.step()) == 1
        engine.pause_scheduling()
        assert len(engine.step()) == 1
        assert not engine.has_launched()
        assert engine.misuse == []

    def test_nothing_launched_beyond_the_end(self):
        """A request whose last token is launched is not scheduled again."""
        engine = SimulatedEngine(batch_queue_size=2)
        add(engine, "r", max_tokens=1)
        engine.step()
        assert engine.step()[0].finished
        assert not engine.has_launched()

    def test_flush(self):
        """A finished id needs one more step."""
        engine = SimulatedEngine()
        add(engine, "r", max_tokens=1)
        assert engine.step()[0].finished
        assert engine.has_work()
        assert engine.step() == []
        assert not engine.has_work()

    def test_priority(self):
        """A lower priority goes first, an earlier arrival before a later one."""
        engine = SimulatedEngine(policy="priority", max_num_seqs=1)
        add(engine, "late", options={"priority": 1, "arrival_time": 2.0}, max_tokens=1)
        add(engine, "early", options={"priority": 1, "arrival_time": 1.0}, max_tokens=1)
        add(engine, "urgent", options={"priority": 0, "arrival_time": 3.0}, max_tokens=1)
        assert [output.request_id for output in drain(engine)] == ["urgent", "early", "late"]

    def test_ids(self):
        """Engine ids are the caller's with a counter; children carry their sample in front."""
        engine = SimulatedEngine()
        assert add(engine, "r") == "r-00000000"
        assert add(engine, "s", n=2) == "s-00000001"
        assert list(engine.requests) == ["r-00000000", "0_s-00000001", "1_s-00000001"]
        found = engine.condition().requests
        assert [(f.request_id, f.engine_id, f.samples) for f in found] == [
            ("r", "r-00000000", 1),
            ("s", "s-00000001", 2),
        ]

    def test_partly_started_parent(self):
        """A parent of which one sample runs has started."""
        engine = SimulatedEngine(max_num_seqs=1)
        engine_id = add(engine, "r", n=3, max_tokens=4)
        assert engine.unstarted([engine_id, "nobody"]) == [engine_id]
        engine.step()
        assert engine.unstarted([engine_id]) == []
        assert engine.tokens(engine_id) == 1

    def test_prefix_cache(self):
        """A cached prefix is not computed again, and changes no token."""
        engine = SimulatedEngine()
        add(engine, "a", "x" * 17, max_tokens=3)
        drain(engine)
        add(engine, "b", "x" * 17, max_tokens=3)
        engine.step()
        assert engine.running[0].num_computed == 17
        assert engine.free_blocks
        outputs = drain(engine)
        assert outputs[-1].outputs[0].token_ids == expected_tokens("x" * 17, SamplingParams(max_tokens=3))


class TestOutputs:
    def text(self, **params):
        return expected_output("a prompt", SamplingParams(**params))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("batch_queue_size", [1, 2])
    def test_stop_string(self, kind, batch_queue_size):
        """Text ends before the stop string, tokens with it; what might become one is held back."""
        whole = self.text(max_tokens=16).text
        stop = whole[6:9]
        engine = SimulatedEngine(batch_queue_size=batch_queue_size)
        add(engine, "r", stop=["never!", stop], output_kind=kind)
        outputs = drain(engine)
        last = outputs[-1].outputs[0]
        texts = [output.outputs[0].text for output in outputs]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert ("".join(texts) if kind is OutputKind.DELTA else last.text) == whole[:6]
        assert tokens_of(outputs, kind is OutputKind.DELTA)["r", 0] == self.text(stop=stop).token_ids
        assert len(self.text(stop=stop).token_ids) == 9
        assert not engine.has_work()

    def test_length(self):
        """Without a stop string the reason is length, and held-back text comes at the end."""
        plain = self.text(max_tokens=5)
        stopped = self.text(max_tokens=5, stop="!!!!")
        assert plain == stopped
        assert (plain.finish_reason, plain.stop_reason, len(plain.text)) == ("length", None, 5)

    def test_live_lists(self):
        """A cumulative output's lists grow with the request; a copy's and a delta's do not."""
        engine = SimulatedEngine()
        add(engine, "r", logprobs=1)
        add(engine, "d", output_kind=OutputKind.DELTA, logprobs=1)
        live, delta = engine.step()
        copy = engine.copy_output(live)
        engine.step()
        assert len(live.outputs[0].token_ids) == len(live.outputs[0].logprobs) == 2
        assert len(copy.outputs[0].token_ids) == len(copy.outputs[0].logprobs) == 1
        assert len(delta.outputs[0].token_ids) == len(delta.outputs[0].logprobs) == 1
        assert engine.count_tokens(live) == 2

    @pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
    def test_samples_streaming(self, kind):
        """Each output carries one sample; only the very last is finished."""
        outputs = run_all(SimulatedEngine(max_num_seqs=2), PROMPTS[:1], n=3, output_kind=kind, max_tokens=4)
        assert [output.finished for output in outputs] == [False] * 11 + [True]
        assert all(len(output.outputs) == 1 for output in outputs)

    def test_samples_final_only(self):
        """One output with all samples in order."""
        engine = SimulatedEngine(max_num_seqs=2)
        (output,) = run_all(engine, PROMPTS[:1], n=3, output_kind=OutputKind.FINAL_ONLY)
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert all(completion.finished() for completion in output.outputs)

    @pytest.mark.parametrize("kind", KINDS)
    def test_last_outputs(self, kind):
        """Cumulative and final-only carry all tokens so far, delta none; text held back comes out."""
        engine = SimulatedEngine()
        engine_id = add(engine, "r", output_kind=kind, stop="!!!", logprobs=1)
        outputs = engine.step() + engine.step() + engine.step()
        (last,) = engine.last_outputs([engine_id, "nobody"], "abort")
        completion = last.outputs[0]
        whole = self.text()
        assert last.finished
        assert completion.finish_reason == "abort"
        assert len(completion.logprobs) == len(completion.token_ids)
        if kind is OutputKind.DELTA:
            assert completion.token_ids == []
            assert "".join(output.outputs[0].text for output in [*outputs, last]) == whole.text[:3]
        else:
            assert completion.token_ids == whole.token_ids[:3]
            assert completion.text == whole.text[:3]
        engine.abort([engine_id])
        assert drain(engine) == []
        assert not engine.condition().requests

    def test_last_outputs_of_samples(self):
        """Streaming kinds give one output a live sample, the last finished; final-only one with all."""
        engine = SimulatedEngine(max_num_seqs=2)
        streaming = add(engine, "s", n=3, max_tokens=2)
        while len(engine.parents[streaming].live) == 3:
            engine.step()
        live = [request.index for request in engine.parents[streaming].live]
        outputs = engine.last_outputs([streaming], "error")
        assert [output.outputs[0].index for output in outputs] == live
        assert [output.finished for output in outputs] == [False] * (len(live) - 1) + [True]
        engine.abort([streaming])
        final = add(engine, "f", n=3, max_tokens=2, output_kind=OutputKind.FINAL_ONLY)
        while len(engine.parents[final].live) == 3:
            engine.step()
        (output,) = engine.last_outputs([final], "abort")
        assert [c.finish_reason for c in output.outputs] == ["length", "length", "abort"]
        assert [len(c.token_ids) for c in output.outputs] == [2, 2, 0]

    def test_abort(self):
        """Nothing follows, a launched token included; the same id may be used again."""
        engine = SimulatedEngine(batch_queue_size=2)
        engine_id = add(engine, "r")
        engine.step()
        engine.abort([engine_id, "nobody"])
        assert drain(engine) == []
        add(engine, "r")
        assert engine.misuse == []


class TestMemory:
    def test_accounting(self):
        """Memory is mapped by tag; level 1 keeps the weights on the host."""
        engine = SimulatedEngine(weights_bytes=10, kv_bytes=20, base_bytes=1)
        assert (engine.memory().device, engine.memory().asleepable) == (31, 30)
        engine.sleep(1)
        assert (engine.memory().device, engine.memory().asleepable, engine.memory().host) == (1, 0, 11)
        engine.wake_up([WEIGHTS])
        assert (engine.memory().device, engine.memory().host) == (11, 1)
        engine.wake_up([KV_CACHE])
        engine.release_kv_cache_memory()
        assert engine.memory().device == 11
        assert engine.misuse == []

    @pytest.mark.parametrize("level", [0, 1])
    @pytest.mark.parametrize("batch_queue_size", [1, 2])
    def test_kept_requests_go_on(self, level, batch_queue_size):
        """Levels 0 and 1 with kept requests lose nothing and change no token."""
        engine = SimulatedEngine(batch_queue_size=batch_queue_size, max_num_seqs=3)
        params = {"max_tokens": 10, "output_kind": OutputKind.DELTA}
        for place, prompt in enumerate(PROMPTS):
            add(engine, str(place), prompt, **params)
        outputs = [output for _ in range(6) for output in engine.step()]
        engine.pause_scheduling()
        while engine.has_launched():
            outputs += engine.step()
        engine.sleep(level)
        if level:
            assert engine.free_blocks == 3 * 64
            engine.wake_up([KV_CACHE, WEIGHTS])
        engine.resume_scheduling()
        found = tokens_of(outputs + drain(engine), delta=True)
        assert found == {
            (str(place), 0): expected_tokens(prompt, SamplingParams(**params))
            for place, prompt in enumerate(PROMPTS)
        }
        assert engine.misuse == []

    def test_level_2_destroys(self):
        """After level 2 the tokens are garbage and recorded, until every parameter is loaded."""
        engine = SimulatedEngine()
        engine.sleep(2)
        assert engine.condition().weights is Weights.DISCARDED
        engine.wake_up([WEIGHTS, KV_CACHE])
        assert engine.missing_weights() == ()
        engine.discard_weights()
        assert engine.missing_weights() == PARAMETERS
        engine.load_weights((name, value) for name, value in make_weights(3).items() if "k_proj" not in name)
        assert engine.missing_weights() == ("layers.0.k_proj", "layers.1.k_proj")
        engine.resume_scheduling()
        add(engine, "r")
        (output,) = drain(engine)[-1:]
        assert output.outputs[0].token_ids != expected_tokens(
            "a prompt", SamplingParams(), 0, make_weights(3)
        )
        assert any("weights not loaded: layers.0.k_proj" in text for text in engine.misuse)
        engine.misuse.clear()
        engine.load_weights((name, value) for name, value in make_weights(3).items() if "k_proj" in name)
        assert engine.reset_caches()
        assert engine.condition().weights is Weights.VALID
        run_all(engine)

    def test_loads_of_all_kinds(self):
        """The worker's methods load too, as does the model object that `apply_model` hands out."""
        engine = SimulatedEngine()
        new = make_weights(4)
        engine.call("collective_rpc", "load_weights", kwargs={"weights": new.items()})
        assert engine.weights == new
        assert engine.call("collective_rpc", "reload_weights") == [set(PARAMETERS)]
        assert engine.weights == make_weights()
        engine.call("collective_rpc", "reload_weights", kwargs={"weights_iterator": new.items()})
        assert engine.weights == new
        engine.call("apply_model", lambda model: model.update(lm_head=7))
        assert engine.weights["lm_head"] == 7
        engine.call("collective_rpc", lambda worker: worker.weights.update(new))
        assert engine.weights == new
        assert engine.misuse == []

    def test_unfinished_update(self):
        """Between its start and its end an update taints what is computed."""
        engine = SimulatedEngine()
        engine.call("collective_rpc", "start_weight_update")
        engine.call("collective_rpc", "update_weights", kwargs={"weights": [("lm_head", 1)]})
        assert engine.condition().weights is Weights.TAINTED
        add(engine, "r")
        engine.step()
        assert "unfinished update" in engine.misuse[0]
        engine.abort(["r-00000000"])
        engine.call("collective_rpc", "finish_weight_update")
        assert engine.condition().weights is Weights.VALID

    def test_torn_load(self):
        """A load that raises half-way leaves the weights tainted until one comes to its end."""
        engine = SimulatedEngine()
        with pytest.raises(ValueError):
            engine.load_weights([("lm_head", 1), ("nonsense", 2)])
        assert engine.condition().weights is Weights.TAINTED
        engine.load_weights(make_weights().items())
        assert engine.condition().weights is Weights.VALID

    @pytest.mark.parametrize("fails", ["in the middle", "before it begins"])
    def test_broken_update(self, fails):
        """The end of an update of which a part failed mends nothing; a load that comes to its end does."""
        engine = SimulatedEngine()
        engine.call("collective_rpc", "start_weight_update")
        names = ["lm_head", "nonsense" if fails == "in the middle" else "embed_tokens"]
        if fails == "before it begins":
            engine.faults.add("update_weights", raises=ValueError("no connection"))
        with pytest.raises(ValueError):
            engine.call("collective_rpc", "update_weights", None, (), {"update_info": {"names": names}})
        engine.call("collective_rpc", "update_weights", None, (), {"update_info": {"names": ["lm_head"]}})
        engine.call("collective_rpc", "finish_weight_update")
        assert engine.condition().weights is Weights.TAINTED
        engine.load_weights(make_weights().items())
        assert engine.condition().weights is Weights.VALID
        engine.call("collective_rpc", "start_weight_update")
        engine.call("collective_rpc", "finish_weight_update")
        assert engine.condition().weights is Weights.VALID

    def test_stale_prefix_cache(self):
        """New weights without a reset of the caches give tokens of neither; with one, the new tokens."""
        prompt, params = "x" * 40, SamplingParams()
        old, new = make_weights(), make_weights(1)
        found = []
        for reset in (False, True):
            engine = SimulatedEngine()
            add(engine, "a", prompt)
            drain(engine)
            engine.load_weights(new.items())
            if reset:
                assert engine.reset_caches()
            add(engine, "b", prompt)
            found.append(drain(engine)[-1].outputs[0].token_ids)
            assert engine.misuse == []
        assert found[0] not in (expected_tokens(prompt, params), expected_tokens(prompt, params, 0, new))
        assert found[1] == expected_tokens(prompt, params, 0, new)
        assert old != new

    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_sleep_drops_the_cache(self, level):
        """Levels 1 and 2 drop the prefix cache with the KV memory; level 0 keeps it."""
        engine = SimulatedEngine()
        add(engine, "a", "x" * 40)
        drain(engine)
        engine.sleep(level)
        assert bool(engine.prefix_cache) == (level == 0)

    def test_reset_with_requests(self):
        """While requests hold KV blocks the caches stay."""
        engine = SimulatedEngine()
        add(engine, "r")
        engine.step()
        assert engine.reset_caches() is False
        assert engine.call("reset_prefix_cache") is False

    def test_dummy_weights(self):
        """An engine built with dummy weights says so."""
        assert SimulatedEngine(dummy_weights=True).condition().weights is Weights.DISCARDED

    def test_condition(self):
        """The level can be read while asleep or paused."""
        engine = SimulatedEngine()
        assert engine.condition().level is None
        engine.pause_scheduling()
        assert (engine.condition().level, engine.condition().paused) == (0, True)
        engine.sleep(2)
        assert (engine.condition().level, engine.condition().resident) == (2, frozenset())
        engine.wake_up([KV_CACHE])
        assert (engine.condition().level, engine.condition().resident) == (2, {KV_CACHE})
        engine.wake_up([WEIGHTS])
        assert engine.condition().level == 0


def asleep(level=1, tags=()):
    engine = SimulatedEngine()
    engine.sleep(level)
    for tag in tags:
        engine.wake_up([tag])
    return engine


class TestMisuse:
    @pytest.mark.parametrize("engine", [asleep(0), asleep(1), asleep(1, [WEIGHTS]), asleep(1, [KV_CACHE])])
    def test_step_while_asleep(self, engine):
        """It returns nothing, spins and is recorded; an add is accepted."""
        add(engine, "r")
        engine.misuse.clear()
        assert engine.step() == engine.step() == []
        assert len(engine.misuse) == 2
        assert engine.call("has_unfinished_requests")
        assert not engine.has_work()

    def test_forward_without_kv(self):
        """Computing while the KV cache is unmapped poisons the engine."""
        engine = asleep(1, [WEIGHTS])
        add(engine, "r")
        engine.resume_scheduling()
        engine.step()
        assert engine.poisoned
        assert [text.split(" ")[0] for text in engine.misuse] == ["add(r)", "resume_scheduling", "step"]

    def test_sleep_loses_requests(self):
        """A sleep over requests that were not paused loses them: no output, and no end."""
        engine = SimulatedEngine()
        engine_id = add(engine, "r")
        engine.step()
        engine.sleep(1)
        assert "1 requests lost" in engine.misuse[0]
        engine.wake_up([WEIGHTS, KV_CACHE])
        engine.resume_scheduling()
        assert drain(engine) == []
        assert engine.call("has_unfinished_requests")
        assert engine.tokens(engine_id) == 1

    def test_sleep_over_a_launched_batch(self):
        """A launched batch is lost by a sleep, and that is recorded."""
        engine = SimulatedEngine(batch_queue_size=2)
        add(engine, "r")
        engine.step()
        engine.pause_scheduling()
        engine.sleep(1)
        assert "launched" in engine.misuse[0]
        assert not engine.has_launched()

    @pytest.mark.parametrize("level", [-1, 7])
    def test_level(self, level):
        """A level that there is not is accepted as vLLM does, and recorded."""
        engine = SimulatedEngine()
        engine.sleep(level)
        assert "no such level" in engine.misuse[0]
        assert engine.condition().paused

    @pytest.mark.parametrize(
        ("engine", "level"),
        [(asleep(1), 1), (asleep(1), 2), (asleep(2), 0), (asleep(0), 0), (asleep(1, [KV_CACHE]), 1)],
    )
    def test_sleep_twice(self, engine, level):
        """A second sleep is silently ignored and recorded."""
        before = engine.condition()
        engine.sleep(level)
        assert "silently ignored" in engine.misuse[0]
        assert engine.condition() == before

    def test_deepen_and_resleep(self):
        """From level 0 and with only the weights awake a sleep is real."""
        engine = asleep(0)
        engine.sleep(2)
        assert engine.condition().resident == frozenset()
        engine = asleep(1, [WEIGHTS])
        engine.sleep(1)
        assert engine.condition().resident == frozenset()
        engine.wake_up([WEIGHTS, KV_CACHE])
        assert engine.weights == make_weights()
        assert engine.misuse == []

    @pytest.mark.parametrize("tags", [[], ["bogus"], ["scheduling"], [WEIGHTS, WEIGHTS], [WEIGHTS, KV_CACHE]])
    def test_tags(self, tags):
        """Empty, unknown, duplicate and awake tags are recorded."""
        engine = asleep(1, [KV_CACHE])
        engine.wake_up(tags)
        assert len(engine.misuse) == 1
        assert (WEIGHTS in engine.resident) == (tags == [WEIGHTS, WEIGHTS])

    def test_duplicate_id(self):
        """The same live id twice is accepted, and recorded: two finished outputs come."""
        engine = SimulatedEngine()
        add(engine, "r")
        add(engine, "r")
        assert sum(output.finished for output in drain(engine)) == 2
        assert "live already" in engine.misuse[0]

    def test_weights_asleep(self):
        """What touches the weights while they are asleep is recorded."""
        engine = asleep(1)
        engine.load_weights(make_weights(1).items())
        engine.call("apply_model", lambda model: model)
        engine.call("add_lora", object())
        engine.discard_weights()
        engine.missing_weights()
        assert len(engine.misuse) == 5

    def test_load_over_requests(self):
        """A load under requests that were computed with the old weights is recorded."""
        engine = SimulatedEngine()
        add(engine, "r")
        engine.load_weights(make_weights().items())
        assert engine.misuse == []
        engine.step()
        engine.load_weights(make_weights().items())
        assert "under 1 requests" in engine.misuse[0]

    def test_discard_of_valid_weights(self):
        """Discarding weights that are valid is recorded."""
        engine = SimulatedEngine()
        engine.discard_weights()
        assert set(engine.weights.values()) == {NAN}
        assert len(engine.misuse) == 1

    def test_release_kv(self):
        """It is refused, and recorded, unless paused and quiet."""
        engine = SimulatedEngine()
        engine.release_kv_cache_memory()
        add(engine, "r")
        engine.pause_scheduling()
        engine.release_kv_cache_memory()
        assert len(engine.misuse) == 2
        assert KV_CACHE in engine.resident

    def test_behind_the_machine(self):
        """Sleep and wake through `call` or `collective_rpc` are recorded."""
        engine = SimulatedEngine()
        engine.call("sleep", 1)
        engine.call("collective_rpc", "wake_up")
        assert len(engine.misuse) == 2
        with pytest.raises(AttributeError):
            engine.call("no_such_method")

    def test_after_shutdown(self):
        """Every call after shutdown is recorded, but for a second shutdown."""
        engine = SimulatedEngine()
        add(engine, "r")
        engine.shutdown()
        engine.shutdown()
        assert engine.misuse == []
        assert engine.step() == []
        assert engine.misuse == ["step after shutdown"]

    def test_two_threads(self):
        """A call while another thread is inside the engine is recorded; reads are calls."""
        engine = SimulatedEngine()
        hang = threading.Event()
        engine.faults.add("step", hang=hang)
        thread = threading.Thread(target=engine.step)
        thread.start()
        while not engine._inside.locked():
            pass
        engine.has_work()
        engine.forget_media()
        hang.set()
        thread.join()
        assert [text.split(" ")[0] for text in engine.misuse] == ["has_work", "forget_media"]
        assert not engine._inside.locked()


class TestFaults:
    def test_step_raises(self):
        """A step that raised poisons the engine: later steps are empty and recorded; tokens can be had."""
        engine = SimulatedEngine()
        engine_id = add(engine, "r")
        engine.faults.add("step", at=3, raises=RuntimeError("lost"))
        engine.step()
        engine.step()
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
        assert engine.tokens(engine_id) == 2
        (last,) = engine.last_outputs([engine_id], "error")
        assert len(last.outputs[0].token_ids) == 2
        assert engine.misuse == []
        assert engine.step() == []
        assert engine.misuse == ["step on a poisoned engine"]

    def test_before_and_after(self):
        """Before, the call takes no effect and is not recorded; after, it does and is."""
        engine = SimulatedEngine()
        engine.faults.add("pause_scheduling", raises=RuntimeError())
        engine.faults.add("pause_scheduling", raises=RuntimeError(), when="after")
        for paused in (False, True):
            with pytest.raises(RuntimeError):
                engine.pause_scheduling()
            assert engine.paused is paused
        assert engine.calls == ["pause_scheduling"]
        assert not engine.faults

    def test_sleep_raises(self):
        """A sleep that raised leaves the scheduler paused and nothing asleep."""
        engine = SimulatedEngine()
        engine.faults.add("sleep", raises=RuntimeError())
        with pytest.raises(RuntimeError):
            engine.sleep(1)
        assert engine.condition().paused
        assert engine.condition().resident == {WEIGHTS, KV_CACHE}

    def test_out_of_memory(self):
        """A wake that is out of memory maps nothing and can be tried again."""
        engine = asleep(1)
        engine.faults.add("wake_up", raises=OutOfDeviceMemory("full", 5))
        with pytest.raises(OutOfDeviceMemory):
            engine.wake_up([WEIGHTS])
        assert not engine.resident
        engine.wake_up([WEIGHTS])
        assert engine.resident == {WEIGHTS}

    def test_effects(self):
        """Each special effect does what it says, once."""
        engine = SimulatedEngine()
        engine.faults.add("sleep", effect="frees_nothing")
        engine.faults.add("wake_up", effect="tag_stays_asleep")
        engine.faults.add("abort", effect="ignored")
        engine.faults.add("reset_caches", returns=False)
        before = engine.memory().device
        engine.sleep(1)
        assert (engine.memory().device, engine.condition().resident) == (before, frozenset())
        engine.wake_up([WEIGHTS, KV_CACHE])
        assert engine.resident == {WEIGHTS}
        engine.wake_up([KV_CACHE])
        assert engine.memory().device == before
        engine.resume_scheduling()
        assert (engine.reset_caches(), engine.reset_caches()) == (False, True)
        engine_id = add(engine, "r")
        engine.abort([engine_id])
        assert engine.has_work()
        engine.abort([engine_id])
        assert drain(engine) == []

    @pytest.mark.parametrize(("effect", "count"), [("output_dropped", 0), ("output_duplicated", 2)])
    def test_outputs(self, effect, count):
        """An output is dropped or doubled at the first step that has one."""
        engine = SimulatedEngine()
        engine.faults.add("step", effect=effect)
        add(engine, "r", output_kind=OutputKind.FINAL_ONLY)
        assert len(drain(engine)) == count

    def test_any_call(self):
        """A fault on "*" strikes whatever comes; one on a worker's method strikes within `call`."""
        engine = SimulatedEngine()
        engine.faults.add("*", at=2, raises=RuntimeError())
        engine.faults.add("reload_weights", raises=KeyError())
        engine.pause_scheduling()
        with pytest.raises(RuntimeError):
            engine.resume_scheduling()
        with pytest.raises(KeyError):
            engine.call("collective_rpc", "reload_weights")

    @pytest.mark.parametrize("fields", [{"at": 0}, {"when": "now"}, {"effect": "ignored"}])
    def test_nonsense(self, fields):
        """A fault that could never strike is refused."""
        with pytest.raises(ValueError):
            SimulatedEngine().faults.add("step", **fields)


class TestRecords:
    def test_calls(self):
        """What took effect is listed with its arguments; reads are not."""
        engine = SimulatedEngine()
        engine_id = add(engine, "r")
        engine.condition()
        engine.call("get_metrics")
        engine.step()
        engine.abort([engine_id])
        engine.step()
        engine.sleep(1)
        engine.wake_up([WEIGHTS, KV_CACHE])
        engine.call("collective_rpc", "reload_weights")
        assert engine.calls == [
            "add(r)",
            "step",
            "abort(r-00000000)",
            "step",
            "sleep(1)",
            "wake_up(weights,kv_cache)",
            "call(collective_rpc,reload_weights)",
        ]

    def test_surface(self):
        """The counts speak of samples, as vLLM's do; the version is the one set."""
        engine = SimulatedEngine()
        add(engine, "r", n=3)
        engine.call("set_weight_version", "v7")
        assert engine.call("get_weight_version") == "v7"
        assert engine.call("get_num_unfinished_requests") == 3
        assert engine.call("is_sleeping") is False
        assert engine.calls == ["add(r)", "call(set_weight_version,v7)"]

    def test_no_record(self):
        """With record=False nothing is kept."""
        engine = SimulatedEngine(record=False)
        add(engine, "r")
        drain(engine)
        assert engine.calls == []

    def test_null_engine(self):
        """Each step hands out one output a request until it is aborted."""
        engine = NullEngine()
        ids = [add(engine, str(place)) for place in range(3)]
        assert [output.request_id for output in engine.step()] == ["0", "1", "2"]
        assert engine.unstarted(ids) == []
        assert engine.tokens(ids[0]) == engine.progress().computed == 1
        (last,) = engine.last_outputs(ids[:1], "abort")
        assert last.finished
        engine.abort(ids[:1])
        assert len(engine.step()) == 2
        engine.abort(ids)
        assert not engine.has_work()
