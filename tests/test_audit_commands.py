"""`lifecycle audit`: what each subcommand says of the logs of real runs, against what these did."""

import contextlib
import csv
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import DrainTimeout, EngineFailed, IllegalCall, Lifecycle, cli
from lifecycle.audit import AuditLog
from lifecycle.audit import format as form
from lifecycle.audit.export import cell
from lifecycle.audit.reading import follow
from lifecycle.audit.screen import Screen, duration, safe, size
from lifecycle.audit.stats import Spread
from tests.audit_runs import live

ROOT = Path(__file__).resolve().parent.parent

# -- logs --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded(path, *, rank=0, close=True, **options):
    """A lifecycle on a simulated engine, and its log; unless it is closed, the log ends open."""
    log = AuditLog(path, rank=rank, requests=True, **options)
    engines = [SimulatedEngine(), SimulatedEngine()]
    lifecycle = Lifecycle(engines.pop, name="rollout", rank=rank, sinks=[log], event_capacity=1 << 20)
    lifecycle.engine = lifecycle._core.engine
    try:
        yield lifecycle
    finally:
        if close:
            lifecycle.close()
        else:
            log.end(clean=False)


def add(lifecycle, name, tokens=6):
    lifecycle.add_request(name, f"prompt of {name}", SamplingParams(max_tokens=tokens))


def step_to_the_end(lifecycle):
    while lifecycle.has_unfinished_requests():
        lifecycle.step()


@pytest.fixture
def logged(tmp_path):
    """A run with all that goes well and what is refused: its log's path, and its events."""
    path = tmp_path / "log.jsonl"
    with guarded(path) as lifecycle:
        live(lifecycle)
        lifecycle.sleep(1)
        for _ in range(5):
            with pytest.raises(IllegalCall):
                lifecycle.step()
        lifecycle.wake_up()
    return path, lifecycle.events()


def audit(capsys, *arguments):
    """(exit status, output, errors) of `lifecycle audit`."""
    try:
        status = cli.main(["audit", *map(str, arguments)])
    except SystemExit as exit_:  # argparse's
        status = exit_.code
    out, errors = capsys.readouterr()
    return status, out, errors


def documents(out):
    """The JSON of each line."""
    return [json.loads(line) for line in out.splitlines()]


def without(record, *names):
    return {name: value for name, value in record.items() if name not in names}


def told(out):
    """The records in JSON lines, as the events that they were; without the log's own lines."""
    return [without(line, "path", "line", "sum") for line in documents(out) if "seq" in line]


# -- show --------------------------------------------------------------------------------------------


def test_show_json_has_every_event_as_it_was(capsys, logged):
    """`show --json` gives back the events, each a line, between the lines of the log itself."""
    path, events = logged
    status, out, errors = audit(capsys, "show", path, "--json")
    assert (status, errors) == (0, "")
    shown = documents(out)
    assert [line["event"] for line in (shown[0], shown[-1])] == ["log_opened", "log_closed"]
    assert told(out) == [
        {**event, "count": 1} if "count" in event and event["event"] != "repeated" else event
        for event in events
    ]
    assert [line["line"] for line in shown] == list(range(1, len(shown) + 1))


def test_show_has_a_row_for_each_record(capsys, logged):
    """In the table each record is a row: when, whose, which number and event, and what happened."""
    path, events = logged
    status, out, _ = audit(capsys, "show", path)
    assert status == 0
    head, *rows = out.splitlines()
    assert head.split() == ["time", "(UTC)", "rank", "seq", "event", "what"]
    rows = [row.split(maxsplit=4) for row in rows if "log_" not in row]
    assert [(row[3], row[4].split()[0]) for row in rows] == [
        (str(event["seq"]), event["event"]) for event in events
    ]
    assert "running -> draining (drain)" in out
    assert "device 49.0 GiB -> 1.0 GiB" in out
    assert "version v0" in out


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        (["--event", "refused", "--event", "weights"], lambda e: e["event"] in {"refused", "weights"}),
        (["--request", "held1"], lambda e: e.get("request") == "held1"),
        (["--rank", "1"], lambda e: False),
        (["--rank", "0"], lambda e: True),
    ],
)
def test_filters_leave_what_is_asked_for(capsys, logged, filters, wanted):
    """Each filter leaves the records that it names, and nothing else."""
    path, events = logged
    _, out, _ = audit(capsys, "show", path, "--json", *filters)
    assert [record["seq"] for record in told(out)] == [event["seq"] for event in events if wanted(event)]


def test_a_state_is_shown_from_the_move_into_it_to_the_move_out(capsys, logged):
    """`--state` leaves what happens in a state, with the transitions that lead to it and away."""
    path, events = logged
    _, out, _ = audit(capsys, "show", path, "--json", "--state", "sleeping")
    expected, state = [], None
    for event in events:
        before, state = state, event.get("dest", state)
        if "sleeping" in (before, state):
            expected.append(event["seq"])
    assert [record["seq"] for record in told(out)] == expected


