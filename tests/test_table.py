"""The table itself, by properties that are stated independently of it, and its wiring."""

import itertools
from dataclasses import replace

import pytest

from engine_adapter.simulated import SimulatedEngine
from lifecycle import Lifecycle, State, Weights
from lifecycle.table import (
    GUARDS,
    KV_CACHE,
    MEMORY_TAGS,
    NEED_CHECKS,
    NEEDS,
    RPC_NEEDS,
    RULES,
    STEERING,
    WEIGHTS,
    Facts,
    Need,
    Trigger,
    admits,
    match,
    may_begin,
    meets,
    rpc_need,
)

RESIDENCIES = [frozenset(), frozenset({WEIGHTS}), frozenset({KV_CACHE}), MEMORY_TAGS]


def every_fact():
    """All combinations of facts that a guard can tell apart."""
    booleans = (False, True)
    for resident, level, weights, paused, in_flight, held, can, may in itertools.product(
        RESIDENCIES, (None, 0, 1, 2), Weights, booleans, (0, 3), (0, 2), booleans, booleans
    ):
        yield Facts(resident, level, weights, paused, in_flight, held, 0, can, may)


def edges():
    return [(rule.source, rule.dest) for rule in RULES if rule.source is not None]


def test_every_state_can_be_left_but_closed():
    """No state is a trap, and CLOSED is the only end."""
    for state in State:
        leaves = {dest for source, dest in edges() if source is state} - {state}
        assert bool(leaves) is (state is not State.CLOSED)


def test_every_state_reaches_closed_in_one_step():
    """Whatever happened, close() is one transition away."""
    for state in set(State) - {State.CLOSED}:
        assert match(Trigger.CLOSE, state, Facts()).dest is State.CLOSED


def test_no_way_to_serving_with_memory_asleep_or_weights_not_valid():
    """No row enters AWAKE or RUNNING by waking, loading or attaching unless everything is back and valid."""
    enters = (Trigger.WAKE, Trigger.WEIGHTS_VALID, Trigger.ATTACH, Trigger.RECOVER)
    for facts in every_fact():
        for trigger, source in itertools.product(
            enters, (None, State.SLEEPING, State.PARTIALLY_AWAKE, State.FAILED)
        ):
            rule = match(trigger, source, facts)
            if rule is not None and rule.dest in (State.AWAKE, State.RUNNING):
                assert facts.resident == MEMORY_TAGS
                assert facts.weights is Weights.VALID


def test_the_only_ways_out_of_sleep_are_wake_weights_failure_and_close():
    """From SLEEPING to serving leads nothing but a wake; from PARTIALLY_AWAKE a wake or valid weights."""
    serving = {State.AWAKE, State.RUNNING}
    ways = {
        rule.trigger
        for rule in RULES
        if rule.source in (State.SLEEPING, State.PARTIALLY_AWAKE) and rule.dest in serving
    }
    assert ways == {Trigger.WAKE, Trigger.WEIGHTS_VALID}


def test_an_explicit_pause_survives_sleep_and_wake():
    """With a pause said, no wake and no load leads to a serving state."""
    for facts in every_fact():
        if facts.paused:
            for trigger, source in itertools.product(
                (Trigger.WAKE, Trigger.WEIGHTS_VALID), (State.SLEEPING, State.PARTIALLY_AWAKE)
            ):
                rule = match(trigger, source, facts)
                assert rule is None or rule.dest not in (State.AWAKE, State.RUNNING)


def test_a_wake_always_has_exactly_one_destination():
    """Whatever the facts, a wake leads somewhere, and to one state only."""
    for facts in every_fact():
        for source in (State.SLEEPING, State.PARTIALLY_AWAKE):
            rows = [
                rule
                for rule in RULES
                if rule.trigger is Trigger.WAKE and rule.source is source and GUARDS[rule.guard][0](facts)
            ]
            assert len(rows) == 1, (source, facts)


def test_a_load_has_one_destination_once_everything_is_back_and_valid():
    """Its rows exclude each other, so that it never depends on which of them stands first."""
    for facts in every_fact():
        rows = [
            rule for rule in RULES if rule.trigger is Trigger.WEIGHTS_VALID and GUARDS[rule.guard][0](facts)
        ]
        assert len(rows) == facts.servable, facts


# -- paths: an engine's physics, with the table deciding where each step leads ----------------------


