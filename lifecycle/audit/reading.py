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

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from lifecycle.audit import format as form
from lifecycle.audit.file import aside, numbers

# After lines that do not fit: so many sums at most may be those that the next line follows.
_MOST_CHAINS: Final = 4
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
    with _explained(path):
        found = [*(aside(path, number) for number in numbers(path)), *([path] if path.exists() else [])]
    if not found:
        raise LogError(f"{path}: no such file")
    return found


def read(path: Path) -> Iterator[Entry]:
    """Every line of a log. Raises LogError if a file can't be read."""
    parts(path)
    chain = _Chain()
    with _explained(path), contextlib.ExitStack() as stack:
        file = _open_if_there(path)
        if file is not None:
            stack.enter_context(file)
        for _, part in _older(path, file):
            yield from _read_whole(part, chain)
        if file is not None:
            yield from _read_part(path, file, chain)


def follow(path: Path) -> Iterator[Entry | None]:
    """Every line of a log, as it grows; None whenever nothing more is there now. Raises LogError."""
    parts(path)
    chain, done = _Chain(), 0  # the parts up to this number were read
    file: IO[bytes] | None = None
    left: IO[bytes] | None = None  # the file that was read last at the path; open, so that no other can be it
    with _explained(path):
        try:
            while True:
                file = _open_if_there(path)
                for number, part in _older(path, file):
                    if number > done and not _is(part, left):
                        yield from _read_whole(part, chain)
                    done = max(done, number)
                if left is not None:
                    left.close()
                left = file
                if file is None:
                    yield None
                else:
                    yield from _follow_part(path, file, chain)
        finally:
            for each in (left, file):
                if each is not None:
                    each.close()


def _older(path: Path, file: IO[bytes] | None) -> Iterator[tuple[int, Path]]:
    """What was set aside before this file, which may have been set aside itself since it was opened."""
    for number in numbers(path):
        part = aside(path, number)
        if _is(part, file):
            return
        yield number, part


def _read_whole(part: Path, chain: "_Chain") -> Iterator[Entry]:
    with _explained(part), _open(part) as file:
        yield from _read_part(part, file, chain)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Whatever the disk says becomes a LogError."""
    try:
        yield
    except OSError as error:
        raise LogError(f"{path}: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    """Open a file for reading. A pipe might never answer, and a device might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise LogError(f"{path}: it is no regular file")
    return path.open("rb")


def _open_if_there(path: Path) -> IO[bytes] | None:
    try:
        return _open(path)
    except FileNotFoundError:
        return None


def _is(path: Path, file: IO[bytes] | None) -> bool:
    """Whether this file is the one at the path."""
    return file is not None and os.path.samestat(path.stat(), os.fstat(file.fileno()))


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
        if not left:
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
        """A line can't be understood: it counts as a record, with the sum that it seems to have, if any."""
        self._last = form.sum_of(line)
        self._sums, self._behind = (self._last,) if form.is_sealed(line) else (), ""
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
        fits = not sums or form.fits(line, sums[0]) or any(form.fits(line, chain) for chain in sums[1:])
        if record["event"] not in form.FRAMES:
            believed = () if fits else [form.sum_for(line, chain) for chain in sums[:_MOST_CHAINS]]
            self._sums = (self._last, *believed)
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
