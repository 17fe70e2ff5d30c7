"""What a log tells, replayed: one `Session` for each engine, and what can't have been.

Theory of operation
-------------------
`Session.feed` takes the records of one session in order. It moves as the machine moved and
says what contradicts the table *of the log's own header*, or what came before: a move that
no rule has, a source that was not the state, an end without its beginning, a request that
ended twice or never began. After a contradiction it goes on from what the record says.

Where records are missing nothing is believed of what they might have changed: the state is
unknown until the next record tells it, and what ends then may have begun there. Records are
missing where their numbers jump, and before the first part that is left of a log.

`Replay` takes the lines of a whole log, and makes the sessions.

A log may come from anywhere, so what is remembered of it is bounded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from lifecycle.audit import format as form
from lifecycle.audit.reading import Entry

# More than any engine has at once.
_MOST_OPERATIONS: Final = 100
_MOST_REQUESTS: Final = 1 << 20
# What tells whether a header goes on with the session before it.
_WRITER: Final = ("engine", "rank", "host", "pid")


class Open(NamedTuple):
    """Something that began: a call or a request, when (seconds since the epoch), and in which line."""

    name: str
    time: float
    line: int


@dataclass(slots=True)
class Session:
    """One engine's run, as far as it was read. Times are seconds since the epoch.

    state: where the engine is; None: unknown. operations: what began and has not ended, the
    outermost first. requests: those that were admitted and have not ended, by id.
    clean: the log says that this is the end. torn: the last line has no end. lost: records that
    an outage cost. whole: all its records were read so far, from the first.
    """

    header: form.Record
    line: int
    state: str | None = None
    operations: list[Open] = field(default_factory=list)
    requests: dict[str, Open] = field(default_factory=dict)
    records: int = 0
    last_seq: int = 0
    last_time: float = 0.0
    lost: int = 0
    clean: bool = False
    torn: bool = False
    whole: bool = True
    _rules: frozenset[tuple[Any, ...]] = frozenset()

    def __post_init__(self) -> None:
        self._rules = frozenset(tuple(rule) for rule in self.header["rules"])
        self.last_time = self.header["time"]
        self.last_seq = self.header["first"] - 1
        self.whole = self.header["part"] == 1

    def feed(self, record: form.Record, line: int) -> str | None:
        """Go on by one record. Returns what is wrong with it, given what came before."""
        name = record["event"]
        self.last_time = record["time"]
        if name in form.FRAMES:
            return self._frame(name, record)
        self.records += 1
        if record["seq"] != self.last_seq + 1:
            self._forget()
        self.last_seq = record["seq"]
        tell = self._TELL.get(name)
        return None if tell is None else tell(self, record, line)

    def _frame(self, name: str, record: form.Record) -> str | None:
        if name == form.OUTAGE and record["lost"]:
            self.lost += record["lost"]
            self.last_seq += record["lost"]
            self._forget()
        elif name == form.CLOSED:
            self.clean = True
            if self.requests and self.whole:
                return f"the log ended well, and {_some(self.requests)} never ended"
        return None

    def _forget(self) -> None:
        """Records are missing."""
        self.whole = False
        self.state = None
        self.operations.clear()
        self.requests.clear()

    def _attached(self, record: form.Record, _: int) -> str | None:
        self.state = record["dest"]
        if ("attach", None, record["dest"]) not in self._rules:
            return f"an engine can't be found {record['dest']}"
        return None

    def _moved(self, record: form.Record, _: int) -> str | None:
        was, self.state = self.state, record["dest"]
        move = (record["trigger"], record["source"], record["dest"])
        if was is not None and was != record["source"]:
            return f"a transition from {record['source']}, and the engine was {was}"
        if move not in self._rules:
            return f"no rule of its table has {move[0]} from {move[1]} to {move[2]}"
        return None

    def _begun(self, record: form.Record, line: int) -> str | None:
        self.operations.append(Open(record["call"], record["time"], line))
        if len(self.operations) <= _MOST_OPERATIONS:
            return None
        self.operations.pop(0)
        return f"more than {_MOST_OPERATIONS} operations are under way"

    def _ended(self, record: form.Record, _: int) -> str | None:
        calls = [operation.name for operation in self.operations]
        if record["call"] not in calls:
            return f"an end of {record['call']}, which did not begin" if self.whole else None
        while self.operations.pop().name != record["call"]:
            pass
        return (
            None if calls[-1] == record["call"] else f"{record['call']} ended before {calls[-1]}, inside it"
        )

    def _admitted(self, record: form.Record, line: int) -> str | None:
        name = record["request"]
        known = name in self.requests
        if len(self.requests) >= _MOST_REQUESTS and not known:
            self._forget()
            return f"more than {_MOST_REQUESTS} requests are live"
        self.requests[name] = Open(name, record["time"], line)
        return f"request {name!r} was admitted while it is live" if known else None

    def _finished(self, record: form.Record, _: int) -> str | None:
        if self.requests.pop(record["request"], None) is None and self.whole:
            return f"an end of request {record['request']!r}, which is not live"
        return None

    _TELL: ClassVar[Mapping[str, Callable[["Session", form.Record, int], str | None]]] = {
        "attached": _attached,
        "transition": _moved,
        "operation_begin": _begun,
        "operation_end": _ended,
        "request_admitted": _admitted,
        "request_finished": _finished,
    }


class Replay:
    """A log, line by line. session: the one that the last line belongs to; None: there was no header yet."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def take(self, entry: Entry) -> str | None:
        """Go on by one line. Returns what is wrong with it, in itself or given what came before it."""
        record, session = entry.record, self.session
        if record is None:
            if session is not None:
                session.torn = entry.problem is None
            return entry.problem
        if record["event"] == form.OPENED:
            self._open(record, entry.line)
        elif session is not None:
            wrong = session.feed(record, entry.line)
            return entry.problem or wrong
        return entry.problem

    def _open(self, header: form.Record, line: int) -> None:
        was = self.session
        goes_on = (
            was is not None
            and header["part"] > 1
            and not was.clean
            and all(header.get(name) == was.header.get(name) for name in _WRITER)
        )
        if was is not None and goes_on:
            was.torn = False  # what was cut is written anew in this part
        else:
            self.session = Session(header, line)


def _some(names: dict[str, Any]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:3])
    return f"{len(names)} requests ({shown}{', ...' if len(names) > 3 else ''})"  # noqa: PLR2004  (as many as are shown)
