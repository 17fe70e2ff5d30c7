"""What a terminal is given: text that can't do anything to it, tables, progress, and a live view.

Theory of operation
-------------------
A log may come from anybody, and a terminal obeys what it is sent. So nothing out of a log is
written but through `safe`, which makes visible whatever is not plain text: no other module writes,
and what is written here has the type `Shown`, which `safe` makes, and padding and cutting keep.

All layout is made here, of text. `rich`, which is optional, adds the colours where it finds a
terminal, the bar and the view that is redrawn in place; without it the same lines come plain.
No markup is ever parsed.

Output is cut to a terminal's width only where there is a terminal: what goes into a pipe or a
file is whole, but for texts of more than `MOST_SHOWN` characters.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NewType

from lifecycle.audit import reading
from lifecycle.audit.reading import Entry

# What the command's exit status says.
FINE: Final = 0
PROBLEMS: Final = 1
CANNOT: Final = 2
INTERRUPTED: Final = 130
READER_GONE: Final = 141  # the shell's number for a program that SIGPIPE ended

# A text as it came from anywhere, or one with a style of rich's.
Piece = str | tuple[str, str]
# What went through `safe`. Only such text is put on the screen, and mypy sees to it.
Shown = NewType("Shown", str)
Line = Sequence[tuple[Shown, str]]
# Reads a log, as `reading.read` does.
Reader = Callable[[Path], Iterator[Entry]]

MOST_SHOWN: Final = 400  # characters of one text
# Files that are read with a bar: reading them takes more than a second or two.
_LARGE: Final = 32 << 20
_LINES_A_LOOK: Final = 4096
_UNSAYABLE: Final = "(a value that JSON can't hold)"
_INSTALL: Final = "a live view needs rich: pip install 'engine-lifecycle[audit]'"


class Refused(Exception):
    """The command can't do what it was asked for. The message says why, in a line."""


# -- text ------------------------------------------------------------------------------------------

# Printable to Unicode, and nothing to be seen of them: joiners, fillers and variation selectors.
_UNSEEN: Final = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0))
) | frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))


def safe(text: str, most: int = MOST_SHOWN) -> Shown:
    """The text, printable: controls, what turns its direction and what is invisible become escapes.

    Of more than `most` characters the first are left, and how many there were.
    """
    beginning = text[:most]
    plain = beginning.isascii() and beginning.isprintable()
    shown = beginning if plain else "".join(map(_visible, beginning))
    return Shown(shown if len(text) <= most else f"{shown}... ({len(text)} characters)")


def _visible(character: str) -> str:
    if character.isprintable() and character not in _UNSEEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def as_json(value: Any) -> str:
    """A value as JSON in ASCII without controls. What JSON has no word for becomes a text."""
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        tame = {name: _sayable(each) for name, each in value.items()} if type(value) is dict else _UNSAYABLE
        return json.dumps(tame)


def plain(value: Any) -> str:
    """A value in a line of text."""
    return value if isinstance(value, str) else as_json(value)


def _sayable(value: Any) -> Any:
    try:
        json.dumps([value], allow_nan=False)  # as deep as it will stand
    except (ValueError, RecursionError):
        return _UNSAYABLE
    return value


def utc(time: float) -> str:
    """A moment: "2026-01-01 00:00:00.250"."""
    return datetime.fromtimestamp(time, UTC).isoformat(sep=" ", timespec="milliseconds")[:23]


# From which amount on a unit is used, its name, and how many seconds or bytes it is.
_Units = Sequence[tuple[float, str, float]]
_DURATIONS: Final[_Units] = (
    (172_800.0, "d", 86_400.0),
    (7200.0, "h", 3600.0),
    (180.0, "min", 60.0),
    (1.0, "s", 1.0),
    (0.001, "ms", 0.001),
    (0.0, "us", 0.000_001),
)
_SIZES: Final[_Units] = tuple(
    (2.0**power, name, 2.0**power)
    for name, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
)


def duration(seconds: float) -> str:
    """How long: "2.5 ms", "12.5 min"."""
    return _in_units(seconds, _DURATIONS)


def size(count: int) -> str:
    """How many bytes: "48.0 GiB"."""
    return _in_units(count, _SIZES)


def _in_units(amount: float, units: _Units) -> str:
    """The amount in the largest unit of which there is enough, else in the smallest."""
    _, name, unit = next((each for each in units if amount >= each[0]), units[-1])
    return f"{amount / unit:.1f} {name}"


