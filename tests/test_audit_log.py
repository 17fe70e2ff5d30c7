"""The durable log: what is on disk when, and what the disk may do to the engine (nothing)."""

import errno
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import lifecycle.audit.log as log_module
from engine_adapter import attach
from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine
from engine_adapter.simulated_llm import SimulatedLLM
from lifecycle import AsyncLifecycle, EngineFailed, InvalidArgument, Lifecycle, State, Unaudited
from lifecycle.audit import AuditLog
from lifecycle.audit import format as form
from lifecycle.audit.file import LogFile
from lifecycle.events import EventLog
from tests.audit_runs import live, read_back, run_with

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


class Disk:
    """Stands between `LogFile` and its file: notes what was written and synced, and fails on demand."""

    def __init__(self, monkeypatch):
        self.written = b""
        self.synced = 0  # bytes of it
        self.calls = []
        self.error = None
        self.takes = None  # so many bytes of each write, before the error
        self.answers = threading.Event()
        self.answers.set()
        write, sync = LogFile.write, LogFile.sync

        def write_some(file, data):
            if self.error is not None and self.takes is None:
                raise self.error
            if self.takes is not None:
                data = data[: self.takes]
                self.takes = None
            count = write(file, data)
            self.written += data[:count]
            self.calls.append("write")
            return count

        def sync_all(file):
            self.answers.wait()
            if self.error is not None:
                raise self.error
            sync(file)
            self.synced = len(self.written)
            self.calls.append("sync")

        monkeypatch.setattr(LogFile, "write", write_some)
        monkeypatch.setattr(LogFile, "sync", sync_all)

    def has(self, number):
        """Whether the record of this number is on disk."""
        return b'{"seq":%d,' % number in self.written[: self.synced]


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(log_module, "WAIT_S", 0.2)
    monkeypatch.setattr(log_module, "AGAIN_S", 0.05)


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


# -- what is in it -------------------------------------------------------------------------------------


def test_it_has_every_event_as_it_was(path):
    """A log reads back as the events in memory, whole and in order, and says that it ended well."""
    events = run_with(AuditLog(path))
    records, problems, [session] = read_back(path)
    counted = [event | ({"count": 1} if "count" in event and "of" not in event else {}) for event in events]
    assert records == json.loads(json.dumps(counted))
    assert not problems
    assert session.clean
    assert session.state == "closed"


def test_a_header_has_the_rules_that_its_log_was_made_by(path):
    """Any later release can replay a log: the table is in it, as (trigger, source, dest)."""
    run_with(AuditLog(path), name="rollout", rank=3)
    [session] = read_back(path)[2]
    assert session.header["table"] == 1
    assert ["slept", "draining", "sleeping"] in session.header["rules"]
    assert (session.header["engine"], session.header["rank"]) == ("rollout", 3)


def test_a_coalesced_refusal_is_told_with_its_count(path):
    """The log has a refusal when it first happens, and how often it did at the end of that state."""
    with Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)]) as lifecycle:
        lifecycle.sleep(1)
        for _ in range(5):
            with pytest.raises(Exception, match="cannot step"):
                lifecycle.step()
        lifecycle.wake_up()
    records = read_back(path)[0]
    [refused] = [record for record in records if record["event"] == "refused"]
    [repeated] = [record for record in records if record["event"] == "repeated"]
    assert (refused["count"], repeated["of"], repeated["count"]) == (1, refused["seq"], 5)


def test_values_that_json_does_not_know_are_told_all_the_same(path):
    """NaN, a set, a circle and a text without end become something readable, and the line stays a line."""
    log = AuditLog(path)
    log.begin("engine", 0)
    circle = []
    circle.append(circle)
    odd = {"nan": float("nan"), "set": {1}, "circle": circle, "long": "x" * (form.MOST_BYTES + 1), 7: "seven"}
    log({"seq": 1, "time": 1.0, "event": "refused", **odd})
    log({"seq": 2, "time": 2.0, "event": "refused", "error": "\x1b[31m \ud800 \u202e"})
    log.end(clean=True)
    records, problems, _ = read_back(path)
    assert not problems
    assert (records[0]["nan"], records[0]["set"], records[0]["7"]) == ("nan", "{1}", "seven")
    assert len(records[0]["long"]) < 100_000
    assert records[1]["error"] == "\x1b[31m \ud800 \u202e"
    assert path.read_bytes().isascii()


