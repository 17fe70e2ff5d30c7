"""`lifecycle audit show`: what happened, a line for each record, and a view of what happens now.

Theory of operation
-------------------
A record is said in one phrase, which `_SAYINGS` makes of its fields: each saying knows some of
them, and a field that none knows is said by its name. Phrases stand in columns whose widths are
known before the first record is read, so that a log of any length can be shown.

`Wanted` is what the filters leave. It asks the replayed session, since a record does not say in
which state the engine is.

`--follow` reads logs that grow, in turn, and never waits for one of them. On a terminal it draws
what each engine is at, once a second: also when nothing is written, since that is when the age of
a call says most. Ages are by this computer's clock, and the times of a log by its writer's.
"""

import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from lifecycle.audit import format as form
from lifecycle.audit import reading
from lifecycle.audit.format import Record
from lifecycle.audit.reading import Entry
from lifecycle.audit.replay import Replay, Session
from lifecycle.audit.screen import (
    FINE,
    PROBLEMS,
    Line,
    Piece,
    Screen,
    Table,
    cut,
    duration,
    plain,
    safe,
    size,
    utc,
)

# -- a record as a phrase --------------------------------------------------------------------------


def phrase(record: Record) -> str:
    """What a record says, beside when, who and which event."""
    said = [saying(record) for saying in _SAYINGS]
    others = [f"{name} {plain(value)}" for name, value in record.items() if name not in _SAID]
    return "; ".join(filter(None, (*said, *others)))


def identity(header: Record) -> str:
    """Whose log it is, by its header."""
    return (
        f"{header['engine']} rank {header['rank']} on {header.get('host', '?')}, pid {header.get('pid', '?')}"
    )


def _frame(record: Record) -> str:
    """What only the log's own lines say."""
    name = record["event"]
    if name == form.OPENED:
        return f"{identity(record)}; part {record['part']}, from record {record['first']}"
    if name == form.OUTAGE:
        late = (
            f"records {record['first']} to {record.get('last', '?')} came late, " if "first" in record else ""
        )
        return f"{late}{record['lost']} are lost"
    return f"the last record is {record['last']}" if name in form.FRAMES else ""


def _move(record: Record) -> str:
    if record["event"] == "attached":
        return f"found {record['dest']}"
    if "dest" not in record:
        return ""
    return f"{record.get('source', '?')} -> {record['dest']} ({record.get('trigger', '?')})"


def _call(record: Record) -> str:
    return " ".join(record[name] for name in ("request", "call") if name in record)


def _how_long(record: Record) -> str:
    return f"after {duration(record['duration_s'])}" if "duration_s" in record else ""


def _outcome(record: Record) -> str:
    words = [record["outcome"]] if "outcome" in record else []
    words += [f"{record[name]} {name}" for name in ("steps", "tokens", "remaining") if name in record]
    words += [f"drained in {duration(record['drain_s'])}"] if "drain_s" in record else []
    return ", ".join(words)


def _counts(record: Record) -> str:
    counts = record.get("counts", {})
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _memory(record: Record) -> str:
    """Before and after, of each kind of memory."""
    amounts, moves = record.get("bytes", {}), []
    for kind in ("device", "host"):
        before, after = (amounts.get(f"{kind}_{when}") for when in ("before", "after"))
        if before is not None and after is not None:
            moves.append(f"{kind} {size(before)} -> {size(after)}")
    return ", ".join(moves)


def _condition(record: Record) -> str:
    loads, weights = record["event"] == "weights", record.get("weights", "valid")
    words = [f"level {record['level']}"] if record.get("level") is not None else []
    words += [f"weights {weights}"] if loads or weights != "valid" else []
    words += [f"epoch {record['epoch']}"] if loads and "epoch" in record else []
    return ", ".join(words)


def _repeats(record: Record) -> str:
    if "of" in record:
        what = f"{record['repeats']} " if "repeats" in record else ""
        return f"{what}{record.get('count', '?')} times in all, since record {record['of']}"
    return f"{record['count']} times" if record.get("count", 1) > 1 else ""


def _held(record: Record) -> str:
    return "held" if record.get("held") else ""


def _error(record: Record) -> str:
    return str(record.get("error", ""))


# In the order in which they stand in a phrase; an error may be long.
_SAYINGS: Final[Sequence[Callable[[Record], str]]] = (
    *(_frame, _move, _call, _how_long, _outcome, _held, _counts, _memory, _condition, _repeats, _error),
)
# What they say, what the other columns of a row say, and what is of use to a replay only.
_SAID: Final = frozenset(
    {"part", "first", "last", "lost", "host", "pid", "source", "dest", "trigger", "request", "call"}
    | {"duration_s", "drain_s", "outcome", "steps", "tokens", "remaining", "counts", "bytes", "level"}
    | {"weights", "epoch", "of", "repeats", "count", "held", "error", "time", "rank", "seq", "event"}
    | {"engine", "state", "resident", "sum", "chain", "after", "rules", "format", "table"}
)

