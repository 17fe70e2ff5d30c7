"""Events: what happened, as names and fields, in memory first.

Theory of operation
-------------------
`EventLog.emit` makes one flat dict with a dense `seq`, keeps the last `capacity` of
them and hands each to the sinks. A sink is any callable that takes the dict; one that
raises is counted and said, never raised into the engine's path. A Ctrl-C that comes
out of a sink waits until the call is over (`deliver`): between an effect and the note of
it nothing may be cut. Refusals and no-ops that repeat within one state are coalesced:
the first event's `count` grows in memory, and a `repeated` event tells the sinks at the
end of that state.

A sink may have more than a call. `requests` and `texts`, if true, ask for events of each
request, and for its texts in them. A `DurableSink` is told of the beginning and the end,
and may forbid an operation that it could not record.

Field names are API: `seq`, `time` (seconds since the epoch), `engine`, `rank`, `event`,
`call`, `trigger`, `source`, `dest`, `state`, `counts`, `resident`, `level`, `weights`,
`duration_s`, `drain_s`, `bytes`, `error`, `count`, `of`, `repeats`, `epoch`, `version`, `policy`, `table`,
`costs`, `remaining`, `steps`, `tokens`, `stacks`, `request`, `held`, `outcome`, `prompt`, `texts`.
Events: `attached`, `operation_begin`, `operation_end`, `transition`, `refused`, `noop`, `repeated`,
`failed`, `drain_progress`, `memory`, `weights`, `stale_kv`, `unexpected_output`, `request_rejected`,
`request_admitted`, `request_finished`, `sink_failed`, `stalled`, `detached`, `closed`.

`structlog_sink` respects an application that configured structlog, and otherwise goes
through the standard library's logger "lifecycle": a library configures nothing.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import structlog

Event = dict[str, Any]
Sink = Callable[[Mapping[str, Any]], None]


@runtime_checkable
class DurableSink(Protocol):
    """A sink that records an engine from its beginning to its end. What it was given before, it ignores."""

    @property
    def given(self) -> int:
        """The number of the last event that it has, with all before it."""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""

    def begin(self, engine: str, rank: int) -> None:
        """The next event has number 1. May raise: then nothing is guarded."""

    def unaudited(self) -> str | None:
        """Why an operation that was announced may not go on, or None."""

    def end(self, *, clean: bool) -> None:
        """There are no more events. clean: because the lifecycle was closed."""

    def forget_parent(self) -> None:
        """This is a forked child: whatever is open belongs to the parent."""


# Distinct messages without end must not grow memory.
_MAX_REPEATS = 64
_WARNINGS = frozenset({"refused", "unexpected_output", "request_rejected", "sink_failed", "stalled"})
_OF_EVERY_EVENT = frozenset({"seq", "time", "engine", "rank", "event"})
_MOVES = frozenset({"attached", "transition"})
_DETAILS = frozenset({"request_admitted", "request_finished"})
logging.getLogger("lifecycle").addHandler(logging.NullHandler())
_fallback = structlog.wrap_logger(
    logging.getLogger("lifecycle"),
    processors=[structlog.stdlib.render_to_log_kwargs],
    wrapper_class=structlog.stdlib.BoundLogger,
)


def structlog_sink(event: Mapping[str, Any]) -> None:
    """Give one event to structlog: the name as the event, everything else as fields."""
    logger = structlog.get_logger("lifecycle") if structlog.is_configured() else _fallback
    fields = {key: value for key, value in event.items() if key != "event"}
    name = event["event"]
    if name == "failed":
        logger.error(name, **fields)
    elif name in _WARNINGS:
        logger.warning(name, **fields)
    elif name in _DETAILS:
        logger.debug(name, **fields)
    else:
        logger.info(name, **fields)


class EventLog:
    """The last events of one engine, in the order of their numbers. Read from any thread."""

    def __init__(
        self, engine: str, rank: int, sinks: Sequence[Sink] = (structlog_sink,), capacity: int = 4096
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.sinks = list(sinks)
        self.sink_failures = 0
        self._interrupt: BaseException | None = None
        self._lock = threading.RLock()  # a signal handler may come in between and tell something as well
        self._events: deque[Event] = deque(maxlen=max(1, capacity))
        self._repeats: dict[tuple[Any, ...], Event] = {}
        self._failing: set[int] = set()  # sinks whose last event raised
        self.requests = any(getattr(sink, "requests", False) for sink in self.sinks)
        self.texts = any(getattr(sink, "texts", False) for sink in self.sinks)
        self._durable: list[DurableSink] = []
        every: Sequence[object] = self.sinks  # any of them may be more than a callable
        try:
            for sink in every:
                if isinstance(sink, DurableSink):
                    sink.begin(engine, rank)
                    self._durable.append(sink)
        except BaseException:
            self.end(clean=False)
            raise

    @property
    def seq(self) -> int:
        """The number of the last event; 0 before the first."""
        return self._events[-1]["seq"] if self._events else 0

    def __len__(self) -> int:
        return len(self._events)

    def tail(self, count: int | None = None) -> list[Event]:
        """Copies of the last events, oldest first."""
        events = list(self._events)
        return [dict(event) for event in (events if count is None else events[len(events) - count :])]

    def forget_parent(self) -> None:
        """In a forked child: wait for no lock of a thread that is gone."""
        self._lock = threading.RLock()
        for sink in self._durable:
            sink.forget_parent()

    def mend(self) -> str | None:
        """After a Ctrl-C at any place: give durable sinks what they were not given.

        Returns the state that the last event told, if it is still in memory.
        """
        for sink in self._durable:
            for event in self.since(sink.given):
                self._give(sink, event)
        told = (event["dest"] for event in reversed(self._events) if event["event"] in _MOVES)
        return next(told, None)

    def last_of(self, request_id: str) -> str | None:
        """The name of the last event of this request that is still in memory."""
        names = (event["event"] for event in reversed(self._events) if event.get("request") == request_id)
        return next(names, None)

    def unaudited(self) -> str | None:
        """Why an operation that was announced may not go on: a sink could not record it. Or None."""
        return next(filter(None, (sink.unaudited() for sink in self._durable)), None)

    def end(self, *, clean: bool) -> None:
        """There are no more events for whoever records them. Safe to call twice."""
        self._tell_repeats()
        for sink in self._durable:
            sink.end(clean=clean)

    def since(self, seq: int) -> list[Event]:
        """Copies of the events after this one, oldest first, as far as they are kept."""
        return [dict(event) for event in list(self._events) if event["seq"] > seq]

    def emit(self, event: str, **fields: Any) -> Event:
        """Record one event; None fields are left out."""
        if event == "transition":
            self._tell_repeats()
        record: Event = {
            "seq": 0,
            "time": time.time(),
            "engine": self.engine,
            "rank": self.rank,
            "event": event,
        }
        record.update((key, value) for key, value in fields.items() if value is not None)
        with self._lock:  # a watchdog tells from a thread of its own
            record["seq"] = self.seq + 1
            self._events.append(record)  # and with it the number: a Ctrl-C comes before or after
        for sink in self.sinks:
            self._give(sink, record)
        return record

    def emit_repeatable(self, event: str, **fields: Any) -> None:
        """Record a refusal or a no-op, or count it if the same was recorded in this state."""
        key = (event, *sorted((name, str(value)) for name, value in fields.items()))
        seen = self._repeats.get(key)
        if seen is None:
            if len(self._repeats) >= _MAX_REPEATS:
                self._tell_repeats()
            self._repeats[key] = self.emit(event, count=1, **fields)
        else:
            seen["count"] += 1

    def _tell_repeats(self) -> None:
        """The sinks saw only the first of what repeated: say how often it did."""
        repeats, self._repeats = self._repeats, {}
        for first in repeats.values():
            if first["count"] > 1:
                told = {name: value for name, value in first.items() if name not in _OF_EVERY_EVENT}
                self.emit("repeated", **told, repeats=first["event"], of=first["seq"])

    def _give(self, sink: Sink, record: Event) -> None:
        try:
            sink(dict(record))
            if self._failing:
                self._failing.discard(id(sink))
        except Exception as error:  # noqa: BLE001  (a broken sink must not reach the engine's path)
            self.sink_failures += 1
            if id(sink) not in self._failing:
                self._failing.add(id(sink))
                self.emit_repeatable("sink_failed", error=repr(error))
        except BaseException as interrupt:  # noqa: BLE001  (kept for `deliver`)
            self._interrupt = interrupt

    def deliver(self) -> None:
        """Raise what came out of a sink and is no `Exception`, once."""
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
