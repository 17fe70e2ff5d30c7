"""What a log looks like: lines of JSON, each with a checksum that depends on all before it.

Theory of operation
-------------------
A log is a series of *sessions*, one for each engine that was guarded. Each session
begins with a header, `log_opened`, and has a *record* for each event: its fields as
they are in memory, with `seq` dense from 1. A session that ended cleanly ends with
`log_closed`; one without "ends open": the process was killed, or still runs.

Every line ends with `"sum"`, 16 hexadecimal digits: BLAKE2b over the *chain* and the
line up to there. The chain begins as the random `chain` of the header, and after each
record it is that record's sum. So no record can be changed, removed, added or moved
without a sum that does not fit, unless all that follow are made anew: it finds damage,
it is no signature. Nothing in a file can show that its tail was removed.

Lines that the log itself adds (`FRAMES`) have a sum like any other, but no number, and
leave the chain as it is: they stand between records that were sealed before.

`log_opened`
    format, table (its version) and `rules`, the legal moves, so that any later release can
    replay it; engine, rank, host, pid; `part` and `first`, since a session may go on in
    another file; `chain`, where the sums of this part begin; `after`, the sum of the line that
    a new session found in front of it.
`log_rotated`
    the session goes on in the next part. last: the number of the last record.
`log_outage`
    the disk took nothing for a while, and why. first, last: the records whose callers went on
    before they were on disk; lost: how many records are missing from here on.
`log_closed`
    the clean end. last as above.

Lines are ASCII. Standard library only; no I/O.
"""

import json
import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Final

FORMAT: Final = 1
OPENED: Final = "log_opened"
ROTATED: Final = "log_rotated"
OUTAGE: Final = "log_outage"
CLOSED: Final = "log_closed"
FRAMES: Final = frozenset({OPENED, ROTATED, OUTAGE, CLOSED})

# No line is longer, so that a reader of a hostile file need not hold more.
MOST_BYTES: Final = 4 << 20
_MOST_CHARACTERS: Final = 64 << 10  # of one text in a record that would be too long

# How a line ends that was never finished, once somebody writes behind it. No record has a NUL.
TORN: Final = b"\0\n"

_SUM_DIGITS: Final = 16
_SEAL: Final = len('"sum":"') + _SUM_DIGITS + len('"}\n')

Record = dict[str, Any]


def seal(fields: Mapping[str, Any], chain: str) -> tuple[bytes, str]:
    """The line of these fields after `chain`, and its sum."""
    body = _encode(fields)
    if len(body) > MOST_BYTES - _SEAL:
        body = _encode({name: _shortened(value) for name, value in fields.items()})
    body = body[:-1] + b","  # without the brace
    digest = _sum(chain, body)
    return b'%b"sum":"%b"}\n' % (body, digest.encode()), digest


def fits(line: bytes, chain: str) -> bool:
    """Whether the line ends with the sum that it has after `chain`."""
    return line.endswith(b'"sum":"%b"}\n' % sum_for(line, chain).encode())


def sum_for(line: bytes, chain: str) -> str:
    """The sum that a line should have after `chain`."""
    return _sum(chain, line[:-_SEAL])


def sum_of(line: bytes) -> str:
    """The sum that a line says it has; "" for no line."""
    return line[-_SEAL + 7 : -3].decode("ascii", "replace")


def is_sealed(line: bytes) -> bool:
    """Whether the line ends as one that has a sum."""
    return line[-_SEAL:].startswith(b'"sum":"') and line.endswith(b'"}\n')


def _sum(chain: str, body: bytes) -> str:
    return blake2b(chain.encode() + body, digest_size=_SUM_DIGITS // 2).hexdigest()


def parse(line: bytes) -> Record:
    """The fields of a line. Raises ValueError, with the reason, for whatever is no record."""
    try:
        text = line.decode()
        record, end = _decoder.raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from None
    if text[end:] != "\n":
        raise ValueError(f"something stands behind its JSON, at column {end + 1}")
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  (whoever reads a log catches one kind)
    for name, value in record.items():
        fits = _FIELDS.get(name)
        if fits is not None and not fits(value):
            raise ValueError(f"its field {name!r} is of the wrong kind")
    for name in _OWED.get(record.get("event", ""), ("event", "seq", "time")):
        if name not in record:
            raise ValueError(f"it has no field {name!r}")
    return record


# -- what the fields are ---------------------------------------------------------------------------

_MOST_NUMBER: Final = 1e18
_END_OF_TIME: Final = 253_402_300_799.0  # of what a calendar shows: the year 9999, in seconds since the epoch


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_NUMBER and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value < _END_OF_TIME


def _are_counts(value: Any) -> bool:
    return type(value) is dict and all(map(_is_count, value.values()))


def _are_bytes(value: Any) -> bool:
    return type(value) is dict and all(each is None or _is_count(each) for each in value.values())


def _are_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _are_rules(value: Any) -> bool:
    return type(value) is list and all(
        type(rule) is list
        and len(rule) == 3  # noqa: PLR2004  (trigger, source, dest)
        and _is_text(rule[0])
        and (rule[1] is None or _is_text(rule[1]))
        and _is_text(rule[2])
        for rule in value
    )


# Fields that a reader relies on. Others may hold anything.
_FIELDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("seq", "count", "of", "epoch", "rank", "pid", "steps", "tokens"), _is_count),
    **dict.fromkeys(("remaining", "part", "first", "last", "lost", "table", "format"), _is_count),
    **dict.fromkeys(("event", "engine", "call", "trigger", "source", "dest", "state", "host"), _is_text),
    **dict.fromkeys(("error", "request", "outcome", "weights", "repeats", "chain", "after", "sum"), _is_text),
    **dict.fromkeys(("duration_s", "drain_s"), _is_number),
    "time": _is_time,
    "counts": _are_counts,
    "bytes": _are_bytes,
    "resident": _are_texts,
    "rules": _are_rules,
    "held": lambda value: type(value) is bool,
    "level": lambda value: value is None or _is_count(value),
}
_OWED: Final[Mapping[str, tuple[str, ...]]] = {
    OPENED: ("time", "engine", "rank", "format", "table", "rules", "part", "first", "chain", "after"),
    ROTATED: ("time", "last"),
    OUTAGE: ("time", "lost", "error"),
    CLOSED: ("time", "last"),
    "attached": ("seq", "time", "dest"),
    "transition": ("seq", "time", "trigger", "source", "dest"),
    "operation_begin": ("seq", "time", "call"),
    "operation_end": ("seq", "time", "call"),
    "request_admitted": ("seq", "time", "request"),
    "request_finished": ("seq", "time", "request", "outcome", "tokens"),
}


# -- JSON ------------------------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has {name}, which is not JSON")


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        text = _encoder.encode(fields)
    except (ValueError, TypeError, RecursionError):  # NaN, a circle, a key that is no text
        text = _encoder.encode({str(name): _plain(value) for name, value in fields.items()})
    return text.encode("ascii")


_decoder: Final = json.JSONDecoder(parse_constant=_no_constant)
_encoder: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=repr)


def _plain(value: Any) -> Any:
    try:
        _encoder.encode(value)
    except (ValueError, TypeError, RecursionError):
        return repr(value)
    return value


def _shortened(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return value
    return f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)"