def test_events_that_come_out_of_order_are_written_in_order(path):
    """A thread or a signal handler may be quicker than the event before its own."""
    log = AuditLog(path)
    log.begin("engine", 0)
    for number in (2, 4, 1, 3):
        log({"seq": number, "time": 1.0, "event": "noop"})
    log.end(clean=True)
    records, problems, _ = read_back(path)
    assert [record["seq"] for record in records] == [1, 2, 3, 4]
    assert not problems


def test_an_event_that_is_given_twice_is_written_once(path):
    """What a Ctrl-C kept from the log is given again, and perhaps something that it had."""
    log = AuditLog(path)
    log.begin("engine", 0)
    for number in (1, 2, 1, 2, 3):
        log({"seq": number, "time": 1.0, "event": "noop"})
    assert log.given == 3
    assert not log._session._early
    log.end(clean=True)
    records, problems, _ = read_back(path)
    assert [record["seq"] for record in records] == [1, 2, 3]
    assert not problems


def test_a_broken_disk_does_not_stop_what_is_told_again(path, disk, impatient):
    """After a Ctrl-C the log is given what it missed; if it complains then, that is told as ever."""
    log = AuditLog(path)
    events = EventLog("engine", 0, (log,))
    events.sinks.remove(log)
    events.emit("failed", error="unseen")  # as if a Ctrl-C had come before the log was given it
    disk.error = OSError(errno.ENOSPC, "full")
    events.mend()
    assert log.given == 1
    assert [event["event"] for event in events.tail()] == ["failed", "sink_failed"]
    events.end(clean=False)


# -- when it is on disk --------------------------------------------------------------------------------


def test_synced_then_returned(path, disk):
    """A transition, a failure and the beginning of what can block are on disk before anybody goes on."""
    seen = []

    class Witness(AuditLog):
        def __call__(self, event):
            super().__call__(event)
            waits = event["event"] in ("attached", "operation_begin", "transition", "failed", "closed")
            if waits and event.get("trigger") not in ("admit", "settle"):
                seen.append((event["event"], disk.has(event["seq"])))

    engine = SimulatedEngine()
    run_with(Witness(path), engine=engine)
    assert {name for name, _ in seen} == {"attached", "operation_begin", "transition", "closed"}
    assert all(on_disk for _, on_disk in seen)
    assert disk.calls.index("sync") > disk.calls.index("write")


def test_a_begin_is_on_disk_before_the_engine_is_called(path, disk):
    """Whatever hangs, its beginning can be read."""
    engine = SimulatedEngine()
    found = {}

    def looks(name):
        real = getattr(engine, name)

        def call(*arguments):
            found[name] = disk.written[: disk.synced].rstrip().rsplit(b"\n", 1)[-1]
            return real(*arguments)

        return call

    for name in ("sleep", "wake_up"):
        setattr(engine, name, looks(name))
    run_with(AuditLog(path), engine=engine, cycles=1)
    for name in ("sleep", "wake_up"):
        last = json.loads(found[name])
        assert (last["event"], last["call"]) == ("operation_begin", name)


def test_a_failure_is_on_disk_before_its_caller_hears_of_it(path, disk):
    """The record of a failed step, its cause in it, is there when EngineFailed is raised."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=[AuditLog(path)])
    lifecycle.add_request("r", "prompt", SamplingParams(max_tokens=9))
    engine.faults.add("step", raises=RuntimeError("boom"))
    with pytest.raises(EngineFailed):
        lifecycle.step()
    assert disk.has(lifecycle.snapshot().seq)
    assert b"boom" in disk.written[: disk.synced]
    lifecycle.close()


def test_a_torn_write_reads_back_to_the_last_synced_record(tmp_path, disk):
    """After a power cut: whatever part of what was not synced is there, all that was synced reads back."""
    run_with(AuditLog(tmp_path / "whole", requests=True))
    whole = disk.written
    chance = random.Random(7)
    for number in range(300):
        synced = chance.choice([end for end in range(len(whole)) if whole[end - 1 : end] == b"\n"][1:])
        tail = whole[synced : synced + chance.randrange(20_000)]
        tail = tail[: chance.randrange(len(tail) + 1)]
        if chance.random() < 0.5:  # the file grew, and its last pages were never written
            tail = tail[: len(tail) // 2] + bytes(len(tail) - len(tail) // 2)
        torn = tmp_path / f"torn{number}"
        torn.write_bytes(whole[:synced] + tail)
        records, problems, sessions = read_back(torn)
        assert not problems
        assert len(records) >= whole[:synced].count(b"\n") - 1 - whole[:synced].count(b"log_closed")
        ended_open = not sessions[0].clean
        before = torn.read_bytes().count(b"\n")
        run_with(AuditLog(torn), cycles=0)  # and the next run goes on behind it
        _, problems, sessions = read_back(torn)
        assert not problems, (problems, before)
        assert [session.clean for session in sessions] == [not ended_open, True]


def test_no_acknowledged_record_is_lost_by_a_kill():
    """200 writers are killed at random moments: all that they were told is on disk reads back."""
    rounds = int(os.environ.get("AUDIT_KILLS", "200"))
    script = [sys.executable, "-m", "tests.audit_kills", str(rounds)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["killed"] == rounds
    assert result["acknowledged"] > 10 * rounds
    assert result["wrong"] == []


def test_what_was_written_is_there_when_the_interpreter_ends(path):
    """A program that never closes loses nothing; its log ends open."""
    program = f"""
