"""`lifecycle audit merge`: many ranks as one story, and the point where one of them left it.

Theory of operation
-------------------
*The story* is a merge by time, then rank and number. Each log is in order already, so one line of
each is held at a time. Ranks on several hosts have clocks of their own: what seems to come first
may have come second, by as much as these differ.

*The divergence* needs no clocks. What a rank did is its sequence of `Deed`s: the operations that it
began and the moves that it made. Ranks of one job are told the same, so their sequences are the
same, and the first place where they are not is where to look. Requests are each rank's own, so
becoming busy or idle is no deed, and between the states awake and running no difference is made.
A log that ends where others go on is named with how it ends.

Deeds are compared by their place in the sequences, one of each log at a time, in a second pass.
"""

import heapq
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from lifecycle.audit import reading
from lifecycle.audit.format import Record
from lifecycle.audit.reading import Entry
from lifecycle.audit.replay import Replay, Session
from lifecycle.audit.screen import FINE, PROBLEMS, Screen, utc
from lifecycle.audit.show import as_line, columns_for, phrase, rank_of, row
from lifecycle.audit.stats import warn_of
from lifecycle.audit.verify import Ending

_DEEDS: Final = frozenset({"attached", "operation_begin", "transition"})
_OF_REQUESTS: Final = frozenset({"admit", "settle"})
_SERVING: Final = dict.fromkeys(("awake", "running"), "serving")


def run(arguments: Namespace, screen: Screen) -> int:
    """Merge logs, unless only their divergence is asked for, and say where they diverge."""
    problems = 0 if arguments.diverge else _tell(arguments, screen)
    comparison = compare(arguments.paths)
    if arguments.json:
        screen.json({"comparison": comparison.to_dict()})
    else:
        _print(comparison, arguments.paths, screen)
    warn_of(problems, screen)
    return PROBLEMS if problems or comparison.groups else FINE


# -- the story -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a line belongs in the story; log tells apart those that are equal."""

    time: float
    rank: int
    seq: int
    log: int


_Told = tuple[_Place, Entry, Session | None, str | None]


def _tell(arguments: Namespace, screen: Screen) -> int:
    """All lines of all logs, in one order. Returns how many of them are wrong."""
    columns, problems = columns_for(screen), 0
    if not arguments.json:
        screen.put(columns.head())
    for _, entry, session, problem in heapq.merge(*map(_lines, range(len(arguments.paths)), arguments.paths)):
        problems += problem is not None
        if arguments.json:
            screen.json(as_line(entry, problem))
        elif entry.record is not None or problem is not None:
            screen.put(columns.row(*row(entry, session, problem)))
    return problems


def _lines(log: int, path: Path) -> Iterator[_Told]:
    """The lines of a log and their places; one that can't be understood stays behind the one before."""
    replay, place = Replay(), _Place(0.0, 0, 0, log)
    for entry in reading.read(path):
        problem = replay.take(entry)
        if entry.record is not None:
            seq = entry.record.get("seq", place.seq)
            place = _Place(entry.record["time"], rank_of(entry.record, replay.session), seq, log)
        yield place, entry, replay.session, problem


# -- the divergence --------------------------------------------------------------------------------


class Deed(NamedTuple):
    """Something that a rank did. what: all that is compared; entry: the record of it."""

    what: tuple[str, ...]
    entry: Entry


class _Lane:
    """A log as a sequence of deeds. header: of its first session; ending: how its last one ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replay = Replay()
        self.header: Record | None = None

    @property
    def ending(self) -> str:
        session = self._replay.session
        return "nothing: no session is in it" if session is None else f"nothing more: it {Ending.of(session)}"

    @property
    def partial(self) -> bool:
        """Whether records are missing so far."""
        return self._replay.session is not None and not self._replay.session.whole

    def deeds(self) -> Iterator[Deed]:
        """What it did, in order."""
        for entry in reading.read(self._path):
            self._replay.take(entry)
            if self.header is None and self._replay.session is not None:
                self.header = self._replay.session.header
            what = deed_of(entry.record) if entry.record is not None else ()
            if what:
                yield Deed(what, entry)


def deed_of(record: Record) -> tuple[str, ...]:
    """What of a record all ranks should have in common; nothing of one that is a rank's own."""
    name = record["event"]
    if name not in _DEEDS or record.get("trigger") in _OF_REQUESTS:
        return ()
    states = (record.get(end, "") for end in ("source", "dest"))
    return (
        name,
        record.get("trigger", ""),
        record.get("call", ""),
        *(_SERVING.get(state, state) for state in states),
    )


