"""The contract of an `Engine`, as a battery that every adapter passes.

A `Bench` is an engine and the little that differs between engines: how parameters are
made and how weights are reloaded. Each function below is one rule; `BATTERY` lists
them, with the name of the one engine and the reason where a rule applies to one only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lifecycle.engine import Engine
from lifecycle.table import KV_CACHE, MEMORY_TAGS, WEIGHTS, Weights

CUMULATIVE, DELTA, FINAL_ONLY = range(3)
PROMPTS = [
    f"{word} is what this prompt is about" for word in ("sleep", "waking", "rest", "work", "play", "talk")
]


@dataclass
class Bench:
    """An engine with four slots, idle and awake, and how to ask it for something.

    params(tokens, kind=..., n=..., stop=...) makes sampling parameters.
    """

    name: str
    engine: Engine
    params: Callable[..., Any]

    def call(self, name, prompt=PROMPTS[0], tokens=6, **params):
        return self.engine.prepare(name, prompt, self.params(tokens, **params), {})

    def add(self, name, *args, **params):
        return self.engine.add(self.call(name, *args, **params))

    def steps(self, most=10_000):
        """Step until nothing is left, or at most so often; all outputs, as snapshots."""
        outputs = []
        while most and self.engine.has_work():
            outputs += [self.engine.copy_output(output) for output in self.engine.step()]
            most -= 1
        return outputs


def last(outputs, name):
    return [output for output in outputs if output.request_id == name and output.finished]


def a_fresh_engine_is_awake_and_empty(bench):
    """All memory resident, nothing paused, nothing in flight, valid weights, no level."""
    condition = bench.engine.condition()
    assert (condition.resident, condition.paused, condition.level) == (MEMORY_TAGS, False, None)
    assert (condition.weights, condition.requests) == (Weights.VALID, ())
    assert not bench.engine.has_work()
    assert bench.engine.step() == []


def prepare_takes_a_snapshot(bench):
    """Changing the parameters after `prepare` does not change the call; equal ones share a snapshot."""
    params = bench.params(6)
    first = bench.engine.prepare("a", PROMPTS[0], params, {})
    second = bench.engine.prepare("b", PROMPTS[1], params, {})
    params.max_tokens = 2
    assert first.params is second.params
    assert first.params.max_tokens == 6
    with pytest.raises(TypeError):
        bench.engine.prepare(7, PROMPTS[0], params, {})


def prepare_knows_samples_and_kind(bench):
    """`samples` is n, `delta` says that outputs carry only new tokens."""
    calls = [bench.call("a", n=3), bench.call("b", kind=DELTA), bench.call("c", kind=FINAL_ONLY)]
    assert [(call.samples, call.delta) for call in calls] == [(3, False), (1, True), (1, False)]


def bad_arguments_leave_no_trace(bench):
    """`validate` and `add` raise ValueError for what can't be served, and the engine stays empty."""
    for prompt in ("", "x" * 4000):
        for method in (bench.engine.validate, bench.engine.add):
            with pytest.raises(ValueError):
                method(bench.call("bad", prompt))
    assert not bench.engine.has_work()
    assert bench.engine.condition().requests == ()


def validation_touches_nothing(bench):
    """A valid call that is only validated is not in the engine."""
    bench.engine.validate(bench.call("only-validated"))
    assert not bench.engine.has_work()


def what_is_in_flight_is_found(bench):
    """`condition` lists requests in flight with their ids, samples and kind."""
    ids = {bench.add("one"): ("one", 1, False), bench.add("two", n=2, kind=DELTA): ("two", 2, True)}
    found = {
        item.engine_id: (item.request_id, item.samples, item.delta)
        for item in bench.engine.condition().requests
    }
    assert found == ids
    bench.steps()


def ids_of_the_engine_are_its_own(bench):
    """The same caller's id used again later gets another engine id."""
    first = bench.add("again")
    bench.steps()
    second = bench.add("again")
    bench.steps()
    assert first != second


def unstarted_means_never_scheduled(bench):
    """Those without a slot never started; a parent with one sample ahead has."""
    ids = [bench.add(f"r{index}", PROMPTS[index]) for index in range(3)]
    wide = bench.add("wide", n=3)
    assert bench.engine.unstarted([*ids, wide]) == [*ids, wide]
    late = bench.add("late")
    outputs = bench.steps(2)
    assert bench.engine.unstarted([*ids, wide, late]) == [late]
    outputs += bench.steps()
    assert bench.engine.unstarted([*ids, wide, late]) == []


def every_request_ends_once(bench):
    """Each kind yields exactly one last output, with all its tokens over its outputs."""
    for index, kind in enumerate((CUMULATIVE, DELTA, FINAL_ONLY)):
        bench.add(f"r{index}", PROMPTS[index], 8, kind=kind)
    outputs = bench.steps()
    assert [len(last(outputs, f"r{index}")) for index in range(3)] == [1, 1, 1]
    delta = [output for output in outputs if output.request_id == "r1"]
    assert sum(bench.engine.count_tokens(output) for output in delta) == 8
    assert bench.engine.count_tokens(last(outputs, "r0")[0]) == 8
    assert [output for output in outputs if output.request_id == "r2"] == last(outputs, "r2")