def test_times_bound_what_is_shown(capsys, logged):
    """`--since` and `--until` take a time, or one before the end of the log, with "=" or a space."""
    path, events = logged
    middle = events[len(events) // 2]["time"]
    iso = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(middle)) + f"{middle % 1:.6f}"[1:]
    _, out, _ = audit(capsys, "show", path, "--json", "--since", iso)
    since = [record["time"] for record in told(out)]
    _, out, _ = audit(capsys, "show", path, "--json", f"--until={iso}")
    until = [record["time"] for record in told(out)]
    assert min(since) >= middle - 1e-6
    assert max(until) <= middle + 1e-6
    assert len(since) + len(until) in (len(events), len(events) + 1)
    end = documents(audit(capsys, "show", path, "--json", "--last", "1")[1])[0]["time"]
    _, out, _ = audit(capsys, "show", path, "--json", "--since", f"-{end - middle:.6f}s")
    assert abs(len(told(out)) - len(since)) <= 1
    assert len(told(audit(capsys, "show", path, "--json", "--since", "-1d")[1])) == len(events)


def test_last_is_counted_after_the_filters(capsys, logged):
    """`--last N` leaves the last N of what the other filters leave."""
    path, events = logged
    _, out, _ = audit(capsys, "show", path, "--json", "--event", "transition", "--last", "3")
    assert told(out) == [event for event in events if event["event"] == "transition"][-3:]


@pytest.mark.parametrize("value", ["yesterday", "-10 m", "10m", "-m", "2026-13-01", "\x1b[31m", "nan"])
def test_what_is_no_time_is_a_usage_error(capsys, logged, value):
    """A time that can't be read is refused with an example, printably, and with status 2."""
    status, out, errors = audit(capsys, "show", logged[0], f"--since={value}")
    assert (status, out) == (2, "")
    assert "-10m" in errors
    assert "\x1b" not in errors


# -- verify ------------------------------------------------------------------------------------------


def test_a_whole_log_is_fine(capsys, logged):
    """Nothing is wrong with the log of a real run: its records are counted, and it ends well."""
    path, events = logged
    status, out, errors = audit(capsys, "verify", path)
    assert (status, errors) == (0, "")
    assert f"{len(events)} records, ends well at seq {len(events)}\n" in out
    assert "nothing is wrong" in out
    document = json.loads(audit(capsys, "verify", "--json", path)[1])
    (log,) = document["logs"]
    (session,) = log["sessions"]
    assert document["ok"]
    assert (log["records"], log["problems"]) == (len(events), [])
    expected = {"engine": "rollout", "rank": 0, "pid": os.getpid(), "clean": True, "state": "closed"}
    assert {name: session[name] for name in expected} == expected


def test_an_open_end_names_the_call_that_never_returned(capsys, tmp_path):
    """A log that ends inside a call says which, since when and in which state; it is no problem."""
    path, hang = tmp_path / "log.jsonl", threading.Event()
    with guarded(path, close=False) as lifecycle:
        add(lifecycle, "a")
        lifecycle.sleep(1)
        lifecycle.engine.faults.add("wake_up", hang=hang)
        waker = threading.Thread(target=lifecycle.wake_up)
        waker.start()
        while lifecycle.events()[-1]["event"] != "operation_begin":
            time.sleep(0.001)
        begun = lifecycle.events()[-1]
        lifecycle._core.events.sinks[0].flush()
        status, out, _ = audit(capsys, "verify", path)
        session = json.loads(audit(capsys, "verify", path, "--json")[1])["logs"][0]["sessions"][0]
        hang.set()
        waker.join()
    assert status == 0
    assert f"ends open, sleeping, at seq {begun['seq']}; under way: wake_up since " in out
    (call,) = session["under_way"]
    assert (call["call"], call["since"], session["state"]) == ("wake_up", begun["time"], "sleeping")


def test_requests_that_live_at_an_open_end_are_named(capsys, tmp_path):
    """What was admitted and did not end is counted, and the first of it named."""
    path = tmp_path / "log.jsonl"
    with guarded(path, close=False) as lifecycle:
        for name in ("a", "b"):
            add(lifecycle, name)
    status, out, _ = audit(capsys, "verify", path)
    assert status == 0
    assert "ends open, running, at seq" in out
    assert "2 requests live: a, b\n" in out


def test_a_changed_byte_is_found_at_its_line(capsys, logged):
    """One changed byte is one problem, printed with its place; the status is 1."""
    path, _ = logged
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"rank":0', b'"rank":7')
    path.write_bytes(b"".join(lines))
    status, out, _ = audit(capsys, "verify", path)
    assert status == 1
    assert out.splitlines()[0] == f"{path}:5: its checksum does not fit it, or what precedes it"
    assert out.splitlines()[-1].endswith(": 1 problem")
    document = json.loads(audit(capsys, "verify", path, "--json")[1])
    assert not document["ok"]
    assert [(each["line"], each["path"]) for each in document["logs"][0]["problems"]] == [(5, str(path))]


def test_a_removed_line_is_one_problem(capsys, logged):
    """A record that is missing is found behind it; what it told is not missed as well."""
    path, _ = logged
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[3]
    path.write_bytes(b"".join(lines))
    document = json.loads(audit(capsys, "verify", path, "--json")[1])
    assert [each["line"] for each in document["logs"][0]["problems"]] == [4]


