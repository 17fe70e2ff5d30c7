"""A sleep, step by step: what it measures, what it says, and where it can still be stopped."""

import time
from itertools import count

import pytest

import lifecycle.sleep
from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import (
    Closed,
    DrainCancelled,
    DrainStalled,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    Lifecycle,
    ReleaseFailed,
    State,
)
from lifecycle.engine import Capabilities, Memory, Progress


class Bench:
    """Three requests on two slots, two steps in."""

    def __init__(self, engine=None, requests=3, kind=OutputKind.CUMULATIVE, **options):
        self.engine = engine or SimulatedEngine(max_num_seqs=2)
        self.lifecycle = Lifecycle(self.engine, sinks=(), **options)
        self.core = self.lifecycle._core
        self.ended = {}
        for index in range(requests):
            self.lifecycle.add_request(f"r{index}", f"prompt {index}", self.params(index, kind))
        self.took = [self.step() for _ in range(2)] if requests else []

    @staticmethod
    def params(index, kind=OutputKind.CUMULATIVE):
        return SamplingParams(max_tokens=8, seed=index, output_kind=kind)

    def step(self):
        for output in self.lifecycle.step():
            if output.finished:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = list(output.outputs[0].token_ids)

    def finish_right(self):
        while self.lifecycle.has_unfinished_requests():
            self.step()
        for name, tokens in self.ended.items():
            assert tokens == expected_tokens(f"prompt {name[1:]}", self.params(int(name[1:]))), name
        assert self.lifecycle.check() == []
        assert self.engine.misuse == []

    def events(self, *kinds):
        return [event for event in self.lifecycle.events() if event["event"] in kinds]


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.finish_right()
    assert set(made.ended) == {"r0", "r1", "r2"}


# -- what it measures ----------------------------------------------------------------------------------


def test_durations_are_seconds_of_this_call(bench):
    """A duration in a report, an event or an error is of what it belongs to: not negative, not longer."""
    began = time.monotonic()
    with pytest.raises(DrainTimeout) as late:
        bench.lifecycle.sleep(1, max_steps=1)
    report = bench.lifecycle.sleep(1)
    bench.lifecycle.sleep(1)
    woken = bench.lifecycle.wake_up()
    loaded = bench.lifecycle.reload_weights() if not bench.lifecycle.has_unfinished_requests() else None
    took = time.monotonic() - began
    seconds = [late.value.seconds, report.drain_s, report.release_s, woken.seconds]
    seconds += [loaded.seconds] if loaded else []
    told = [event["duration_s"] for event in bench.lifecycle.events() if event.get("duration_s") is not None]
    assert len(told) >= 5
    assert all(0 <= one <= took for one in (*seconds, *told))
    assert report.drain_s + report.release_s <= took


def test_a_sleep_that_frees_what_it_should_warns_of_nothing(bench):
    """All that could sleep was released: no warning, and the memory before and after is in the log."""
    report = bench.lifecycle.sleep(1)
    assert report.warnings == ()
    assert report.released_bytes == bench.engine.tag_bytes["weights"] + bench.engine.tag_bytes["kv_cache"]
    (memory,) = bench.events("memory")
    assert memory["bytes"] == {
        "device_before": report.device_before,
        "device_after": report.device_after,
        "host_before": report.host_before,
        "host_after": report.host_after,
    }
    bench.lifecycle.wake_up()


