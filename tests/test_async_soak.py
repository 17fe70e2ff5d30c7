"""Ten thousand streams at once, round after round: nothing lost, nothing twice, nothing left, nothing grows.

A round begins asleep: 10,000 `generate` calls are held by the library. At the wake a thousand run at once and
the others queue in the engine. While they are served the engine is put to sleep in four ways and woken, more
calls come in each time, some callers are cancelled or aborted, some leave early, some read slowly or not at
all for a while. Each output and each end is judged by the oracle, which knows what an undisturbed run gives.
"""

import asyncio
import contextlib
import functools
import gc
import os
import random
import sys
import threading
import time
import tracemalloc
from collections import Counter
from itertools import combinations, pairwise
from statistics import median

import pytest

from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine, expected_output
from lifecycle import AsyncLifecycle, RequestAborted
from tests import report
from tests.oracle import Requests
from tests.test_soak import resident_bytes

QUEUED = 10_000
LATE = 100  # more that come during each sleep
AT_ONCE = 1_000
NEVER_ENDS_S = 120
WARM_UP, ROUNDS = 1, 10
# `tracemalloc` knows bytes, and takes four times as long; the interpreter's count of blocks costs nothing.
TRACED = int(os.environ.get("MACHINE_TIMES", "1")) > 1
# What is kept of each request is a block at the least, or eight bytes in a list. How much the process has
# from the system goes up and down by megabytes, with what the two threads need at the same time.
FLAT = {"blocks": QUEUED / 100, "traced bytes": QUEUED, "resident bytes": 100 * QUEUED}
# With so many left the engine is put to sleep, at this level and in this mode.
SLEEPS = [(7_500, 1, "wait"), (5_000, 2, "keep"), (3_000, 0, "keep"), (1_200, 1, "abort")]
CANCELLED, ABORTED = 200, 100
HOWS = ("reads", "reads", "reads", "reads", "dawdles", "reads", "reads", "waits", "reads", "leaves")

pytestmark = pytest.mark.timeout(900)


@functools.cache
def expected(seed, kind, max_tokens):
    return expected_output([seed, 7], SamplingParams(seed=seed, max_tokens=max_tokens, output_kind=kind))


def reference(asked, sample, contents, *, stop):
    """Never other weights, more than one sample or a stop string."""
    options = asked.options
    return expected(options["seed"], options["output_kind"], options["max_tokens"])


def slope(sizes):
    """How much more a round: the median over all pairs of rounds, which a few odd ones can't bend."""
    pairs = combinations(enumerate(sizes), 2)
    return median((after - before) / (later - earlier) for (earlier, before), (later, after) in pairs)


class Paced(SimulatedEngine):
    """Counts how many requests ran at once, and stands still in the step after which so many are left."""

    most = 0
    stops_at = -1

    def stop_at(self, left):
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        self.go_on = threading.Event()
        self.stops_at = left

    def step(self):
        outputs = super().step()
        self.most = max(self.most, len(self.running))
        if len(self.requests) <= self.stops_at:
            self.stops_at = -1
            self.loop.call_soon_threadsafe(self.stopped.set)
            assert self.go_on.wait(NEVER_ENDS_S)
        return outputs


async def until(holds):
    while not holds():  # noqa: ASYNC110  (what it waits for is told to nobody)
        await asyncio.sleep(0.001)


