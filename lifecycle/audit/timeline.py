"""The timeline: what engines did, as one page of HTML that opens anywhere.

Theory of operation
-------------------
`page` packs the records of any number of logs into `timeline.html`, which does the rest in
the browser: this module knows no colours, and the page knows no Python. A page is read
where something went wrong, so it needs nothing that could be missing there: one file, no
network, no library.

*Nothing out of a log is ever markup or script.* Ids and errors are strings of strangers.
They enter the page at one place, as JSON in a data block that no browser runs, written
in ASCII and without the three characters that could end the block. The script of the page
sets text and draws; it makes no markup of what it reads. The page's policy backs this up:
it allows the one script and the one style that have the hashes of those in the template,
and no request of any kind.

*Records repeat themselves*: the same names, states and counts, again and again. So a page
holds every distinct set of field names (a shape) once, every distinct value once, and a
record is a row of numbers: which shape, the fields that are numbers, and for each other
field which value. That is a quarter of the records' own JSON.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

from lifecycle.table import MEANINGS

Record = Mapping[str, Any]
_Row = list[int | float]

# Beyond this a browser's numbers are no longer exact.
_EXACT: Final = 2**53
# What could end a data block, or begin something in it.
_INERT: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def page(lanes: Mapping[str, Iterable[Record]], *, title: str) -> str:
    """One HTML page with a lane for each log.

    lanes: the name of a lane -> the records of one log, in order, as the page of events describes them.
    """
    template = (resources.files(__package__) / "timeline.html").read_text("utf-8")
    parts = {"policy": _policy(template), "data": _data(lanes, title)}
    # One pass, so that no part is looked at for the place of another.
    return re.sub(r"\{\{(policy|data)\}\}", lambda place: parts[place[1]], template)


def _policy(template: str) -> str:
    """What the page may do: run its own script, use its own style, and nothing else."""
    script, style = (_hash(template, element) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
    )


def _hash(template: str, element: str) -> str:
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", template, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(lanes: Mapping[str, Iterable[Record]], title: str) -> str:
    """All that the page is told, as JSON that no parser of HTML can take for anything else."""
    pack = _Pack()
    rows = [
        {"name": name, "rows": [pack.row(record) for record in records]} for name, records in lanes.items()
    ]
    told = {
        "title": title,
        "states": [[state.value, meaning] for state, meaning in MEANINGS.items()],
        "lanes": rows,
        "shapes": list(pack.shapes),
    }
    text = json.dumps(told, separators=(",", ":"))
    return f'{text[:-1]},"values":[{",".join(pack.values)}]}}'.translate(_INERT)


class _Pack:
    """The distinct shapes and values of the records so far.

    shapes: (names of fields that are numbers, names of the others) -> its place.
    values: a value as JSON -> its place.
    """

    def __init__(self) -> None:
        self.shapes: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        self.values: dict[str, int] = {}

    def row(self, record: Record) -> _Row:
        """A record as numbers: the place of its shape, its numbers, and the places of its other values."""
        numbers = tuple(name for name, value in record.items() if _is_number(value))
        others = tuple(name for name in record if name not in numbers)
        shape = self.shapes.setdefault((numbers, others), len(self.shapes))
        places = [self.values.setdefault(_text(record[name]), len(self.values)) for name in others]
        return [shape, *(record[name] for name in numbers), *places]


def _is_number(value: Any) -> bool:
    """Whether a browser reads it as the same number."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) <= _EXACT


def _text(value: Any) -> str:
    """A value as JSON; what JSON can't say becomes what Python calls it."""
    if type(value) is int:
        return json.dumps(str(value))
    try:
        return json.dumps(value, default=repr, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(repr(value))
