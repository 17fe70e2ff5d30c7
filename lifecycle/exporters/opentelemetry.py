"""`OpenTelemetrySink`: operations as spans.

Theory of operation
-------------------
An operation says when it begins and when it ends, and operations nest: what is open in one
lifecycle is a stack. Each entry is a span, begun and ended at the `time` of its events. A
sleep has its two phases as children:

    sleep            "operation_begin" of "sleep(level=1, mode=wait)", to its "operation_end"
    |-- drain        the transition "drain", to the beginning of the release
    `-- release      "operation_begin" of "sleep", to its "operation_end"

What is told meanwhile is a span event of the innermost open span; what is told while nothing
is open is left to the other sinks, except a failure: that gets a span of its own, which takes
no time. The outermost span is a child of whatever span is current in the thread that tells:
where a blocking caller has one around its call, the operation hangs below it.

*Names.* A field `x` of an event is the attribute `lifecycle.x`, and where the field holds
fields, `lifecycle.x.y`. A span is named by its call without the arguments, so that equal
operations have equal names; the arguments are attributes.

*Ends.* An end with an error gives the status Error, and so does `failed` to all that is open;
the span in which it happened has the exception. What has no end when the engine is closed or
let go of, or when `close()` is called, ends there with a status that says so. Until then a
span that hangs is seen by nobody: for that there are metrics.

Of OpenTelemetry only its API is used. Which spans are kept, and where they go, is decided by
the SDK that the program configured; without one nothing happens.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

_DRAIN: Final = "drain"
_RELEASE: Final = "release"
_ARGUMENTS: Final = re.compile(r"\(level=(\d), mode=(\w+)\)")
_ERROR_TYPE: Final = re.compile(r"[A-Za-z_][\w.]*(?=[:(])")  # of "RuntimeError: lost", "RuntimeError('lost')"
_NEVER_ENDED: Final = "did not come to its end: "

# The fields of an "operation_begin" that describe the span; its level is that before the operation.
_OF_BEGIN: Final = ("engine", "rank", "call", "state", "counts")
# Those of a transition that sum up the operation which led to it.
_OF_RESULT: Final = ("steps", "tokens")
# Those of no span event: the span has them, or they are as long as a log.
_NOT_NOTED: Final = frozenset({"seq", "time", "engine", "rank", "event", "stacks"})
_LAST_SECOND: Final = 2**33


@dataclass(slots=True)
class _Open:
    """One open span. call: as its events name it. error: what went wrong in it so far."""

    call: str
    span: trace.Span
    error: str | None = None


class OpenTelemetrySink:
    """A callable for `sinks=`. tracer_provider: who makes the spans, the global one by default.

    Any number of lifecycles may share it. Have the provider export in the background
    (`BatchSpanProcessor`): a sink runs while the engine waits.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("lifecycle", tracer_provider=tracer_provider)
        self._spans: dict[tuple[str, str], _Spans] = {}
        self._lock = threading.RLock()  # a watchdog tells from a thread of its own

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take note of an event; the lifecycle calls this."""
        take = _TAKES.get(str(event.get("event")))
        if take is None:
            return
        whose = str(event.get("engine")), str(event.get("rank"))
        with self._lock:
            if whose not in self._spans:
                self._spans[whose] = _Spans(self._tracer)
            take(self._spans[whose], event)

    def close(self) -> None:
        """End what is open now, as something that did not come to its end. Safe to call twice."""
        with self._lock:
            for spans in self._spans.values():
                spans.end_from(0, None, f"{_NEVER_ENDED}the sink was closed")


class _Spans:
    """The open spans of one lifecycle, the outermost first."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._open: list[_Open] = []

    # -- what is done with which event -----------------------------------------------------------------

    def operation_begin(self, event: Mapping[str, Any]) -> None:
        if self._open and self._open[-1].call == _DRAIN:
            self.end_from(len(self._open) - 1, _nanoseconds(event), None)
        call = str(event.get("call"))
        is_release = bool(self._open) and call == "sleep"
        self._start(call, _RELEASE if is_release else _name(call), event)

    def operation_end(self, event: Mapping[str, Any]) -> None:
        call, error = str(event.get("call")), event.get("error")
        places = [place for place, entry in enumerate(self._open) if entry.call == call]
        if places:
            self.end_from(places[-1], _nanoseconds(event), None if error is None else str(error))
        else:  # it began before this sink was there, or there was nothing to say before it failed
            self.note(event)

    def transition(self, event: Mapping[str, Any]) -> None:
        self.note(event)
        for entry in self._open:
            if entry.call == event.get("call"):
                entry.span.set_attributes(_attributes(event, _OF_RESULT))
        if self._open and event.get("trigger") == _DRAIN:
            self._start(_DRAIN, _DRAIN, event)

    def failed(self, event: Mapping[str, Any]) -> None:
        call, error = str(event.get("call")), str(event.get("error"))
        at, alone = _nanoseconds(event), not self._open
        if alone:
            self._start(call, _name(call), event)
        exception = {"exception.message": error, **_error_type("exception.type", error)}
        self._open[-1].span.add_event("exception", exception, at)
        for entry in self._open:
            entry.error = entry.error or error
        if alone:
            self.end_from(0, at, None)

    def left(self, event: Mapping[str, Any]) -> None:
        self.end_from(0, _nanoseconds(event), f"{_NEVER_ENDED}the engine was {event.get('event')}")

    def note(self, event: Mapping[str, Any]) -> None:
        if self._open:
            attributes = _attributes(event, (field for field in event if field not in _NOT_NOTED))
            self._open[-1].span.add_event(str(event.get("event")), attributes, _nanoseconds(event))

    # -- the stack -------------------------------------------------------------------------------------

    def _start(self, call: str, name: str, event: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._open[-1].span) if self._open else None,
            attributes={**_attributes(event, _OF_BEGIN), **_arguments(call)},
            start_time=_nanoseconds(event),
        )
        self._open.append(_Open(call, span))

    def end_from(self, place: int, at: int | None, error: str | None) -> None:
        """End the span at this place, and first those above it. at: nanoseconds, None for now."""
        for entry in reversed(self._open[place:]):
            why = entry.error or error
            if why is not None:
                entry.span.set_status(trace.Status(trace.StatusCode.ERROR, why))
                entry.span.set_attributes(_error_type("error.type", why))
            entry.span.end(at)
        del self._open[place:]