def snapshots_do_not_grow(bench):
    """`copy_output` of a cumulative output keeps its length while the engine goes on."""
    bench.add("r", tokens=6)
    outputs = [output for output in bench.steps() if output.outputs]
    assert [bench.engine.count_tokens(output) for output in outputs] == [1, 2, 3, 4, 5, 6]


def tokens_are_counted_while_in_flight(bench):
    """`tokens` rises by one a sample and step, and is 0 for what the engine does not know."""
    engine_id = bench.add("r", tokens=6, n=2)
    counts = []
    while bench.engine.condition().requests:
        bench.steps(1)
        counts.append(bench.engine.tokens(engine_id))
    assert counts[:3] == [2, 4, 6]
    assert counts[-1] == 0
    bench.steps()


def an_aborted_request_is_gone(bench):
    """After `abort` no output follows, unknown ids are ignored, and the engine becomes quiet."""
    gone = bench.add("gone", n=2)
    bench.add("stays")
    bench.steps(2)
    bench.engine.abort([gone, "unknown"])
    outputs = bench.steps()
    assert not [output for output in outputs if output.request_id == "gone"]
    assert len(last(outputs, "stays")) == 1
    assert bench.engine.condition().requests == ()
    assert not bench.engine.has_work()


def last_outputs_have_the_tokens_so_far(bench):
    """Asked before the abort: cumulative and final-only give all tokens, delta none twice."""
    reference = {}
    for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
        bench.add(f"full{kind}", PROMPTS[kind], 9, kind=CUMULATIVE)
    for output in bench.steps():
        reference[output.request_id[-1]] = list(output.outputs[0].token_ids)
    ids = {
        kind: bench.add(f"cut{kind}", PROMPTS[kind], 9, kind=kind) for kind in (CUMULATIVE, DELTA, FINAL_ONLY)
    }
    before = bench.steps(4)
    for kind, engine_id in ids.items():
        outputs = bench.engine.last_outputs([engine_id], "abort")
        assert [output.finished for output in outputs] == [True]
        assert outputs[0].outputs[0].finish_reason == "abort"
        given = [output for output in before if output.request_id == f"cut{kind}"] if kind == DELTA else []
        tokens = [token for output in [*given, *outputs] for token in output.outputs[0].token_ids]
        assert 0 < len(tokens) < 9
        assert tokens == reference[str(kind)][: len(tokens)]
    bench.engine.abort(list(ids.values()))
    assert bench.steps() == []


def last_outputs_of_many_samples_end_once(bench):
    """n=3 cut short: every sample is told, and only the last output is finished."""
    for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
        engine_id = bench.add(f"wide{kind}", tokens=9, n=3, kind=kind)
        bench.steps(3)
        outputs = bench.engine.last_outputs([engine_id], "abort")
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert sorted(sample.index for output in outputs for sample in output.outputs) == [0, 1, 2]
        bench.engine.abort([engine_id])
        assert bench.steps() == []


def nothing_is_scheduled_while_paused(bench):
    """After `pause_scheduling` a step computes nothing; after `resume_scheduling` it goes on where it was."""
    engine_id = bench.add("r", tokens=6)
    bench.steps(2)
    bench.engine.pause_scheduling()
    assert bench.engine.condition().paused
    count = bench.engine.tokens(engine_id)
    for _ in range(3):
        bench.engine.step()
    assert bench.engine.tokens(engine_id) == count
    bench.engine.resume_scheduling()
    outputs = bench.steps()
    assert bench.engine.count_tokens(last(outputs, "r")[0]) == 6


def progress_rises_at_every_step(bench):
    """Each step that computes something changes `progress`, final-only requests included."""
    bench.add("r", tokens=6, kind=FINAL_ONLY)
    seen = []
    while bench.engine.condition().requests:
        bench.steps(1)
        seen.append(bench.engine.progress())
    assert len(set(seen)) == len(seen)
    bench.steps()


def finished_ids_are_flushed(bench):
    """After the last output one more step is needed, and then there is no work."""
    bench.add("r", tokens=2)
    while not last(bench.steps(1), "r"):
        pass
    assert bench.engine.has_work()
    bench.engine.step()
    assert not bench.engine.has_work()


def sleep_and_wake_change_what_is_resident(bench):
    """Level 1: nothing resident and paused; each tag comes back alone; scheduling stays paused until told."""
    bench.engine.pause_scheduling()
    bench.engine.sleep(1)
    condition = bench.engine.condition()
    assert (condition.resident, condition.paused, condition.level) == (frozenset(), True, 1)
    for tags in ([WEIGHTS], [KV_CACHE]):
        bench.engine.wake_up(tags)
        assert bench.engine.condition().paused
    assert bench.engine.condition().resident == MEMORY_TAGS
    bench.engine.resume_scheduling()
    bench.add("r", tokens=3)
    assert len(last(bench.steps(), "r")) == 1