def effects(state, facts):
    """What may happen to an engine in `state`, as (name, trigger, facts afterwards).

    Stated from physics: a sleep unmaps, level 2 destroys, a wake maps what it is asked for and
    restores nothing, a load needs mapped weights. Whether it is *legal*, the table says.
    """
    yield "fail", Trigger.FAIL, facts
    yield "close", Trigger.CLOSE, facts
    if state in (State.AWAKE, State.RUNNING):
        yield "add", Trigger.ADMIT, replace(facts, in_flight=1)
        yield "finish", Trigger.SETTLE, replace(facts, in_flight=0)
        yield "sleep", Trigger.DRAIN, facts
    if state is State.DRAINING:
        yield "give up", Trigger.ROLL_BACK, facts
        for level in (0, 1, 2):
            yield f"sleep {level}", Trigger.SLEPT, asleep(facts, level)
    if state in (State.SLEEPING, State.PARTIALLY_AWAKE):
        again = Trigger.DEEPEN if state is State.SLEEPING else Trigger.RESLEEP
        for level in (1, 2):
            yield f"sleep {level} again", again, asleep(facts, level)
        yield "release kv", Trigger.RELEASE_KV, replace(facts, resident=frozenset({WEIGHTS}))
        for tags in RESIDENCIES:
            mapped = replace(facts, resident=facts.resident | tags)
            level = facts.level if not mapped.servable else 0 if facts.paused else None
            yield f"wake {sorted(tags)}", Trigger.WAKE, replace(mapped, level=level)
        if WEIGHTS in facts.resident:
            loaded = replace(facts, weights=Weights.VALID)
            stays = facts.paused or facts.level == 0
            level = facts.level if not loaded.servable else 0 if stays else None
            yield "load", Trigger.WEIGHTS_VALID, replace(loaded, level=level)
    if WEIGHTS in facts.resident and not facts.in_flight:
        yield "failed load", Trigger.WEIGHTS_TAINTED, replace(facts, weights=Weights.TAINTED)


def asleep(facts, level):
    if level == 0:
        return replace(facts, level=0)
    weights = Weights.DISCARDED if level == 2 else facts.weights
    return replace(facts, level=level, resident=frozenset(), weights=weights)


def steps_from(state, facts):
    """Every (what, state, facts) that the table lets come of this."""
    for what, trigger, after in effects(state, facts):
        if state is not None and may_begin(trigger, state, facts):
            rule = match(trigger, state, after)
            if rule is not None:
                yield what, rule.dest, after


def paths():
    """Every reachable (state, facts) with the ways on from there."""
    starts = [(match(Trigger.ATTACH, None, facts), facts) for facts in every_fact()]
    todo = [(rule.dest, facts) for rule, facts in starts if rule is not None and not facts.held]
    ways = {}
    while todo:
        here = todo.pop()
        if here not in ways:
            ways[here] = list(steps_from(*here))
            todo += [(state, facts) for _, state, facts in ways[here]]
    return ways


WAYS = paths()


def reachable_without(start, avoided):
    """States that can be reached from these places by no step that `avoided` names."""
    seen, todo = set(), list(start)
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += [(state, facts) for what, state, facts in WAYS[here] if not avoided(what, here, facts)]
    return {state for state, _ in seen}


def test_the_paths_reach_every_state_and_every_sleep():
    """What follows is not said of an empty set."""
    assert {state for state, _ in WAYS} >= set(State)
    assert {facts.level for state, facts in WAYS if state is State.SLEEPING} == {0, 1, 2}
    assert len(WAYS) > 100


def test_no_path_from_sleep_to_stepping_avoids_a_full_wake():
    """From a sleep with memory asleep no path serves unless the last of it was woken."""
    sleeping = [(state, facts) for state, facts in WAYS if state is State.SLEEPING and not facts.resident]

    def wakes_the_rest(what, here, facts):
        return what.startswith("wake") and facts.resident == MEMORY_TAGS

    assert not {State.AWAKE, State.RUNNING} & reachable_without(sleeping, wakes_the_rest)


def test_no_path_from_level_2_to_stepping_avoids_a_load():
    """Contents that level 2 destroyed are never served: every path from there has a load in it."""
    destroyed = [
        (state, facts)
        for state, facts in WAYS
        if state is State.SLEEPING and facts.weights is Weights.DISCARDED
    ]
    assert destroyed
    assert not {State.AWAKE, State.RUNNING} & reachable_without(destroyed, lambda what, *_: what == "load")


def test_no_path_from_a_failed_load_to_stepping_avoids_a_load():
    """Half-loaded weights are never served either."""
    torn = [(state, facts) for state, facts in WAYS if facts.weights is Weights.TAINTED]
    assert {state for state, _ in torn} >= {State.PARTIALLY_AWAKE}
    assert not {State.AWAKE, State.RUNNING} & reachable_without(torn, lambda what, *_: what == "load")


