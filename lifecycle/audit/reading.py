"""Reading a log back: every line of all its parts, with its fields or with what is wrong with it.

Theory of operation
-------------------
`read` goes through the parts of a log, oldest first, in one pass and in constant memory.
It checks what the lines themselves promise (`lifecycle.audit.format`): their sums and
their numbers. What they tell is checked by `lifecycle.audit.verify`.

After a line that is wrong, the chain is taken up again at what the next line says, so that
one damage is one problem. A last line without its end is no damage: the process was
killed while it wrote it, or is writing it now. It is left out, and said.

A log may come from anywhere: a line that is too long is not read into memory, and whatever
is no record becomes a problem, never an exception.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from lifecycle.audit import format as form
from lifecycle.audit.file import aside, numbers

_MISFIT: Final = "its checksum does not fit it, or what precedes it"


class Entry(NamedTuple):
    """One line. record: its fields, or None if it can't be understood. problem: what is wrong with it.

    Neither: it has no end, because the process was killed while it wrote it, or is writing it now.
    offset: of the byte behind it, in its file.
    """

    path: Path
    line: int
    record: form.Record | None
    problem: str | None
    offset: int


class LogError(Exception):
    """The file can't be read at all. The message says why, in a line."""


def parts(path: Path) -> list[Path]:
    """The files of a log, oldest first: what was set aside, then the path itself. Raises LogError."""
    found = [*(aside(path, number) for number in numbers(path)), *([path] if path.exists() else [])]
    if not found:
        raise LogError(f"{path}: no such file")
    return found


def read(path: Path) -> Iterator[Entry]:
    """Every line of a log. Raises LogError if a file can't be read."""
    chain = _Chain()
    for part in parts(path):
        try:
            with part.open("rb") as file:
                yield from _read_part(part, file, chain)
        except OSError as error:
            raise LogError(f"{part}: {error.strerror}") from None


def follow(path: Path) -> Iterator[Entry | None]:
    """Every line of a log, as it grows; None whenever nothing more is there now. Raises LogError."""
    chain = _Chain()
    for part in parts(path)[:-1]:
        with part.open("rb") as file:
            yield from _read_part(part, file, chain)
    while True:
        try:
            with path.open("rb") as file:
                yield from _follow_part(path, file, chain)
        except FileNotFoundError:
            yield None
        except OSError as error:
            raise LogError(f"{path}: {error.strerror}") from None


def _follow_part(path: Path, file: IO[bytes], chain: "_Chain") -> Iterator[Entry | None]:
    """Until the log goes on in another file at this path."""
    line = offset = 0
    left = False
    while not left:
        left = _was_left(path, file)  # looked at first: what was written before that is still read
        file.seek(offset)
        for entry in _read_part(path, file, chain, line, growing=True):
            line, offset = entry.line, entry.offset
            yield entry
        yield None


def _was_left(path: Path, file: IO[bytes]) -> bool:
    """Whether the log goes on in another file at this path, or in this one that was cut."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return not os.path.samestat(there, os.fstat(file.fileno())) or there.st_size < file.tell()


def _read_part(
    path: Path, file: IO[bytes], chain: "_Chain", number: int = 0, *, growing: bool = False
) -> Iterator[Entry]:
    """The lines from where the file stands. growing: but for a last one that is being written."""
    offset = file.tell()
    if number == 0:
        chain.begin_file()
    torn: Entry | None = None  # ended by whoever wrote behind it
    while line := file.readline(form.MOST_BYTES + 1):
        number += 1
        whole = line.endswith(b"\n")
        if not whole and len(line) > form.MOST_BYTES:
            offset += len(line) + _skip_line(file)
            chain.lose_track()
            yield Entry(path, number, None, f"it is longer than {form.MOST_BYTES} bytes", offset)
            continue
        offset += len(line)
        record, problem = None, None
        if not whole and growing:
            return
        if whole and not line.endswith(form.TORN):
            record, problem = chain.check(line)
        if torn is not None and (record is None or record["event"] != form.OPENED):
            torn = torn._replace(problem="a record without its end")
        if torn is not None:
            yield torn
        torn = Entry(path, number, None, None, offset) if record is None and problem is None else None
        if torn is None:
            yield Entry(path, number, record, problem, offset)
    if torn is not None:
        yield torn


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


class _Chain:
    """Where the sums and the numbers of a log are.

    After a line whose sum does not fit, either may be wrong: the next one may follow what it says,
    or what it should say.
    """

    def __init__(self) -> None:
        self._sums: tuple[str, ...] = ()  # none: anything is believed
        self._next: int | None = None
        self._behind = "no header is before it"  # why no record may come now, if none may
        self._last = ""  # the sum of the line before

    def begin_file(self) -> None:
        """Another file: no line is before its first."""
        self._last = ""

    def lose_track(self, line: bytes = b"") -> None:
        """A line can't be understood: it counts as a record, with the sum that it seems to have."""
        self._last = form.sum_of(line)
        self._sums, self._behind = (self._last,) if line else (), ""
        self._next = None if self._next is None or not line else self._next + 1

    def check(self, line: bytes) -> tuple[form.Record | None, str | None]:
        """The fields of a line, and what is wrong with it."""
        try:
            record = form.parse(line)
        except ValueError as error:
            self.lose_track(line)
            return None, str(error)
        name, last, self._last = record["event"], self._last, form.sum_of(line)
        if name == form.OPENED:
            return record, self._open(line, record, last)
        problem = self._behind or self._misfit(line, record)
        if name in form.FRAMES:
            return record, problem or self._frame(record)
        self._behind, self._next = "", record["seq"] + 1
        return record, problem

    def _open(self, line: bytes, record: form.Record, last: str) -> str | None:
        """A header begins a session, or goes on with one in another part."""
        sums, number = self._sums, self._next
        self._sums, self._next, self._behind = (record["chain"],), record["first"], ""
        if not form.fits(line, record["chain"]):
            return _MISFIT
        if record["part"] == 1 and record["after"] != last:
            return "another line stood before this header"
        if record["part"] > 1 and sums and (record["chain"] not in sums or record["first"] != number):
            return f"this part goes on with record {record['first']}, and the one before it ended elsewhere"
        return None

    def _misfit(self, line: bytes, record: form.Record) -> str | None:
        """What is wrong with the sum or the number. The chain goes on from here."""
        sums, number = self._sums, self._next
        fits = not sums or any(form.fits(line, chain) for chain in sums)
        if record["event"] not in form.FRAMES:
            self._sums = (form.sum_of(line), *(() if fits else (form.sum_for(line, chain) for chain in sums)))
            if number is not None and record["seq"] != number:
                return f"record {record['seq']} stands where {number} should"
        return None if fits else _MISFIT

    def _frame(self, record: form.Record) -> str | None:
        if record["event"] == form.OUTAGE:
            self._next = None if self._next is None else self._next + record["lost"]
            return None
        self._behind = "it stands behind the end of a log"
        if self._next is not None and record["last"] != self._next - 1:
            return f"it says that the last record is {record['last']}, and that is {self._next - 1}"
        return None
