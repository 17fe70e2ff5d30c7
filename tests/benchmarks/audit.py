"""What the durable log costs: events a second, what syncing adds to a transition, and requests to a step.

The log of the first two is on the disk of the folder for temporary files. A transition is one event that
waits for the disk; what it takes more than one without a log is what syncing adds, and depends on the disk.

With records of requests on, the step loop of a real vLLM (the tiny model, blocks of four requests) is
compared with the same lifecycle whose ledger is told to say nothing, in blocks that alternate.

`verify` of ten million records takes minutes and 3 GB of disk, so it is a command of its own:
`python -m tests.benchmarks.audit 10000000`.
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lifecycle.audit import AuditLog
from lifecycle.audit import format as form
from lifecycle.audit.log import _header
from lifecycle.events import EventLog
from lifecycle.request_log import RequestLog
from tests.benchmarks.measure import Line, pairs_of, ratio

FIELDS: dict[str, Any] = {
    "trigger": "settle",
    "source": "running",
    "dest": "awake",
    "counts": {"in_flight": 0, "held": 0, "undelivered": 12},
    "resident": ["kv_cache", "weights"],
    "level": None,
    "weights": "valid",
}
EVENTS = 20_000
TRANSITIONS = 1000
TARGET = 0.99


def run(*, quick: bool) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        laps = [events_a_second(Path(folder) / f"events{lap}") for lap in range(3 if quick else 9)]
        yield Line(
            "events a second into the log, without syncing",
            statistics.median(laps),
            "/s",
            at_least=50_000,
            note=f"{min(laps):,.0f} to {max(laps):,.0f}; the last is on disk at the end of the lap",
        )
        count = TRANSITIONS // 5 if quick else TRANSITIONS
        bare = seconds_of_transitions(EventLog("engine", 0, ()), count)
        log = EventLog("engine", 0, (AuditLog(Path(folder) / "transitions"),))
        synced = seconds_of_transitions(log, count)
        log.end(clean=True)
        name = "what syncing adds to a transition"
        yield Line(f"{name}, median", 1e3 * (statistics.median(synced) - statistics.median(bare)), "ms")
        yield Line(f"{name}, p99", 1e3 * (p99(synced) - p99(bare)), "ms", note=f"{count} transitions")
        yield with_requests(Path(folder) / "requests", quick=quick)


def events_a_second(path: Path) -> float:
    audit = AuditLog(path)
    log = EventLog("engine", 0, (audit,))
    started = time.perf_counter()
    for _ in range(EVENTS):
        log.emit("transition", **FIELDS)
    assert audit.flush(60)
    seconds = time.perf_counter() - started
    log.end(clean=True)
    assert audit.lost == 0
    return EVENTS / seconds


def seconds_of_transitions(log: EventLog, count: int) -> list[float]:
    laps = []
    for _ in range(count):
        started = time.perf_counter()
        log.emit("transition", **{**FIELDS, "trigger": "drain"})
        laps.append(time.perf_counter() - started)
    return laps


def p99(laps: list[float]) -> float:
    return sorted(laps)[int(0.99 * len(laps))]


def with_requests(path: Path, *, quick: bool) -> Line:
    """Steps per second with records of each request by those without, on a real vLLM."""
    from vllm.sampling_params import RequestOutputKind

    from tests.benchmarks.throughput import SEQUENCES, TOKENS, block_of
    from tests.benchmarks.vllm_engine import pair

    llm = pair()
    core = llm.lifecycle._core
    audit = AuditLog(path, requests=True)
    core.events.sinks.append(audit)
    audit.begin("engine", 0)
    audit._session.next = core.events.seq + 1
    requests = RequestLog(core)
    block = block_of(llm.lifecycle, RequestOutputKind.DELTA, TOKENS)

    def told() -> float:
        core.request_log = requests
        core.ledger.on_begin, core.ledger.on_end = requests.began, requests.ended
        return block()

    def untold() -> float:
        core.request_log = core.ledger.on_begin = core.ledger.on_end = None
        return block()

    pairs = pairs_of(untold, told, 30 if quick else 200)
    core.request_log = core.ledger.on_begin = core.ledger.on_end = None
    core.events.sinks.remove(audit)
    audit.end(clean=True)
    llm.settle()
    median, low, high = ratio([(second, first) for first, second in pairs])
    note = f"95 % bound; median {median:.4f}, {low:.4f} to {high:.4f}; {len(pairs)} pairs"
    name = f"steps per second with records of requests, blocks of {SEQUENCES} x {TOKENS} tokens"
    return Line(name, high, "", at_least=TARGET, note=note)


# -- ten million records ---------------------------------------------------------------------------------


def write_log(path: Path, count: int) -> None:
    """A log of so many records that replays."""
    chain = "0" * 16
    header = {**_header("engine", 0), "time": 1.0, "part": 1, "first": 1, "chain": chain, "after": ""}
    moves = [("admit", "awake", "running"), ("settle", "running", "awake")]
    with path.open("wb") as file:
        file.write(form.seal(header, chain)[0])
        for number in range(1, count + 1):
            event = {"seq": number, "time": 1.0 + number / 1000, "engine": "engine", "rank": 0}
            if number == 1:
                event |= {"event": "attached", "dest": "awake"}
            else:
                trigger, source, dest = moves[number % 2]
                event |= {"event": "transition", **FIELDS, "trigger": trigger, "source": source, "dest": dest}
            line, chain = form.seal(event, chain)
            file.write(line)
        file.write(form.seal({"event": form.CLOSED, "time": 1.0 + count, "last": count}, chain)[0])


def main(count: int) -> None:
    from lifecycle.cli import main as command

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        write_log(path, count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        status = command(["audit", "verify", str(path)])
        seconds = time.perf_counter() - started
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        size = path.stat().st_size
        print(
            f"{count:,} records, {size / 1e9:.2f} GB: status {status}, {seconds:.1f} s, "
            f"{count / seconds:,.0f} a second, {grown / 1024:.1f} MiB more resident at its peak"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