def test_a_line_that_is_no_json_is_one_problem(capsys, logged):
    """A line that can't be understood is found, and what it told is not missed as well."""
    path, _ = logged
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10] = b"\x00\xff" + lines[10][2:]
    path.write_bytes(b"".join(lines))
    document = json.loads(audit(capsys, "verify", path, "--json")[1])
    assert [each["line"] for each in document["logs"][0]["problems"]] == [11]


def resealed(path, change):
    """Write the log anew with other records and the sums that fit them."""
    chain, lines = "", []
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        del record["sum"]
        record = change(record)
        if record["event"] == "log_opened":
            chain = record["chain"]
        sealed, after = form.seal(record, chain)
        chain = chain if record["event"] in form.FRAMES else after
        lines.append(sealed)
    path.write_bytes(b"".join(lines))


def test_what_cannot_have_been_is_found_though_all_sums_fit(capsys, logged):
    """A move that the header's table does not have is a problem, also in a log that is whole."""
    path, _ = logged
    resealed(
        path, lambda r: {**r, "source": "sleeping"} if r.get("trigger") == "drain" and r["seq"] < 20 else r
    )
    status, out, _ = audit(capsys, "verify", path)
    assert status == 1
    assert "a transition from sleeping, and the engine was running" in out


def test_the_table_of_the_log_judges_and_not_ours(capsys, logged):
    """A log of another release is replayed by its own rules: what they allow is legal."""
    path, _ = logged

    def other(record):
        if record["event"] == "log_opened":
            return {**record, "rules": [[trigger.upper(), s, d] for trigger, s, d in record["rules"]]}
        return {**record, "trigger": record["trigger"].upper()} if "trigger" in record else record

    resealed(path, other)
    document = json.loads(audit(capsys, "verify", path, "--json")[1])
    problems = [each["what"] for each in document["logs"][0]["problems"]]
    assert problems == ["an engine can't be found awake"]  # the beginning is no trigger of a record


def test_a_request_that_never_ended_is_a_problem_of_a_clean_end(capsys, logged):
    """In a log that ended well each request that was admitted ended."""
    path, _ = logged
    resealed(
        path,
        lambda r: {**r, "event": "noop"} if r.get("request") == "held1" and "outcome" in r else r,
    )
    status, out, _ = audit(capsys, "verify", path)
    assert status == 1
    assert "1 requests ('held1') never ended" in out


def test_only_the_first_problems_are_printed(capsys, logged):
    """Of many problems twenty are printed, and how many more there are; --json has all."""
    path, _ = logged
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *(b"no JSON\n" for _ in range(50))]))
    status, out, _ = audit(capsys, "verify", path)
    assert status == 1
    assert out.count("it is not JSON") == 20
    assert "30 more problems" in out
    assert len(json.loads(audit(capsys, "verify", path, "--json")[1])["logs"][0]["problems"]) == 50


def test_every_session_of_a_log_is_told(capsys, tmp_path):
    """A log that several engines wrote, one after the other, says how each ended; a kill is no problem."""
    path = tmp_path / "log.jsonl"
    with guarded(path, close=False) as lifecycle:
        lifecycle.sleep(1)
    with path.open("ab") as file:
        file.write(b'{"seq":7,"event":"oper')
    with guarded(path) as lifecycle:
        lifecycle.sleep(2)
    document = json.loads(audit(capsys, "verify", path, "--json")[1])
    sessions = document["logs"][0]["sessions"]
    assert document["ok"]
    assert [(each["clean"], each["torn"], each["state"]) for each in sessions] == [
        (False, True, "sleeping"),
        (True, False, "closed"),
    ]


def test_a_log_is_read_with_what_was_set_aside(capsys, tmp_path):
    """The parts of a log are one log, also where the shell names them all; a part alone can be read, too."""
    path = tmp_path / "log.jsonl"
    with guarded(path, max_bytes=4000) as lifecycle:
        live(lifecycle)
    parts = sorted(tmp_path.glob("log.jsonl*"))
    assert len(parts) > 3
    for arguments in ([path], parts):
        status, out, errors = audit(capsys, "verify", *arguments)
        assert (status, errors) == (0, "")
        assert out.endswith(f"1 log, {len(lifecycle.events())} records: nothing is wrong\n")
    status, out, _ = audit(capsys, "verify", tmp_path / "log.jsonl.2")
    assert status == 0, out


def test_a_log_without_its_first_parts_is_no_problem(capsys, tmp_path):
    """Who removes old parts has no damage: what began in them is unknown."""
    path = tmp_path / "log.jsonl"
    with guarded(path, max_bytes=4000) as lifecycle:
        live(lifecycle)
    (tmp_path / "log.jsonl.1").unlink()
    (tmp_path / "log.jsonl.2").unlink()
    status, out, _ = audit(capsys, "verify", path)
    assert status == 0, out


