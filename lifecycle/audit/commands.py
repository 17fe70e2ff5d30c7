"""The command `lifecycle audit`: its subcommands, what each takes, and what is done when it fails.

Theory of operation
-------------------
`SUBCOMMANDS` is the table of them: a name, what it does, and what it takes. `run` calls one,
and is the one place where an error becomes a line on stderr and an exit status: a log that can't
be read, a disk that is full, a reader that is gone, a Ctrl-C.

Everything that a subcommand says of a log goes through `lifecycle.audit.screen`.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lifecycle.audit import export, merge, show, stats, verify
from lifecycle.audit.file import aside, numbers
from lifecycle.audit.reading import LogError
from lifecycle.audit.screen import CANNOT, INTERRUPTED, READER_GONE, Refused, Screen, silence
from lifecycle.audit.show import Moment

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  (argparse has no other name for it)

_ABOUT: Final = """\
Read the logs that AuditLog and LIFECYCLE_LOG write. What was set aside beside a log
(log.jsonl.1 and so on) is read with it, and a log may still be written to.
"""
_EXAMPLES: Final = """\
examples:
  lifecycle audit verify logs/*.jsonl            are they whole, and which call never returned?
  lifecycle audit merge --diverge logs/*.jsonl   which rank did something else than the others?
  lifecycle audit show --last 20 log.jsonl       what happened last?
  lifecycle audit show --follow logs/*.jsonl     what happens now?
"""
_STATUS: Final = """\
exit status: 0 fine; 1 problems were found; 2 it could not be done (a log can't be read, or the
command line is wrong); 130 interrupted; 141 its output was closed early
"""


# -- what options take -----------------------------------------------------------------------------

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _count(text: str) -> int:
    """A number of at least 1; argparse says the rest."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _moment(text: str) -> Moment:
    """A time of ISO 8601, in UTC unless it says otherwise, or one before the end as "-10m"."""
    relative = re.fullmatch(r"-(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)
    if relative:
        return Moment(float(relative[1]) * _UNITS[relative[2]], before_end=True)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        why = f"{text!r} is no time: give 2026-01-31T04:29:35 (UTC), or -10m (s, m, h, d): before the end"
        raise argparse.ArgumentTypeError(why) from None
    return Moment((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


class _Option(NamedTuple):
    """One option, as argparse is told of it."""

    name: str
    told: dict[str, Any]


_FILTERS: Final = (
    _Option("--event", {"action": "append", "help": "only events of this name; may be given again"}),
    _Option("--state", {"help": "only while the engine is in this state, or comes into it"}),
    _Option("--request", {"metavar": "ID", "help": "only what is about this request"}),
    _Option("--rank", {"type": int, "help": "only this rank"}),
    _Option("--since", {"type": _moment, "metavar": "TIME", "help": "2026-01-31T04:29:35 (UTC), or -10m"}),
    _Option("--until", {"type": _moment, "metavar": "TIME", "help": "likewise; -10m is before the end"}),
    _Option("--last", {"type": _count, "metavar": "N", "help": "only the last N of these"}),
)
_OUTPUT: Final = {"type": Path, "metavar": "FILE", "help": "where to write; no log is overwritten"}


class Subcommand(NamedTuple):
    """One subcommand. more: what its help says beside the summary; examples: its arguments, and what for."""

    name: str
    run: Callable[[argparse.Namespace, Screen], int]
    summary: str
    more: str
    examples: Sequence[tuple[str, str]]
    options: Sequence[_Option]


_JSON_LINES: Final = _Option("--json", {"action": "store_true", "help": "JSON lines"})
_JSON: Final = _Option("--json", {"action": "store_true", "help": "one JSON document"})

SUBCOMMANDS: Final = (
    Subcommand(
        "show",
        show.run,
        "what happened, a line for each record",
        """\
With --follow it goes on for as long as logs grow: on a terminal as a view of what each engine is
at (ages are by this computer's clock), elsewhere as lines. Ctrl-C ends it.""",
        (
            ("log.jsonl --since -10m", "the last ten minutes of the log"),
            ("log.jsonl --event failed --event stalled", "what went wrong"),
            ("log.jsonl --request 17 --json", "the life of one request, for a program"),
            ("logs/*.jsonl --follow", "all ranks, live"),
        ),
        (
            *_FILTERS,
            _Option("--follow", {"action": "store_true", "help": "go on with what is written"}),
            _JSON_LINES,
        ),
    ),
    Subcommand(
        "verify",
        verify.run,
        "whether logs are whole and tell what can have been, and how they end",
        """\
Checks that each line is whole (its checksum depends on all lines before it), that no record is
missing, that each move was legal by the table in the log's own header, and that each request that
was admitted ended once. Then it says how each engine's records end: well, or open, with the calls
that are under way and the requests that are live. An open end alone is no problem: the engine may
still run. Nothing in a file can show that its end was cut off.""",
        (("logs/*.jsonl", "all ranks"), ("log.jsonl --json", "all problems (up to 10000), for a program")),
        (_JSON,),
    ),
    Subcommand(
        "stats",
        stats.run,
        "where the time went, and what was done, refused and lost",
        """\
For each engine's records, and for all together. Medians and 90th percentiles are counted in
buckets and within 1 %; all else is exact, but for times between records, which are as good as the
clock that they were written by. Of names (calls, errors) the first 200 are told apart.""",
        (("log.jsonl", "one log"), ("logs/*.jsonl --json", "all ranks, for a program")),
        (_JSON,),
    ),
    Subcommand(
        "merge",
        merge.run,
        "many ranks as one story, and the point where they diverge",
        """\
Lines are in the order of their times. Clocks of several hosts differ, and so may the order.
Then what the ranks did (operations begun, and moves) is compared in each rank's own order, without
times, and without what requests cause; the first difference is named. Ranks that diverge are a
problem: status 1.""",
        (
            ("logs/*.jsonl", "the story, and where it parts"),
            ("logs/*.jsonl --diverge", "only where it parts"),
            ("logs/*.jsonl --json", "JSON lines, the last of them the comparison"),
        ),
        (_Option("--diverge", {"action": "store_true", "help": "only name the difference"}), _JSON_LINES),
    ),
    Subcommand(
        "timeline",
        export.timeline,
        "logs as a page for a browser, with a lane for each",
        "The page needs no network. Lines that are damaged are left out, and counted.",
        (("logs/*.jsonl -o timeline.html", "all ranks in one page"),),
        (_Option("-o", {"dest": "output", "required": True, **_OUTPUT}),),
    ),
    Subcommand(
        "export",
        export.run,
        "logs as CSV",
        """\
One row for each record. Texts are printable: whatever else was in them is there as an escape, and a
cell that a spreadsheet would run as a formula has an apostrophe before it.""",
        (("log.jsonl -o log.csv", "to a file"), ("logs/*.jsonl", "all ranks, to the output")),
        (_Option("-o", {"dest": "output", **_OUTPUT}),),
    ),
)


# -- the command line ------------------------------------------------------------------------------


def add_parser(commands: "Subparsers") -> None:
    """Add `audit` and its subcommands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "audit",
        help="read audit logs: show, verify, stats, merge, timeline, export",
        description=_ABOUT,
        epilog=f"{_EXAMPLES}\n{_STATUS}",
        formatter_class=raw,
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="subcommand")
    for each in SUBCOMMANDS:
        width = max(len(arguments) for arguments, _ in each.examples)
        lines = [f"  lifecycle audit {each.name} {told:{width}}   {what}" for told, what in each.examples]
        subparser = subcommands.add_parser(
            each.name,
            help=each.summary,
            description=f"{each.summary.capitalize()}.\n\n{each.more}",
            epilog="\n".join(["examples:", *lines, "", _STATUS]),
            formatter_class=raw,
        )
        subparser.add_argument("paths", nargs="+", type=Path, metavar="LOG", help="a log")
        for option in each.options:
            subparser.add_argument(option.name, **option.told)
        subparser.set_defaults(audit=each.run)


def joined(argv: Sequence[str]) -> list[str]:
    """The arguments, with `--since -10m` as `--since=-10m`: else argparse takes the time for an option."""
    found: list[str] = []
    for argument in argv:
        if found and found[-1] in {"--since", "--until"}:
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand that was asked for, and return its exit status."""
    screen = Screen()
    arguments.paths = _logs(arguments.paths)
    try:
        status: int = arguments.audit(arguments, screen)
        screen.flush()
    except (LogError, Refused) as error:
        screen.say(str(error))
    except BrokenPipeError:
        silence()
        return READER_GONE
    except OSError as error:  # of what is written: a log's own is a LogError
        silence()
        screen.say(f"can't write: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    else:
        return status
    return CANNOT


def _logs(paths: Sequence[Path]) -> list[Path]:
    """Each log once; a part of another one that is given (as by `log*`) is read with that."""
    parts = {aside(path, number) for path in paths for number in numbers(path)}
    return [path for path in dict.fromkeys(paths) if path not in parts]