from lifecycle import Lifecycle
from lifecycle.audit import AuditLog
from engine_adapter.simulated import SimulatedEngine, SamplingParams
lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog({str(path)!r}, requests=True)])
lifecycle.add_request("r", "p", SamplingParams(max_tokens=3))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    records, problems, [session] = read_back(path)
    assert [record["event"] for record in records] == ["attached", "request_admitted", "transition"]
    assert not problems
    assert not session.clean
    assert list(session.requests) == ["r"]


# -- damage --------------------------------------------------------------------------------------------


def test_every_damage_is_found_at_its_line(path, tmp_path):
    """A byte changed, a line removed, moved or added, but for the tail: 1,000 of 1,000."""
    for _ in range(3):
        run_with(AuditLog(path, requests=True), cycles=1)
    run_with(AuditLog(tmp_path / "other", requests=True), cycles=1)
    lines = path.read_bytes().splitlines(keepends=True)
    foreign = (tmp_path / "other").read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "damaged"
    chance = random.Random(11)
    for _ in range(1000):
        at = chance.randrange(len(lines) - 1)
        broken, kind = list(lines), chance.choice(["byte", "removed", "swapped", "copied", "foreign"])
        if kind == "byte":
            byte = chance.randrange(len(lines[at]))
            other = (lines[at][byte] + chance.randrange(1, 256)) % 256
            broken[at] = lines[at][:byte] + bytes([other]) + lines[at][byte + 1 :]
        elif kind == "removed":
            del broken[at]
        elif kind == "swapped":
            broken[at], broken[at + 1] = broken[at + 1], broken[at]
        else:
            broken.insert(at, chance.choice(lines if kind == "copied" else foreign))
        damaged.write_bytes(b"".join(broken))
        if broken == lines:
            continue
        problems = read_back(damaged)[1]
        first = next(index for index, (a, b) in enumerate(zip(broken, lines, strict=False)) if a != b) + 1
        assert problems, (kind, at)
        assert problems[0][0] == first, (kind, at, problems[:2])


def test_one_damage_is_one_problem(path, tmp_path):
    """After a changed byte the rest of the log is believed again."""
    run_with(AuditLog(path))
    lines = path.read_bytes().splitlines(keepends=True)
    place = lines[5].index(b'"time":') + 9
    lines[5] = lines[5][:place] + bytes([lines[5][place] ^ 1]) + lines[5][place + 1 :]
    path.write_bytes(b"".join(lines))
    problems = read_back(path)[1]
    assert [line for line, _ in problems] == [6]


# -- the disk ------------------------------------------------------------------------------------------