def test_a_log_that_cannot_be_read_keeps_no_other_from_being_told(capsys, tmp_path, logged):
    """Among many logs, one that can't be read is said, with status 2, and the others are checked."""
    path, events = logged
    status, out, errors = audit(capsys, "verify", tmp_path / "none.jsonl", path, tmp_path)
    assert status == 2
    assert f"{len(events)} records, ends well" in out
    assert errors.splitlines() == [
        f"lifecycle audit: {tmp_path}/none.jsonl: no such file",
        f"lifecycle audit: {tmp_path}: it is no regular file",
    ]
    document = json.loads(audit(capsys, "verify", "--json", tmp_path, path)[1])
    assert (document["ok"], len(document["logs"]), len(document["unreadable"])) == (False, 1, 1)


# -- stats -------------------------------------------------------------------------------------------


def stats_of(capsys, *paths):
    return json.loads(audit(capsys, "stats", *paths, "--json")[1])


def test_stats_are_those_of_the_events(capsys, logged):
    """Counts, sums and extremes are exactly those of the events; refusals with all that were repeated."""
    path, events = logged
    figures = stats_of(capsys, path)["together"]
    ended = [event for event in events if event["event"] == "operation_end"]
    finished = [event for event in events if event["event"] == "request_finished"]
    moves = Counter(
        f"{e['source']} -> {e['dest']} ({e['trigger']})" for e in events if e["event"] == "transition"
    )
    refused = Counter()
    for event in events:
        if event["event"] == "refused":
            refused[f"{event['call']}: {event['error'].split(':')[0]}"] += event["count"]
    assert figures["records"] == len(events)
    assert {name: spread["count"] for name, spread in figures["transitions"].items()} == moves
    assert {name: spread["count"] for name, spread in figures["operations"].items()} == Counter(
        event["call"] for event in ended
    )
    assert figures["operations"]["wake_up"]["max_s"] == max(
        e["duration_s"] for e in ended if e["call"] == "wake_up"
    )
    assert figures["longest"][0]["seconds"] == max(event["duration_s"] for event in ended)
    assert figures["refused"] == refused == {"step: IllegalCall": 7}
    assert figures["outcomes"] == Counter(event["outcome"] for event in finished)
    assert sum(figures["tokens"].values()) == sum(event["tokens"] for event in finished)
    assert (figures["admitted"], figures["held"]) == (len(finished), 2)
    assert (figures["loads"], figures["versions"]) == (2, {"v0": 1, "v1": 1})
    drains = [event for event in events if event["event"] == "transition" and event["trigger"] == "slept"]
    assert figures["drains"]["count"] == len(drains)
    assert figures["drain_steps"] == sum(event["steps"] for event in drains)
    assert figures["drain_tokens"] == sum(event["tokens"] for event in drains)
    freed = sum(
        max(e["bytes"]["device_before"] - e["bytes"]["device_after"], 0) for e in events if "bytes" in e
    )
    assert figures["freed"]["device"] == freed > 0


def test_seconds_are_spent_in_the_states_between_the_moves(capsys, logged):
    """The time in each state is between its moves, and all together are the time of the log."""
    path, events = logged
    states = stats_of(capsys, path)["together"]["states"]
    expected, state, since = Counter(), None, 0.0
    for event in events:
        if "dest" in event:
            if state is not None:
                expected[state] += event["time"] - since
            state, since = event["dest"], event["time"]
    del states["closed"]  # until the line that closes the log
    assert states == pytest.approx(expected)


def test_a_failure_and_a_rollback_are_counted(capsys, tmp_path):
    """Failures are counted by call and class of error, drains that were rolled back for themselves."""
    path = tmp_path / "log.jsonl"
    with guarded(path) as lifecycle:
        add(lifecycle, "a", tokens=100)
        lifecycle.step()
        with pytest.raises(DrainTimeout):
            lifecycle.sleep(1, "wait", timeout=0)
        lifecycle.engine.faults.add("step", raises=RuntimeError("the device\x1b[31m is gone"))
        with pytest.raises(EngineFailed):
            lifecycle.step()
        lifecycle.recover()
        lifecycle.sleep(1)
    figures = stats_of(capsys, path)["together"]
    assert figures["failed"] == {"step: RuntimeError": 1}
    assert (figures["rolled_back"], figures["drains"]["count"]) == (1, 1)
    assert figures["raised"] == {"sleep(level=1, mode=wait)": 1}
    assert figures["outcomes"] == {"error": 1}
    status, out, _ = audit(capsys, "stats", path)
    assert status == 0
    for words in ("failed", "rolled back", "step: RuntimeError", "transition", "longest operations"):
        assert words in out
    status, out, _ = audit(capsys, "verify", path)
    assert status == 0, out
    assert "the device\\x1b[31m is gone" in audit(capsys, "show", path, "--event", "failed")[1]


def test_quantiles_are_within_one_percent():
    """A median and a 90th percentile of many durations are within 1 % of the true ones."""
    spread, halves = Spread(), [Spread(), Spread()]
    seconds = [0.001 * 1.01**index for index in range(1000)]
    for index, each in enumerate(seconds):
        spread.add(each)
        halves[index % 2].add(each)
    halves[0].merge(halves[1])
    for each in (spread, halves[0]):
        assert each.quantile(0.5) == pytest.approx(seconds[499], rel=0.01)
        assert each.quantile(0.9) == pytest.approx(seconds[899], rel=0.01)
        assert (each.longest, each.count) == (seconds[-1], 1000)


