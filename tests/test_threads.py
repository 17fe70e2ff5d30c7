"""Many threads at once on one lifecycle, with a switch between them wherever Python allows one."""

import faulthandler
import random
import sys
import threading

import pytest

from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import DrainTimeout, IllegalCall, Lifecycle, State

OPERATIONS = 100_000
DEADLOCK_S = 120  # a stack dump of every thread, and the end, if nothing moved for so long


class Crowd:
    """Eight threads, what they asked for and what they were handed."""

    def __init__(self):
        self.engine = SimulatedEngine(max_num_seqs=8, record=False)
        self.lifecycle = Lifecycle(self.engine, sinks=())
        self.asked = {}
        self.given_up = set()
        self.ended = []
        self.errors = []
        self.done = 0

    def take(self, outputs):
        self.ended.extend((output.request_id, output) for output in outputs if output.finished)

    # -- what each of them does over and over ----------------------------------------------------------

    def submit(self, random, name):
        if self.lifecycle.snapshot().in_flight + self.lifecycle.snapshot().held > 40:
            self.lifecycle.get_num_unfinished_requests()
            return
        kind = random.choice([OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY])
        params = SamplingParams(max_tokens=random.randint(1, 6), seed=random.randint(0, 9), output_kind=kind)
        prompt = [random.randint(1, 9) for _ in range(random.randint(1, 6))]
        self.asked[name] = (prompt, params)
        self.lifecycle.add_request(name, prompt, params)

    def step(self, random, name):
        try:
            self.take(self.lifecycle.step())
        except IllegalCall:  # asleep, or on the way there
            assert self.lifecycle.state is not State.FAILED

    def abort(self, random, name):
        live = list(self.lifecycle._core.ledger.in_flight)  # a caller's own list, as good as any
        if live and random.random() < 0.2:
            victim = random.choice(live)
            self.given_up.add(victim)
            self.lifecycle.abort_request([victim])
        else:
            self.lifecycle.abort_request(["nobody"])

    def sleep(self, random, name):
        if random.random() < 0.9:
            self.lifecycle.has_unfinished_requests()
            return
        mode = random.choice(["wait", "wait", "keep"])
        try:
            self.lifecycle.sleep(random.choice([0, 1, 2]), mode, max_steps=random.choice([None, None, 1]))
        except DrainTimeout:
            return
        if not self.lifecycle.wake_up():
            self.lifecycle.reload_weights()

    def read(self, random, name):
        snapshot = self.lifecycle.snapshot()
        assert snapshot.state in set(State)
        assert snapshot.in_flight >= 0
        repr(self.lifecycle)
        self.lifecycle.events(3)
        if random.random() < 0.05:
            assert self.lifecycle.check() == []

    # -- the run ---------------------------------------------------------------------------------------

    def work(self, what, number, times):
        mine = random.Random(number)
        try:
            for turn in range(times):
                what(mine, f"t{number}-{turn}")
                self.done += 1
        except BaseException as error:
            self.errors.append(error)

    def run(self, times):
        doing = [self.submit, self.submit, self.step, self.step, self.step, self.abort, self.sleep, self.read]
        threads = [
            threading.Thread(target=self.work, args=(what, number, times), daemon=True)
            for number, what in enumerate(doing)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def finish(self):
        while self.lifecycle.has_unfinished_requests():
            self.take(self.lifecycle.step())


@pytest.fixture
def _switches_everywhere():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    faulthandler.dump_traceback_later(DEADLOCK_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switches_everywhere")
def test_eight_threads_at_once():
    """Submitting, stepping, aborting, sleeping and reading at once: nothing is lost, doubled or stuck."""
    crowd = Crowd()
    crowd.run(OPERATIONS // 8)
    assert crowd.errors == []
    crowd.finish()
    assert crowd.engine.misuse == []
    assert crowd.lifecycle.check() == []
    ended = [name for name, _ in crowd.ended]
    assert len(ended) == len(set(ended)), "a last output was handed out twice"
    assert set(crowd.asked) - set(ended) <= crowd.given_up
    assert len(ended) > OPERATIONS // 500  # how many escape the aborts is the schedule's to say
    for name, output in crowd.ended:
        prompt, params = crowd.asked[name]
        assert output.outputs[0].token_ids == expected_tokens(prompt, params), name
