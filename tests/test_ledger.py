"""The ledger by itself: order, handles and invariants."""

import pytest

from lifecycle.engine import Call
from lifecycle.requests import Ledger, Scope


class Out:
    def __init__(self, request_id, *, finished):
        self.request_id, self.finished = request_id, finished


def call(name):
    return Call(name, "prompt", "params", 0.0, {})


def test_held_requests_come_oldest_first_however_they_came_to_be_held():
    """A request recalled after a newer one was held still goes first."""
    ledger = Ledger()
    old = ledger.admit(call("old"), "old-1", None, 0)
    ledger.hold(call("new"), None, 0)
    ledger.recall(old)
    assert [record.request_id for record in ledger.oldest_first()] == ["old", "new"]
    assert ledger.check() == []


def test_the_mailbox_keeps_order_and_gives_once():
    """Outputs of a request come in order, once, and the request is forgotten with its last."""
    ledger = Ledger()
    record = ledger.admit(call("r"), "r-1", None, 0)
    outputs = [Out("r", finished=False), Out("r", finished=False), Out("r", finished=True)]
    for output in outputs:
        ledger.post(record, output)
    assert ledger.is_live("r")
    assert ledger.take(None) == outputs
    assert ledger.take(None) == []
    assert not ledger.is_live("r")
    assert ledger.find(["r", "r-1"]) == []
    assert ledger.check() == []


def test_nobody_takes_what_is_not_theirs():
    """A blocking call takes its own, anybody takes the rest, and each count says so."""
    ledger = Ledger()
    scope = Scope("generate")
    mine, theirs = (
        ledger.admit(call(name), f"{name}-1", owner, 0) for name, owner in (("m", scope), ("t", None))
    )
    for record in (mine, theirs):
        ledger.post(record, Out(record.request_id, finished=True))
    assert (ledger.busy(scope), ledger.busy(), ledger.samples(scope)) == (True, True, 1)
    assert [output.request_id for output in ledger.take(scope)] == ["m"]
    assert (ledger.busy(scope), ledger.busy()) == (False, True)
    assert [output.request_id for output in ledger.take(None)] == ["t"]
    assert ledger.check() == []


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (lambda led, r: led.held.update({"r": r}), "in one place"),
        (lambda led, r: led.undelivered.update({"x": r}), "undelivered are those"),
        (lambda led, r: setattr(r, "engine_id", ""), "has an engine id"),
        (lambda led, r: setattr(r.owner, "live", 7), "counts its live"),
        (lambda led, r: setattr(led, "scoped", 3), "blocking calls are counted"),
        (lambda led, r: led._handles.pop(r.handle), "handle leads to its"),
        (lambda led, r: led.in_flight.clear(), "forgotten request"),
        (
            lambda led, r: led.mailbox.extend([(r, Out("r", finished=True)), (r, Out("r", finished=False))]),
            "last in",
        ),
    ],
)
def test_check_sees_each_broken_promise(spoil, promise):
    """The invariants can fail: each kind of damage is named."""
    ledger = Ledger()
    record = ledger.admit(call("r"), "r-1", None, 0)
    assert ledger.check() == []
    spoil(ledger, record)
    assert any(promise in broken for broken in ledger.check())