def test_stats_of_several_logs_add_up(capsys, tmp_path, logged):
    """The figures of all sessions together are the sums of each one's."""
    path, events = logged
    other = tmp_path / "other.jsonl"
    with guarded(other, rank=1) as lifecycle:
        live(lifecycle, cycles=1)
    document = stats_of(capsys, path, other)
    parts = [session["figures"] for session in document["sessions"]]
    together = document["together"]
    assert [session["path"] for session in document["sessions"]] == [str(path), str(other)]
    assert (
        together["records"] == len(events) + len(lifecycle.events()) == sum(part["records"] for part in parts)
    )
    for name in ("states", "refused", "outcomes", "tokens", "freed", "versions"):
        names = {each for part in parts for each in part[name]}
        assert together[name] == pytest.approx(
            {n: sum(part[name].get(n, 0) for part in parts) for n in names}
        )
    assert together["operations"]["wake_up"]["count"] == sum(
        p["operations"]["wake_up"]["count"] for p in parts
    )
    assert "2 sessions together" in audit(capsys, "stats", path, other)[1]


# -- merge -------------------------------------------------------------------------------------------


def ranks(folder, count, last=None):
    """Logs of so many ranks that do the same; `last`: what the last one does instead of the end."""
    paths = [folder / f"rank{rank}.jsonl" for rank in range(count)]
    for rank, path in enumerate(paths):
        with guarded(path, rank=rank, close=rank < count - 1 or last is None) as lifecycle:
            for index in range(rank % 3):  # requests are each rank's own
                add(lifecycle, f"{rank}-{index}")
            lifecycle.sleep(1)
            if rank == count - 1 and last is not None:
                last(lifecycle)
                continue
            lifecycle.wake_up()
            step_to_the_end(lifecycle)
    return paths


def test_a_merge_is_in_order_and_complete(capsys, tmp_path):
    """Merged records are in the order of their times, each once, and each rank's in its own order."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with guarded(paths[0], rank=1) as first, guarded(paths[1], rank=0) as second:
        for lifecycle in (first, second, second, first):
            lifecycle.sleep(1)
            lifecycle.wake_up()
    status, out, _ = audit(capsys, "merge", *paths, "--json")
    *lines, comparison = documents(out)
    assert status == 0
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    for path in paths:
        mine = [line["line"] for line in lines if line["path"] == str(path)]
        assert mine == list(range(1, len(path.read_bytes().splitlines()) + 1))
    assert not comparison["comparison"]["diverge"]


def test_ranks_with_other_requests_do_not_diverge(capsys, tmp_path):
    """What requests cause is no divergence: the same calls make the same story."""
    status, out, _ = audit(capsys, "merge", "--diverge", *ranks(tmp_path, 4))
    assert status == 0
    assert out.startswith("all 4 logs did the same ")


def test_the_rank_that_stopped_is_named_with_its_call(capsys, tmp_path):
    """The first point where a rank does not go on as the others is named: who, what, and how it ends."""

    def hang(lifecycle):
        lifecycle._core.begin_operation("wake_up")

    paths = ranks(tmp_path, 8, hang)
    status, out, _ = audit(capsys, "merge", "--diverge", *paths)
    assert status == 1
    head, _, most, least = out.splitlines()
    assert head.startswith("8 logs did the same ")
    assert most.startswith("ranks 0-6  transition sleeping -> awake (wake)")
    assert least.startswith("rank 7     nothing more: it ends open, sleeping, at seq ")
    assert "under way: wake_up since" in least
    comparison = json.loads(audit(capsys, "merge", "--diverge", "--json", *paths)[1])["comparison"]
    same, other = comparison["groups"]
    assert (same["names"], other["names"]) == ([f"rank {rank}" for rank in range(7)], ["rank 7"])
    assert (same["record"]["trigger"], other["record"]) == ("wake", None)


def test_a_rank_that_did_something_else_is_named(capsys, tmp_path):
    """A rank that goes on with another call is named with it, after as many common deeds as there are."""
    paths = ranks(tmp_path, 3, lambda lifecycle: lifecycle.wake_up(["weights"]))
    status, out, _ = audit(capsys, "merge", "--diverge", *paths)
    assert status == 1
    assert "ranks 0-1  transition sleeping -> awake (wake)" in out
    assert "rank 2     transition sleeping -> partially_awake (wake)" in out
    common = json.loads(audit(capsys, "merge", "--diverge", "--json", *paths)[1])["comparison"]["common"]
    deeds = [
        e
        for e in told(audit(capsys, "show", paths[0], "--json")[1])
        if e["event"] in {"attached", "operation_begin", "transition"}
    ]
    assert deeds[common]["trigger"] == "wake"


def test_logs_of_one_rank_are_told_apart_by_more(capsys, tmp_path):
    """Where ranks are not enough to tell logs apart, their engines are named, or else their paths."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        with guarded(path) as lifecycle:
            lifecycle.sleep(1 if path is paths[0] else 2)
    _, out, _ = audit(capsys, "merge", "--diverge", *paths)
    for path in paths:
        assert f"{path}  operation_begin sleep(level=" in out


