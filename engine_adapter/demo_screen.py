"""What is seen of the demo: lines and tables, and streams side by side while they run.

Theory of operation
-------------------
`Screen` is plain text, `RichScreen` the same with colours. Both show streams from a
`Frame`, a view of all of them at one moment, which a ticker asks for ten times a second in
the event loop. On a terminal, rich redraws one panel for each stream in place, or one row
where panels do not fit. Anywhere else nothing can be redrawn: a frame is printed when the
engine's state is new and lasts, and once a second while streams change.

Text is cut from its left: what is new is what is seen. `rich` is optional.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from lifecycle import DrainProgress, SleepReport

READER_GONE: Final = 141  # the shell's number for a program that SIGPIPE ended
_TICK_S: Final = 0.1
_PRINT_EVERY_S: Final = 1.0
_ON_A_CPU: Final = {
    1: "(On a CPU vLLM keeps its memory: nothing to measure. The order of calls is a GPU's.)",
    2: "(On a CPU they really stay; the guard asks for the load that a GPU needs.)",
}
_TRANSITION_COLUMNS: Final = ("trigger", "transition", "in flight", "held", "memory", "weights")

# What a stream is doing, in the order in which they are counted, and its colour.
STATUSES: Final = {
    "running": "green",
    "draining": "yellow",
    "waiting": "",
    "held": "magenta",
    "finished": "cyan",
    "later": "dim",
}
_STATE_STYLES: Final = {"running": "bold green", "draining": "bold yellow"}  # any other: it serves nobody
_PANEL: Final = 26  # columns that a panel needs
_CELL: Final = 34  # likewise a stream in plain text


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream at one moment: `tokens` of `wanted` came; the text is one line."""

    name: str
    status: str
    tokens: int
    wanted: int
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """All streams at one moment, and the engine's state."""

    state: str
    seconds: float
    streams: list[StreamView]

    def counts(self) -> str:
        """How many streams do what."""
        shown = [stream.status for stream in self.streams]
        return ", ".join(f"{shown.count(status)} {status}" for status in STATUSES if status in shown)

    def rows(self, width: int, columns: int = 0) -> list[str]:
        """The streams as text, in so many columns, or in as many as fit into the width."""
        columns = columns or min(max(width // _CELL, 1), 4)
        cell = width // columns - 2
        places = range(0, len(self.streams), columns)
        return [
            "  ".join(_row(stream, cell) for stream in self.streams[place : place + columns]).rstrip()
            for place in places
        ]


def _row(stream: StreamView, width: int) -> str:
    head = f"{stream.name} {stream.status:8} {stream.tokens:2}/{stream.wanted:2} "
    room = max(width - len(head), 1)
    text = stream.text if len(stream.text) <= room else f"…{stream.text[1 - room :]}" if room > 1 else "…"
    return f"{head}{text:{room}}"


def _reader_gone() -> NoReturn:
    """Nobody reads any more, as after `| head`: end as the signal ends other programs, without a word.

    SystemExit passes through the event loop and its task groups as it is.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still written on the way out
    raise SystemExit(READER_GONE)


class Screen:
    """Plain text. `RichScreen` shows the same with colours and a moving bar."""

    def heading(self, text: str) -> None:
        """Begin a chapter."""
        self.line(f"\n{text}")

    def line(self, text: str) -> None:
        """One line, seen at once also through a pipe."""
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            _reader_gone()

    def report(self, report: object) -> None:
        """A report of the lifecycle, as it prints itself."""
        self.line(f"{report}")

    def refusal(self, text: str) -> None:
        """A call that was refused, as it should be."""
        self.line(text)

    def good(self, text: str) -> None:
        """The verdict that was hoped for."""
        self.line(text)

    def bad(self, text: str) -> None:
        """The other one."""
        self.line(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under column names."""
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join(cells).rstrip())

    def slept(self, report: SleepReport) -> None:
        """The report of a sleep, with a note where no memory could be measured."""
        self.report(report)
        if report.released_bytes is None:
            self.line(_ON_A_CPU[report.level])

    def transitions(self, events: Iterable[dict[str, Any]]) -> None:
        """The transitions among these events."""
        rows = [
            (
                event["trigger"],
                f"{event['source']} -> {event['dest']}",
                str(event["counts"]["in_flight"]),
                str(event["counts"]["held"]),
                "both" if len(event["resident"]) > 1 else "".join(event["resident"]) or "none",
                event["weights"],
            )
            for event in events
            if event["event"] == "transition"
        ]
        self.table(_TRANSITION_COLUMNS, rows)

    @contextlib.contextmanager
    def drain_bar(self) -> Iterator[Callable[[DrainProgress], None]]:
        """Lend a `progress` callback: one line whenever a request finishes."""
        seen = 0

        def show(view: DrainProgress) -> None:
            nonlocal seen
            if view.drained != seen:
                seen = view.drained
                self.line(f"draining: {seen} of {seen + view.remaining} finished after {view.steps} steps")

        yield show

    def width(self) -> int:
        """How many characters `line` has room for."""
        return shutil.get_terminal_size().columns

    @contextlib.asynccontextmanager
    async def streams(self, look: Callable[[], Frame]) -> AsyncIterator[None]:
        """Show streams side by side while the block runs, and once more at its end."""
        shown, before, due = Frame("", 0.0, []), "", 0.0

        def draw(frame: Frame) -> None:
            self.line(f"[{frame.seconds:4.1f} s] {frame.state}: {frame.counts()}")
            for row in frame.rows(self.width() - 2):
                self.line(f"  {row}")

        def draw_if_due() -> None:
            nonlocal shown, before, due
            now, frame = time.monotonic(), look()
            # A state that lasts: by the next tick the story has told in a line of its own how it was entered.
            lasts, before = frame.state == before, frame.state
            stale = now >= due and frame.streams != shown.streams
            if lasts and (frame.state != shown.state or stale):
                shown, due = frame, now + _PRINT_EVERY_S
                draw(frame)

        async with _ticking(draw_if_due):
            yield
        draw(look())


@contextlib.asynccontextmanager
async def _ticking(draw: Callable[[], None]) -> AsyncIterator[None]:
    """Draw ten times a second while the block runs."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            draw()

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticker


class RichScreen(Screen):
    """The same through rich, whose absence is the constructor's ImportError."""

    def __init__(self) -> None:
        from rich.console import Console

        class Piped(Console):
            def on_broken_pipe(self) -> None:  # rich's own ends with status 1, which means a difference here
                _reader_gone()

        # Messages hold brackets of their own: nothing is markup.
        self._console = Piped(markup=False, highlight=False)

    def heading(self, text: str) -> None:  # noqa: D102  (described by the base, as what follows)
        self._console.print(f"\n{text}", style="bold cyan")

    def line(self, text: str) -> None:  # noqa: D102
        self._print(text)

    def report(self, report: object) -> None:  # noqa: D102
        self._print(f"{report}", "green")

    def refusal(self, text: str) -> None:  # noqa: D102
        self._print(text, "yellow")

    def good(self, text: str) -> None:  # noqa: D102
        self._print(text, "bold green")

    def bad(self, text: str) -> None:  # noqa: D102
        self._print(text, "bold red")

    def _print(self, text: str, style: str = "") -> None:
        from rich.padding import Padding

        self._console.print(Padding(text, (0, 0, 0, 3), expand=False), style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:  # noqa: D102
        from rich.table import Table

        # The last column is the one that may be cut short.
        shown = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns[:-1]:
            shown.add_column(column, no_wrap=True)
        shown.add_column(columns[-1], no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            shown.add_row(*row)
        self._console.print(shown)

    @contextlib.contextmanager
    def drain_bar(self) -> Iterator[Callable[[DrainProgress], None]]:  # noqa: D102
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("   draining"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=None)

            def show(view: DrainProgress) -> None:
                bar.update(
                    task,
                    total=view.drained + view.remaining,
                    completed=view.drained,
                    description=f"{view.steps} steps, {view.tokens} tokens, {view.held} held",
                )

            yield show

    def width(self) -> int:  # noqa: D102
        return int(self._console.width) - 3

    @contextlib.asynccontextmanager
    async def streams(self, look: Callable[[], Frame]) -> AsyncIterator[None]:  # noqa: D102
        # FORCE_COLOR makes a terminal of any log for rich; one that can't move its cursor is none here.
        if not (self._console.is_interactive and sys.stdout.isatty()):
            async with super().streams(look):
                yield
            return
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False) as live:

            def draw() -> None:
                live.update(_picture(look(), *self._console.size), refresh=True)

            async with _ticking(draw):
                yield
            draw()


def _picture(frame: Frame, width: int, height: int) -> Any:
    """The frame for rich: a panel for each stream where they fit into the terminal, else a row."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header = Text.assemble(
        (f"   {frame.state.upper()}", _STATE_STYLES.get(frame.state, "bold magenta")),
        f"   {frame.seconds:4.1f} s   {frame.counts()}",
        no_wrap=True,
        overflow="ellipsis",
    )
    columns = max((n for n in (1, 2, 3, 4, 6) if width // n >= _PANEL), default=1)
    lines = min((height - 3) // -(-len(frame.streams) // columns) - 2, 3)
    if lines < 1:
        rows = zip(frame.rows(width, columns=1), frame.streams, strict=True)
        return Group(header, *(Text(row, STATUSES[stream.status], no_wrap=True) for row, stream in rows))
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    panels = [_panel(stream, width // columns - 4, lines) for stream in frame.streams]
    for place in range(0, len(panels), columns):
        grid.add_row(*panels[place : place + columns])
    return Group(header, grid)


def _panel(stream: StreamView, width: int, lines: int) -> Any:
    from rich.panel import Panel
    from rich.text import Text

    style = STATUSES[stream.status]
    # Wrapped from its beginning, so that only the last line changes until it is full.
    newest = textwrap.wrap(stream.text, width)[-lines:]
    return Panel(
        Text("\n".join(newest), no_wrap=True, style="dim" if stream.status == "finished" else ""),
        title=Text(f"{stream.name} {stream.status}", style),
        title_align="left",
        subtitle=Text(f"{stream.tokens}/{stream.wanted}", style),
        subtitle_align="right",
        border_style=style,
        height=lines + 2,
    )


def make_screen() -> Screen:
    """The one with colours, if rich is there. What the terminal has no letter for is shown as "?"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        return RichScreen()
    except ImportError:
        return Screen()
