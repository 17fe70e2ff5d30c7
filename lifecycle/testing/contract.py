"""The contract of an `Engine`: one test a rule, for whoever writes one.

Theory of operation
-------------------
`Engine` says what the lifecycle asks of an engine; `EngineContract` is the same as tests. An
adapter's author subclasses it and gives a `bench` fixture: a fresh `Bench`, which is an engine
and the little that differs between engines.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def bench(self):
            return Bench(MyEngine(slots=4), my_params)

The rules are about behaviour that can be seen through the protocol: nothing here looks inside
an output beyond what vLLM's have. What an engine may lack without breaking the contract is in
`NEEDS`: such a rule is skipped, with its reason, and `Bench.lacking` says which are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from lifecycle.engine import Call, Engine
from lifecycle.table import KV_CACHE, MEMORY_TAGS, WEIGHTS, Weights

# How much each output carries, as vLLM's `RequestOutputKind` numbers it.
CUMULATIVE, DELTA, FINAL_ONLY = range(3)
PROMPTS: Final = tuple(
    f"{word} is what this prompt is about" for word in ("sleep", "waking", "rest", "work", "play", "talk")
)


@dataclass
class Bench:
    """An engine to be tested, idle and awake, and how to ask it for something.

    engine: takes four requests at once, and a prompt of 40 characters but not one of 4000.
    params: `params(tokens, kind=..., n=...)` makes sampling parameters for exactly so many tokens,
    the same ones each time; `kind` is CUMULATIVE, DELTA or FINAL_ONLY, `n` the number of samples.
    launches_ahead: a step launches a batch and hands out the outputs of the one before.
    """

    engine: Engine
    params: Callable[..., Any]
    launches_ahead: bool = False

    def call(self, name: str, prompt: str = PROMPTS[0], tokens: int = 6, **params: Any) -> Call:
        """A request, prepared."""
        return self.engine.prepare(name, prompt, self.params(tokens, **params), {})

    def add(self, name: str, *args: Any, **params: Any) -> str:
        """A request, added; returns the engine's id."""
        return self.engine.add(self.call(name, *args, **params))

    def steps(self, most: int = 10_000) -> list[Any]:
        """Step until nothing is left, or at most so often; all outputs, as snapshots."""
        outputs: list[Any] = []
        while most and self.engine.has_work():
            outputs += [self.engine.copy_output(output) for output in self.engine.step()]
            most -= 1
        return outputs

    def lacking(self) -> dict[str, str]:
        """The rules that do not apply to this engine, and why."""
        return {rule: reason for rule, (applies, reason) in NEEDS.items() if not applies(self)}


# What a rule needs that an engine may lack, and what is said of it then.
NEEDS: Final[Mapping[str, tuple[Callable[[Bench], bool], str]]] = {
    "test_kv_memory_alone_is_released": (
        lambda bench: bench.engine.capabilities.release_kv,
        "this engine can't release the memory of the KV cache alone",
    ),
    "test_holes_in_the_weights_are_seen": (
        lambda bench: bench.engine.capabilities.check_weights,
        "this engine can't look for holes in its weights",
    ),
    "test_device_memory_is_released": (
        lambda bench: bench.engine.memory().device is not None,
        "no device memory can be measured here",
    ),
    "test_a_launched_batch_is_seen": (
        lambda bench: bench.launches_ahead,
        "this engine does not launch batches ahead",
    ),
}


def _last(outputs: list[Any], name: str) -> list[Any]:
    return [output for output in outputs if output.request_id == name and output.finished]