def test_many_ranks_can_be_merged(capsys, tmp_path):
    """Sixty-four logs are merged at once, within few file descriptors."""
    paths = ranks(tmp_path, 2)
    for rank in range(2, 64):
        path = tmp_path / f"rank{rank}.jsonl"
        path.write_bytes(paths[0].read_bytes())
        resealed(path, lambda r, rank=rank: {**r, "rank": rank} if "rank" in r else r)
        paths.append(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        status, out, _ = audit(capsys, "merge", *paths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert status == 0
    assert "all 64 logs did the same" in out


def test_missing_records_are_said_before_a_divergence(capsys, tmp_path):
    """A log whose beginning was removed may be out of step, and that is said."""
    paths = ranks(tmp_path, 2)
    with guarded(tmp_path / "late.jsonl", rank=2, max_bytes=2000) as lifecycle:
        live(lifecycle, cycles=1)
    (tmp_path / "late.jsonl.1").unlink()
    _, _, errors = audit(capsys, "merge", "--diverge", *paths, tmp_path / "late.jsonl")
    assert "rank 2: records are missing" in errors


# -- export and timeline -----------------------------------------------------------------------------


def test_export_has_a_row_for_each_record(capsys, tmp_path, logged):
    """The CSV has every record: what has a column there, and the rest as JSON; as a file or as the output."""
    path, events = logged
    output = tmp_path / "log.csv"
    assert audit(capsys, "export", path, "-o", output) == (0, "", "")
    status, out, _ = audit(capsys, "export", path)
    assert (status, out) == (0, output.read_text())
    rows = [row for row in csv.DictReader(out.splitlines()) if row["seq"]]
    assert [int(row["seq"]) for row in rows] == [event["seq"] for event in events]
    for row, event in zip(rows, events, strict=True):
        assert (row["event"], float(row["time"]), row["call"]) == (
            event["event"],
            event["time"],
            event.get("call", ""),
        )
        rest = json.loads(row["rest"] or "{}")
        for name in ("resident", "version", "of", "held", "policy", "bytes"):
            assert rest.get(name) == event.get(name)
        assert row["counts.in_flight"] == str(event.get("counts", {}).get("in_flight", ""))


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\uff1d1", '=cmd|"/c calc"!A1']
)
def test_a_formula_is_no_formula_in_the_export(text):
    """A cell that a spreadsheet would run begins with an apostrophe instead."""
    assert cell(text) == f"'{safe(text)}"
    assert cell(f"a{text}") == f"a{safe(text)}"


def test_the_timeline_has_a_lane_for_each_log(capsys, tmp_path):
    """The page names each engine, with its rank and host, and has its records."""
    paths, output = ranks(tmp_path, 2), tmp_path / "page.html"
    assert audit(capsys, "timeline", *paths, "-o", output) == (0, "", "")
    page = output.read_text()
    for rank in (0, 1):
        assert f'"rollout rank {rank} on {os.uname().nodename}"' in page
    assert "log_closed" in page


@pytest.mark.parametrize("command", ["timeline", "export"])
def test_no_log_is_overwritten(capsys, tmp_path, command):
    """What is written never replaces a log: not the one that is read, a part of it, or another one."""
    path, other = tmp_path / "log.jsonl", tmp_path / "other.jsonl"
    for each in (path, other):
        with guarded(each, max_bytes=4000) as lifecycle:
            live(lifecycle, cycles=1)
    (tmp_path / "link").symlink_to(path)
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    for target in before:
        status, out, errors = audit(capsys, command, path, "-o", target)
        assert (status, out) == (2, "")
        assert "is a log" in errors
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_damaged_lines_are_left_out_and_said(capsys, tmp_path, logged):
    """What can't be understood is in no page and no CSV; beside them it is counted, and the status is 1."""
    path, _ = logged
    lines = path.read_bytes().splitlines(keepends=True)
    lines[6] = b"disguised\n"
    path.write_bytes(b"".join(lines))
    for command in ("timeline", "export", "stats", "merge"):
        output = tmp_path / command
        extra = ["-o", output] if command in ("timeline", "export") else []
        status, out, errors = audit(capsys, command, path, *extra)
        assert status == 1
        assert "1 line damaged" in errors
        assert "disguised" not in (output.read_text() if extra else out)


# -- what can go wrong around it ---------------------------------------------------------------------

COMMANDS = ("show", "verify", "stats", "merge", "export", "timeline")


def with_output(command, folder):
    return ["-o", folder / "page.html"] if command == "timeline" else []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "device", "unreadable", "loop", "long"])
