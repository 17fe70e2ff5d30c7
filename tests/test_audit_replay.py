"""Replaying a log: what can't have been is said, at the record that says it."""

import pytest

from lifecycle.audit.replay import Session
from lifecycle.table import RULES

FOUND = {"event": "attached", "dest": "awake"}


def move(trigger, source, dest):
    return {"event": "transition", "trigger": trigger, "source": source, "dest": dest}


def begin(call):
    return {"event": "operation_begin", "call": call}


def end(call):
    return {"event": "operation_end", "call": call}


def admitted(name):
    return {"event": "request_admitted", "request": name}


def finished(name):
    return {"event": "request_finished", "request": name, "outcome": "stop", "tokens": 1}


CLOSED = {"event": "log_closed", "last": 0}
IMPOSSIBLE = {
    "no such beginning": ([{"event": "attached", "dest": "draining"}], "can't be found draining"),
    "another source": ([FOUND, move("settle", "running", "awake")], "the engine was awake"),
    "no such rule": ([FOUND, move("slept", "awake", "sleeping")], "no rule of its table has slept"),
    "an end alone": ([FOUND, end("sleep")], "an end of sleep, which did not begin"),
    "ends crossed": ([FOUND, begin("sleep"), begin("load"), end("sleep")], "sleep ended before load"),
    "admitted twice": ([FOUND, admitted("r"), admitted("r")], "'r' was admitted while it is live"),
    "ended twice": ([FOUND, admitted("r"), finished("r"), finished("r")], "'r', which is not live"),
    "never ended": ([FOUND, admitted("r"), CLOSED], "1 requests ('r') never ended"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_can_not_have_been_is_said(name):
    """Only the last of these records contradicts what came before, and it is the one that is named."""
    records, problem = IMPOSSIBLE[name]
    rules = [[rule.trigger, rule.source, rule.dest] for rule in RULES]
    session = Session({"rules": rules, "time": 0.0, "part": 1, "first": 1}, 1)
    said = [
        session.feed({**record, "seq": number, "time": 0.0}, number + 1)
        for number, record in enumerate(records, start=1)
    ]
    assert said[:-1] == [None] * (len(said) - 1)
    assert problem in said[-1]