@pytest.mark.parametrize(
    ("level", "before", "after", "falls_short"),
    [
        (1, Memory(100, 0, 60), Memory(70, 0, 0), False),  # half of it
        (1, Memory(100, 0, 60), Memory(71, 0, 0), True),
        (2, Memory(100, 0, 60), Memory(100, 0, 0), True),
        (1, Memory(100, 0, 0), Memory(100, 0, 0), False),  # nothing was there to sleep
        (1, Memory(100, 0, None), Memory(100, 0, None), False),  # or nobody can tell
        (1, Memory(None, 0, 60), Memory(70, 0, 0), False),
        (1, Memory(100, 0, 60), Memory(None, 0, 0), False),
        (0, Memory(100, 0, 60), Memory(100, 0, 60), False),  # a pause frees nothing
    ],
)
def test_too_little_is_less_than_half_of_what_could_sleep(level, before, after, falls_short):
    """A strict lifecycle raises only for a sleep that was to free memory and measurably did not free half."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=(), strict_release=True)
    readings = iter([before, after])
    engine.memory = lambda: next(readings)
    if falls_short:
        with pytest.raises(ReleaseFailed, match=f"released {100 - after.device} bytes of the 60") as failed:
            lifecycle.sleep(level)
        assert (failed.value.report.level, failed.value.expected_bytes) == (level, 60)
    else:
        assert lifecycle.sleep(level).warnings == ()
    assert lifecycle.state is State.SLEEPING


# -- what it says --------------------------------------------------------------------------------------


def test_what_begins_also_ends_in_the_log(bench):
    """Each operation that was begun ends: a sleep, one rolled back, one from asleep, a wake, a release."""
    with pytest.raises(DrainTimeout):
        bench.lifecycle.sleep(1, max_steps=0)
    bench.lifecycle.sleep(0, "keep")
    bench.lifecycle.sleep(1, "keep")
    bench.lifecycle.wake_up(["weights"])
    bench.lifecycle.sleep(1, "keep")
    bench.lifecycle.wake_up()
    began = [event["call"] for event in bench.events("operation_begin")]
    ended = [event["call"] for event in bench.events("operation_end")]
    assert sorted(began) == sorted(ended)
    assert began.count("sleep(level=1, mode=wait)") == 1
    assert began.count("sleep(level=1, mode=keep)") == 2
    assert began.count("wake_up") == 2
    assert [
        event["call"] for event in bench.events("operation_end") if event.get("error") == "rolled back"
    ] == ["sleep(level=1, mode=wait)"]


def test_a_long_drain_says_how_far_it_is(monkeypatch):
    """Once a second, not at every step: how many requests remain, how many steps and tokens it took."""
    clock = count(1000.0, 0.1)
    bench = Bench(requests=0)
    bench.lifecycle.add_request("r0", "prompt 0", SamplingParams(max_tokens=100, seed=0))
    bench.step()
    monkeypatch.setattr(lifecycle.sleep.time, "monotonic", lambda: next(clock))
    report = bench.lifecycle.sleep(1)
    monkeypatch.undo()
    told = bench.events("drain_progress")
    took = report.drain_s
    assert report.steps == 100
    assert took / 1.5 <= len(told) <= took
    assert len(told) < report.steps / 2
    remaining = [event["remaining"] for event in told]
    assert (remaining[0], remaining) == (1, sorted(remaining, reverse=True))
    steps = [event["steps"] for event in told]
    assert steps == sorted(set(steps))
    assert [event["tokens"] for event in told] == steps


@pytest.mark.parametrize(
    ("limits", "said"), [({"max_steps": 3}, "after 3 steps"), ({"timeout": 0}, r"after 0 s")]
)
def test_a_deadline_says_what_it_was(bench, limits, said):
    """The error of a drain that was rolled back names the limit that it did not keep to."""
    with pytest.raises(DrainTimeout, match=said) as late:
        bench.lifecycle.sleep(1, **limits)
    assert late.value.steps == limits.get("max_steps", 0)
    assert set(late.value.remaining) == {"r0", "r1"}


def test_a_deadline_that_is_far_off_changes_nothing(bench):
    """A drain that ends before its limits returns its report."""
    report = bench.lifecycle.sleep(1, timeout=600, max_steps=600)
    assert (set(report.drained), report.held) == ({"r0", "r1"}, ("r2",))
    bench.lifecycle.wake_up()


@pytest.mark.parametrize(
    ("way", "hint"),
    [
        (lambda life: life.sleep(2), "vLLM ignores a change from level 1"),
        (lambda life: (life.wake_up(["kv_cache"]), life.sleep(1)), r"wake_up\(\['weights'\]\) first"),
        (lambda life: life.sleep(0), "pause.. holds the next wake at level 0"),
        (
            lambda life: (life.wake_up(["weights"]), life.sleep(1)),
            r"wake_up\(\['kv_cache'\]\) first, or close",
        ),
    ],
)
def test_a_sleep_that_would_free_nothing_says_the_way_out(way, hint):
    """What vLLM would ignore is refused with a way that works from there."""
    engine = SimulatedEngine(capabilities=Capabilities("old", {}, resleep_partial=False))
    lifecycle = Lifecycle(engine, sinks=())
    lifecycle.sleep(1)
    with pytest.raises(IllegalCall, match=hint):
        way(lifecycle)
    assert engine.misuse == []


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sleep_that_already_holds_names_its_level(level):
    """Asked for again, a sleep at the same level is a no-op that says so, and says at which level."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.sleep(level)
    report = lifecycle.sleep(level)
    assert (report.noop, report.level) == (True, level)
    assert [event["call"] for event in lifecycle.events() if event["event"] == "noop"] == [
        f"sleep(level={level}, mode=wait)"
    ]


# -- where it can be stopped ---------------------------------------------------------------------------


