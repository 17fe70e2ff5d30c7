"""Events: dense, bounded, coalesced, and never in the engine's way."""

import logging

import pytest
import structlog

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import IllegalCall, Lifecycle
from lifecycle.events import EventLog, structlog_sink


def test_sequence_is_dense_and_memory_bounded():
    """`seq` counts by one; only the last `capacity` events are kept."""
    log = EventLog("e", 0, (), capacity=10)
    for index in range(25):
        log.emit("transition", source=str(index))
    assert [event["seq"] for event in log.tail()] == list(range(16, 26))
    assert [event["seq"] for event in log.tail(2)] == [24, 25]


def test_equal_refusals_are_one_event_with_a_count():
    """A caller that spins on a refused call fills no memory: the event's count grows."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.sleep(1)
    for _ in range(1000):
        with pytest.raises(IllegalCall):
            lifecycle.step()
    refusals = [event for event in lifecycle.events() if event["event"] == "refused"]
    assert [event["count"] for event in refusals] == [1000]


def test_refusals_in_another_state_are_another_event():
    """Coalescing ends with the state: the log shows in which state how often."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    for _ in range(2):
        lifecycle.sleep(1)
        with pytest.raises(IllegalCall):
            lifecycle.step()
        lifecycle.wake_up()
    assert [event["count"] for event in lifecycle.events() if event["event"] == "refused"] == [1, 1]


def test_distinct_refusals_without_end_keep_memory_bounded():
    """Even refusals that all differ are kept within a bound."""
    log = EventLog("e", 0, (), capacity=10)
    for index in range(1000):
        log.emit_repeatable("refused", call="add_request", error=str(index))
    assert len(log._repeats) <= 64


def test_a_broken_sink_is_counted_and_never_raised():
    """A sink that raises does not reach the engine's path; it is said once."""
    seen = []

    def broken(event):
        raise OSError(event["event"])

    lifecycle = Lifecycle(SimulatedEngine(), sinks=(broken, seen.append))
    lifecycle.sleep(1)
    log = lifecycle._core.events
    assert log.sink_failures == log.seq == len(seen)
    assert [event["event"] for event in seen].count("sink_failed") == 1


def test_operation_begin_comes_before_the_engine_call():
    """If a call hangs or the process dies, the last event names it: it is written first."""
    engine = SimulatedEngine()
    order = []
    lifecycle = Lifecycle(engine, sinks=(lambda event: order.append((event["event"], event.get("call"))),))
    real = engine.sleep
    engine.sleep = lambda level: (order.append(("engine", "sleep")), real(level))[1]
    lifecycle.sleep(1)
    at = order.index(("engine", "sleep"))
    assert order[at - 1] == ("operation_begin", "sleep")
    assert order[at + 1] == ("operation_end", "sleep")


def test_events_carry_the_fields_that_are_api():
    """A transition says trigger, source, dest, counts, residency, level and weights."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=(), name="llm", rank=3)
    lifecycle.add_request("r", "prompt", SamplingParams(max_tokens=4))
    lifecycle.sleep(2, "keep")
    last = [event for event in lifecycle.events() if event["event"] == "transition"][-1]
    expected = {
        "engine": "llm",
        "rank": 3,
        "trigger": "slept",
        "source": "draining",
        "dest": "sleeping",
        "counts": {"in_flight": 1, "held": 0, "undelivered": 0},
        "resident": [],
        "level": 2,
        "weights": "discarded",
    }
    assert {key: last[key] for key in expected} == expected
    assert last["duration_s"] >= 0
    assert last["time"] > 1.7e9


def test_no_event_per_step():
    """Stepping writes nothing: only becoming busy and idle does."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.add_request("r", "prompt", SamplingParams(max_tokens=30))
    before = lifecycle.snapshot().seq
    steps = 0
    while lifecycle.has_unfinished_requests():
        lifecycle.step()
        steps += 1
    assert steps >= 30
    assert lifecycle.snapshot().seq == before + 1


def test_structlog_is_used_as_the_application_configured_it():
    """An application that configured structlog gets the events through its own processors."""
    with structlog.testing.capture_logs() as logs:
        structlog_sink({"event": "refused", "seq": 1, "call": "step"})
        assert logs == [] or logs[0]["event"] == "refused"
    structlog.configure(processors=[structlog.testing.LogCapture()])
    try:
        capture = structlog.get_config()["processors"][0]
        structlog_sink({"event": "failed", "seq": 2, "call": "step"})
        structlog_sink({"event": "transition", "seq": 3})
    finally:
        structlog.reset_defaults()
    assert capture.entries == [
        {"call": "step", "event": "failed", "log_level": "error", "seq": 2},
        {"event": "transition", "log_level": "info", "seq": 3},
    ]


def test_an_unconfigured_structlog_goes_to_standard_logging(caplog):
    """Without a configuration nothing is printed: events go to the logger "lifecycle"."""
    with caplog.at_level(logging.INFO, logger="lifecycle"):
        structlog_sink({"event": "transition", "seq": 7, "dest": "awake"})
    assert caplog.records[-1].message == "transition"
    assert caplog.records[-1].dest == "awake"