class Round:
    """The calls of one round, and the account of them."""

    def __init__(self, life, engine, number):
        self.life, self.engine = life, engine
        self.random = random.Random(number)
        self.requests = Requests(reference)
        self.tasks = {}
        self.ends = []  # (request, how its stream ended)
        self.gate = asyncio.Event()
        self.aborted = set()

    def begin(self, count):
        for _ in range(count):
            number = len(self.tasks)
            name = f"r{number}"
            options = {"n": 1, "seed": number % 13, "stop": None, "output_kind": OutputKind(number % 3)}
            options["max_tokens"] = 2 + number // 3 % 3
            self.requests.ask(name, [], options, {})
            params = SamplingParams(
                seed=options["seed"], max_tokens=options["max_tokens"], output_kind=options["output_kind"]
            )
            self.tasks[name] = asyncio.create_task(self.read(name, params, HOWS[number % len(HOWS)]))

    async def read(self, name, params, how):
        try:
            async with contextlib.aclosing(self.life.generate([params.seed, 7], params, name)) as outputs:
                async for output in outputs:
                    self.requests.take([output])
                    if how == "leaves" and not output.finished:
                        self.ends.append((name, "left"))
                        return
                    if how == "dawdles":
                        await asyncio.sleep(0.005)
                    elif how == "waits":
                        await self.gate.wait()
            assert self.requests.asked[name].over, f"{name} ended without an end"
            self.ends.append((name, "told"))
        except asyncio.CancelledError:
            self.ends.append((name, "cancelled"))
            raise
        except RequestAborted:
            assert name in self.aborted, f"{name} was aborted, and nobody said so"
            self.ends.append((name, "aborted while held"))

    async def disturb(self):
        """Some callers are cancelled, some requests aborted, wherever they are.

        Drawn from all of them: of those still open, it would in the end be just the ones that were lost.
        """
        for name in self.random.sample(list(self.tasks), CANCELLED):
            self.tasks[name].cancel()
        names = self.random.sample(list(self.tasks), ABORTED)
        self.aborted.update(names)
        self.requests.may_end(names, "abort")
        await self.life.abort(names)

    async def sleep_and_wake(self, level, mode, left):
        """Sleep at once, and wake up to run until so many are left."""
        sleep = asyncio.create_task(self.life.sleep(level, mode))
        await asyncio.sleep(0)
        self.engine.go_on.set()
        self.begin(LATE)
        if mode == "abort":
            self.requests.may_end(self.requests.live(), "abort")
        slept = await sleep
        assert (slept.level, slept.mode) == (level, mode)
        assert {"wait": slept.drained and slept.held, "keep": slept.kept, "abort": slept.aborted}[mode]
        self.aborted.update(slept.aborted)
        await self.disturb()
        if level == 2:
            await self.life.wake_up(["weights"])
            await self.life.reload_weights()
        await self.disturb()
        self.engine.stop_at(left)
        assert await self.life.wake_up()

    async def run(self):
        life = self.life
        await life.sleep(1)
        self.begin(QUEUED)
        await until(lambda: life.snapshot().held == QUEUED)
        assert life.snapshot().in_flight == 0
        self.engine.stop_at(SLEEPS[0][0])
        await life.wake_up()
        for (_, level, mode), (left, *_) in pairwise([*SLEEPS, (-1,)]):
            if mode == "abort":
                self.gate.set()
            await asyncio.wait_for(self.engine.stopped.wait(), NEVER_ENDS_S)
            await self.sleep_and_wake(level, mode, left)
        _, waiting = await asyncio.wait(self.tasks.values(), timeout=NEVER_ENDS_S)
        assert not waiting, f"nobody ends {len(waiting)} streams"

    def judge(self):
        """Each stream came to one end, and everything that was not given up to the right one."""
        for task in self.tasks.values():
            if not task.cancelled():
                task.result()
        told = dict(self.ends)
        assert told.keys() == self.tasks.keys()
        assert len(self.ends) == len(self.tasks)
        gone = [name for name, how in told.items() if how != "told"]
        self.requests.given_up(gone)
        assert self.requests.lost() == []
        cut = {
            asked.request_id for asked in self.requests.asked.values() if asked.samples[0].reason == "abort"
        }
        assert cut <= self.aborted, "ended early, and nobody said so"
        return Counter(told.values())


async def nothing_is_left(life, engine):
    """Of a round whose last stream has ended: no task, no thread, no record, nothing in the engine."""
    await life.call("get_metrics")  # behind the last withdrawal
    core, ledger = life._owner.core, life._owner.core.ledger
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert core.check() == []
    snapshot = life.snapshot()
    assert (snapshot.in_flight, snapshot.held, snapshot.undelivered) == (0, 0, 0)
    assert not any((ledger._handles, ledger.mailbox, core.unaborted, life._owner._streams, life._streams))
    assert life.get_num_unfinished_requests() == 0
    assert not any((engine.requests, engine.parents, engine.running, engine.waiting, engine.live_ids))
    assert engine.misuse == []


async def test_ten_thousand_streams_ten_times():
    """Whatever happens to 10,000 requests, each comes to its one right end, and no round leaves anything."""
    engine = Paced(
        max_num_seqs=AT_ONCE, max_num_batched_tokens=4 * AT_ONCE, prefix_caching=False, record=False
    )
    measures = {"blocks": sys.getallocatedblocks, "resident bytes": resident_bytes}
    if TRACED:
        measures["traced bytes"] = lambda: tracemalloc.get_traced_memory()[0]
        tracemalloc.start(1)
    points, seconds, ends = [], [], Counter()
    threads = threading.active_count()
    async with AsyncLifecycle(lambda: engine, sinks=(), event_capacity=64) as life:
        for number in range(WARM_UP + ROUNDS):
            engine.most = 0
            began = time.perf_counter()
            the_round = Round(life, engine, number)
            await the_round.run()
            ends += the_round.judge()
            await nothing_is_left(life, engine)
            seconds.append(time.perf_counter() - began)
            assert engine.most == AT_ONCE
            assert threading.active_count() == threads + 1
            streams = len(the_round.tasks)
            del the_round
            gc.collect()
            points.append({what: measure() for what, measure in measures.items()})
    tracemalloc.stop()
    assert threading.active_count() == threads

    section = f"asynchronous soak: {ROUNDS} rounds of {streams} streams, {AT_ONCE} at once"
    report.say(section, f"seconds a round: {median(seconds):.2f}, longest {max(seconds):.2f}")
    report.say(section, "streams: " + ", ".join(f"{how} {count}" for how, count in sorted(ends.items())))
    for what in measures:
        sizes = [point[what] for point in points[WARM_UP:]]
        growth = slope(sizes)
        report.say(section, f"{what}: {sizes[-1]} in the end, {growth:.0f} more a round")
        assert growth < FLAT[what], (what, sizes)
