"""`lifecycle audit export` and `timeline`: logs as a table for other programs, and as a page.

Theory of operation
-------------------
*CSV.* One row for each record: columns for the fields that many events have, and the others as
JSON in the last one. A spreadsheet runs a cell that begins like a formula, and ids and errors are
anybody's texts: such a cell gets an apostrophe before it. Texts are made printable as they are for
a terminal, and never cut.

*The page* is made by `lifecycle.audit.timeline`.

A file is written where the caller says, unless a log is there: that can't be undone.
"""

import contextlib
import csv
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

from lifecycle.audit import format as form
from lifecycle.audit import reading
from lifecycle.audit.format import Record
from lifecycle.audit.merge import names_of
from lifecycle.audit.reading import Entry
from lifecycle.audit.screen import FINE, PROBLEMS, Refused, Screen, plain, safe, utc
from lifecycle.audit.stats import warn_of

_FIELDS: Final = (
    *("time", "seq", "engine", "rank", "event", "trigger", "source", "dest", "state", "call", "request"),
    *("outcome", "duration_s", "steps", "tokens", "count", "error", "level", "weights", "epoch"),
)
_COUNTS: Final = ("in_flight", "held", "undelivered")
COLUMNS: Final = ("log", "line", "utc", *_FIELDS, *(f"counts.{name}" for name in _COUNTS), "problem", "rest")
# What serves the log itself, and is long in its headers.
_OF_THE_LOG: Final = frozenset({"rules", "sum", "chain", "after"})
_NOT_REST: Final = frozenset(_FIELDS) | _OF_THE_LOG
# What begins a formula. The last four are as wide as a Chinese character, and some spreadsheets take them.
_FORMULA: Final = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")


# -- CSV -------------------------------------------------------------------------------------------


def run(arguments: Namespace, screen: Screen) -> int:
    """Write logs as CSV, to a file or to the output."""
    problems = 0
    with screen.reading(arguments.paths) as read, _output(arguments, screen) as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        for entry in chain.from_iterable(map(read, arguments.paths)):
            problems += entry.problem is not None
            if entry.record is not None:
                writer.writerow(cells(entry, entry.record))
    warn_of(problems, screen)
    return PROBLEMS if problems else FINE


def cells(entry: Entry, record: Record) -> list[str]:
    """One record as the cells of `COLUMNS`."""
    counts = record.get("counts", {})
    rest = {name: value for name, value in record.items() if name not in _NOT_REST}
    if counts.keys() <= set(_COUNTS):
        rest.pop("counts", None)
    values = (
        *(str(entry.path), entry.line, utc(record["time"])),
        *(record.get(name) for name in _FIELDS),
        *(counts.get(name) for name in _COUNTS),
        *(entry.problem, rest or None),
    )
    return ["" if value is None else cell(plain(value)) for value in values]


def cell(text: str) -> str:
    """A text that a spreadsheet shows and does not run."""
    shown = safe(text, len(text))
    return f"'{shown}" if text.lstrip(" ").startswith(_FORMULA) else shown


class _Writable(Protocol):
    def write(self, text: str, /) -> object:
        """Take some text."""


@contextlib.contextmanager
def _output(arguments: Namespace, screen: Screen) -> Iterator[_Writable]:
    if arguments.output is None:
        yield screen
        return
    refuse_a_log(arguments.output, arguments.paths)
    with arguments.output.open("w", encoding="utf-8", newline="") as file:
        yield file


def refuse_a_log(output: Path, paths: Sequence[Path]) -> None:
    """Raise Refused if a log is at the path that is to be written."""
    there = output.resolve()
    if there in {part.resolve() for path in paths for part in reading.parts(path)} or _is_log(output):
        raise Refused(f"{output} is a log: it is not overwritten")


def _is_log(path: Path) -> bool:
    """Whether the file begins with a record."""
    first = next(reading.read(path), None) if path.is_file() else None
    return first is not None and first.record is not None


# -- the page --------------------------------------------------------------------------------------


def timeline(arguments: Namespace, screen: Screen) -> int:
    """Write logs as one page, a lane for each."""
    from lifecycle.audit.timeline import page

    refuse_a_log(arguments.output, arguments.paths)
    lanes = [_Lane(path) for path in arguments.paths]
    names = names_of(arguments.paths, [lane.header() for lane in lanes], short=False)
    text = page(
        {name: lane.records() for name, lane in zip(names, lanes, strict=True)},
        title=names[0] if len(names) == 1 else f"{len(names)} engines",
    )
    arguments.output.write_text(text, encoding="utf-8")
    warn_of(sum(lane.problems for lane in lanes), screen)
    return PROBLEMS if any(lane.problems for lane in lanes) else FINE


class _Lane:
    """One log. problems: of the lines that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems = 0

    def header(self) -> Record | None:
        """The first header that is in it."""
        records = (entry.record for entry in reading.read(self._path) if entry.record is not None)
        return next((record for record in records if record["event"] == form.OPENED), None)

    def records(self) -> Iterator[Record]:
        """What can be understood of it, without what serves the log itself."""
        for entry in reading.read(self._path):
            self.problems += entry.problem is not None
            if entry.record is not None:
                yield {name: value for name, value in entry.record.items() if name not in _OF_THE_LOG}