def test_a_failed_load_leaves_service_and_pause():
    """No state that promises valid weights is kept over weights that are not."""
    tainted = Facts(weights=Weights.TAINTED)
    for state, level in ((State.AWAKE, None), (State.SLEEPING, 0)):
        rule = match(Trigger.WEIGHTS_TAINTED, state, replace(tainted, level=level))
        assert rule is not None
        assert rule.dest is State.PARTIALLY_AWAKE


def test_no_state_is_a_trap():
    """From every place that is not failed there is a path back to service, and from every one to CLOSED."""
    for state, facts in WAYS:
        reached = reachable_without([(state, facts)], lambda *_: False)
        assert State.CLOSED in reached
        if state not in (State.FAILED, State.CLOSED) and not facts.paused:
            assert {State.AWAKE, State.RUNNING} & reached, (state, facts)


def test_no_path_leaves_an_explicit_pause():
    """Once asleep with a pause said, no path serves until it is taken back."""
    paused = [
        (state, facts)
        for state, facts in WAYS
        if facts.paused and state in (State.SLEEPING, State.PARTIALLY_AWAKE)
    ]
    assert paused
    assert not {State.AWAKE, State.RUNNING} & reachable_without(paused, lambda *_: False)


def test_exactly_the_serving_states_admit():
    """A new request goes to the engine in AWAKE and RUNNING, and nowhere else."""
    assert {state for state in State if admits(state)} == {State.AWAKE, State.RUNNING}


def test_rows_are_distinct_and_guards_exist():
    """No row stands twice, and each guard it names is defined."""
    assert len(set(RULES)) == len(RULES)
    assert {rule.guard for rule in RULES} | {rule.before for rule in RULES} == set(GUARDS)


def test_only_serving_states_step():
    """`step` is met in AWAKE and RUNNING and nowhere else, whatever the facts."""
    for state, facts in itertools.product(State, every_fact()):
        assert meets(Need.SERVING, state, facts) is (state in (State.AWAKE, State.RUNNING))


def test_after_the_end_nothing_but_reading_is_legal():
    """In FAILED only abort, recover, close and reading; in CLOSED nothing at all."""
    legal = {call for call, need in NEEDS.items() if meets(need, State.FAILED, Facts())}
    assert legal & set(STEERING) == {"abort_request", "recover", "close"}
    assert not [call for call, need in NEEDS.items() if meets(need, State.CLOSED, Facts())]


def test_loads_need_resident_weights_and_nothing_computed_with_them():
    """A load needs resident weights, and under requests computed with valid ones the caller's word."""
    for facts in every_fact():
        if meets(Need.LOADING, State.PARTIALLY_AWAKE, facts):
            assert WEIGHTS in facts.resident
            assert facts.kept_may_load or not (facts.in_flight and facts.weights is Weights.VALID)


@pytest.mark.parametrize("method", ["sleep", "wake_up", "discard"])
def test_no_worker_method_goes_behind_the_machine(method):
    """Sleep, wake and discard through collective_rpc are legal in no state."""
    assert not any(meets(RPC_NEEDS[method], state, Facts()) for state in State)


def test_a_caller_names_its_own_worker_methods():
    """The caller's `rpc_needs` come first, unknown methods need a quiet engine, update_weights_* loads."""
    assert rpc_need("refit", {"refit": Need.LOADING}) is Need.LOADING
    assert rpc_need("prepare_refit_info", {}) is Need.QUIET
    assert rpc_need("update_weights_from_ipc", {}) is Need.LOADING
    assert rpc_need("reload_weights", {"reload_weights": Need.QUIET}) is Need.QUIET


def test_every_need_has_words():
    """An error message can always say what is missing."""
    assert set(NEED_CHECKS) == set(Need)
    assert all(check.words for check in NEED_CHECKS.values())


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("trigger", [trigger for trigger in Trigger if trigger is not Trigger.ATTACH])
def test_the_machine_is_wired_as_the_table_says(state, trigger):
    """For every cell, `transitions` goes where the table says, or nowhere."""
    core = Lifecycle(SimulatedEngine(), sinks=())._core
    for facts in (
        Facts(),
        Facts(frozenset(), 1),
        Facts(frozenset({WEIGHTS}), 2, Weights.DISCARDED, in_flight=1),
    ):
        core.facts = lambda facts=facts: facts
        core._cursor.state = state
        expected = match(trigger, state, facts)
        has_rows = any(rule.trigger is trigger and rule.source is state for rule in RULES)
        if has_rows:
            assert core._cursor.trigger(trigger) is (expected is not None)
        assert core._cursor.state is (expected.dest if expected else state)