def counted(number: int, word: str) -> str:
    """So many of something: "1 log", "2 logs"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def cut(text: str, width: int) -> str:
    """The text, or so much of its beginning that it fits into the width."""
    if columns(text) <= width:
        return text
    text = text[:width]
    while text and columns(text) > width - 3:
        text = text[:-1]
    return f"{text}..."


# -- the screen ------------------------------------------------------------------------------------


class Screen:
    """Where a command writes. width: of the terminal; None: it is none, and lines may be long."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
        self.width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._paint = _painter()

    def line(self, *pieces: Piece) -> None:
        """One line of these pieces."""
        self.put([_shown(piece) for piece in pieces])

    def put(self, line: Line) -> None:
        """One line that was made before."""
        sys.stdout.write(f"{self._paint(line)}\n")

    def table(self, names: Sequence[str], rows: Iterable[Sequence[Piece]]) -> None:
        """Rows under the names of their columns, all as wide as they need; nothing without rows."""
        lines = [[_shown(cell) for cell in row] for row in rows]
        if not lines:
            return
        widths = {
            name: max(columns(text) for text, _ in cells) for name, *cells in zip(names, *lines, strict=True)
        }
        table = Table(widths, self.width)
        self.put(table.head())
        for line in lines:
            self.put(table.aligned(line))

    def json(self, value: Any) -> None:
        """One line of JSON."""
        sys.stdout.write(f"{as_json(value)}\n")

    def write(self, text: str) -> None:
        """Text that is safe, as it is: for a writer that makes lines of its own."""
        sys.stdout.write(text)

    def flush(self) -> None:
        """Whatever was written is seen. Raises OSError."""
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """A line for whoever started the command, beside its output."""
        sys.stderr.write(f"lifecycle audit: {safe(text)}\n")

    @contextlib.contextmanager
    def reading(self, paths: Iterable[Path]) -> Iterator[Reader]:
        """Lend what reads these logs: with a bar on stderr, if there is much to read and a terminal."""
        total = sum(map(_bytes_of, paths))
        if total < _LARGE or not sys.stderr.isatty():
            yield reading.read
            return
        with _bar(total) as show:
            yield _watched(show)

    @contextlib.contextmanager
    def live(self) -> Iterator[Callable[[Sequence[Line]], None]]:
        """Lend what shows some lines in the place of those before. Raises Refused without rich."""
        try:
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text
        except ImportError:
            raise Refused(_INSTALL) from None
        with Live(console=Console(), auto_refresh=False) as view:

            def show(lines: Sequence[Line]) -> None:
                texts = (Text.assemble(*line) for line in lines)
                view.update(Text("\n", no_wrap=True, overflow="crop").join(texts), refresh=True)

            yield show


class Table:
    """Makes rows one by one, as they come.

    widths: the name of each column, and how wide it is at least; in one with a ">" before its name
    cells stand to the right. The last column gets what is left of `width`; None: as much as it needs.
    """

    def __init__(self, widths: Mapping[str, int], width: int | None) -> None:
        self._widths = {name: max(least, len(name)) for name, least in widths.items()}
        self._width = width

    def head(self) -> Line:
        """The names of the columns."""
        return self.row(*((name.removeprefix(">"), "dim") for name in self._widths))

    def row(self, *cells: Piece) -> Line:
        """One row."""
        return self.aligned([_shown(cell) for cell in cells])

    def aligned(self, cells: Line) -> Line:
        """One row of what is safe already."""
        line = [
            (Shown(_padded(text, width, name)), style)
            for (text, style), (name, width) in zip(cells, self._widths.items(), strict=True)
        ]
        if self._width is not None:
            used = sum(columns(text) for text, _ in line[:-1])
            text, style = line[-1]
            line[-1] = (Shown(cut(text.rstrip(), max(self._width - used, 4))), style)
        return line


def _padded(text: str, width: int, name: str) -> str:
    gap = " " * (width - columns(text))
    return f"{gap}{text}  " if name.startswith(">") else f"{text}{gap}  "


def _shown(piece: Piece) -> tuple[Shown, str]:
    return (safe(piece), "") if isinstance(piece, str) else (safe(piece[0]), piece[1])


def _watched(show: Callable[[int], None]) -> Reader:
    """A reader that tells how many bytes it has read, of all logs so far."""
    before = 0  # of the files that were read to their end

    def read(path: Path) -> Iterator[Entry]:
        nonlocal before
        part, offset = path, 0
        for entry in reading.read(path):
            if entry.path is not part:
                before += offset
            part, offset = entry.path, entry.offset
            if not entry.line % _LINES_A_LOOK:
                show(before + offset)
            yield entry
        before += offset

    return read


def _painter() -> Callable[[Line], str]:
    """How texts with styles become what is written: coloured by rich, on a terminal; else plain."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return _plain
    console = Console()
    if not console.is_terminal:
        return _plain

    def paint(line: Line) -> str:
        with console.capture() as painted:
            console.print(Text.assemble(*line), soft_wrap=True, end="")
        return str(painted.get())

    return paint


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Lend a function that is told how many bytes were read so far."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda _: None
        return
    shown = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _bytes_of(path: Path) -> int:
    with contextlib.suppress(reading.LogError, OSError):
        return sum(part.stat().st_size for part in reading.parts(path))
    return 0


def silence() -> None:
    """Nobody takes the output any more: what is still written on the way out goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # where it is no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
