"""What is told of each request, for sinks that ask for it: its admission and its end, once.

Theory of operation
-------------------
The ledger says when a request becomes live and when its end is known (`on_begin`, `on_end`);
each becomes an event. How many tokens a request has is read off its last output where that has
all of them. A stream of deltas has not, nor has one of several samples, so those are counted as
they come. Nothing of this exists unless a sink asks for it: a step then pays for nothing.

What is told of a request must not fail it, so nothing here raises for an output, or an answer
of the engine's, that can't be understood.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from lifecycle.engine import PassThrough, outcome_of
from lifecycle.errors import Closed, EngineFailed, InvalidArgument, RequestAborted
from lifecycle.requests import Record

if TYPE_CHECKING:
    from lifecycle.core import Core

# What became of a request without a last output, by what its caller is told. None: its caller's own wish.
_OUTCOMES: Final[Mapping[type, str]] = {
    type(None): "abort",
    RequestAborted: "abort",
    InvalidArgument: "rejected",
    Closed: "closed",
}


def _reason(output: Any) -> str:
    """Why it ended, by its last output."""
    with suppress(Exception):
        return outcome_of(output) or "finished"
    return "finished"


class _Told:
    """A request whose admission was told. tokens, texts: so far, by the index of the sample."""

    __slots__ = ("record", "since", "texts", "tokens")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.since = time.monotonic()
        self.tokens: dict[int, int] = {}
        self.texts: dict[int, str] = {}


class RequestLog:
    """The events of the requests of one core."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._open: dict[str, _Told] = {}

    def began(self, record: Record) -> None:
        """It is live: inside the engine, or held."""
        events = self._core.events
        events.emit(
            "request_admitted",
            request=record.request_id,
            held=not record.engine_id,
            epoch=record.epoch,
            prompt=record.call.prompt if events.texts else None,
        )
        self._open[record.request_id] = _Told(record)

    def ended(self, record: Record, output: Any, error: Exception | None) -> None:
        """Its end is known: its last output, or why there is none."""
        told = self._open.get(record.request_id) or _Told(record)
        if output is None and record.engine_id:  # ask, as long as the engine knows
            with suppress(Exception):
                told.tokens = {0: self._core.engine.tokens(record.engine_id)}
        self._core.events.emit(
            "request_finished",
            request=record.request_id,
            outcome=_OUTCOMES.get(type(error), "error") if output is None else _reason(output),
            tokens=sum(told.tokens.values()),
            epoch=record.epoch,
            version=self._core.weights.version,
            duration_s=time.monotonic() - told.since,
            texts=[told.texts[index] for index in sorted(told.texts)] or None,
        )
        self._open.pop(record.request_id, None)

    def count(self, outputs: list[Any]) -> None:
        """Note what these outputs have of requests whose last output will not have it all."""
        for output in outputs:
            told = self._open.get(getattr(output, "request_id", ""))
            if told is None:
                continue
            call = told.record.call
            if output.finished or call.delta or call.samples > 1:
                with suppress(Exception):  # it fails where it is handed out
                    self._add(told, output)

    def _add(self, told: _Told, output: Any) -> None:
        if isinstance(output, PassThrough) or not isinstance(output.outputs, list):
            told.tokens[0] = self._core.engine.count_tokens(output)
            return
        for sample in output.outputs:
            tokens, text = len(sample.token_ids), sample.text
            if told.record.call.delta:
                tokens += told.tokens.get(sample.index, 0)
                text = told.texts.get(sample.index, "") + text
            told.tokens[sample.index] = tokens
            if self._core.events.texts:
                told.texts[sample.index] = text

    def mend(self) -> None:
        """After a Ctrl-C at any place: tell what happened and was not told."""
        core = self._core
        live = {**core.ledger.held, **core.ledger.in_flight}
        for name, told in list(self._open.items()):
            if live.get(name) is told.record:
                del live[name]
                continue
            if core.events.last_of(name) == "request_admitted":
                self.ended(told.record, None, core.failure or EngineFailed("its last output was lost"))
            self._open.pop(name, None)
        for record in live.values():
            self.began(record)
