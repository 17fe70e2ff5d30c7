"""How the benchmarks measure, and how they print.

Two ways of doing the same work are timed in pairs of blocks, next to each other in time and in alternating
order. What is compared is then a median over pairs: a block that the machine interrupted is one pair of many.
"""

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WIDTHS = (68, 14, 14)
UNCOLLECTED = 20  # pairs of blocks between two collections


@dataclass(frozen=True)
class Line:
    """One figure. A target is a bound that the figure may reach; without one it is only told."""

    name: str
    figure: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        return not (
            (self.at_most is not None and self.figure > self.at_most)
            or (self.at_least is not None and self.figure < self.at_least)
        )

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}".rstrip()
        return "" if self.at_least is None else f">= {self.at_least:g} {self.unit}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def print_title() -> None:
    name, figure, target = WIDTHS
    print(f"{'':{name}}{'measured':>{figure}}  {'target':{target}}")


def print_line(line: Line) -> None:
    name, figure, target = WIDTHS
    digits = 4 if line.at_least is not None else 3
    measured = f"{line.figure:.{digits}f} {line.unit}" if line.unit != "B" else f"{line.figure:.0f} B"
    verdict = ("PASS" if line.ok else "FAIL") if line.target else "    "
    text = f"{line.name:{name}}{measured.strip():>{figure}}  {line.target:{target}}{verdict}  {line.note}"
    print(text.rstrip(), flush=True)


def tell(lines: Iterable[Line], path: Path | None) -> list[Line]:
    """Print lines as they are measured, and write them to the file at `path` too."""
    told = []
    print_title()
    for line in lines:
        print_line(line)
        told.append(line)
    if path is not None:
        records = [line.to_dict() for line in told]
        path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return told


@contextmanager
def no_gc() -> Iterator[None]:
    """Collect now, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def pairs_of(
    one: Callable[[], float], other: Callable[[], float], count: int, *, warm_up: int = 2
) -> list[tuple[float, float]]:
    """What two measurements gave, in pairs: one first, then the other first, and so on.

    Garbage is collected between pairs, now and then.
    """
    pairs = []
    for start in range(0, count + warm_up, UNCOLLECTED):
        with no_gc():
            for number in range(start, min(start + UNCOLLECTED, count + warm_up)):
                if number % 2:
                    second = other()
                    first = one()
                else:
                    first = one()
                    second = other()
                pairs.append((first, second))
    return pairs[warm_up:]


def median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    """How much more the second of a pair is."""
    return statistics.median(second - first for first, second in pairs)


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Second by first: the median over the pairs, and the 95 % bounds of it from below and from above.

    Bounds are one-sided, from 4,000 bootstrap samples of the pairs.
    """
    logs = [math.log(second / first) for first, second in pairs]
    dice = random.Random(20240229)
    medians = sorted(statistics.median(dice.choices(logs, k=len(logs))) for _ in range(4000))
    bounds = medians[int(0.05 * len(medians))], medians[int(0.95 * len(medians))]
    return math.exp(statistics.median(logs)), math.exp(bounds[0]), math.exp(bounds[1])