def events_of(lifecycle, name):
    return [event for event in lifecycle.events() if event["event"] == name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_does_not_stop_the_engine(path, disk, impatient, code):
    """The engine goes on, it is said once, and recorded when the disk is back; nothing is lost."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)], event_capacity=1 << 20)
    disk.error = OSError(code, os.strerror(code))
    started = time.monotonic()
    live(lifecycle, 3)
    assert time.monotonic() - started < 2
    assert [os.strerror(code) in event["error"] for event in events_of(lifecycle, "sink_failed")] == [True]
    disk.error = None
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    lifecycle.close()
    records, problems, [session] = read_back(path)
    assert not problems
    assert len(records) == lifecycle.snapshot().seq
    assert session.clean
    assert not session.lost
    [outage] = [json.loads(line) for line in path.read_bytes().splitlines() if b"log_outage" in line]
    assert (outage["error"], outage["lost"]) == (os.strerror(code), 0)
    assert 1 < outage["first"] < outage["last"] <= len(records)


def test_half_a_write_is_gone_on_with(path, disk, impatient):
    """A disk that is full in the middle of a line leaves no torn line behind."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)])
    disk.takes, disk.error = 100, OSError(errno.ENOSPC, "full")
    lifecycle.sleep(1)
    until(lambda: disk.takes is None)
    assert not path.read_bytes().endswith(b"\n")
    disk.error = None
    lifecycle.wake_up()
    lifecycle.close()
    assert read_back(path)[1] == []


def test_half_a_line_that_vanishes_is_written_whole(path, disk, impatient):
    """A file that is removed in the middle of a line: the new one begins with a header and that line."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)])
    disk.takes, disk.error = 100, OSError(errno.ENOSPC, "full")
    lifecycle.sleep(1)
    until(lambda: disk.takes is None)
    path.unlink()
    disk.error = None
    lifecycle.wake_up()
    lifecycle.close()
    records, problems, [session] = read_back(path)
    assert not problems
    assert records[0]["seq"] == session.header["first"] > 1
    assert session.clean


def test_a_full_disk_for_real(path):
    """The limit of a file's size stands for a full disk: the log goes on once it is raised."""
    program = f"""
import resource, time
import lifecycle.audit.log as log_module
log_module.AGAIN_S = 0.05
from engine_adapter.simulated import SimulatedEngine
from lifecycle import Lifecycle
from lifecycle.audit import AuditLog
lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog({str(path)!r})])
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
for _ in range(20):
    lifecycle.sleep(1)
    lifecycle.wake_up()
[said] = [event for event in lifecycle.events() if event["event"] == "sink_failed"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(0.5)
lifecycle.close()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    records, problems, [session] = read_back(path)
    assert not problems
    assert session.clean
    assert len(records) > 150
    assert b"log_outage" in path.read_bytes()


def test_a_disk_that_is_stuck_is_waited_for_once(path, disk, impatient):
    """A sync that never returns costs one transition its wait; all that follow go on at once."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)], event_capacity=1 << 20)
    disk.answers.clear()
    started = time.monotonic()
    live(lifecycle, 3)
    assert 0.2 <= time.monotonic() - started < 1
    [said] = events_of(lifecycle, "sink_failed")
    assert "did not answer for 0.2 s" in said["error"]
    disk.answers.set()
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    lifecycle.close()
    assert read_back(path)[1] == []


def test_a_step_waits_for_no_disk(path, disk):
    """Becoming busy and idle, and requests, are written without waiting: a stuck disk blocks no step."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path, requests=True)])
    disk.answers.clear()
    started = time.monotonic()
    lifecycle.add_request("r", "prompt", SamplingParams(max_tokens=20))
    while lifecycle.has_unfinished_requests():
        lifecycle.step()
    assert time.monotonic() - started < 1
    assert not events_of(lifecycle, "sink_failed")
    disk.answers.set()
    lifecycle.close()
    assert read_back(path)[1] == []


def test_records_that_find_no_room_are_counted(path, disk, impatient, monkeypatch):
    """While the disk is away the backlog is bounded: what is lost is counted, and named in its place."""
    monkeypatch.setattr(log_module, "MOST_BACKLOG", 5000)
    log = AuditLog(path)
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[log], event_capacity=1 << 20)
    disk.error = OSError(errno.ENOSPC, "full")
    live(lifecycle, 3)
    assert log.lost > 10
    disk.error = None
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    live(lifecycle, 1)
    lifecycle.close()
    records, problems, [session] = read_back(path)
    assert not problems
    assert session.lost == log.lost
    assert len(records) + log.lost == lifecycle.snapshot().seq
    assert session.state == "closed"


@pytest.mark.parametrize("how", ["removed", "moved", "folder"])
def test_a_file_that_vanishes_is_begun_again(tmp_path, impatient, how):
    """The log goes on in a new file at the path, whose header says from which record on."""
    path = tmp_path / "folder" / "log"
    log = AuditLog(path)
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[log])
    live(lifecycle, 1)
    assert log.flush()
    seq = lifecycle.snapshot().seq
    if how == "removed":
        path.unlink()
    elif how == "moved":
        path.rename(tmp_path / "elsewhere")
    else:
        path.parent.rename(tmp_path / "away")
    lifecycle.sleep(1)
    lifecycle.wake_up()
    lifecycle.close()
    assert len(events_of(lifecycle, "sink_failed")) == 1
    records, problems, [session] = read_back(path)
    assert not problems
    assert records[0]["seq"] == session.header["first"] == seq + 1
    assert session.clean
    if how == "moved":
        assert read_back(tmp_path / "elsewhere")[1] == []


def test_a_strict_log_refuses_what_it_can_not_record(path, disk, impatient):
    """Sleeps and loads are refused while the disk takes nothing; nothing is touched, and waking is not."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=[AuditLog(path, strict=True)])
    disk.error = OSError(errno.ENOSPC, "full")
    calls = len(engine.calls)
    for forbidden in (lifecycle.sleep, lifecycle.pause, lifecycle.reload_weights):
        with pytest.raises(Unaudited, match="strict"):
            forbidden()
    assert not {"sleep", "pause_scheduling", "reload_weights"} & set(engine.calls[calls:])
    assert lifecycle.state is State.AWAKE
    disk.error = None
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    lifecycle.sleep(1)
    disk.error = OSError(errno.ENOSPC, "full")
    assert lifecycle.wake_up()
    disk.error = None
    lifecycle.close()
    assert read_back(path)[1] == []


def test_a_strict_log_that_fails_during_the_drain_rolls_it_back(path, disk, impatient):
    """The memory is released only once its beginning is on disk; else the engine serves on."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=[AuditLog(path, strict=True)])
    lifecycle.add_request("r", "prompt", SamplingParams(max_tokens=5))

    def fills_up(_):
        disk.error = OSError(errno.ENOSPC, "full")

    with pytest.raises(Unaudited):
        lifecycle.sleep(1, progress=fills_up)
    assert "sleep" not in engine.calls
    assert lifecycle.state in (State.AWAKE, State.RUNNING)
    disk.error = None
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    lifecycle.close()
    assert read_back(path)[1] == []


def test_a_strict_log_that_fails_before_memory_goes_leaves_the_sleep_as_it_was(path, disk, impatient):
    """From one sleep to a deeper one: refused, still asleep as before, and nothing is under way."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=[AuditLog(path, strict=True)])
    lifecycle.sleep(0)
    looks = engine.has_launched

    def fills_up():
        disk.error = OSError(errno.ENOSPC, "full")
        return looks()

    engine.has_launched = fills_up
    with pytest.raises(Unaudited):
        lifecycle.sleep(1, "keep")
    engine.has_launched = looks
    assert (lifecycle.snapshot().level, lifecycle.snapshot().operation) == (0, None)
    disk.error = None
    until(lambda: b"log_outage" in disk.written[: disk.synced])
    lifecycle.sleep(1, "keep")
    lifecycle.close()
    assert read_back(path)[1] == []


# -- one writer, one file ------------------------------------------------------------------------------


def test_a_second_writer_is_refused(path):
    """In this process or another: the error says what to do."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)])
    with pytest.raises(
        BlockingIOError, match="another log is written to it; give each writer a path of its own"
    ):
        AuditLog(path)
    program = f"from lifecycle.audit import AuditLog; AuditLog({str(path)!r})"
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "another log is written to it" in other.stderr
    lifecycle.close()
    AuditLog(path)
    assert read_back(path)[1] == []


def test_one_log_is_of_one_engine_at_a_time(path):
    """A log that is in use is refused to another lifecycle, and serves it when the first is closed."""
    log = AuditLog(path)
    first = Lifecycle(SimulatedEngine(), sinks=[log])
    with pytest.raises(InvalidArgument, match="another engine"):
        Lifecycle(SimulatedEngine(), sinks=[log])
    first.sleep(1)
    first.close()
    Lifecycle(SimulatedEngine(), sinks=[log]).close()
    _, problems, sessions = read_back(path)
    assert not problems
    assert [session.clean for session in sessions] == [True, True]


def test_what_is_refused_at_the_beginning_holds_no_file(path):
    """A lifecycle that can't be made lets the log go."""
    with pytest.raises(InvalidArgument):
        Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)], max_held=-1)
    with pytest.raises(ZeroDivisionError):
        Lifecycle(lambda: 1 / 0, sinks=[AuditLog(path)])
    run_with(AuditLog(path))
    assert read_back(path)[1] == []


