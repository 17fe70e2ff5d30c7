"""What is legal, as data. This module is the only place that says so.

Theory of operation
-------------------
An engine is in one of seven *states*. Everything else that legality depends on
(which memory is resident, whether the weights are valid, how many requests there
are) is a *fact*: `Facts` is a frozen record, and guards are predicates on it.

Three tables follow:

`RULES`
    trigger, source, destination, guard. A trigger fires the first row whose
    source matches and whose guard holds. The `transitions` machine, the diagram
    and the matrix in the documentation are made from it.
`NEEDS`
    what each call of the engine's surface needs, and `NEED_CHECKS` what each need
    means. A call the table does not know needs the strictest: a serving engine.
`RPC_NEEDS`
    the same for the worker methods reached through `collective_rpc`.

A state is entered when the engine has proved it, never when it was asked for:
while memory is being released the state is still `DRAINING`.

Standard library only; imported by everything, imports nothing of the project.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

TABLE_VERSION: Final = 1

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
SCHEDULING: Final = "scheduling"
MEMORY_TAGS: Final = frozenset({WEIGHTS, KV_CACHE})
TAGS: Final = frozenset({WEIGHTS, KV_CACHE, SCHEDULING})
LEVELS: Final = (0, 1, 2)
MODES: Final = ("wait", "wait_all", "abort", "keep")


class State(StrEnum):
    """Where the engine is. The value is the name used in events and messages."""

    AWAKE = "awake"
    RUNNING = "running"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    PARTIALLY_AWAKE = "partially_awake"
    FAILED = "failed"
    CLOSED = "closed"


MEANINGS: Final[Mapping[State, str]] = {
    State.AWAKE: "all memory resident, weights valid, nothing in flight",
    State.RUNNING: "at least one admitted request is unfinished",
    State.DRAINING: "admission closed; the lifecycle drives the step loop until the engine is quiet",
    State.SLEEPING: "the engine confirmed it: level 0 (paused), 1 (weights offloaded) or 2 (all dropped)",
    State.PARTIALLY_AWAKE: "some memory is back, or all of it while the weights' contents are not valid",
    State.FAILED: "the engine can't be trusted; the cause is kept",
    State.CLOSED: "shut down, or detached",
}

SERVING: Final = frozenset({State.AWAKE, State.RUNNING})
ALIVE: Final = frozenset(State) - {State.FAILED, State.CLOSED}
ASLEEP: Final = frozenset({State.SLEEPING, State.PARTIALLY_AWAKE})


class Weights(StrEnum):
    """Whether the contents of the weights can be served."""

    VALID = "valid"
    DISCARDED = "discarded"  # level 2, a dummy load, or asleep at a level that can't be read
    TAINTED = "tainted"  # an update failed, or began and has not finished


@dataclass(frozen=True, slots=True)
class Facts:
    """What guards read. Counts are of requests, not of their `n` samples.

    level: the level of the sleep the engine is in, None when it serves.
    paused: the caller said `pause()` and has not said `resume()`.
    in_flight: requests inside the engine; kept: those of them frozen by a sleep.
    held: requests kept outside the engine until it wakes.
    can_resleep: the engine really goes back to sleep from this residency.
    kept_may_load: the caller said what becomes of the KV that kept requests have.
    """

    resident: frozenset[str] = MEMORY_TAGS
    level: int | None = None
    weights: Weights = Weights.VALID
    paused: bool = False
    in_flight: int = 0
    held: int = 0
    undelivered: int = 0
    can_resleep: bool = True
    kept_may_load: bool = False

    @property
    def all_resident(self) -> bool:
        """All memory is mapped."""
        return self.resident >= MEMORY_TAGS

    @property
    def servable(self) -> bool:
        """Memory is back and its contents can be used."""
        return self.all_resident and self.weights is Weights.VALID

    @property
    def busy(self) -> bool:
        """There is something to compute once the engine serves."""
        return bool(self.in_flight or self.held)


class Trigger(StrEnum):
    """What moves the machine. `attach` has no source: it names where a machine begins."""

    ATTACH = "attach"
    ADMIT = "admit"
    SETTLE = "settle"
    DRAIN = "drain"
    ROLL_BACK = "roll_back"
    SLEPT = "slept"
    DEEPEN = "deepen"
    RESLEEP = "resleep"
    RELEASE_KV = "release_kv"
    WAKE = "wake"
    WEIGHTS_VALID = "weights_valid"
    WEIGHTS_TAINTED = "weights_tainted"
    FAIL = "fail"
    RECOVER = "recover"
    CLOSE = "close"


# The words a message uses for a guard that does not hold.
GUARDS: Final[Mapping[str, tuple[Callable[[Facts], bool], str]]] = {
    "always": (lambda _: True, ""),
    "idle": (lambda f: not f.busy, "nothing in flight or held"),
    "busy": (lambda f: f.busy, "requests in flight or held"),
    "paused_only": (lambda f: f.level == 0 and f.servable, "level 0"),
    "level_0_and_idle": (
        lambda f: f.level == 0 and f.all_resident and not f.in_flight,
        "a pause (level 0) with nothing in flight",
    ),
    "level_0": (lambda f: f.level == 0 and f.all_resident, "level 0"),
    "can_resleep": (lambda f: f.can_resleep, "memory that this engine can put back to sleep"),
    "nothing_resident": (lambda f: f.level is not None and not f.resident, "all memory asleep"),
    "not_servable": (lambda f: not f.servable, "some memory asleep, or weights not valid"),
    "servable_paused": (lambda f: f.servable and f.paused, "everything back, and an explicit pause"),
    "servable_idle": (
        lambda f: f.servable and not f.paused and not f.busy,
        "everything back and nothing in flight or held",
    ),
    "servable_busy": (
        lambda f: f.servable and not f.paused and f.busy,
        "everything back and requests in flight or held",
    ),
    "servable_stays": (
        lambda f: f.servable and (f.paused or f.level == 0),
        "everything back, at a pause (level 0)",
    ),
    "servable_goes_idle": (
        lambda f: f.servable and not (f.paused or f.level == 0) and not f.busy,
        "everything back, no pause, and nothing in flight or held",
    ),
    "servable_goes_busy": (
        lambda f: f.servable and not (f.paused or f.level == 0) and f.busy,
        "everything back, no pause, and requests in flight or held",
    ),
    "serves_idle": (lambda f: f.servable and f.level is None and not f.busy, "a serving, idle engine"),
    "serves_busy": (lambda f: f.servable and f.level is None and f.busy, "a serving, busy engine"),
}


class Rule(NamedTuple):
    """One row: `trigger` moves `source` to `dest` if `guard` holds of the facts after the effect.

    before: the guard that must hold before the engine is asked for that effect.
    """

    trigger: Trigger
    source: State | None
    dest: State
    guard: str = "always"
    before: str = "always"


_A, _R, _D, _S, _P, _F, _C = State

RULES: Final[tuple[Rule, ...]] = (
    # Whatever the engine is found in.
    Rule(Trigger.ATTACH, None, _A, "serves_idle"),
    Rule(Trigger.ATTACH, None, _R, "serves_busy"),
    Rule(Trigger.ATTACH, None, _S, "paused_only"),
    Rule(Trigger.ATTACH, None, _S, "nothing_resident"),
    Rule(Trigger.ATTACH, None, _P, "not_servable"),
    # Requests come and go.
    Rule(Trigger.ADMIT, _A, _R, "busy"),
    Rule(Trigger.SETTLE, _R, _A, "idle"),
    # Sleep: close admission, drain, release, verify.
    Rule(Trigger.DRAIN, _A, _D),
    Rule(Trigger.DRAIN, _R, _D),
    Rule(Trigger.ROLL_BACK, _D, _R, "busy"),
    Rule(Trigger.ROLL_BACK, _D, _A, "idle"),
    Rule(Trigger.SLEPT, _D, _S),
    # From one sleep to another.
    Rule(Trigger.DEEPEN, _S, _S, "nothing_resident", before="level_0"),
    Rule(Trigger.RESLEEP, _P, _S, "nothing_resident", before="can_resleep"),
    Rule(Trigger.RELEASE_KV, _S, _P, "not_servable", before="level_0_and_idle"),
    # Wake, by tags or whole. An explicit pause survives.
    *(
        row
        for source in (_S, _P)
        for row in (
            Rule(Trigger.WAKE, source, _P, "not_servable"),
            Rule(Trigger.WAKE, source, _S, "servable_paused"),
            Rule(Trigger.WAKE, source, _A, "servable_idle"),
            Rule(Trigger.WAKE, source, _R, "servable_busy"),
        )
    ),
    # Weights. A load is no wake: it comes back to the pause that it was made in.
    Rule(Trigger.WEIGHTS_VALID, _P, _S, "servable_stays"),
    Rule(Trigger.WEIGHTS_VALID, _P, _A, "servable_goes_idle"),
    Rule(Trigger.WEIGHTS_VALID, _P, _R, "servable_goes_busy"),
    Rule(Trigger.WEIGHTS_TAINTED, _A, _P, "not_servable"),
    Rule(Trigger.WEIGHTS_TAINTED, _S, _P, "not_servable"),
    # Failure and the end.
    *(Rule(Trigger.FAIL, source, _F) for source in (_A, _R, _D, _S, _P)),
    Rule(Trigger.RECOVER, _F, _A, "serves_idle"),
    Rule(Trigger.RECOVER, _F, _R, "serves_busy"),
    Rule(Trigger.RECOVER, _F, _S, "paused_only"),
    Rule(Trigger.RECOVER, _F, _S, "nothing_resident"),
    Rule(Trigger.RECOVER, _F, _P, "not_servable"),
    *(Rule(Trigger.CLOSE, source, _C) for source in (_A, _R, _D, _S, _P, _F)),
)


def match(trigger: Trigger, source: State | None, facts: Facts) -> Rule | None:
    """The row that `trigger` takes from `source` given `facts`, or None."""
    for rule in RULES:
        if rule.trigger is trigger and rule.source is source and GUARDS[rule.guard][0](facts):
            return rule
    return None


def may_begin(trigger: Trigger, source: State, facts: Facts) -> bool:
    """Whether the engine may be asked for the effect of `trigger`."""
    return any(
        GUARDS[rule.before][0](facts) for rule in RULES if rule.trigger is trigger and rule.source is source
    )


class Need(StrEnum):
    """What a call needs of the engine; `NEED_CHECKS` says when it is met."""

    NOTHING = "nothing"
    ALIVE = "alive"
    QUIET = "quiet"
    SERVING = "serving"
    WEIGHTS = "weights"
    LOADING = "loading"
    SLEEP = "sleep"
    WAKE = "wake"
    RELEASE = "release"
    FAILED = "failed"
    ABORT = "abort"
    MACHINE = "machine"


class NeedCheck(NamedTuple):
    """`states` where the need can be met, the `guard` on the facts, and its words."""

    states: frozenset[State]
    holds: Callable[[Facts], bool]
    words: str


def _always(_: Facts) -> bool:
    return True


def _weights_resident(facts: Facts) -> bool:
    return WEIGHTS in facts.resident


NEED_CHECKS: Final[Mapping[Need, NeedCheck]] = {
    Need.NOTHING: NeedCheck(frozenset(State) - {_C}, _always, "an engine that is not closed"),
    Need.ALIVE: NeedCheck(ALIVE, _always, "an engine that is alive"),
    Need.ABORT: NeedCheck(ALIVE | {_F}, _always, "an engine that is not closed"),
    Need.QUIET: NeedCheck(ALIVE - {_D}, _always, "an engine with no operation under way"),
    Need.SERVING: NeedCheck(SERVING, _always, "a serving engine: all memory awake and weights valid"),
    Need.WEIGHTS: NeedCheck(ALIVE - {_D}, _weights_resident, "weights that are resident"),
    Need.LOADING: NeedCheck(
        ALIVE - {_D},
        # Requests kept over level 2 lost their KV with the weights: a load gives both back.
        lambda f: (
            _weights_resident(f) and (not f.in_flight or f.kept_may_load or f.weights is not Weights.VALID)
        ),
        "weights that are resident, and nothing in flight that pause_generation does not keep",
    ),
    Need.SLEEP: NeedCheck(ALIVE - {_D}, _always, "an engine with no operation under way"),
    Need.WAKE: NeedCheck(ALIVE - {_D}, _always, "an engine with no operation under way"),
    Need.RELEASE: NeedCheck(
        frozenset({_S}),
        GUARDS["level_0_and_idle"][0],
        "a pause (level 0) with nothing in flight",
    ),
    Need.FAILED: NeedCheck(frozenset({_F}), _always, "an engine that failed"),
    Need.MACHINE: NeedCheck(frozenset(), _always, "the lifecycle's own method of that name"),
}

# Every call of the engine's surface. `add_request` needs only a living engine: while
# admission is closed the request is held.
NEEDS: Final[Mapping[str, Need]] = {
    "get_num_unfinished_requests": Need.NOTHING,
    "has_unfinished_requests": Need.NOTHING,
    "is_sleeping": Need.NOTHING,
    "snapshot": Need.NOTHING,
    "get_tokenizer": Need.NOTHING,
    "get_supported_tasks": Need.NOTHING,
    "get_metrics": Need.NOTHING,
    "get_weight_version": Need.NOTHING,
    "do_log_stats": Need.NOTHING,
    "add_request": Need.ALIVE,
    "abort_request": Need.ABORT,
    "step": Need.SERVING,
    "sleep": Need.SLEEP,
    "pause": Need.SLEEP,
    "wake_up": Need.WAKE,
    "resume": Need.WAKE,
    "release_kv_cache_memory": Need.RELEASE,
    "reset_prefix_cache": Need.QUIET,
    "reset_encoder_cache": Need.QUIET,
    "reset_mm_cache": Need.QUIET,
    "start_profile": Need.QUIET,
    "stop_profile": Need.QUIET,
    "collective_rpc": Need.QUIET,  # and what RPC_NEEDS says of the method
    "list_loras": Need.QUIET,
    "set_weight_version": Need.QUIET,
    "mark_weights_loaded": Need.LOADING,
    "apply_model": Need.WEIGHTS,
    "add_lora": Need.WEIGHTS,
    "remove_lora": Need.WEIGHTS,
    "pin_lora": Need.WEIGHTS,
    "reload_weights": Need.LOADING,
    "recover": Need.FAILED,
    "close": Need.NOTHING,
    "detach": Need.NOTHING,
}

# Worker methods behind `collective_rpc`, by name; a callable goes by its `__name__`.
RPC_DEFAULT: Final = Need.QUIET
RPC_NEEDS: Final[Mapping[str, Need]] = {
    "reload_weights": Need.LOADING,
    "load_weights": Need.LOADING,
    "load_model": Need.LOADING,
    "update_weight": Need.LOADING,
    "update_weights": Need.LOADING,
    "start_weight_update": Need.LOADING,
    "start_draft_weight_update": Need.LOADING,
    "finish_weight_update": Need.LOADING,
    "apply_model": Need.WEIGHTS,
    "add_lora": Need.WEIGHTS,
    "remove_lora": Need.WEIGHTS,
    "pin_lora": Need.WEIGHTS,
    "sleep": Need.MACHINE,
    "wake_up": Need.MACHINE,
    "discard": Need.MACHINE,
}
RPC_LOAD_PREFIX: Final = "update_weights"


def rpc_need(method: str, own: Mapping[str, Need]) -> Need:
    """What the worker method `method` needs; the caller's `own` names come first."""
    if method in own:
        return own[method]
    if method in RPC_NEEDS:
        return RPC_NEEDS[method]
    return Need.LOADING if method.startswith(RPC_LOAD_PREFIX) else RPC_DEFAULT


def meets(need: Need, state: State, facts: Facts) -> bool:
    """Whether a call with this need may reach the engine now."""
    check = NEED_CHECKS[need]
    return state in check.states and check.holds(facts)


# What an error message offers instead: the calls that lead somewhere.
STEERING: Final = (
    "recover",
    "reload_weights",
    "mark_weights_loaded",
    "wake_up",
    "resume",
    "step",
    "add_request",
    "abort_request",
    "sleep",
    "pause",
    "release_kv_cache_memory",
    "close",
)


# Calls that the lifecycle makes itself: passed on by name they would go behind it.
OWN_CALLS: Final = frozenset(STEERING) | {"collective_rpc", "load_weights"}


def legal_calls(state: State, facts: Facts) -> tuple[str, ...]:
    """Those of the steering calls that are legal now."""
    return tuple(call for call in STEERING if meets(NEEDS[call], state, facts))


def admits(state: State) -> bool:
    """Whether a new request goes straight to the engine; elsewhere it is held or refused."""
    return state in SERVING