class EngineContract:
    """The rules. A subclass gives the fixture `bench`."""

    @pytest.fixture(autouse=True)
    def _skip_what_does_not_apply(self, request: pytest.FixtureRequest, bench: Bench) -> None:
        reason = bench.lacking().get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)

    def test_a_fresh_engine_is_awake_and_empty(self, bench: Bench) -> None:
        """All memory resident, nothing paused, nothing in flight, valid weights, no level."""
        engine = bench.engine
        condition = engine.condition()
        assert (condition.resident, condition.paused, condition.level) == (MEMORY_TAGS, False, None)
        assert (condition.weights, condition.requests) == (Weights.VALID, ())
        assert not engine.has_work()
        assert engine.step() == []

    def test_prepare_takes_a_snapshot(self, bench: Bench) -> None:
        """Changing the parameters after `prepare` does not change the call; equal ones share a snapshot."""
        engine = bench.engine
        params = bench.params(6)
        first = engine.prepare("a", PROMPTS[0], params, {})
        second = engine.prepare("b", PROMPTS[1], params, {})
        params.max_tokens = 2
        assert first.params is second.params
        assert first.params.max_tokens == 6
        with pytest.raises(TypeError):
            engine.prepare(7, PROMPTS[0], params, {})  # type: ignore[arg-type]  # that is the point

    def test_prepare_knows_samples_and_kind(self, bench: Bench) -> None:
        """`samples` is n, `delta` says that outputs carry only new tokens."""
        calls = [bench.call("a", n=3), bench.call("b", kind=DELTA), bench.call("c", kind=FINAL_ONLY)]
        assert [(call.samples, call.delta) for call in calls] == [(3, False), (1, True), (1, False)]

    def test_bad_arguments_leave_no_trace(self, bench: Bench) -> None:
        """`validate` and `add` raise ValueError for what can't be served, and the engine stays empty."""
        engine = bench.engine
        for prompt in ("", "x" * 4000):
            for method in (engine.validate, engine.add):
                with pytest.raises(ValueError):
                    method(bench.call("bad", prompt))
        assert not engine.has_work()
        assert engine.condition().requests == ()

    def test_validation_touches_nothing(self, bench: Bench) -> None:
        """A valid call that is only validated is not in the engine."""
        engine = bench.engine
        engine.validate(bench.call("only-validated"))
        assert not engine.has_work()

    def test_what_is_in_flight_is_found(self, bench: Bench) -> None:
        """`condition` lists requests in flight with their ids, samples and kind."""
        engine = bench.engine
        ids = {bench.add("one"): ("one", 1, False), bench.add("two", n=2, kind=DELTA): ("two", 2, True)}
        found = {
            item.engine_id: (item.request_id, item.samples, item.delta)
            for item in engine.condition().requests
        }
        assert found == ids
        bench.steps()

    def test_ids_of_the_engine_are_its_own(self, bench: Bench) -> None:
        """The same caller's id used again later gets another engine id."""
        first = bench.add("again")
        bench.steps()
        second = bench.add("again")
        bench.steps()
        assert first != second

    def test_unstarted_means_never_scheduled(self, bench: Bench) -> None:
        """Those without a slot never started; a parent with one sample ahead has."""
        engine = bench.engine
        ids = [bench.add(f"r{index}", PROMPTS[index]) for index in range(3)]
        wide = bench.add("wide", n=3)
        assert engine.unstarted([*ids, wide]) == [*ids, wide]
        late = bench.add("late")
        outputs = bench.steps(2)
        assert engine.unstarted([*ids, wide, late]) == [late]
        outputs += bench.steps()
        assert engine.unstarted([*ids, wide, late]) == []

    def test_every_request_ends_once(self, bench: Bench) -> None:
        """Each kind yields exactly one last output, with all its tokens over its outputs."""
        engine = bench.engine
        for index, kind in enumerate((CUMULATIVE, DELTA, FINAL_ONLY)):
            bench.add(f"r{index}", PROMPTS[index], 8, kind=kind)
        outputs = bench.steps()
        assert [len(_last(outputs, f"r{index}")) for index in range(3)] == [1, 1, 1]
        delta = [output for output in outputs if output.request_id == "r1"]
        assert sum(engine.count_tokens(output) for output in delta) == 8
        assert engine.count_tokens(_last(outputs, "r0")[0]) == 8
        assert [output for output in outputs if output.request_id == "r2"] == _last(outputs, "r2")

    def test_snapshots_do_not_grow(self, bench: Bench) -> None:
        """`copy_output` of a cumulative output keeps its length while the engine goes on."""
        engine = bench.engine
        bench.add("r", tokens=6)
        outputs = [output for output in bench.steps() if output.outputs]
        assert [engine.count_tokens(output) for output in outputs] == [1, 2, 3, 4, 5, 6]

    def test_outputs_that_waited_become_one(self, bench: Bench) -> None:
        """`merge_outputs` joins the deltas of each sample; of cumulative outputs the latest stands."""
        engine = bench.engine
        for name, kind in (("cumulative", CUMULATIVE), ("delta", DELTA)):
            bench.add(name, tokens=6, n=2, kind=kind)
        outputs = bench.steps()
        deltas = [output for output in outputs if output.request_id == "delta"]
        counts = [engine.count_tokens(output) for output in deltas]
        merged: dict[str, Any] = {}
        for output in outputs:
            name = output.request_id
            waiting = merged.get(name)
            merged[name] = engine.merge_outputs(waiting, output, delta=name == "delta") if waiting else output
        assert all(output.finished for output in merged.values())
        assert engine.count_tokens(merged["delta"]) == sum(counts)
        assert engine.count_tokens(merged["cumulative"]) == sum(counts)

    def test_tokens_are_counted_while_in_flight(self, bench: Bench) -> None:
        """Once begun, `tokens` rises by one a sample and step; it is 0 for what the engine does not know."""
        engine = bench.engine
        engine_id = bench.add("r", tokens=6, n=2)
        counts = []
        while engine.condition().requests:
            bench.steps(1)
            counts.append(engine.tokens(engine_id))
        assert counts[counts.index(2) :][:3] == [2, 4, 6]
        assert counts[-1] == 0
        bench.steps()

    def test_an_aborted_request_is_gone(self, bench: Bench) -> None:
        """After `abort` no output follows, unknown ids are ignored, and the engine becomes quiet."""
        engine = bench.engine
        gone = bench.add("gone", n=2)
        bench.add("stays")
        bench.steps(2)
        engine.abort([gone, "unknown"])
        outputs = bench.steps()
        assert not [output for output in outputs if output.request_id == "gone"]
        assert len(_last(outputs, "stays")) == 1
        assert engine.condition().requests == ()
        assert not engine.has_work()

    def test_last_outputs_have_the_tokens_so_far(self, bench: Bench) -> None:
        """Asked before the abort: cumulative and final-only give all tokens, delta none twice."""
        engine = bench.engine
        reference = {}
        for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
            bench.add(f"full{kind}", PROMPTS[kind], 9, kind=CUMULATIVE)
        for output in bench.steps():
            reference[output.request_id[-1]] = list(output.outputs[0].token_ids)
        ids = {
            kind: bench.add(f"cut{kind}", PROMPTS[kind], 9, kind=kind)
            for kind in (CUMULATIVE, DELTA, FINAL_ONLY)
        }
        before = bench.steps(4)
        for kind, engine_id in ids.items():
            outputs = engine.last_outputs([engine_id], "abort")
            assert [output.finished for output in outputs] == [True]
            assert outputs[0].outputs[0].finish_reason == "abort"
            given = (
                [output for output in before if output.request_id == f"cut{kind}"] if kind == DELTA else []
            )
            tokens = [token for output in [*given, *outputs] for token in output.outputs[0].token_ids]
            assert 0 < len(tokens) < 9
            assert tokens == reference[str(kind)][: len(tokens)]
        engine.abort(list(ids.values()))
        assert bench.steps() == []

    def test_last_outputs_of_many_samples_end_once(self, bench: Bench) -> None:
        """n=3 cut short: every sample is told, and only the last output is finished."""
        engine = bench.engine
        for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
            engine_id = bench.add(f"wide{kind}", tokens=9, n=3, kind=kind)
            bench.steps(3)
            outputs = engine.last_outputs([engine_id], "abort")
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert sorted(sample.index for output in outputs for sample in output.outputs) == [0, 1, 2]
            engine.abort([engine_id])
            assert bench.steps() == []

    def test_nothing_is_scheduled_while_paused(self, bench: Bench) -> None:
        """While paused a step computes nothing but what was launched before; resumed, it goes on."""
        engine = bench.engine
        engine_id = bench.add("r", tokens=6)
        bench.steps(2)
        engine.pause_scheduling()
        assert engine.condition().paused
        while engine.has_launched():
            engine.step()
        count = engine.tokens(engine_id)
        for _ in range(3):
            engine.step()
        assert engine.tokens(engine_id) == count
        assert not engine.has_work()  # what is frozen is none
        engine.resume_scheduling()
        assert engine.has_work()
        outputs = bench.steps()
        assert engine.count_tokens(_last(outputs, "r")[0]) == 6

    def test_progress_rises_at_every_step(self, bench: Bench) -> None:
        """Each step that computes something changes `progress`, final-only requests included."""
        engine = bench.engine
        bench.add("r", tokens=6, kind=FINAL_ONLY)
        seen = []
        while engine.condition().requests:
            bench.steps(1)
            seen.append(engine.progress())
        assert len(set(seen)) == len(seen)
        bench.steps()

    def test_finished_ids_are_flushed(self, bench: Bench) -> None:
        """After the last output one more step is needed, and then there is no work."""
        engine = bench.engine
        bench.add("r", tokens=2)
        while not _last(bench.steps(1), "r"):
            pass
        assert engine.has_work()
        engine.step()
        assert not engine.has_work()

    def test_sleep_and_wake_change_what_is_resident(self, bench: Bench) -> None:
        """Level 1: nothing resident and paused; each tag comes back alone; it stays paused until told."""
        engine = bench.engine
        engine.pause_scheduling()
        engine.sleep(1)
        condition = engine.condition()
        assert (condition.resident, condition.paused, condition.level) == (frozenset(), True, 1)
        for tags in ([WEIGHTS], [KV_CACHE]):
            engine.wake_up(tags)
            assert engine.condition().paused
        assert engine.condition().resident == MEMORY_TAGS
        engine.resume_scheduling()
        bench.add("r", tokens=3)
        assert len(_last(bench.steps(), "r")) == 1

    def test_a_pause_is_level_0(self, bench: Bench) -> None:
        """Level 0: all resident, paused, level 0."""
        engine = bench.engine
        engine.sleep(0)
        condition = engine.condition()
        assert (condition.resident, condition.paused, condition.level) == (MEMORY_TAGS, True, 0)
        engine.resume_scheduling()
        assert engine.condition().level is None

    def test_frozen_requests_go_on_after_a_sleep(self, bench: Bench) -> None:
        """Requests in flight at a paused sleep are computed on after the wake, with the same tokens."""
        engine = bench.engine
        bench.add("whole", PROMPTS[1], 8)
        reference = _last(bench.steps(), "whole")[0].outputs[0].token_ids
        bench.add("slept", PROMPTS[1], 8)
        bench.steps(3)
        engine.pause_scheduling()
        while engine.has_launched():
            engine.step()
        engine.sleep(1)
        engine.wake_up([WEIGHTS, KV_CACHE])
        engine.resume_scheduling()
        assert _last(bench.steps(), "slept")[0].outputs[0].token_ids == reference

    def test_kv_memory_alone_is_released(self, bench: Bench) -> None:
        """`release_kv_cache_memory` leaves the weights resident; the tag brings the cache back."""
        engine = bench.engine
        engine.pause_scheduling()
        engine.release_kv_cache_memory()
        assert engine.condition().resident == {WEIGHTS}
        engine.wake_up([KV_CACHE])
        assert engine.condition().resident == MEMORY_TAGS
        engine.resume_scheduling()

    def test_caches_are_dropped_when_idle(self, bench: Bench) -> None:
        """`reset_caches` says True on an idle engine."""
        engine = bench.engine
        bench.add("r", PROMPTS[0] * 3, 3)
        bench.steps()
        assert engine.reset_caches() is True

    def test_holes_in_the_weights_are_seen(self, bench: Bench) -> None:
        """After `discard_weights` everything is missing; after a reload nothing is, and tokens are right."""
        engine = bench.engine
        bench.add("before", PROMPTS[2], 6)
        reference = _last(bench.steps(), "before")[0].outputs[0].token_ids
        engine.pause_scheduling()
        engine.sleep(2)
        engine.wake_up([WEIGHTS])
        engine.discard_weights()
        assert len(engine.missing_weights()) > 5
        engine.call("collective_rpc", "reload_weights")
        assert engine.missing_weights() == ()
        engine.wake_up([KV_CACHE])
        engine.resume_scheduling()
        bench.add("after", PROMPTS[2], 6)
        assert _last(bench.steps(), "after")[0].outputs[0].token_ids == reference

    def test_memory_is_read_in_bytes(self, bench: Bench) -> None:
        """`memory` gives resident bytes of the process where the platform has them."""
        engine = bench.engine
        host = engine.memory().host
        assert host is None or host > 2**20

    def test_device_memory_is_released(self, bench: Bench) -> None:
        """Asleep the device holds less, by what was said to be asleepable."""
        engine = bench.engine
        before = engine.memory()
        engine.pause_scheduling()
        engine.sleep(1)
        after = engine.memory()
        assert None not in (before.device, before.asleepable, after.device)
        assert (before.device or 0) - (after.device or 0) == before.asleepable
        assert (before.asleepable or 0) > 0
        engine.wake_up([WEIGHTS, KV_CACHE])
        engine.resume_scheduling()

    def test_a_launched_batch_is_seen(self, bench: Bench) -> None:
        """With batches launched ahead a step may return nothing though work is under way."""
        engine = bench.engine
        bench.add("r", tokens=4)
        assert engine.step() == []
        assert engine.has_launched()
        assert len(_last(bench.steps(), "r")) == 1
        assert not engine.has_launched()