# -- every row, by one function in words ---------------------------------------------------------------


def destination(trigger, source, facts):
    """Where each trigger leads, from what the states mean: the oracle for the table's rows."""
    alive = set(State) - {State.FAILED, State.CLOSED}
    asleep = {State.SLEEPING, State.PARTIALLY_AWAKE}
    good = facts.resident == MEMORY_TAGS and facts.weights is Weights.VALID
    gone = facts.level is not None and not facts.resident
    serves = State.RUNNING if facts.in_flight or facts.held else State.AWAKE
    woken = State.SLEEPING if facts.paused else serves
    found = serves if facts.level is None else State.SLEEPING if facts.level == 0 else None
    found = found if good else State.SLEEPING if gone else State.PARTIALLY_AWAKE
    ways = {
        Trigger.ATTACH: ({None}, found),
        Trigger.RECOVER: ({State.FAILED}, found),
        Trigger.ADMIT: ({State.AWAKE}, State.RUNNING if serves is State.RUNNING else None),
        Trigger.SETTLE: ({State.RUNNING}, State.AWAKE if serves is State.AWAKE else None),
        Trigger.DRAIN: ({State.AWAKE, State.RUNNING}, State.DRAINING),
        Trigger.ROLL_BACK: ({State.DRAINING}, serves),
        Trigger.SLEPT: ({State.DRAINING}, State.SLEEPING),
        Trigger.DEEPEN: ({State.SLEEPING}, State.SLEEPING if gone else None),
        Trigger.RESLEEP: ({State.PARTIALLY_AWAKE}, State.SLEEPING if gone else None),
        Trigger.RELEASE_KV: ({State.SLEEPING}, None if good else State.PARTIALLY_AWAKE),
        Trigger.WAKE: (asleep, woken if good else State.PARTIALLY_AWAKE),
        Trigger.WEIGHTS_VALID: (
            {State.PARTIALLY_AWAKE},
            (State.SLEEPING if facts.level == 0 else woken) if good else None,
        ),
        Trigger.WEIGHTS_TAINTED: ({State.AWAKE, State.SLEEPING}, None if good else State.PARTIALLY_AWAKE),
        Trigger.FAIL: (alive, State.FAILED),
        Trigger.CLOSE: (set(State) - {State.CLOSED}, State.CLOSED),
    }
    sources, dest = ways[trigger]
    return dest if source in sources else None


@pytest.mark.parametrize("trigger", list(Trigger))
def test_every_trigger_leads_where_the_states_meanings_say(trigger):
    """A state is entered exactly where what it means is so; no trigger leads anywhere else."""
    for source, facts in itertools.product((None, *State), every_fact()):
        if facts.can_resleep:
            rule = match(trigger, source, facts)
            assert (rule and rule.dest) is destination(trigger, source, facts), (source, facts)


def test_where_a_guard_of_its_own_comes_before_the_effect():
    """Deepening needs a pause, a KV release an idle one, a sleep from half awake an engine that can."""
    pairs = itertools.product([trigger for trigger in Trigger if trigger is not Trigger.ATTACH], State)
    for trigger, source in pairs:
        has_way = any(destination(trigger, source, facts) for facts in BOTH_ENDS)
        for facts in every_fact():
            pause = facts.level == 0 and facts.resident == MEMORY_TAGS
            before = {
                (Trigger.DEEPEN, State.SLEEPING): pause,
                (Trigger.RELEASE_KV, State.SLEEPING): pause and not facts.in_flight,
                (Trigger.RESLEEP, State.PARTIALLY_AWAKE): facts.can_resleep,
            }
            expected = before.get((trigger, source), has_way)
            assert may_begin(trigger, source, facts) is expected, (trigger, source, facts)
            if (trigger, source) not in before:
                break  # one is enough where no fact is asked


# Facts after which each trigger has taken effect in one case or the other.
BOTH_ENDS = (
    Facts(),
    Facts(in_flight=1),
    Facts(frozenset(), 1),
    Facts(MEMORY_TAGS, None, Weights.TAINTED),
)


def test_facts_begin_as_an_idle_serving_engine():
    """What guards read, by default."""
    facts = Facts()
    assert match(Trigger.ATTACH, None, facts).dest is State.AWAKE
    assert (facts.resident, facts.paused, facts.can_resleep) == (MEMORY_TAGS, False, True)
    assert (facts.in_flight, facts.held, facts.undelivered) == (0, 0, 0)
