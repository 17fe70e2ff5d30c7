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


# -- by any id, in any place ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in flight", "held", "recalled", "readmitted", "undelivered"])
def test_a_request_is_found_by_every_id_it_was_ever_given(place):
    """The caller's id, the handle it was given and the engine's id of now lead to it wherever it is."""
    ledger = Ledger()
    held_first = place in ("held", "readmitted")
    record = ledger.hold(call("r"), None, 0) if held_first else ledger.admit(call("r"), "r-1", None, 0)
    handle = record.handle
    assert handle == ("r-held1" if held_first else "r-1")
    ids = {"r", handle}
    if place == "recalled":
        ledger.recall(record)
        ledger.into_engine(record, "r-2")
        ledger.recall(record)
        assert ledger.find(["r-2"]) == []
    elif place == "readmitted":
        ledger.into_engine(record, "r-2")
        ids.add("r-2")
    elif place == "undelivered":
        ledger.post(record, Out("r", finished=True))
    for name in ids:
        assert ledger.find([name]) == [record], name
    assert ledger.find([*ids, "unknown"]) == [record]
    assert record.handle == handle
    assert ledger.is_live("r")
    assert [ledger.records().__next__()] == ledger.owned_by(ledger.anybody) == [record]
    assert ledger.check() == []
    ledger.drop(record)
    assert ledger.find(ids) == []
    assert not ledger.is_live("r")
    assert list(ledger.mailbox) == []
    assert ledger.check() == []


def test_dropping_one_leaves_the_others_outputs():
    """Only the outputs of the request that ended leave the mailbox."""
    ledger = Ledger()
    gone, stays = (ledger.admit(call(name), f"{name}-1", None, 0) for name in ("gone", "stays"))
    for record in (gone, stays, gone):
        ledger.post(record, Out(record.request_id, finished=False))
    ledger.drop(gone)
    assert [output.request_id for output in ledger.take(None)] == ["stays"]
    assert ledger.check() == []


def test_the_owners_of_what_nobody_is_waiting_for():
    """Anybody may take what was enqueued, and counts it; nobody takes what a blocking call owns."""
    ledger = Ledger()
    scope = Scope("generate")
    mine = ledger.admit(call("m"), "m-1", scope, 0)
    assert (ledger.scoped, ledger.busy(), ledger.busy(scope)) == (1, False, True)
    queued = ledger.admit(call("q"), "q-1", ledger.enqueued, 0)
    assert (ledger.scoped, ledger.busy(), ledger.samples()) == (1, True, 1)
    assert ledger.check() == []
    for record in (mine, queued):
        ledger.post(record, Out(record.request_id, finished=True))
    assert [output.request_id for output in ledger.take(None)] == ["q"]
    assert (ledger.busy(), ledger.scoped) == (False, 1)
    ledger.own([mine], ledger.anybody)
    assert (ledger.scoped, scope.live, ledger.busy(scope)) == (0, 0, False)
    assert ledger.check() == []
    assert [output.request_id for output in ledger.take(None)] == ["m"]


@pytest.mark.parametrize("place", ["in flight", "held", "undelivered"])
def test_delivered_means_that_nothing_is_left_to_compute(place):
    """Of an owner's requests: those inside the engine and those held are unfinished, a last output is not."""
    ledger = Ledger()
    other = ledger.admit(call("other"), "other-1", None, 0)
    assert ledger.all_delivered(ledger.enqueued)
    if place == "held":
        ledger.hold(call("q"), ledger.enqueued, 0)
    else:
        record = ledger.admit(call("q"), "q-1", ledger.enqueued, 0)
        if place == "undelivered":
            ledger.post(record, Out("q", finished=True))
    assert ledger.all_delivered(ledger.enqueued) is (place == "undelivered")
    ledger.finished(other, Out("other", finished=True))
    assert ledger.all_delivered(ledger.anybody)


def test_what_an_interrupted_call_had_taken_can_be_taken_again():
    """Only a call that claims what was enqueued gives back; in order, and once."""
    ledger = Ledger()
    for keeps in (True, False):
        scope = Scope("wait", keeps=keeps)
        records = [ledger.admit(call(name), f"{name}-1", scope, 0) for name in ("a", "b")]
        for record in records:
            ledger.post(record, Out(record.request_id, finished=True))
        assert [output.request_id for output in ledger.take(scope)] == ["a", "b"]
        assert not ledger.is_live("a")
        for _ in range(2):
            ledger.give_back(scope)
            assert ledger.check() == []
        again = [output.request_id for output in ledger.take(None)]
        assert again == (["a", "b"] if keeps else [])
        assert ledger.find(["a-1"]) == []


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (lambda led, r: led.undelivered.pop("e"), "undelivered are those"),
        (lambda led, r: setattr(led.held["h"], "engine_id", "x"), "held has none"),
        (
            lambda led, r: led.mailbox.append((Ledger().hold(call("x"), None, 0), Out("x", finished=False))),
            "live",
        ),
        (lambda led, r: setattr(led.anybody, "live", 9), "counts its live"),
        (lambda led, r: led._handles.update(ghost=Ledger().hold(call("x"), None, 0)), "forgotten request"),
    ],
)
def test_check_sees_damage_beside_other_requests(spoil, promise):
    """With requests in every place and of every owner: sound before, one broken promise named after."""
    ledger = Ledger()
    scope = Scope("generate")
    record = ledger.admit(call("r"), "r-1", scope, 0)
    ledger.hold(call("h"), ledger.enqueued, 0)
    ended = ledger.admit(call("e"), "e-1", None, 0)
    for finished in (False, True):
        ledger.post(ended, Out("e", finished=finished))
    ledger.post(record, Out("r", finished=False))
    assert ledger.check() == []
    spoil(ledger, record)
    assert [promise in broken for broken in ledger.check()].count(True) == 1