# -- rows ------------------------------------------------------------------------------------------

_STYLES: Final = {
    "transition": "bold",
    "attached": "bold",
    "operation_begin": "cyan",
    "operation_end": "cyan",
    "failed": "bold red",
    "stalled": "bold red",
    "refused": "yellow",
    "request_rejected": "yellow",
    "unexpected_output": "yellow",
    "sink_failed": "yellow",
    form.OUTAGE: "yellow",
    "request_admitted": "dim",
    "request_finished": "dim",
}
_WIDTHS: Final = {"time (UTC)": 23, ">rank": 4, ">seq": 7, "event": 16, "what": 4}


def columns_for(screen: Screen) -> Table:
    """The columns of `row`."""
    return Table(_WIDTHS, screen.width)


def row(entry: Entry, session: Session | None, problem: str | None) -> list[Piece]:
    """The cells of one line of a log. session: the one that it belongs to."""
    record = entry.record
    if record is None:
        return ["", "", "", ("(damaged)", "bold red"), (where(entry, problem), "bold red")]
    style = _STYLES.get(record["event"], "")
    what = phrase(record) if problem is None else f"[{where(entry, problem)}] {phrase(record)}"
    return [
        utc(record["time"]),
        str(rank_of(record, session)),
        str(record.get("seq", "")),
        (record["event"], style),
        (what, style if problem is None else "bold red"),
    ]


def where(entry: Entry, problem: str | None) -> str:
    """A problem, and where it is."""
    return f"{entry.path}:{entry.line}: {problem}"


def rank_of(record: Record, session: Session | None) -> int:
    """Whose record it is; those that the log itself adds do not all say so."""
    said = record if "rank" in record or session is None else session.header
    rank: int = said.get("rank", 0)
    return rank


def as_line(entry: Entry, problem: str | None) -> dict[str, Any]:
    """A line of a log for a program: the record, where it stands, and what is wrong with it."""
    found = {**(entry.record or {}), "path": str(entry.path), "line": entry.line}
    return found if problem is None else {**found, "problem": problem}


# -- filters ---------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A time, in seconds since the epoch; before_end: or rather before the end of the log."""

    seconds: float
    before_end: bool = False

    def at(self, end: float) -> float:
        """The time, for logs that end then."""
        return end - self.seconds if self.before_end else self.seconds


class Wanted:
    """What the filters of a command line leave. end: when the logs end."""

    def __init__(self, arguments: Namespace, end: float) -> None:
        self._events: list[str] | None = arguments.event
        self._state: str | None = arguments.state
        self._request: str | None = arguments.request
        self._rank: int | None = arguments.rank
        self._since = arguments.since.at(end) if arguments.since else None
        self._until = arguments.until.at(end) if arguments.until else None

    def has(self, record: Record, session: Session | None, before: str | None) -> bool:
        """Whether to show a record. before: the state that the engine was in."""
        states = (before, session.state if session is not None else None)
        return (
            (self._events is None or record["event"] in self._events)
            and (self._state is None or self._state in states)
            and (self._request is None or self._request in (record.get("request"), record.get("call")))
            and (self._rank is None or self._rank == rank_of(record, session))
            and (self._since is None or record["time"] >= self._since)
            and (self._until is None or record["time"] <= self._until)
        )


class _Shown(NamedTuple):
    entry: Entry
    session: Session | None
    problem: str | None


class _Lane:
    """One log, as far as it was read."""

    def __init__(self, wanted: Wanted) -> None:
        self._replay = Replay()
        self._wanted = wanted
        self.problems = 0

    @property
    def session(self) -> Session | None:
        """The one that the last line belongs to."""
        return self._replay.session

    @property
    def state(self) -> str | None:
        """Where its engine is, if that is known."""
        return self.session.state if self.session is not None else None

    def take(self, entry: Entry) -> _Shown | None:
        """Go on by one line; it comes back if it is to be shown. Damage always is."""
        before = self.state
        problem = self._replay.take(entry)
        if problem is not None:
            self.problems += 1
        elif entry.record is None or not self._wanted.has(entry.record, self.session, before):
            return None
        return _Shown(entry, self.session, problem)


# -- show ------------------------------------------------------------------------------------------


def run(arguments: Namespace, screen: Screen) -> int:
    """Show logs, one after the other, or follow them all."""
    if arguments.follow:
        return _follow(arguments, screen)
    end = 0.0
    if any(moment and moment.before_end for moment in (arguments.since, arguments.until)):
        end = max(map(_end, arguments.paths))
    wanted, problems = Wanted(arguments, end), 0
    for number, path in enumerate(arguments.paths):
        lane = _Lane(wanted)
        found = filter(None, map(lane.take, reading.read(path)))
        _print(screen, _last(found, arguments.last), arguments, head=number == 0)
        problems += lane.problems
    return PROBLEMS if problems else FINE