def test_a_path_that_is_no_log_is_said(capsys, tmp_path, command, kind):
    """Whatever is at a path, what can't be read is one line on stderr and status 2; nothing is waited for."""
    path = tmp_path / "log.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path.touch(mode=0)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "long":
        path = tmp_path / ("x" * 300)
    status, out, errors = audit(capsys, command, path, *with_output(command, tmp_path))
    assert (status, errors.count("\n")) == (2, 1)
    assert out.count("\n") <= 1  # the names of the columns
    assert errors.startswith(f"lifecycle audit: {path}: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_file_is_an_empty_log(capsys, tmp_path, command):
    """A log that was only just made has nothing in it, and nothing wrong."""
    path = tmp_path / "log.jsonl"
    path.touch()
    assert audit(capsys, command, path, *with_output(command, tmp_path))[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_binary_file_is_full_of_problems(capsys, tmp_path, command):
    """A file that is no log at all is read to its end, and everything in it is a problem."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(bytes(range(256)) * 40)
    assert audit(capsys, command, path, *with_output(command, tmp_path))[0] == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_the_exit_status(capsys, command):
    """Each subcommand's help shows how it is called and what its status says."""
    status, out, _ = audit(capsys, command, "--help")
    assert status == 0
    assert f"  lifecycle audit {command} log" in out
    assert "exit status: 0 fine; 1 problems were found" in out


def test_help_says_what_no_log_can_show(capsys):
    """Nobody is left to believe that a removed end would be seen."""
    assert "Nothing in a file can show that its end was cut off" in " ".join(
        audit(capsys, "verify", "--help")[1].split()
    )


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["show"], ["show", "x", "--last", "0"], ["timeline", "x"]]
)
def test_a_wrong_command_line_is_a_usage_error(capsys, arguments):
    """What the command line does not know has status 2, and how it is used is said."""
    status, out, errors = audit(capsys, *arguments)
    assert (status, out) == (2, "")
    assert errors.startswith("usage: lifecycle audit")


def process(*arguments, **options):
    """`lifecycle audit` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "lifecycle", "audit", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_reader_that_goes_away_ends_it_without_a_word(tmp_path):
    """Behind a closed pipe, as after `| head`, it ends with the status of SIGPIPE and says nothing."""
    path = tmp_path / "log.jsonl"
    with guarded(path) as lifecycle:
        live(lifecycle, cycles=40)  # more than a pipe holds
    running = process("show", path)
    running.stdout.readline()
    running.stdout.close()
    assert (running.stderr.read(), running.wait(60)) == (b"", 141)
    running.stderr.close()


def test_a_full_disk_is_said(tmp_path, logged):
    """Output that can't be written is said in a line, with status 2."""
    path, _ = logged
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lifecycle", "audit", "show", path],
            cwd=ROOT,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"lifecycle audit: can't write")
    assert done.stderr.count(b"\n") == 1


def test_rich_is_known_to_one_module():
    """What a terminal gets goes through `screen`: no other module of the package imports rich, or prints."""
    audit = ROOT / "lifecycle" / "audit"
    found = {
        path.name
        for path in audit.glob("*.py")
        if re.search(r"(from|import) rich|\bprint\(|sys\.std", path.read_text())
    }
    assert found == {"screen.py"}


# -- with and without colours ------------------------------------------------------------------------


def test_colours_are_only_for_terminals(capsys, logged, monkeypatch):
    """Into a pipe goes plain text; forced colours change no character of it."""
    path, _ = logged
    plain = audit(capsys, "show", path)[1]
    assert "\x1b" not in plain
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no colours, forced or not
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = audit(capsys, "show", path)[1]
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", audit(capsys, "show", path)[1])


@pytest.fixture
def _no_rich(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "rich":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.mark.usefixtures("_no_rich")
@pytest.mark.parametrize("command", COMMANDS)
def test_everything_but_the_view_works_without_rich(capsys, tmp_path, logged, monkeypatch, command):
    """Its package is an extra: without rich the same text comes, without colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, errors = audit(capsys, command, logged[0], *with_output(command, tmp_path))
    assert (status, errors) == (0, "")
    assert "\x1b" not in out


def test_a_terminal_that_knows_ascii_alone_gets_escapes(tmp_path):
    """What a terminal's encoding does not have is written as an escape, and ends nothing."""
    path = tmp_path / "log.jsonl"
    with guarded(path, close=False) as lifecycle:
        add(lifecycle, "grün-\u6f22")
    running = process("show", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, b"")
    assert b"gr\\xfcn-\\u6f22" in out


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 us"),
        (0.0025, "2.5 ms"),
        (1.5, "1.5 s"),
        (200, "3.3 min"),
        (750, "12.5 min"),
        (9000, "2.5 h"),
        (1e18, "11574074074074.1 d"),
    ],
)
def test_durations_are_said_in_their_units(seconds, shown):
    """A duration is said in the unit that fits it, however absurd."""
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0.0 B"), (1536, "1.5 KiB"), (49 << 30, "49.0 GiB"), (2**63, "8388608.0 TiB")]
)
def test_sizes_are_said_in_their_units(count, shown):
    """So is a number of bytes."""
    assert size(count) == shown


