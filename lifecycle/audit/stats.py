"""`lifecycle audit stats`: where the time went, and what was done, refused and lost.

Theory of operation
-------------------
One pass. Each session has its `Figures`, which take its records one by one; the figures of several
sessions add up to those of all.

Memory is bounded, whatever the log holds. Durations are counted in buckets that are 2 % wide
(`Spread`), so a median and a 90th percentile are within 1 % of the true ones; counts, sums and
extremes are exact. What strangers name (states, calls, errors, outcomes) is told apart up to some
number of names, and the rest is one.

Seconds in a state are between records, by the clock of whoever wrote them: where that went
backwards nothing is counted.
"""

import heapq
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from lifecycle.audit.format import Record
from lifecycle.audit.reading import Entry
from lifecycle.audit.replay import Replay, Session
from lifecycle.audit.screen import FINE, PROBLEMS, Reader, Screen, counted, duration, plain, safe, size
from lifecycle.audit.verify import Ending

_MOST_NAMES: Final = 200  # that are told apart in one table
_OTHERS: Final = "(others)"
_MOST_CHARACTERS: Final = 200  # of a name
_LONGEST: Final = 10
_MOST_SESSIONS: Final = 1000  # that are told one by one

# -- what figures are made of ----------------------------------------------------------------------


class Spread:
    """How long things took. count: of all; timed: of those whose duration is known.

    The shortest, the longest and the total are exact, and quantiles within 1 %.
    """

    _A_FACTOR: ClassVar[float] = 1 / math.log(1.02)  # so many buckets for each factor of e
    _SHORTEST: ClassVar[float] = 1e-9

    def __init__(self) -> None:
        self.count = self.timed = 0
        self.total = self.longest = 0.0
        self.shortest = math.inf
        self.buckets: Counter[int] = Counter()

    def add(self, seconds: float | None) -> None:
        """One more, which took so long if that is known."""
        self.count += 1
        if seconds is not None:
            self.timed += 1
            self.total += seconds
            self.shortest, self.longest = min(self.shortest, seconds), max(self.longest, seconds)
            self.buckets[round(math.log(max(seconds, self._SHORTEST)) * self._A_FACTOR)] += 1

    def merge(self, other: "Spread") -> None:
        """All of another."""
        self.count += other.count
        self.timed += other.timed
        self.total += other.total
        self.shortest, self.longest = min(self.shortest, other.shortest), max(self.longest, other.longest)
        self.buckets.update(other.buckets)

    def quantile(self, share: float) -> float | None:
        """This share of them took so long, or less. None: nothing was timed."""
        wanted = share * self.timed
        for bucket in sorted(self.buckets):
            wanted -= self.buckets[bucket]
            if wanted <= 0:
                return min(max(math.exp(bucket / self._A_FACTOR), self.shortest), self.longest)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The spread for a program."""
        if not self.timed:
            return {"count": self.count}
        quantiles = {"median_s": self.quantile(0.5), "p90_s": self.quantile(0.9), "max_s": self.longest}
        return {"count": self.count, "total_s": self.total, **quantiles}

    def cells(self) -> list[str]:
        """The spread as the cells of `_SPREAD`."""
        if not self.timed:
            return [str(self.count), "", "", ""]
        shown = (self.quantile(0.5) or 0.0, self.quantile(0.9) or 0.0, self.longest)
        return [str(self.count), *map(duration, shown)]


_SPREAD: Final = (">count", ">median", ">90 %", ">longest")


def _bounded(names: Mapping[str, Any], name: str) -> str:
    """The name under which something is counted, among those that are."""
    name = safe(name, _MOST_CHARACTERS)
    return name if name in names or len(names) < _MOST_NAMES else _OTHERS


class Sums(dict[str, float]):
    """Amounts by name."""

    def add(self, name: str, amount: float = 1) -> None:
        """That much more."""
        name = _bounded(self, name)
        self[name] = self.get(name, 0) + amount

    def merge(self, other: "Sums") -> None:
        """All of another."""
        for name, amount in other.items():
            self.add(name, amount)

    def to_dict(self) -> dict[str, float]:
        """The sums for a program."""
        return dict(self)


class Spreads(dict[str, Spread]):
    """Durations by name."""

    def at(self, name: str) -> Spread:
        """The one of this name, which is there from now on."""
        name = _bounded(self, name)
        if name not in self:
            self[name] = Spread()
        return self[name]

    def add(self, name: str, seconds: float | None) -> None:
        """One more."""
        self.at(name).add(seconds)

    def merge(self, other: "Spreads") -> None:
        """All of another."""
        for name, spread in other.items():
            self.at(name).merge(spread)

    def to_dict(self) -> dict[str, Any]:
        """The spreads for a program."""
        return {name: spread.to_dict() for name, spread in self.items()}


class Operation(NamedTuple):
    """One that ended, and where."""

    seconds: float
    call: str
    where: str


class Longest(list[Operation]):
    """The operations that took longest: a heap, the shortest of them first."""

    def add(self, operation: Operation) -> None:
        """One more, if it is one of them."""
        if len(self) < _LONGEST:
            heapq.heappush(self, operation)
        else:
            heapq.heappushpop(self, operation)

    def merge(self, other: "Longest") -> None:
        """All of another."""
        for operation in other:
            self.add(operation)

    def to_dict(self) -> list[dict[str, Any]]:
        """The operations for a program, the longest first."""
        return [operation._asdict() for operation in sorted(self, reverse=True)]


# -- figures ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What records add up to. Each field is a number, or something to `add` to, and `merge`.

    states: seconds in each. transitions: those between two states, and operations: those that ended, by
    their call; raised: those of them that ended with an error. drains: that led to a sleep. freed: bytes
    that sleeps released, and mapped: bytes that wakes took back. refused, noops, failed: by call and class
    of error. noted: other events that are worth a look. outcomes and tokens: of requests that ended.
    """

    records: int = 0
    seconds: float = 0.0
    lost: int = 0
    states: Sums = field(default_factory=Sums)
    transitions: Spreads = field(default_factory=Spreads)
    operations: Spreads = field(default_factory=Spreads)
    raised: Sums = field(default_factory=Sums)
    longest: Longest = field(default_factory=Longest)
    drains: Spread = field(default_factory=Spread)
    drain_steps: int = 0
    drain_tokens: int = 0
    rolled_back: int = 0
    freed: Sums = field(default_factory=Sums)
    mapped: Sums = field(default_factory=Sums)
    refused: Sums = field(default_factory=Sums)
    noops: Sums = field(default_factory=Sums)
    failed: Sums = field(default_factory=Sums)
    noted: Sums = field(default_factory=Sums)
    admitted: int = 0
    held: int = 0
    requests: Spread = field(default_factory=Spread)
    outcomes: Sums = field(default_factory=Sums)
    tokens: Sums = field(default_factory=Sums)
    loads: int = 0
    versions: Sums = field(default_factory=Sums)

    def merge(self, other: "Figures") -> None:
        """All of another session's."""
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, int | float):
                setattr(self, each.name, mine + its)
            else:
                mine.merge(its)

    def to_dict(self) -> dict[str, Any]:
        """The figures for a program."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: v if isinstance(v, int | float) else v.to_dict() for name, v in values.items()}


class Account:
    """Keeps the figures of one session."""

    def __init__(self, session: Session, path: Path) -> None:
        self.figures = Figures()
        self.path = path
        self._session = session
        self._state: str | None = None
        self._since = self._began = session.header["time"]

    def take(self, entry: Entry, record: Record) -> None:
        """Go on by one record, after the session did."""
        if self._session.state != self._state:
            self._leave(record["time"])
        tell = self._TELL.get(record["event"])
        if tell is not None:
            tell(self, record, entry)

    def end(self) -> Ending:
        """The session is over: its figures are complete. Returns how it ends."""
        session, figures = self._session, self.figures
        self._leave(session.last_time)
        figures.records, figures.lost = session.records, session.lost
        figures.seconds = max(session.last_time - self._began, 0.0)
        return Ending.of(session)

    def _leave(self, time: float) -> None:
        if self._state is not None:
            self.figures.states.add(self._state, max(time - self._since, 0.0))
        self._state, self._since = self._session.state, time

    def _moved(self, record: Record, _: Entry) -> None:
        figures, trigger = self.figures, record["trigger"]
        name = f"{record['source']} -> {record['dest']} ({trigger})"
        figures.transitions.add(name, record.get("duration_s"))
        if trigger == "roll_back":
            figures.rolled_back += 1
        elif "drain_s" in record and record["source"] == "draining":
            figures.drains.add(record["drain_s"])
            figures.drain_steps += record.get("steps", 0)
            figures.drain_tokens += record.get("tokens", 0)

    def _ended(self, record: Record, entry: Entry) -> None:
        figures, seconds = self.figures, record.get("duration_s")
        figures.operations.add(record["call"], seconds)
        if "error" in record:
            figures.raised.add(record["call"])
        if seconds is not None:
            call = safe(record["call"], _MOST_CHARACTERS)
            figures.longest.add(Operation(seconds, call, f"{entry.path}:{entry.line}"))

    def _measured(self, record: Record, _: Entry) -> None:
        amounts = record.get("bytes", {})
        for kind in ("device", "host"):
            before, after = (amounts.get(f"{kind}_{when}") for when in ("before", "after"))
            if before is not None and after is not None and before != after:
                sums = self.figures.freed if after < before else self.figures.mapped
                sums.add(kind, abs(before - after))

    def _refused(self, record: Record, _: Entry) -> None:
        self.figures.refused.add(_call_and_error(record), record.get("count", 1))

    def _noop(self, record: Record, _: Entry) -> None:
        self.figures.noops.add(record.get("call", "?"), record.get("count", 1))

    def _noted(self, record: Record, _: Entry) -> None:
        self.figures.noted.add(record["event"], record.get("count", 1))

    def _repeated(self, record: Record, entry: Entry) -> None:
        """The first of them was counted when it came."""
        tell = self._COUNTED.get(record.get("repeats", ""))
        if tell is not None:
            more = max(record.get("count", 1) - 1, 0)
            tell(self, {**record, "event": record["repeats"], "count": more}, entry)

    def _failed(self, record: Record, _: Entry) -> None:
        self.figures.failed.add(_call_and_error(record))

    def _admitted(self, record: Record, _: Entry) -> None:
        self.figures.admitted += 1
        self.figures.held += record.get("held", False)

    def _finished(self, record: Record, _: Entry) -> None:
        figures, outcome = self.figures, record["outcome"]
        figures.requests.add(record.get("duration_s"))
        figures.outcomes.add(outcome)
        figures.tokens.add(outcome, record["tokens"])

    def _loaded(self, record: Record, _: Entry) -> None:
        if record.get("weights") == "valid":
            self.figures.loads += 1
            if "version" in record:
                self.figures.versions.add(plain(record["version"]))

    _COUNTED: ClassVar[Mapping[str, Callable[["Account", Record, Entry], None]]] = {
        "refused": _refused,
        "noop": _noop,
        **dict.fromkeys(("stalled", "stale_kv", "request_rejected"), _noted),
        **dict.fromkeys(("unexpected_output", "sink_failed"), _noted),
    }
    _TELL: ClassVar[Mapping[str, Callable[["Account", Record, Entry], None]]] = {
        **_COUNTED,
        "transition": _moved,
        "operation_end": _ended,
        "memory": _measured,
        "repeated": _repeated,
        "failed": _failed,
        "request_admitted": _admitted,
        "request_finished": _finished,
        "weights": _loaded,
    }


def _call_and_error(record: Record) -> str:
    """The call, and the class of its error: messages differ."""
    return f"{record.get('call', '?')}: {record.get('error', '?').partition(':')[0]}"


# -- the command -----------------------------------------------------------------------------------


class Told(NamedTuple):
    """One session that is over."""

    path: Path
    ending: Ending
    figures: Figures

    def to_dict(self) -> dict[str, Any]:
        """The session for a program."""
        return {"path": str(self.path), "ending": self.ending.to_dict(), "figures": self.figures.to_dict()}


class Stats:
    """What is gathered from all logs. told: the first sessions; sessions: how many there are."""

    def __init__(self) -> None:
        self.together = Figures()
        self.told: list[Told] = []
        self.sessions = self.problems = 0

    def read(self, path: Path, read: Reader) -> None:
        """Go through a log. Raises LogError."""
        replay = Replay()
        account: Account | None = None
        for entry in read(path):
            was = replay.session
            self.problems += replay.take(entry) is not None
            if replay.session is not was and replay.session is not None:
                self._end(account)
                account = Account(replay.session, path)
            if account is not None and entry.record is not None:
                account.take(entry, entry.record)
        self._end(account)

    def _end(self, account: Account | None) -> None:
        if account is not None:
            told = Told(account.path, account.end(), account.figures)
            self.together.merge(told.figures)
            self.sessions += 1
            if len(self.told) < _MOST_SESSIONS:
                self.told.append(told)


def run(arguments: Namespace, screen: Screen) -> int:
    """Tell the figures of each session, and of all together."""
    stats = Stats()
    with screen.reading(arguments.paths) as read:
        for path in arguments.paths:
            stats.read(path, read)
    if arguments.json:
        sessions = [told.to_dict() for told in stats.told]
        screen.json({"sessions": sessions, "together": stats.together.to_dict()})
    else:
        _print(stats, screen)
    warn_of(stats.problems, screen)
    return PROBLEMS if stats.problems else FINE


def warn_of(problems: int, screen: Screen) -> None:
    """Say beside the output that there are some."""
    if problems:
        lines = counted(problems, "line")
        screen.say(f"{lines} damaged, or not to be believed; `lifecycle audit verify` says which")


def _print(stats: Stats, screen: Screen) -> None:
    for path, ending, figures in stats.told:
        screen.line((f"{path}: {ending.who}", "bold cyan"))
        screen.line(f"{counted(figures.records, 'record')} in {duration(figures.seconds)}; {ending}")
        _print_figures(figures, screen)
    if stats.sessions > len(stats.told):
        screen.line(f"{stats.sessions - len(stats.told)} more sessions\n")
    if stats.sessions != 1:
        screen.line((f"{stats.sessions} sessions together", "bold cyan"))
        records, seconds = stats.together.records, stats.together.seconds
        screen.line(f"{counted(records, 'record')} in {duration(seconds)}")
        _print_figures(stats.together, screen)


def _print_figures(figures: Figures, screen: Screen) -> None:
    for names, rows in _tables(figures):
        if rows:
            screen.line()
            screen.table(names, rows)
    screen.line()


_Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _tables(figures: Figures) -> Iterator[_Table]:
    """The names of the columns, and the rows, of all that there is to tell."""
    whole = sum(figures.states.values()) or 1.0
    yield (
        ("state", ">time", ">share"),
        [(name, duration(s), f"{s / whole:.1%}") for name, s in _largest(figures.states)],
    )
    yield (("transition", *_SPREAD), _spread_rows(figures.transitions))
    yield (
        ("operation", *_SPREAD, ">raised"),
        [(*row, _number(figures.raised.get(row[0], 0))) for row in _spread_rows(figures.operations)],
    )
    longest = sorted(figures.longest, reverse=True)
    yield (
        ("longest operations", ">time", "where"),
        [(call, duration(s), where) for s, call, where in longest],
    )
    drains = (
        *figures.drains.cells(),
        *map(str, (figures.drain_steps, figures.drain_tokens, figures.rolled_back)),
    )
    drained = figures.drains.count or figures.rolled_back
    yield (
        ("drains", *_SPREAD, ">steps", ">tokens", ">rolled back"),
        [("that led to a sleep", *drains)] if drained else [],
    )
    yield (
        ("memory", ">freed by sleeps", ">mapped by wakes"),
        [
            (kind, *(size(int(sums.get(kind, 0))) for sums in (figures.freed, figures.mapped)))
            for kind in sorted({*figures.freed, *figures.mapped})
        ],
    )
    for name, sums in (
        ("refused", figures.refused),
        ("nothing to do", figures.noops),
        ("failed", figures.failed),
        ("noted", figures.noted),
    ):
        yield ((name, ">times"), _sum_rows(sums))
    yield (
        ("requests by outcome", ">count", ">tokens"),
        [(name, _number(n), _number(figures.tokens.get(name, 0))) for name, n in _largest(figures.outcomes)],
    )
    yield (
        ("requests", *_SPREAD, ">admitted", ">of them held"),
        [("that ended", *figures.requests.cells(), str(figures.admitted), str(figures.held))]
        if figures.admitted or figures.requests.count
        else [],
    )
    yield (("weights loaded", ">times"), [("in all", str(figures.loads))] if figures.loads else [])
    yield (("version", ">times"), _sum_rows(figures.versions))


def _spread_rows(spreads: Spreads) -> list[tuple[str, ...]]:
    most = sorted(spreads.items(), key=lambda item: -item[1].total)
    return [(name, *spread.cells()) for name, spread in most]


def _sum_rows(sums: Sums) -> list[tuple[str, str]]:
    return [(name, _number(amount)) for name, amount in _largest(sums)]


def _largest(sums: Sums) -> list[tuple[str, float]]:
    return sorted(sums.items(), key=lambda item: -item[1])


def _number(amount: float) -> str:
    return f"{amount:.0f}"
