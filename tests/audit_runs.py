"""Runs whose logs are looked at: a guarded simulated engine, and what was read back."""

import contextlib

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import IllegalCall, Lifecycle
from lifecycle.audit import format as form
from lifecycle.audit.reading import read
from lifecycle.audit.replay import Session
from lifecycle.table import RULES


def live(lifecycle, cycles=2):
    """Requests, refusals, every kind of sleep, a load, and all that it takes to end well."""
    for cycle in range(cycles):
        for index in range(3):
            lifecycle.add_request(f"r{cycle}-{index}", "prompt", SamplingParams(max_tokens=6))
        lifecycle.step()
        lifecycle.sleep(1)
        lifecycle.add_request(f"held{cycle}", "prompt", SamplingParams(max_tokens=3))
        for _ in range(2):
            with contextlib.suppress(IllegalCall):
                lifecycle.step()
        lifecycle.wake_up()
        lifecycle.sleep(2, "abort")
        lifecycle.wake_up(["weights"])
        lifecycle.reload_weights(version=f"v{cycle}")
        lifecycle.wake_up()
        while lifecycle.has_unfinished_requests():
            lifecycle.step()


def run_with(*sinks, cycles=2, engine=None, **options):
    """A whole run, closed at its end. Returns its events."""
    with Lifecycle(engine or SimulatedEngine(), sinks=sinks, event_capacity=1 << 20, **options) as lifecycle:
        live(lifecycle, cycles)
    return lifecycle.events()


class Replayed:
    """A sink that replays what it is told as a log is replayed. wrong: what can't have been.

    requests: of each request as well; that has the engine asked for tokens.
    """

    def __init__(self, *, requests=True):
        self.requests = requests
        rules = [[rule.trigger, rule.source, rule.dest] for rule in RULES]
        self.session = Session({"rules": rules, "time": 0.0, "part": 1, "first": 1}, 0)
        self.wrong = []
        self.events = {}

    def begin(self, engine, rank):
        """It is one of the sinks that are given what a Ctrl-C kept from them."""

    def end(self, *, clean):
        pass

    def unaudited(self):
        return None

    def forget_parent(self):
        pass

    @property
    def given(self):
        given = self.session.last_seq
        while given + 1 in self.events:
            given += 1
        return given

    def __call__(self, event):
        self.events[event["seq"]] = event  # and nothing else: a Ctrl-C may come at any place

    def replay(self):
        for number in range(self.session.last_seq + 1, self.given + 1):
            record = form.parse(form.seal(self.events.pop(number), "")[0])
            wrong = self.session.feed(record, number)
            if wrong:
                self.wrong.append(f"{number}: {wrong}")
        if self.events:
            self.wrong.append(f"never told: {self.session.last_seq + 1}")

    def check(self, core):
        """What it was told is what there is: the state, the requests, and that nothing is under way."""
        self.replay()
        ledger, session = core.ledger, self.session
        live = {*ledger.held, *ledger.in_flight}
        if self.requests and session.requests.keys() != live:
            self.wrong.append(f"live by the log: {sorted(session.requests)}, really: {sorted(live)}")
        if session.state != core.state:
            self.wrong.append(f"{session.state} by the log, really {core.state}")
        if session.operations and core.transition is None:
            self.wrong.append(f"under way by the log: {session.operations}")
        return self.wrong


def read_back(path):
    """(records, problems, sessions) of a log. Problems are (line, what)."""
    records, problems, sessions = [], [], []
    for entry in read(path):
        if entry.problem:
            problems.append((entry.line, entry.problem))
        if entry.record is None:
            continue
        if entry.record["event"] == "log_opened":
            if entry.record["part"] == 1 or not sessions:
                sessions.append(Session(entry.record, entry.line))
            continue
        if "seq" in entry.record:
            records.append({name: value for name, value in entry.record.items() if name != "sum"})
        wrong = sessions[-1].feed(entry.record, entry.line) if sessions else None
        if wrong:
            problems.append((entry.line, wrong))
    return records, problems, sessions
