"""Which call is legal where, call by call, on a lifecycle that really is in each situation.

The expectation is written out here as a matrix, without the library's own tables: a row
is what a group of calls needs, a column a situation that callers get into.
"""

import dataclasses

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine
from lifecycle import IllegalCall, Lifecycle, LifecycleError, State
from lifecycle.table import NEEDS, Facts, meets

# The calls that are passed on to the engine, by what they need.
READS = (
    "get_num_unfinished_requests",
    "has_unfinished_requests",
    "is_sleeping",
    "get_tokenizer",
    "get_supported_tasks",
    "get_metrics",
    "get_weight_version",
    "do_log_stats",
)
QUIET = (
    "reset_prefix_cache",
    "reset_encoder_cache",
    "reset_mm_cache",
    "start_profile",
    "stop_profile",
    "list_loras",
    "set_weight_version",
    "rpc prepare_refit_info",
)
WEIGHTS = (
    *("apply_model", "add_lora", "remove_lora", "pin_lora"),
    *("rpc apply_model", "rpc add_lora", "rpc remove_lora", "rpc pin_lora"),
)
LOADS = (
    "reload_weights",
    "mark_weights_loaded",
    "rpc reload_weights",
    "rpc load_weights",
    "rpc load_model",
    "rpc update_weight",
    "rpc update_weights",
    "rpc update_weights_from_ipc",
    "rpc start_weight_update",
    "rpc start_draft_weight_update",
    "rpc finish_weight_update",
)
SERVING = ("step", "no_such_call")
BEHIND = ("rpc sleep", "rpc wake_up", "rpc discard")
OPERATIONS = ("sleep", "pause", "wake_up", "resume", "collective_rpc")

# One letter a situation, in the order of SITUATIONS: x where the call may reach the engine.
MATRIX = {
    READS: "xxxxxxxxxxxxx.",
    QUIET: "xx.xxxxxxxxx..",
    WEIGHTS: "xx.xx..." + "xx.x" + "..",
    LOADS: "x..x...." + "xx.x" + "..",
    SERVING: "xx............",
    BEHIND: "..............",
    OPERATIONS: "xx.xxxxxxxxx..",
    ("add_request",): "xxxxxxxxxxxx..",
    ("abort_request",): "xxxxxxxxxxxxx.",
    ("release_kv_cache_memory",): "...x..........",
    ("recover",): "............x.",
    ("close", "detach", "snapshot"): "xxxxxxxxxxxxx.",
}
SITUATIONS = (
    "awake",
    "running",
    "draining",
    "paused",
    "paused over requests",
    "level 1",
    "level 1 over requests",
    "level 2",
    "weights back",
    "weights back, discarded",
    "kv cache back",
    "all back, discarded",
    "failed",
    "closed",
)
STATES = dict(
    zip(
        SITUATIONS,
        (
            *(State.AWAKE, State.RUNNING, State.DRAINING),
            *[State.SLEEPING] * 5,
            *[State.PARTIALLY_AWAKE] * 4,
            *(State.FAILED, State.CLOSED),
        ),
        strict=True,
    )
)


def make(situation):
    """A lifecycle in this situation. Weights are declared, so that the caller's word is enough."""
    lifecycle = Lifecycle(SimulatedEngine, sinks=(), weights="declared")
    busy = situation in ("running", "draining") or situation.endswith("over requests")
    if busy:
        lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=9))
        lifecycle.step()
    if situation == "draining":
        lifecycle._core.begin_sleep(1, "wait")
    elif situation.startswith("paused"):
        lifecycle.pause()
    elif situation.startswith("level"):
        lifecycle.sleep(int(situation[6]), "keep")
    elif "back" in situation:
        lifecycle.sleep(2 if "discarded" in situation else 1)
        tags = {"weights": ["weights"], "kv": ["kv_cache"], "all": None}[
            situation.replace(",", " ").split()[0]
        ]
        lifecycle.wake_up(tags)
    elif situation == "failed":
        lifecycle.sleep(1)
        lifecycle._core.engine.faults.add("wake_up", raises=RuntimeError("lost"))
        with pytest.raises(LifecycleError):
            lifecycle.wake_up()
    elif situation == "closed":
        lifecycle.close()
    assert lifecycle.state is STATES[situation]
    return lifecycle


def reaches_the_engine(lifecycle, call):
    """Whether the call is let through; what the engine then makes of it is another matter."""
    core = lifecycle._core
    kind, _, method = call.partition(" ")
    methods = {
        "reload_weights": lifecycle.reload_weights,
        "mark_weights_loaded": lifecycle.mark_weights_loaded,
    }
    try:
        if kind == "rpc":
            lifecycle.collective_rpc(method)
        elif call in methods:
            methods[call]()
        elif call == "step":
            lifecycle.step()
        elif call == "apply_model":
            lifecycle.apply_model(lambda _: None)
        elif any(call in group for group in (READS, QUIET, WEIGHTS, SERVING)):
            lifecycle.call(call)
        else:
            return meets(NEEDS[call], lifecycle.state, core.facts()) and (
                core.transition is None
                or call in ("add_request", "abort_request", "close", "detach", "snapshot")
            )
    except LifecycleError:
        return False
    except (AttributeError, TypeError, LookupError):  # the engine has no such call, or wants arguments
        return True
    return True


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_call_is_legal_exactly_where_the_matrix_says(situation):
    """What a call needs is what it gets, and nothing else: not refused too soon, not let through too late."""
    place = SITUATIONS.index(situation)
    for calls, letters in MATRIX.items():
        for call in calls:
            lifecycle = make(situation)
            assert reaches_the_engine(lifecycle, call) is (letters[place] == "x"), call


def test_the_matrix_is_complete():
    """Every call that the library knows stands in the matrix, and every situation has its letter."""
    assert {call for calls in MATRIX for call in calls} >= set(NEEDS)
    assert {len(letters) for letters in MATRIX.values()} == {len(SITUATIONS)}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_refusal_names_the_calls_that_are_legal(situation):
    """The way out is part of the refusal: exactly the steering calls that the matrix allows there."""
    lifecycle = make(situation)
    place = SITUATIONS.index(situation)
    steering = {
        "recover",
        "reload_weights",
        "mark_weights_loaded",
        "wake_up",
        "resume",
        "step",
        "add_request",
    }
    steering |= {"abort_request", "sleep", "pause", "release_kv_cache_memory", "close"}
    legal = {call for calls, letters in MATRIX.items() for call in calls if letters[place] == "x"}
    with pytest.raises(IllegalCall) as refused:
        lifecycle._core.refuse(IllegalCall, "anything", "for the sake of it")
    assert set(refused.value.legal) == legal & steering


def test_facts_cannot_be_changed_under_those_who_read_them():
    """A guard, a need and a refusal all see the same moment."""
    facts = Facts()
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.level = 1