def _end(path: Path) -> float:
    """When the last record of a log was written."""
    last = 0.0
    for entry in reading.read(path):
        if entry.record is not None:
            last = entry.record["time"]
    return last


def _last(found: Iterator[_Shown], count: int | None) -> Iterator[_Shown]:
    return found if count is None else iter(deque(found, count))


def _print(screen: Screen, found: Iterator[_Shown], arguments: Namespace, *, head: bool) -> None:
    columns = columns_for(screen)
    if head and not arguments.json:
        screen.put(columns.head())
    for each in found:
        if arguments.json:
            screen.json(as_line(each.entry, each.problem))
        else:
            screen.put(columns.row(*row(*each)))


# -- show --follow ---------------------------------------------------------------------------------

_LOOK_EVERY_S: Final = 1.0
# So many lines of each log are read before the view is drawn again: a long one is caught up with in steps.
_LINES_A_ROUND: Final = 20_000
_EVENTS: Final = 10
_VIEW: Final = {
    "engine": 12,
    ">rank": 4,
    "state": 15,
    ">for": 9,
    ">in flight": 9,
    ">held": 4,
    ">undelivered": 11,
    ">device": 9,
    ">age": 9,
    "under way": 9,
}
_STATE_STYLES: Final = {"awake": "bold green", "running": "bold green", "failed": "bold red"}


class _Watched(_Lane):
    """A log that grows. behind: there was more to read than was read."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        super().__init__(wanted)
        self.path = path
        self.behind = True
        self._lines = reading.follow(path)
        self._since = 0.0  # when the engine came into its state
        self._counts: dict[str, int] = {}
        self._device: int | None = None

    def read(self) -> Iterator[_Shown]:
        """What is new and wanted."""
        self.behind = True
        for entry in islice(self._lines, _LINES_A_ROUND):
            if entry is None:
                self.behind = False
                return
            before = self.state
            shown = self.take(entry)
            if entry.record is not None:
                self._note(entry.record, before)
            if shown is not None:
                yield shown

    def _note(self, record: Record, before: str | None) -> None:
        if self.state != before:
            self._since = record["time"]
        if "in_flight" in record.get("counts", {}):
            self._counts = record["counts"]
        self._device = record.get("bytes", {}).get("device_after", self._device)

    def cells(self, now: float) -> list[Piece]:
        """What its engine is at."""
        session = self.session
        if session is None:
            return [self.path.name, "", "no log yet", *[""] * (len(_VIEW) - 3)]
        state, operations = self.state or "unknown", session.operations
        return [
            cut(safe(session.header["engine"]), _VIEW["engine"]),
            str(session.header["rank"]),
            (cut(safe(state), _VIEW["state"]), _STATE_STYLES.get(state, "bold yellow")),
            duration(max(now - self._since, 0.0)) if self.state else "",
            *(str(self._counts.get(name, "")) for name in ("in_flight", "held", "undelivered")),
            "" if self._device is None else size(self._device),
            duration(max(now - operations[-1].time, 0.0)) if operations else "",
            (" > ".join(operation.name for operation in operations), "cyan"),
        ]


def _follow(arguments: Namespace, screen: Screen) -> int:
    """Until Ctrl-C."""
    wanted = Wanted(arguments, time.time())
    lanes = [_Watched(path, wanted) for path in arguments.paths]
    if screen.width is None or arguments.json:
        _print_new(lanes, arguments, screen)
    else:
        _draw(lanes, arguments.last or _EVENTS, screen)
    return FINE


def _rounds(lanes: Sequence[_Watched]) -> Iterator[list[_Shown]]:
    """What is new in all logs, about once a second."""
    while True:
        yield [shown for lane in lanes for shown in lane.read()]
        if not any(lane.behind for lane in lanes):
            time.sleep(_LOOK_EVERY_S)


def _print_new(lanes: Sequence[_Watched], arguments: Namespace, screen: Screen) -> None:
    """Lines as they come, after the last of those that are there."""
    recent: deque[_Shown] = deque(maxlen=arguments.last)
    head = True
    for new in _rounds(lanes):
        recent.extend(new)
        if arguments.last is not None and any(lane.behind for lane in lanes):
            continue
        _print(screen, iter(recent), arguments, head=head)
        screen.flush()
        recent.clear()
        head = False


def _draw(lanes: Sequence[_Watched], events: int, screen: Screen) -> None:
    engines, rows = Table(_VIEW, screen.width), columns_for(screen)
    recent: deque[Line] = deque(maxlen=events)
    with screen.live() as show:
        for new in _rounds(lanes):
            recent.extend(rows.row(*row(*each)) for each in new)
            now = time.time()
            show(
                [engines.head(), *(engines.row(*lane.cells(now)) for lane in lanes), [], rows.head(), *recent]
            )
