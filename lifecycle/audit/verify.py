"""`lifecycle audit verify`: whether logs are whole and tell what can have been, and how they end.

Theory of operation
-------------------
One pass, in constant memory. `reading.read` checks the lines (JSON, checksums, numbers), and
`Replay` what they tell: legal moves by the table of the log's own header, and for each request
one beginning and one end. Here both are only gathered: the first problems of each log, the number
of all, and the `Ending` of each session.

The ending is what the command is for: an operation that is under way where a log ends open is a
call that never returned. It is no problem of the log, so it does not change the exit status.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from lifecycle.audit.reading import Entry, LogError
from lifecycle.audit.replay import Open, Replay, Session
from lifecycle.audit.screen import CANNOT, FINE, PROBLEMS, Reader, Screen, counted, duration, safe, utc
from lifecycle.audit.show import identity

_PRINTED: Final = 20  # problems of each log
_KEPT: Final = 10_000  # that --json has
_MOST_SESSIONS: Final = 1000  # of each log that are told one by one
_MOST_NAMES: Final = 5


class Ending(NamedTuple):
    """How a session ends, as far as it was read.

    under_way: the operations that began and did not end, the outermost first. live: how many
    requests did not, and requests: the ids of the first of them.
    """

    engine: str
    rank: int
    host: str
    pid: int
    records: int
    seq: int
    time: float
    state: str | None
    clean: bool
    torn: bool
    lost: int
    under_way: tuple[Open, ...]
    live: int
    requests: tuple[str, ...]

    @classmethod
    def of(cls, session: Session) -> "Ending":
        """What is left of a session once it is over: little, also of one that held much."""
        header = session.header
        return cls(
            safe(header["engine"]),
            header["rank"],
            safe(header.get("host", "?")),
            header.get("pid", 0),
            session.records,
            session.last_seq,
            session.last_time,
            None if session.state is None else safe(session.state),
            session.clean,
            session.torn,
            session.lost,
            tuple(operation._replace(name=safe(operation.name)) for operation in session.operations),
            len(session.requests),
            tuple(map(safe, islice(session.requests, _MOST_NAMES))),
        )

    def __str__(self) -> str:
        return "; ".join(self._words())

    @property
    def who(self) -> str:
        """Whose session it is."""
        return identity(self._asdict())

    def _words(self) -> Iterator[str]:
        """The parts of the sentence."""
        how = "well" if self.clean else f"open, {self.state or 'in an unknown state'},"
        yield f"ends {how} at seq {self.seq}"
        if self.under_way:
            yield "under way: " + ", ".join(
                f"{call} since {utc(since)} UTC ({duration(max(self.time - since, 0.0))} at the end)"
                for call, since, _ in self.under_way
            )
        if self.live:
            more = ", ..." if self.live > len(self.requests) else ""
            yield f"{counted(self.live, 'request')} live: {', '.join(self.requests)}{more}"
        if self.lost:
            yield f"{counted(self.lost, 'record')} lost in outages"
        if self.torn:
            yield "its last line has no end"

    def to_dict(self) -> dict[str, Any]:
        """The same for a program."""
        under_way = [
            {"call": call, "since": since, "age_s": max(self.time - since, 0.0), "line": line}
            for call, since, line in self.under_way
        ]
        return {**self._asdict(), "under_way": under_way}


@dataclass(slots=True)
class Finding:
    """What a log is like. problems: place and words of the first; found: how many there are in all."""

    path: Path
    records: int = 0
    found: int = 0
    problems: list[tuple[Path, int, str]] = field(default_factory=list)
    sessions: int = 0
    endings: list[Ending] = field(default_factory=list)

    def note(self, entry: Entry, problem: str) -> None:
        """One line is wrong."""
        self.found += 1
        if len(self.problems) < _KEPT:
            self.problems.append((entry.path, entry.line, safe(problem)))

    def end(self, session: Session | None) -> None:
        """A session is over."""
        if session is not None:
            self.records += session.records
            self.sessions += 1
            if len(self.endings) < _MOST_SESSIONS:
                self.endings.append(Ending.of(session))

    def to_dict(self) -> dict[str, Any]:
        """The finding for a program."""
        problems = [{"path": str(path), "line": line, "what": what} for path, line, what in self.problems]
        return {
            "path": str(self.path),
            "records": self.records,
            "found": self.found,
            "problems": problems,
            "sessions": [ending.to_dict() for ending in self.endings],
        }


def run(arguments: Namespace, screen: Screen) -> int:
    """Check logs and say how they end."""
    findings: list[Finding] = []
    unreadable: list[str] = []
    with screen.reading(arguments.paths) as read:
        for path in arguments.paths:
            try:
                findings.append(check(path, read))
            except LogError as error:  # one of many must not keep the others from being told
                unreadable.append(str(error))
    bad = any(finding.found for finding in findings)
    if arguments.json:
        logs = [finding.to_dict() for finding in findings]
        screen.json({"ok": not (bad or unreadable), "logs": logs, "unreadable": unreadable})
    elif findings:
        _print(findings, screen)
    for why in unreadable:
        screen.say(why)
    return CANNOT if unreadable else PROBLEMS if bad else FINE


def check(path: Path, read: Reader) -> Finding:
    """Go through a log. Raises LogError."""
    finding, replay = Finding(path), Replay()
    session: Session | None = None
    for entry in read(path):
        problem = replay.take(entry)
        if problem is not None:
            finding.note(entry, problem)
        if replay.session is not session:
            finding.end(session)
            session = replay.session
    finding.end(session)
    return finding


def _print(findings: Sequence[Finding], screen: Screen) -> None:
    for finding in findings:
        for path, line, what in finding.problems[:_PRINTED]:
            screen.line((f"{path}:{line}: {what}", "bold red"))
        if finding.found > _PRINTED:
            screen.line(f"{finding.path}: {finding.found - _PRINTED} more problems")
        for ending in finding.endings:
            screen.line(
                f"{finding.path}: ",
                f"{ending.who}: {counted(ending.records, 'record')}, ",
                (str(ending), "green" if ending.clean else "yellow"),
            )
        if finding.sessions > len(finding.endings):
            screen.line(f"{finding.path}: {finding.sessions - len(finding.endings)} more sessions")
        if not finding.sessions:
            screen.line(f"{finding.path}: no session in it")
    records, found = (sum(getattr(each, name) for each in findings) for name in ("records", "found"))
    verdict = ("nothing is wrong", "bold green") if not found else (counted(found, "problem"), "bold red")
    screen.line(f"{counted(len(findings), 'log')}, {counted(records, 'record')}: ", verdict)