def a_pause_is_level_0(bench):
    """Level 0: all resident, paused, level 0."""
    bench.engine.sleep(0)
    condition = bench.engine.condition()
    assert (condition.resident, condition.paused, condition.level) == (MEMORY_TAGS, True, 0)
    bench.engine.resume_scheduling()
    assert bench.engine.condition().level is None


def frozen_requests_go_on_after_a_sleep(bench):
    """Requests in flight at a paused sleep are computed on after the wake, with the same tokens."""
    bench.add("whole", PROMPTS[1], 8)
    reference = last(bench.steps(), "whole")[0].outputs[0].token_ids
    bench.add("slept", PROMPTS[1], 8)
    bench.steps(3)
    bench.engine.pause_scheduling()
    while bench.engine.has_launched():
        bench.engine.step()
    bench.engine.sleep(1)
    bench.engine.wake_up([WEIGHTS, KV_CACHE])
    bench.engine.resume_scheduling()
    assert last(bench.steps(), "slept")[0].outputs[0].token_ids == reference


def kv_memory_alone_is_released(bench):
    """`release_kv_cache_memory` leaves the weights resident; the tag brings the cache back."""
    bench.engine.pause_scheduling()
    bench.engine.release_kv_cache_memory()
    assert bench.engine.condition().resident == {WEIGHTS}
    bench.engine.wake_up([KV_CACHE])
    assert bench.engine.condition().resident == MEMORY_TAGS
    bench.engine.resume_scheduling()


def caches_are_dropped_when_idle(bench):
    """`reset_caches` says True on an idle engine."""
    bench.add("r", PROMPTS[0] * 3, 3)
    bench.steps()
    assert bench.engine.reset_caches() is True


def holes_in_the_weights_are_seen(bench):
    """After `discard_weights` everything is missing; after a reload nothing is, and tokens are right."""
    bench.add("before", PROMPTS[2], 6)
    reference = last(bench.steps(), "before")[0].outputs[0].token_ids
    bench.engine.pause_scheduling()
    bench.engine.sleep(2)
    bench.engine.wake_up([WEIGHTS])
    bench.engine.discard_weights()
    assert len(bench.engine.missing_weights()) > 5
    bench.engine.call("collective_rpc", "reload_weights")
    assert bench.engine.missing_weights() == ()
    bench.engine.wake_up([KV_CACHE])
    bench.engine.resume_scheduling()
    bench.add("after", PROMPTS[2], 6)
    assert last(bench.steps(), "after")[0].outputs[0].token_ids == reference


def memory_is_read_in_bytes(bench):
    """`memory` gives resident bytes of the process where the platform has them."""
    host = bench.engine.memory().host
    assert host is None or host > 2**20


def device_memory_is_released(bench):
    """Asleep the device holds less, by what was said to be asleepable."""
    before = bench.engine.memory()
    bench.engine.pause_scheduling()
    bench.engine.sleep(1)
    after = bench.engine.memory()
    assert before.device - after.device == before.asleepable > 0
    bench.engine.wake_up([WEIGHTS, KV_CACHE])
    bench.engine.resume_scheduling()


def a_launched_batch_is_seen(bench):
    """With batches launched ahead a step may return nothing though work is under way."""
    bench.add("r", tokens=4)
    assert bench.engine.step() == []
    assert bench.engine.has_launched()
    assert len(last(bench.steps(), "r")) == 1
    assert not bench.engine.has_launched()


# The rule, and where it applies to one engine only: that engine and the reason.
BATTERY = [
    (a_fresh_engine_is_awake_and_empty, None, ""),
    (prepare_takes_a_snapshot, None, ""),
    (prepare_knows_samples_and_kind, None, ""),
    (bad_arguments_leave_no_trace, None, ""),
    (validation_touches_nothing, None, ""),
    (what_is_in_flight_is_found, None, ""),
    (ids_of_the_engine_are_its_own, None, ""),
    (unstarted_means_never_scheduled, None, ""),
    (every_request_ends_once, None, ""),
    (snapshots_do_not_grow, None, ""),
    (tokens_are_counted_while_in_flight, None, ""),
    (an_aborted_request_is_gone, None, ""),
    (last_outputs_have_the_tokens_so_far, None, ""),
    (last_outputs_of_many_samples_end_once, None, ""),
    (nothing_is_scheduled_while_paused, None, ""),
    (progress_rises_at_every_step, None, ""),
    (finished_ids_are_flushed, None, ""),
    (sleep_and_wake_change_what_is_resident, None, ""),
    (a_pause_is_level_0, None, ""),
    (frozen_requests_go_on_after_a_sleep, None, ""),
    (kv_memory_alone_is_released, None, ""),
    (caches_are_dropped_when_idle, None, ""),
    (holes_in_the_weights_are_seen, None, ""),
    (memory_is_read_in_bytes, None, ""),
    (
        device_memory_is_released,
        "simulated",
        "a CPU has no device memory to measure; tests/gpu does it on a GPU",
    ),
    (
        a_launched_batch_is_seen,
        "simulated",
        "vLLM launches ahead only on a GPU; test_vllm_drain forces it on a CPU",
    ),
]