async def test_an_engine_that_can_not_be_built_lets_the_file_go(path):
    """An asynchronous start that raises leaves nothing behind that keeps the next one from the path."""
    lifecycle = AsyncLifecycle(lambda: 1 / 0, sinks=[AuditLog(path)])
    with pytest.raises(ZeroDivisionError):
        await lifecycle.start()
    lifecycle._owner.thread.join(5)
    run_with(AuditLog(path))
    assert read_back(path)[1] == []


def test_a_lifecycle_that_is_dropped_lets_the_file_go(path):
    """Without a close the log ends open, and the next one can be written."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path)])
    lifecycle.sleep(1)
    del lifecycle
    gc.collect()
    run_with(AuditLog(path), cycles=0)
    _, problems, sessions = read_back(path)
    assert not problems
    assert [session.clean for session in sessions] == [False, True]


def test_paths_are_templates(tmp_path, monkeypatch):
    """{host}, {rank} and {pid} are filled in; anything else is refused, naming what there is."""
    monkeypatch.setenv("RANK", "5")
    log = AuditLog(tmp_path / "deep" / "{host}-{rank}-{pid}")
    assert log.path.name == f"{os.uname().nodename}-5-{os.getpid()}"
    assert log.path.exists()
    assert AuditLog(tmp_path / "{rank}", rank=2).path.name == "2"
    for wrong in ("{user}", "{", "{0}", "{pid.nothing}"):
        with pytest.raises(InvalidArgument, match="host, rank or pid"):
            AuditLog(tmp_path / wrong)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="max_bytes"):
            AuditLog(tmp_path / "x", max_bytes=wrong)


def test_a_path_that_can_not_be_written_is_an_error_at_once(tmp_path):
    """Before an engine is built, and not in its way."""
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"directory|exists"):
            AuditLog(wrong)


def test_a_fork_leaves_the_log_to_the_parent(path):
    """The child writes nothing and holds no lock; the parent goes on."""
    program = f"""
