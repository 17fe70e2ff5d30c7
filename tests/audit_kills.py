"""Writers that are killed at random moments; a process of its own, because it forks.

Each child guards a simulated engine, sleeps and wakes it, and acknowledges through a pipe the
number of every record as soon as the log says that it is on disk. The parent kills it, takes
what was acknowledged, and reads the log.
"""

import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import Lifecycle
from lifecycle.audit import AuditLog
from tests.audit_runs import read_back


def write(path, pipe):
    log = AuditLog(path, requests=True)
    told = 0

    def acknowledge(event):  # called after the log was
        nonlocal told
        if log.on_disk > told:
            told = log.on_disk
            os.write(pipe, struct.pack("q", told))

    lifecycle = Lifecycle(SimulatedEngine(), sinks=[log, acknowledge])
    cycle = 0
    while True:
        cycle += 1
        for index in range(3):
            lifecycle.add_request(f"{cycle}-{index}", "prompt", SamplingParams(max_tokens=4))
        lifecycle.step()
        lifecycle.sleep(1, "wait_all")
        lifecycle.wake_up()
        while lifecycle.has_unfinished_requests():
            lifecycle.step()


def one_round(path, seconds):
    """Returns (the last acknowledged number, what is wrong)."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            write(path, writes)
        finally:
            os._exit(1)
    os.close(writes)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reads, "rb") as pipe:
        told = pipe.read()
    acknowledged = struct.unpack("q", told[-8:])[0] if told else 0
    if not path.exists():
        return acknowledged, ["no file"] if acknowledged else []
    records, problems, sessions = read_back(path)
    wrong = [f"{line}: {what}" for line, what in problems]
    if [record["seq"] for record in records] != list(range(1, len(records) + 1)):
        wrong.append("not dense")
    if len(records) < acknowledged:
        wrong.append(f"{acknowledged} acknowledged, {len(records)} there")
    if any(session.clean for session in sessions):
        wrong.append("it says that it ended well")
    return acknowledged, wrong


def main(rounds):
    chance = random.Random()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"log{number}" for number in range(rounds)]
        results = [one_round(path, 0.02 + chance.random() * 0.15) for path in paths]
    wrong = [problem for _, problems in results for problem in problems]
    acknowledged = sum(told for told, _ in results)
    print(json.dumps({"killed": rounds, "acknowledged": acknowledged, "wrong": wrong[:20]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
