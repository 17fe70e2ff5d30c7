"""The watchdog: what hangs is told, what works is not, and a signal gets a report."""

import asyncio
import faulthandler
import gc
import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import AsyncLifecycle, IllegalCall, InvalidArgument, Lifecycle, watchdog

PARAMS = SamplingParams(max_tokens=200)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.005)


def stalled(lifecycle):
    return [event for event in lifecycle.events() if event["event"] == "stalled"]


def until(true):
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def hung():
    """Makes a lifecycle whose engine hangs in a call; all are let go at the end."""
    threads, let_go = [], threading.Event()

    def make(call, act):
        engine = SimulatedEngine()
        lifecycle = Lifecycle(engine, sinks=())
        lifecycle.add_request("r", "a prompt", PARAMS)
        engine.faults.add(call, hang=let_go)
        threads.append(threading.Thread(target=lambda: act(lifecycle)))
        return lifecycle, threads[-1].start

    yield make
    let_go.set()
    for thread in threads:
        thread.join(5)


@pytest.mark.parametrize(
    ("call", "act", "named"),
    [
        ("step", lambda lifecycle: lifecycle.step(), "step"),
        ("sleep", lambda lifecycle: lifecycle.sleep(1, "abort"), "sleep"),
        ("has_work", lambda lifecycle: lifecycle.sleep(1), "sleep(level=1, mode=wait)"),
    ],
)
def test_a_call_that_hangs_is_told_with_the_stacks(hung, call, act, named):
    """Its name, its age in seconds, and where each thread is; again when the age has doubled."""
    lifecycle, start = hung(call, act)
    with lifecycle.watch(0.02):
        start()
        until(lambda: len(stalled(lifecycle)) == 2)
    first, second = stalled(lifecycle)
    assert named in first["call"]
    assert first["duration_s"] >= 0.02
    assert second["duration_s"] >= 2 * first["duration_s"]
    assert "test_watchdog.py" in first["stacks"]
    assert "_strike" in first["stacks"]


def test_what_works_is_not_told():
    """Many quick calls, and a long drain that makes steps, are no stall."""

    class Paced(SimulatedEngine):
        def step(self):
            time.sleep(0.002)
            return super().step()

    lifecycle = Lifecycle(Paced(), sinks=())
    with lifecycle.watch(0.1):
        lifecycle.add_request("r", "a prompt", PARAMS)
        started = time.monotonic()
        lifecycle.sleep(1, "wait_all")
        assert time.monotonic() - started > 0.3
    assert stalled(lifecycle) == []


def test_a_signal_gets_a_report():
    """The snapshot, the last events, and the stacks, also while a call hangs; the handler is gone after."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=(), name="the-engine")
    before = signal.getsignal(signal.SIGUSR1)
    out = io.StringIO()
    with lifecycle.watch(60, signum=signal.SIGUSR1, out=out):
        with pytest.raises(IllegalCall, match="another watchdog"):
            lifecycle.watch(60, signum=signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: "test_watchdog.py" in out.getvalue())
    report = out.getvalue()
    assert report.startswith("--- the-engine: awake\n")
    assert '"state": "awake"' in report
    assert '"event": "attached"' in report
    assert "Current thread" in report or "Thread 0x" in report
    assert signal.getsignal(signal.SIGUSR1) is before
    with lifecycle.watch(60, signum=signal.SIGUSR1, out=out):
        pass


def test_a_watchdog_leaves_nothing_behind():
    """Its thread, its pipe and its handler are gone with it, also after it has reported."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    files, threads = len([*Path("/proc/self/fd").iterdir()]), threading.active_count()
    out = io.StringIO()
    with lifecycle.watch(60, signum=signal.SIGUSR1, out=out):
        os.kill(os.getpid(), signal.SIGUSR1)
        until(out.getvalue)
        assert threading.active_count() == threads + 1
    assert len([*Path("/proc/self/fd").iterdir()]) == files
    assert threading.active_count() == threads
    assert not faulthandler.unregister(signal.SIGUSR1)


def test_a_pipe_is_not_closed_before_its_last_byte(monkeypatch):
    """The thread may see that it must end before `stop()` has written: no other file gets that byte."""
    watching = Lifecycle(SimulatedEngine(), sinks=()).watch(60)
    write = os.write

    def late(file, data):
        watching._thread.join(0.1)
        return write(file, data)

    monkeypatch.setattr(os, "write", late)
    watching.stop()
    assert not watching._thread.is_alive()


def test_a_signal_never_waits_for_its_reader():
    """The stacks of many threads are longer than a pipe: what does not fit is left out, and nobody blocks."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    go = threading.Event()
    idle = [threading.Thread(target=go.wait) for _ in range(99)]
    for thread in idle:
        thread.start()
    out = io.StringIO()
    watching = lifecycle.watch(60, signum=signal.SIGUSR1, out=out)
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: "Thread 0x" in out.getvalue())
    finally:
        go.set()
        watching.stop()
        for thread in idle:
            thread.join(5)


def test_it_stops_though_its_pipe_is_full():
    """The stacks came faster than they were read: there is no room for the byte that says stop, nor need."""
    told, go = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text):
            told.set()
            go.wait(5)
            return super().write(text)

    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    watching = lifecycle.watch(60, signum=signal.SIGUSR1, out=Slow())
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.wait(5)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(watching._writes, b"." * 65536)
    threading.Timer(0.05, go.set).start()
    watching.stop()
    assert not watching._thread.is_alive()


@pytest.mark.parametrize("limit", [0, -1, None, True, "60", float("nan")])
def test_a_limit_is_a_number_of_seconds(limit):
    """Anything else is refused, and no thread begins."""
    before = threading.active_count()
    with pytest.raises(InvalidArgument, match="limit_s"):
        Lifecycle(SimulatedEngine(), sinks=()).watch(limit)
    assert threading.active_count() == before


def test_it_ends_with_what_it_watches():
    """Closed, or forgotten: no thread and no pipe is left."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    closed = lifecycle.watch()
    lifecycle.close()
    closed._thread.join(5)
    assert not closed._thread.is_alive()
    closed.stop()
    forgotten = Lifecycle(SimulatedEngine(), sinks=()).watch()
    gc.collect()
    forgotten._thread.join(5)
    assert not forgotten._thread.is_alive()


async def test_an_asynchronous_one_is_watched_too():
    """The same events, read as they happen."""
    let_go = threading.Event()
    engine = SimulatedEngine()
    async with AsyncLifecycle(lambda: engine, sinks=()) as lifecycle:
        engine.faults.add("step", hang=let_go)
        outputs = lifecycle.generate("a prompt", PARAMS, "r")
        with lifecycle.watch(0.02):
            task = asyncio.create_task(anext(outputs))
            async for event in lifecycle.events():
                if event["event"] == "stalled":
                    break
        assert event["call"] == "step"
        let_go.set()
        await task
        await outputs.aclose()