class Group(NamedTuple):
    """Logs that did the same at the divergence. deed: what they did; None: they end there, as ending says."""

    names: tuple[str, ...]
    deed: Deed | None
    ending: str

    def __str__(self) -> str:
        if self.deed is None:
            return self.ending
        record = self.deed.entry.record or {}
        return f"{record['event']} {phrase(record)}"

    def to_dict(self) -> dict[str, Any]:
        """The group for a program."""
        record = None if self.deed is None else as_line(self.deed.entry, None)
        return {"names": list(self.names), "record": record, "ending": self.ending or None}


class Comparison(NamedTuple):
    """How far logs are the same. common: so many deeds; groups: what came then, if they diverge.

    partial: the names of logs whose records are not all there, so that they may be out of step.
    """

    common: int
    groups: tuple[Group, ...]
    partial: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The comparison for a program."""
        groups = [group.to_dict() for group in self.groups]
        return {
            "common": self.common,
            "diverge": bool(groups),
            "groups": groups,
            "partial": list(self.partial),
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare what logs say that was done, up to the first difference. Raises LogError."""
    lanes = [_Lane(path) for path in paths]
    common = 0
    for deeds in zip_longest(*(lane.deeds() for lane in lanes)):
        if len({deed and deed.what for deed in deeds}) > 1:
            break
        common += 1
    else:
        deeds = ()
    names = names_of(paths, [lane.header for lane in lanes])
    return Comparison(
        common,
        _groups(names, lanes, deeds),
        tuple(name for name, lane in zip(names, lanes, strict=True) if lane.partial),
    )


def _groups(names: Sequence[str], lanes: Sequence[_Lane], deeds: Sequence[Deed | None]) -> tuple[Group, ...]:
    """Who did what, the most first."""
    members: dict[tuple[str, ...], list[int]] = {}
    for place, deed in enumerate(deeds):
        what = ("", lanes[place].ending) if deed is None else deed.what
        members.setdefault(what, []).append(place)
    most_first = sorted(members.values(), key=len, reverse=True)
    return tuple(
        Group(
            tuple(names[place] for place in places),
            deeds[places[0]],
            lanes[places[0]].ending if deeds[places[0]] is None else "",
        )
        for places in most_first
    )


# -- names -----------------------------------------------------------------------------------------


def names_of(paths: Sequence[Path], headers: Sequence[Record | None], *, short: bool = True) -> list[str]:
    """A name for each log, by what tells them apart: the rank if that is enough and may be short."""
    ranks = [
        f"rank {header['rank']}" if header else str(path) for path, header in zip(paths, headers, strict=True)
    ]
    whole = [
        f"{header['engine']} rank {header['rank']} on {header.get('host', '?')}" if header else str(path)
        for path, header in zip(paths, headers, strict=True)
    ]
    for names in (ranks, whole) if short else (whole,):
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


_RANK: Final = re.compile(r"rank (\d+)")
_MOST_NAMES: Final = 8


def together(names: Sequence[str]) -> str:
    """Names in a few words: "ranks 0-6", or the first of them."""
    ranks = sorted(int(match[1]) for match in map(_RANK.fullmatch, names) if match)
    if len(ranks) < len(names):
        more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        return ", ".join([*names[:_MOST_NAMES], *more])
    runs: list[list[int]] = []  # of ranks that follow one another
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _print(comparison: Comparison, paths: Sequence[Path], screen: Screen) -> None:
    if len(paths) == 1:
        screen.line("one log: nothing to compare it with")
        return
    for name in comparison.partial:
        screen.say(f"{name}: records are missing, so it may be out of step with the others")
    if not comparison.groups:
        screen.line((f"all {len(paths)} logs did the same {comparison.common} things", "bold green"))
        return
    screen.line((f"{len(paths)} logs did the same {comparison.common} things, and then:", "bold red"))
    screen.table(
        ("who", "what", "where"),
        [(together(group.names), str(group), _where(group)) for group in comparison.groups],
    )


def _where(group: Group) -> str:
    if group.deed is None or group.deed.entry.record is None:
        return ""
    entry = group.deed.entry
    return f"{entry.path}:{entry.line}, {utc(group.deed.entry.record['time'])}"