def test_a_drain_is_cancelled_once_and_only_while_it_drains(bench):
    """`cancel` rolls back and says so; said again, or too late, it says no and changes nothing."""
    sleep = bench.core.begin_sleep(1, "wait")
    sleep.advance()
    assert bench.lifecycle.check() == []
    assert (bench.lifecycle.state, sleep.draining) == (State.DRAINING, True)
    assert sleep.cancel() is True
    assert (bench.lifecycle.state, bench.core.transition) == (State.RUNNING, None)
    assert sleep.cancel() is False
    assert sleep.draining is False
    other = bench.core.begin_sleep(1, "wait")
    assert sleep.cancel() is False
    assert bench.lifecycle.state is State.DRAINING
    while (report := other.advance()) is None:
        pass
    assert other.cancel() is False
    assert (bench.lifecycle.state, other.draining) == (State.SLEEPING, False)
    calls = len(bench.engine.calls)
    assert other.advance() is report
    assert len(bench.engine.calls) == calls
    bench.lifecycle.wake_up()


def test_frozen_requests_go_on_after_a_rollback():
    """A drain that keeps stops scheduling at once; rolled back, everything is scheduled again."""
    bench = Bench(SimulatedEngine(max_num_seqs=2, batch_queue_size=2))
    sleep = bench.core.begin_sleep(1, "keep")
    assert bench.engine.condition().paused
    assert sleep.cancel()
    assert not bench.engine.condition().paused
    bench.finish_right()


def test_a_sleep_from_asleep_owns_its_transition(bench):
    """Deeper, or back to sleep: under way it is named, nothing else may begin, and it can't be cancelled."""
    bench.lifecycle.sleep(0, "keep")
    sleep = bench.core.begin_sleep(1, "keep")
    assert bench.lifecycle.snapshot().operation == "sleep(level=1, mode=keep)"
    assert bench.lifecycle.check() == []
    with pytest.raises(IllegalCall, match="is under way"):
        bench.lifecycle.wake_up()
    assert sleep.cancel() is False
    while sleep.advance() is None:
        pass
    assert bench.lifecycle.snapshot().level == 1
    bench.lifecycle.wake_up()


@pytest.mark.parametrize("mode", ["wait", "wait_all"])
def test_kept_requests_are_not_waited_for_asleep(bench, mode):
    """They can't be computed there: both modes that would wait are refused, from every sleep."""
    bench.lifecycle.sleep(0, "keep")
    with pytest.raises(IllegalCall, match="can't finish while asleep"):
        bench.lifecycle.sleep(1, mode)
    bench.lifecycle.sleep(1, "keep")
    bench.lifecycle.wake_up(["weights"])
    with pytest.raises(IllegalCall, match="can't finish while asleep"):
        bench.lifecycle.sleep(1, mode)
    bench.lifecycle.wake_up()