# What is done with which event. One that is not here is left to other sinks.
_TAKES: Final[Mapping[str, Callable[[_Spans, Mapping[str, Any]], None]]] = {
    "operation_begin": _Spans.operation_begin,
    "operation_end": _Spans.operation_end,
    "transition": _Spans.transition,
    "failed": _Spans.failed,
    "closed": _Spans.left,
    "detached": _Spans.left,
    "drain_progress": _Spans.note,
    "memory": _Spans.note,
    "noop": _Spans.note,
    "refused": _Spans.note,
    "request_rejected": _Spans.note,
    "stale_kv": _Spans.note,
    "stalled": _Spans.note,
    "weights": _Spans.note,
}


# -- names and fields as attributes --------------------------------------------------------------------


def _name(call: str) -> str:
    """A call without its arguments: "sleep" of "sleep(level=1, mode=wait)"."""
    return call.partition("(")[0]


def _arguments(call: str) -> dict[str, AttributeValue]:
    """The arguments in a call: level and mode of "sleep(level=1, mode=wait)"."""
    found = _ARGUMENTS.search(call)
    return {"lifecycle.level": int(found[1]), "lifecycle.mode": found[2]} if found else {}


def _error_type(attribute: str, error: str) -> dict[str, AttributeValue]:
    """The class at the beginning of an error's text, under this attribute; nothing if there is none."""
    found = _ERROR_TYPE.match(error)
    return {attribute: found[0]} if found else {}


def _attributes(event: Mapping[str, Any], fields: Iterable[str]) -> dict[str, AttributeValue]:
    """These fields of an event by the names of their attributes; those without a value are left out."""
    named: dict[str, Any] = {}
    for field in fields:
        value = event.get(field)
        if isinstance(value, Mapping):
            named.update((f"{field}.{part}", content) for part, content in value.items())
        else:
            named[field] = value
    return {f"lifecycle.{name}": _plain(value) for name, value in named.items() if value is not None}


def _plain(value: object) -> AttributeValue:
    """The value as an attribute can have it; a list is one of texts here."""
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return value if isinstance(value, bool | int | float | str) else str(value)


def _nanoseconds(event: Mapping[str, Any]) -> int | None:
    """When it happened, since the epoch. None, which is now, for an event without a time."""
    seconds = event.get("time")
    if isinstance(seconds, int | float) and 0 <= seconds < _LAST_SECOND:
        return round(seconds * 1e9)
    return None
