"""When weights may be served, beyond the common paths: what cures, what doesn't, and what is never asked."""

import pytest

from engine_adapter.simulated import (
    PARAMETERS,
    SamplingParams,
    SimulatedEngine,
    expected_tokens,
    make_weights,
)
from lifecycle import Lifecycle, State, UnsupportedEngine, WeightsNotValid
from lifecycle.engine import Capabilities

SHARDS = list(make_weights().items())


class Uncheckable(SimulatedEngine):
    """An engine whose parameters can't hold NaN; nobody may look for one."""

    def __init__(self):
        super().__init__(capabilities=Capabilities("uncheckable", {}, check_weights=False))

    def missing_weights(self):
        raise AssertionError("its weights can't be checked")

    discard_weights = missing_weights


@pytest.fixture
def engine():
    return SimulatedEngine()


@pytest.fixture
def lifecycle(engine):
    made = Lifecycle(engine, sinks=())
    yield made
    assert made.check() == []
    assert engine.misuse == []


def serves_right(lifecycle):
    lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=4, seed=1))
    outputs = []
    while lifecycle.has_unfinished_requests():
        outputs += lifecycle.step()
    assert outputs[-1].outputs[0].token_ids == expected_tokens(
        "a prompt", SamplingParams(max_tokens=4, seed=1)
    )


def load(lifecycle, shards):
    """A load that is seen, of these shards alone."""
    lifecycle.collective_rpc("load_weights", None, (shards,))


def test_weights_discarded_twice_are_looked_at_anew(lifecycle, engine):
    """What was found missing, or loaded, before a level-2 sleep says nothing after it."""
    for _ in range(2):
        lifecycle.sleep(2)
        report = lifecycle.wake_up()
        assert set(report.missing) == set(PARAMETERS)
        engine.load_weights(SHARDS[:3])
    lifecycle.sleep(2)
    assert set(lifecycle.wake_up().missing) == set(PARAMETERS)
    engine.load_weights(SHARDS)
    serves_right(lifecycle)


@pytest.mark.parametrize(
    "starts", [["start_weight_update"], ["start_weight_update", "start_draft_weight_update"]]
)
def test_an_update_that_was_not_whole_leaves_the_weights_discarded(lifecycle, engine, starts):
    """An update over discarded weights ends in what it found: the rest may still come unseen."""
    lifecycle.sleep(2)
    lifecycle.wake_up()
    for start in starts:
        lifecycle.collective_rpc(start)
    assert lifecycle.snapshot().weights == "tainted"
    load(lifecycle, SHARDS[:-1])
    lifecycle.collective_rpc("finish_weight_update")
    assert lifecycle.snapshot().weights == "discarded"
    with pytest.raises(WeightsNotValid, match=SHARDS[-1][0]):
        lifecycle.step()
    engine.load_weights(SHARDS[-1:])
    serves_right(lifecycle)


def test_a_partial_load_over_valid_weights_is_a_new_epoch(lifecycle):
    """Adapters or trainable parameters alone, loaded over valid weights, leave them valid in a new epoch."""
    before = lifecycle.snapshot().epoch
    load(lifecycle, SHARDS[:2])
    assert (lifecycle.state, lifecycle.snapshot().epoch) == (State.AWAKE, before + 1)
    serves_right(lifecycle)


def test_a_partial_load_over_discarded_weights_proves_nothing():
    """Where nothing can be looked at, a load of some parameters is not the caller's word for all."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=(), weights="declared")
    lifecycle.sleep(2)
    lifecycle.wake_up()
    load(lifecycle, SHARDS)
    assert lifecycle.snapshot().weights == "discarded"
    with pytest.raises(WeightsNotValid):
        lifecycle.step()
    lifecycle.mark_weights_loaded()
    serves_right(lifecycle)


def test_tainted_weights_stay_so_however_often_they_are_looked_at(lifecycle, engine):
    """A load that failed is cured by a whole one, not by a step that looks again."""
    engine.faults.add("reload_weights", raises=OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        lifecycle.reload_weights()
    for _ in range(2):
        with pytest.raises(WeightsNotValid):
            lifecycle.step()
    assert lifecycle.snapshot().weights == "tainted"
    assert [event["weights"] for event in lifecycle.events() if event["event"] == "weights"] == ["tainted"]
    lifecycle.reload_weights()
    serves_right(lifecycle)


def test_weights_once_valid_are_not_looked_at_again(lifecycle, engine):
    """The check costs a pass over all parameters: it is made where a hole may be, until they are loaded."""
    looked = []
    engine.missing_weights = lambda look=engine.missing_weights: looked.append(1) or look()
    for _ in range(2):
        load(lifecycle, SHARDS)
        lifecycle.mark_weights_loaded()
        assert looked == []
        lifecycle.sleep(2)
        lifecycle.wake_up()
        assert lifecycle.reload_weights().missing == ()
        assert looked
        looked.clear()


def test_the_end_of_an_update_that_was_overtaken_is_no_news(lifecycle):
    """The caller's word ends an open update; its late `finish` begins no epoch and changes nothing."""
    lifecycle.collective_rpc("start_weight_update")
    lifecycle.mark_weights_loaded("mine")
    before = lifecycle.snapshot()
    lifecycle.collective_rpc("finish_weight_update")
    after = lifecycle.snapshot()
    assert (after.weights, after.epoch, after.weights_version) == ("valid", before.epoch, "mine")


def test_what_cannot_be_checked_is_declared():
    """An engine whose parameters can't hold NaN gets the policy that needs no look; "checked" is refused."""
    lifecycle = Lifecycle(Uncheckable(), sinks=())
    assert lifecycle.events()[0]["policy"] == "declared"
    lifecycle.sleep(2)
    assert lifecycle.wake_up().missing == ()
    lifecycle.reload_weights()
    serves_right(lifecycle)
    assert Lifecycle(Uncheckable(), sinks=(), weights="unchecked").state is State.AWAKE
    with pytest.raises(UnsupportedEngine):
        Lifecycle(Uncheckable(), sinks=(), weights="checked")


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_what_was_loaded_before_a_nap_is_not_missing_after_it(lifecycle, engine, tags):
    """Level 1 keeps what was loaded since level 2 dropped everything: only the rest is named after it.

    So it is as soon as the weights are back, the KV cache still asleep.
    """
    lifecycle.sleep(2)
    lifecycle.wake_up()
    engine.load_weights(SHARDS[:3])
    lifecycle.sleep(1)
    assert set(lifecycle.wake_up(tags).missing) == set(PARAMETERS) - {name for name, _ in SHARDS[:3]}
    engine.load_weights(SHARDS[3:])
    lifecycle.wake_up()
    serves_right(lifecycle)


def test_a_reload_with_a_hole_is_told(lifecycle, engine):
    """Valid weights that a reload left a hole in are discarded, in the log too; tainted ones stay tainted."""
    missing = engine.missing_weights
    engine.missing_weights = lambda: ("lm_head",)  # vLLM makes layers anew: what it was not given is missing
    assert lifecycle.reload_weights().missing == ("lm_head",)
    assert lifecycle.snapshot().weights == "discarded"
    told = [event["weights"] for event in lifecycle.events() if event["event"] == "weights"]
    assert told == ["discarded"]
    lifecycle.collective_rpc("start_weight_update")
    lifecycle.reload_weights()
    assert lifecycle.snapshot().weights == "tainted"
    engine.missing_weights = missing
    lifecycle.reload_weights()
    serves_right(lifecycle)