import os
from engine_adapter.simulated import SimulatedEngine
from lifecycle import Closed, Lifecycle
from lifecycle.audit import AuditLog
log = AuditLog({str(path)!r})
lifecycle = Lifecycle(SimulatedEngine(), sinks=[log])
child = os.fork()
if not child:
    try:
        lifecycle.sleep(1)
    except Closed:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
lifecycle.sleep(1)
lifecycle.close()
AuditLog({str(path)!r})
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    records, problems, [session] = read_back(path)
    assert not problems
    assert session.clean
    assert "refused" not in {record["event"] for record in records}


def test_a_file_is_set_aside_by_its_size(path):
    """Parts are numbered from the oldest, each with a header of its own, and read as one."""
    events = run_with(AuditLog(path, max_bytes=6000), cycles=10)
    parts = sorted(path.parent.iterdir())
    assert len(parts) > 5
    assert all(part.stat().st_size < 6000 + 2 * 4096 for part in parts)
    assert all(b'"log_opened"' in part.read_bytes().splitlines()[0] for part in parts)
    records, problems, [session] = read_back(path)
    assert [record["seq"] for record in records] == [event["seq"] for event in events]
    assert not problems
    assert session.clean
    (path.parent / "log.jsonl.3").unlink()
    assert "the one before it ended elsewhere" in read_back(path)[1][0][1]


def test_a_part_that_is_smaller_than_its_header_still_takes_records(path):
    """However small the limit, each part has at least one record."""
    events = run_with(AuditLog(path, max_bytes=1), cycles=1)
    records, problems, _ = read_back(path)
    assert len(records) == len(events)
    assert not problems


def test_it_is_switched_on_without_code(tmp_path, monkeypatch):
    """LIFECYCLE_LOG names the file, for every surface."""
    monkeypatch.setenv("LIFECYCLE_LOG", str(tmp_path / "{rank}.jsonl"))
    run_with(rank=1)
    llm = SimulatedLLM()
    lifecycle = attach(llm, rank=2)
    llm.generate(["p"])
    lifecycle.detach()
    for rank in (1, 2):
        records, problems, [session] = read_back(tmp_path / f"{rank}.jsonl")
        assert not problems
        assert session.clean
        assert records[0]["event"] == "attached"