def test_columns_stay_aligned_under_wide_characters(capsys):
    """A wide character takes two columns: what stands behind it stays in its place."""
    Screen().table((">n", "name", "what"), [("1", "\u6f22\u5b57", "x"), ("22", "abcd", "y")])
    assert capsys.readouterr().out.splitlines() == [" n  name  what", " 1  \u6f22\u5b57  x", "22  abcd  y"]


# -- follow ------------------------------------------------------------------------------------------


class Following:
    """`show --follow` in a process, for a block; it writes into a pipe, or to a terminal of its own."""

    def __init__(self, *arguments, terminal=False):
        ours, theirs = pty.openpty() if terminal else os.pipe()
        env = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lifecycle", "audit", "show", "--follow", *map(str, arguments)],
            cwd=ROOT,
            env=env,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        os.close(theirs)
        self.ours = ours
        self.seen = ""

    def until(self, pattern, seconds=30.0):
        """Read on until what was written since the last such pattern has this one. Returns the match."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert select.select([self.ours], [], [], deadline - time.monotonic())[0], self.seen
            self.seen += os.read(self.ours, 65536).decode()
            self.seen = re.sub(r"\x1b\[[0-9;]*m", "", self.seen)  # colours
        self.seen = self.seen[found.end() :]
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        os.close(self.ours)

    def interrupt(self):
        """Ctrl-C. Returns the exit status and what it said on stderr."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # a terminal whose other side is gone
            while os.read(self.ours, 65536):
                pass
        errors = self.process.stderr.read().decode()
        return self.process.wait(30), errors


def test_follow_prints_what_comes_across_rotation(tmp_path):
    """Without a terminal, lines come as they are written, also into parts to come, until Ctrl-C."""
    path = tmp_path / "log.jsonl"
    with guarded(path, max_bytes=4000) as lifecycle:
        add(lifecycle, "early")
        with Following(path, "--event", "request_finished", "--event", "request_admitted") as following:
            following.until("request_admitted +early")
            live(lifecycle)
            for request in ("r0-0", "held0", "r1-2", "held1"):
                following.until(f"request_finished +{request};")
            assert following.interrupt() == (130, "")
    assert len(list(tmp_path.glob("log.jsonl.*"))) > 3


def test_follow_begins_with_the_last(logged):
    """`--last N` begins with the last N records that are there."""
    path, events = logged
    with Following(path, "--json", "--last", "3") as following:
        first = json.loads(following.until(r"(.*)\n")[1])
        assert first["seq"] == events[-2]["seq"]  # before the last event, and the line that closes the log
        assert following.interrupt() == (130, "")


def test_follow_draws_an_age_that_grows(tmp_path):
    """On a terminal, a call that does not return is shown with its age, also while nothing is written."""
    path, other = tmp_path / "log.jsonl", tmp_path / "other.jsonl"
    with guarded(path, close=False) as lifecycle, guarded(other, rank=1, close=False) as second:
        add(second, "a")
        lifecycle.sleep(1)
        add(lifecycle, "b")
        lifecycle._core.begin_operation("wake_up")
        with Following(path, other, terminal=True) as following:
            view = r"rollout +0  sleeping +[\d.]+ m?s +0 +1 +0 +1\.0 GiB +([\d.]+) (m?s)  wake_up"
            ages = [following.until(view) for _ in range(3)]
            following.until(r"rollout +1  running +[\d.]+ m?s +1 +0 +0 ")
            second.sleep(1)
            following.until(r"rollout +1  sleeping ")
            following.until(r"operation_end +sleep\(level=1, mode=wait\); after")
            assert following.interrupt() == (130, "")
    seconds = [float(age[1]) * (1 if age[2] == "s" else 0.001) for age in ages]
    assert seconds == sorted(set(seconds))


@pytest.mark.usefixtures("_no_rich")
def test_the_view_says_what_it_needs(capsys, logged, monkeypatch):
    """Without rich a live view is refused with what to install; lines are not."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, _, errors = audit(capsys, "show", "--follow", logged[0])
    assert (status, errors.count("\n")) == (2, 1)
    assert "engine-lifecycle[audit]" in errors


def test_a_log_that_is_not_there_is_not_followed(capsys, tmp_path):
    """To follow a log, it has to be there."""
    status, _, errors = audit(capsys, "show", "--follow", tmp_path / "log.jsonl")
    assert (status, errors) == (2, f"lifecycle audit: {tmp_path}/log.jsonl: no such file\n")


def test_no_part_is_missed_however_fast_they_come(tmp_path):
    """Parts that came and were set aside between two looks are read, each once and in order."""
    path = tmp_path / "log.jsonl"
    seen = []

    def look():
        for entry in iter(lambda: next(lines), None):
            assert entry.problem is None
            if "seq" in entry.record:
                seen.append(entry.record["seq"])

    with guarded(path, max_bytes=2000) as lifecycle:
        lines = follow(path)
        for _ in range(3):
            live(lifecycle, cycles=1)
            lifecycle._core.events.sinks[0].flush()
            look()
    look()
    assert seen == list(range(1, len(lifecycle.events()) + 1))
    assert len(list(tmp_path.glob("log.jsonl.*"))) > 10