# -- what is left half done ----------------------------------------------------------------------------


def full():
    """Requests in every place and of every owner, with unfinished and last outputs in the mailbox."""
    ledger = Ledger()
    scope = Scope("generate")
    running = ledger.admit(call("running"), "running-1", scope, 0)
    ledger.post(running, Out("running", finished=False))
    ledger.admit(call("fresh"), "fresh-1", ledger.enqueued, 0)
    ledger.hold(call("waits"), None, 0)
    readmitted = ledger.hold(call("again"), scope, 0)
    ledger.into_engine(readmitted, "again-2")
    ended = ledger.admit(call("ended"), "ended-1", None, 0)
    for finished in (False, True):
        ledger.post(ended, Out("ended", finished=finished))
    return ledger


@pytest.mark.parametrize(
    "spoil",
    [
        lambda led: None,
        lambda led: led.undelivered.clear(),
        lambda led: led.in_flight.update(led.undelivered),
        lambda led: led.held.update(led.undelivered),
        lambda led: led.held.update(running=led.in_flight["running"]),
        lambda led: led.undelivered.update(fresh=led.in_flight["fresh"]),
        lambda led: led.mailbox.appendleft(
            (Ledger().hold(call("gone"), None, 0), Out("gone", finished=False))
        ),
        lambda led: led._handles.update(ghost=Ledger().hold(call("gone"), None, 0)),
        lambda led: led._handles.clear(),
        lambda led: led._handles.pop("fresh-1"),
        lambda led: setattr(led, "scoped", 7),
        lambda led: setattr(led.anybody, "live", 7),
        lambda led: setattr(led.enqueued, "live", 0),
        lambda led: setattr(led.in_flight["running"].owner, "live", 7),
    ],
)
def test_a_change_left_half_done_is_made_one_again(spoil):
    """Whatever one interrupted change leaves, mended it is what it was: the mailbox is believed.

    Every request is in its one place, counted once, found by all its ids, and nothing else is found.
    """
    ledger = full()
    spoil(ledger)
    ledger.mend()
    assert ledger.check() == []
    assert (set(ledger.in_flight), set(ledger.held), set(ledger.undelivered)) == (
        {"running", "fresh", "again"},
        {"waits"},
        {"ended"},
    )
    assert [record.request_id for record, _ in ledger.mailbox] == ["running", "ended", "ended"]
    assert (ledger.scoped, ledger.anybody.live, ledger.enqueued.live) == (2, 2, 1)
    for name in ("running-1", "fresh-1", "waits-held3", "again-held4", "again-2", "ended-1"):
        assert [record.request_id for record in ledger.find([name])] == [name.partition("-")[0]], name
    assert ledger.find(["ghost", "gone", ""]) == []


def test_a_handle_is_new_only_to_its_own_request_and_outside_the_engine():
    """An engine may give a recalled request the id it had; no other one, and not while it has it."""
    ledger = Ledger()
    record = ledger.admit(call("r"), "r-1", None, 0)
    assert ledger.is_new_handle("r-2", "r")
    assert not ledger.is_new_handle("r-1", "r")
    assert not ledger.is_new_handle("r-1", "other")
    ledger.recall(record)
    assert ledger.is_new_handle("r-1", "r")
    assert not ledger.is_new_handle("r-1", "other")


def test_a_request_ends_once():
    """A second last output finds nothing to end, and no count goes wrong by it."""
    ledger = Ledger()
    record = ledger.admit(call("r"), "r-1", None, 0)
    assert ledger.finished(record, Out("r", finished=True))
    assert not ledger.finished(record, Out("r", finished=True))
    assert (ledger.anybody.live, ledger.check()) == (0, [])


def test_a_held_request_that_ends_is_held_no_more():
    """Its last output waits in the mailbox like any other's, and it is readmitted nowhere."""
    ledger = Ledger()
    record = ledger.hold(call("r"), None, 0)
    ledger.post(record, Out("r", finished=True))
    assert (ledger.oldest_first(), list(ledger.undelivered)) == ([], ["r"])
    assert ledger.check() == []


def test_only_a_call_that_was_said_to_keep_keeps():
    """An ordinary blocking call remembers nothing of what it was handed."""
    ledger = Ledger()
    scope = Scope("generate")
    ledger.post(ledger.admit(call("r"), "r-1", scope, 0), Out("r", finished=True))
    assert [output.request_id for output in ledger.take(scope)] == ["r"]
    assert scope.handed_out == []