@pytest.mark.parametrize("level", [1, 2])
def test_memory_that_stays_is_no_sleep(level):
    """Paused, but with memory still resident: at levels 1 and 2 the engine does not sleep."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=())
    engine.sleep = lambda _: engine.pause_scheduling()
    with pytest.raises(EngineFailed, match="returned, but the engine is"):
        lifecycle.sleep(level)
    assert lifecycle.state is State.FAILED


def test_a_stray_output_in_a_drain_is_no_reason_to_drop_the_others(bench):
    """An output that belongs to nobody is recorded; what came with it in the same step is delivered."""
    stray = []
    real = bench.core._step

    def step():
        outputs = real()
        if outputs and not stray:
            copy = bench.engine.copy_output(outputs[0])
            copy.request_id = "nobody"
            stray.append(copy)
            return [copy, *outputs]
        return outputs

    bench.core._step = step
    report = bench.lifecycle.sleep(1)
    assert stray
    assert set(report.drained) == {"r0", "r1"}
    assert [event["call"] for event in bench.events("unexpected_output")] == ["nobody"]
    bench.lifecycle.wake_up()


def test_a_deadline_has_rolled_back_before_it_is_raised(bench):
    """Whoever advances a sleep need not cancel it as well: at the error the machine is back where it was."""
    sleep = bench.core.begin_sleep(1, "wait", max_steps=0)
    with pytest.raises(DrainTimeout):
        sleep.advance()
    assert (bench.lifecycle.state, bench.core.transition) == (State.RUNNING, None)
    assert bench.lifecycle.snapshot().in_flight == 3


def test_a_sleep_that_another_call_ended_does_not_go_on(bench):
    """Rolled back or closed by somebody else, it does nothing more and says what happened."""
    began = time.monotonic()
    sleep = bench.core.begin_sleep(1, "wait")
    sleep.cancel()
    steps = bench.engine.calls.count("step")
    with pytest.raises(DrainCancelled, match="another call ended it") as cancelled:
        sleep.advance()
    assert 0 <= cancelled.value.seconds <= time.monotonic() - began
    assert bench.engine.calls.count("step") == steps
    bench.finish_right()
    other = Bench()
    sleep = other.core.begin_sleep(1, "wait")
    other.lifecycle.close()
    with pytest.raises(Closed):
        sleep.advance()


def test_requests_of_one_drain_step_are_counted_apart(bench):
    """Two that end in the same step are each drained once, and their tokens counted once."""
    report = bench.lifecycle.sleep(1, "wait_all")
    assert sorted(report.drained) == ["r0", "r1", "r2"]
    assert report.tokens == 3 * 8 - 2 * 2  # two had two tokens each
    bench.lifecycle.wake_up()


def test_a_request_that_ends_twice_in_one_step_was_drained_once():
    """The copy of a last output that an engine hands out beside it counts for nothing."""
    bench = Bench(requests=1)
    real = bench.engine.step
    bench.core._step = lambda: [it for output in real() for it in (output, bench.engine.copy_output(output))]
    report = bench.lifecycle.sleep(1)
    assert (report.drained, report.tokens) == (("r0",), 6)
    bench.lifecycle.wake_up()
    bench.finish_right()


@pytest.mark.parametrize("more", [0, 1])
def test_a_deadline_gives_what_is_to_be_flushed_its_few_steps(more):
    """With nothing in flight the limit is on flushing: so many steps are still taken, and not one more."""
    bench = Bench(requests=0)
    flushes = lifecycle.sleep.FLUSHES + more
    bench.engine.has_work = lambda: bench.engine.calls.count("step") < flushes
    if more:
        with pytest.raises(DrainTimeout):
            bench.lifecycle.sleep(1, max_steps=0)
        assert bench.lifecycle.state is State.AWAKE
    else:
        assert bench.lifecycle.sleep(1, max_steps=0).steps == flushes
    assert bench.lifecycle.check() == []


def test_what_only_has_to_be_flushed_is_no_progress_and_no_stall():
    """An engine that works for nobody, for ever, is stalled at last."""
    engine = SimulatedEngine(max_num_seqs=2)
    bench = Bench(engine, requests=0, stall_s=0.05)
    engine.has_work = lambda: True
    steps = count(1)
    engine.progress = lambda: Progress(next(steps), frozenset({"somebody"}))
    with pytest.raises(DrainStalled):
        bench.lifecycle.sleep(1)
    assert bench.lifecycle.state is State.AWAKE


def test_frozen_requests_are_no_work_that_got_lost():
    """While scheduling stands still the engine says it has no work: launched batches are stepped out."""
    for level in (0, 1):
        for steps in range(12):
            bench = Bench(SimulatedEngine(max_num_seqs=2, batch_queue_size=2), kind=OutputKind.FINAL_ONLY)
            for _ in range(steps):
                bench.step()
            bench.lifecycle.sleep(level, "keep")
            assert not bench.engine.has_launched()
            bench.lifecycle.wake_up()
            bench.finish_right()
            assert set(bench.ended) == {"r0", "r1", "r2"}


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_batch_that_an_aborted_request_left_behind_is_flushed_before_memory_goes(mode):
    """Also where there is no drain: the engine serves nobody, as a weight update is open."""
    bench = Bench(SimulatedEngine(max_num_seqs=2, batch_queue_size=2), requests=1)
    bench.lifecycle.abort_request(["r0"])
    bench.lifecycle.collective_rpc("start_weight_update")
    assert bench.engine.has_launched()
    assert bench.lifecycle.state is State.PARTIALLY_AWAKE
    bench.lifecycle.sleep(1, mode)
    assert not bench.engine.has_launched()
    assert bench.engine.misuse == []


def test_an_engine_that_cannot_flush_fails_the_sleep():
    """Nothing can be rolled back there, and a deadline is about requests: so many steps, then it failed."""
    bench = Bench(SimulatedEngine(max_num_seqs=2, batch_queue_size=2), requests=1)
    bench.lifecycle.abort_request(["r0"])
    bench.lifecycle.collective_rpc("start_weight_update")
    bench.engine.has_launched = lambda: True
    bench.core._step = lambda: bench.engine.calls.append("step") or []
    steps = bench.engine.calls.count("step")
    with pytest.raises(EngineFailed, match="batches are still launched after 16 steps"):
        bench.lifecycle.sleep(1, "keep", timeout=0)
    assert bench.engine.calls.count("step") - steps == lifecycle.sleep.FLUSHES
    assert bench.lifecycle.state is State.FAILED
    assert bench.core.transition is None