async def test_it_is_switched_on_for_asyncio_too(path, monkeypatch):
    """An `AsyncLifecycle` writes from the thread that owns the engine, and ends with its close."""
    monkeypatch.setenv("LIFECYCLE_LOG", str(path))
    async with AsyncLifecycle(SimulatedEngine) as lifecycle:
        async for _ in lifecycle.generate("p", SamplingParams(max_tokens=3), "r"):
            pass
        await lifecycle.sleep(1)
    _, problems, [session] = read_back(path)
    assert not problems
    assert session.clean


# -- requests ------------------------------------------------------------------------------------------


def ends(records):
    return {
        record["request"]: (record["outcome"], record["tokens"])
        for record in records
        if record["event"] == "request_finished"
    }


def test_requests_are_recorded_on_demand(path):
    """Admission, end, tokens and version of each; never what was asked or answered, unless asked for."""
    run_with(AuditLog(path, requests=True))
    records, problems, [session] = read_back(path)
    assert not problems
    assert not session.requests
    assert ends(records)["r0-0"] == ("length", 6)
    admitted = {r["request"]: r["held"] for r in records if r["event"] == "request_admitted"}
    assert (admitted["r0-0"], admitted["held0"]) == (False, True)
    last = [record for record in records if record["event"] == "request_finished"][-1]
    assert (last["version"], last["epoch"]) == ("v0", 1)
    assert b"prompt" not in path.read_bytes()
    assert not {"request_admitted", "prompt", "texts"} & {r["event"] for r in run_with()}


def test_texts_are_recorded_only_when_asked_for(path):
    """With texts=True a request's prompt and its answers are there, whole."""
    engine = SimulatedEngine()
    with Lifecycle(engine, sinks=[AuditLog(path, texts=True)]) as lifecycle:
        lifecycle.add_request("r", "what is it?", SamplingParams(max_tokens=5, n=2))
        outputs = []
        while lifecycle.has_unfinished_requests():
            outputs += lifecycle.step()
    records = {record["event"]: record for record in read_back(path)[0]}
    assert records["request_admitted"]["prompt"] == "what is it?"
    texts = {sample.index: sample.text for output in outputs for sample in output.outputs}
    assert records["request_finished"]["texts"] == [texts[0], texts[1]]


async def test_streams_are_counted_to_their_end(path):
    """A stream of deltas has its tokens and its text added up."""
    texts = ""
    log = AuditLog(path, texts=True)
    async with AsyncLifecycle(SimulatedEngine, sinks=[log]) as lifecycle:
        params = SamplingParams(max_tokens=40, output_kind=OutputKind.DELTA)
        async for output in lifecycle.generate("p", params, "r"):
            texts += output.outputs[0].text
    [end] = [record for record in read_back(path)[0] if record["event"] == "request_finished"]
    assert (end["tokens"], end["texts"], end["outcome"]) == (40, [texts], "length")


def test_every_end_of_a_request_is_told_once(path):
    """By its caller, a sleep, a refusal at the wake, a failure, a close: each with its name."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=[AuditLog(path, requests=True)])

    def add(name, tokens=50):
        lifecycle.add_request(name, "prompt", SamplingParams(max_tokens=tokens))

    add("given up")
    add("slept over")
    for _ in range(3):
        lifecycle.step()
    lifecycle.abort_request(["given up"])
    lifecycle.sleep(1, "abort")
    add("held, given up")
    lifecycle.abort_request(["held, given up"])
    lifecycle.wake_up()
    add("failed")
    lifecycle.step()
    engine.faults.add("step", raises=RuntimeError("boom"))
    with pytest.raises(EngineFailed):
        while True:
            lifecycle.step()
    lifecycle.close()
    records, problems, [session] = read_back(path)
    assert not problems
    assert not session.requests
    outcomes = {name: outcome for name, (outcome, _) in ends(records).items()}
    assert outcomes == {
        "given up": "abort",
        "slept over": "abort",
        "held, given up": "abort",
        "failed": "error",
    }
    assert ends(records)["given up"][1] == ends(records)["slept over"][1] > 0


def test_a_close_ends_what_is_held(path):
    """What is still held when the lifecycle is closed ends as "closed"."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[AuditLog(path, requests=True)])
    lifecycle.sleep(1)
    lifecycle.add_request("held", "prompt", SamplingParams(max_tokens=3))
    lifecycle.close()
    records, problems, _ = read_back(path)
    assert ends(records) == {"held": ("closed", 0)}
    assert not problems
