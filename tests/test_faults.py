"""The fault matrix: each engine call, failing in each way, from each state that it can be made from.

A *route* is a state, what a caller does there, the engine calls that this makes, and the state that
follows. A *cell* is a route, one of its calls and a way to fail:

`before`, `after`
    it raises, without or with its effect
`wrong`
    it returns what it should not, or did not do what it says: each of `WRONG`
`hang`
    it does not return
`interrupt`
    a KeyboardInterrupt comes out of it

What must follow is written here by hand, without the lifecycle's own table: `OUTCOMES` and its exceptions.
"""

import contextlib
import gc
import re
import threading
import time
from functools import partial

import pytest

from engine_adapter.simulated import RequestOutput
from lifecycle import CacheNotReset, EngineFailed, IllegalCall, State, WakeFailed
from lifecycle.engine import Condition, OutOfDeviceMemory, Progress
from tests import fault_world as at
from tests import report
from tests.fault_world import CALLS, OPS

KINDS = ("before", "after", "wrong", "hang", "interrupt")

# -- the states ------------------------------------------------------------------------------------

SCENES = {
    "nothing yet, a busy engine": (at.found_busy, None),
    "nothing yet, dummy weights": (at.found_dummy, None),
    "awake": (at.idle_after_work, State.AWAKE),
    "running": (at.running, State.RUNNING),
    "running, all silent": (at.silent, State.RUNNING),
    "running, launching ahead": (at.launching_ahead, State.RUNNING),
    "draining": (at.draining, State.DRAINING),
    "draining, to keep": (at.draining_to_keep, State.DRAINING),
    "asleep 0": (partial(at.asleep, 0), State.SLEEPING),
    "asleep 0, kept": (partial(at.asleep, 0, "keep"), State.SLEEPING),
    "asleep 0, to flush": (at.paused_to_flush, State.SLEEPING),
    "asleep 0, deepening": (at.deepening, State.SLEEPING),
    "asleep 1": (partial(at.asleep, 1), State.SLEEPING),
    "asleep 1, kept": (partial(at.asleep, 1, "keep"), State.SLEEPING),
    "asleep 1, paused": (at.paused_and_asleep, State.SLEEPING),
    "asleep 2": (partial(at.asleep, 2), State.SLEEPING),
    "asleep 2, kept": (partial(at.asleep, 2, "keep"), State.SLEEPING),
    "weights awake": (partial(at.partly, 1, "weights"), State.PARTIALLY_AWAKE),
    "weights awake, going back": (at.resleeping, State.PARTIALLY_AWAKE),
    "KV cache awake": (partial(at.partly, 1, "kv_cache"), State.PARTIALLY_AWAKE),
    "weights awake, empty": (partial(at.partly, 2, "weights"), State.PARTIALLY_AWAKE),
    "all but valid": (at.all_but_valid, State.PARTIALLY_AWAKE),
    "all but valid, unseen load": (at.loaded_unseen, State.PARTIALLY_AWAKE),
    "updating": (at.updating, State.PARTIALLY_AWAKE),
    "failed": (at.failed, State.FAILED),
}

# -- the routes: what a caller does in a state -> the state that follows | the engine calls it makes ---

TOGETHER = {
    "RECALL": "unstarted abort last_outputs",
    "DRAIN": "has_work tokens step copy_output progress",
    "LAUNCHED": "has_launched tokens step copy_output progress",
    "RELEASE": "memory sleep condition",
    "MAP": "memory wake_up condition",
    "LOOK": "missing_weights reset_caches",
    "RESUME": "resume_scheduling condition",
    "READMIT": "forget_media add",
    "END": "last_outputs abort",
}

ROUTES_IN_WORDS = """
nothing yet, a busy engine
    attach                         -> running         | condition
nothing yet, dummy weights
    attach                         -> partially_awake | condition discard_weights missing_weights
awake
    step                           -> awake           | step
    add                            -> running         | prepare add
    generate, left by an exception -> awake           | prepare add step END
    sleep(1)                       -> sleeping        | unstarted has_work RELEASE
    sleep(1, keep)                 -> sleeping        | pause_scheduling has_launched RELEASE
    reload_weights                 -> awake           | call reset_caches missing_weights
    update                         -> awake           | call reset_caches
    mark_weights_loaded            -> awake           | reset_caches
    rpc                            -> awake           | call
    apply_model                    -> awake           | call
    reset_prefix_cache             -> awake           | call
    close                          -> closed          | shutdown
running
    step                           -> running         | step
    add                            -> running         | prepare add
    abort                          -> running         | END
    generate                       -> awake           | prepare add step copy_output has_work
    sleep(0)                       -> sleeping        | RECALL DRAIN count_tokens RELEASE
    sleep(1)                       -> sleeping        | RECALL DRAIN count_tokens RELEASE
    sleep(1, wait_all)             -> sleeping        | DRAIN count_tokens RELEASE
    sleep(1, abort)                -> sleeping        | END has_work step progress RELEASE
    sleep(1, keep)                 -> sleeping        | pause_scheduling has_launched RELEASE
    sleep(1), rolled back          -> running         | RECALL DRAIN RESUME READMIT
    sleep(1), falling through      -> sleeping        | RECALL DRAIN RELEASE
    pause                          -> sleeping        | pause_scheduling has_launched RELEASE
    rpc                            -> running         | call
    apply_model                    -> running         | call
    close                          -> closed          | END shutdown
running, all silent
    step                           -> running         | step has_work
running, launching ahead
    step                           -> running         | step
    abort                          -> running         | END
    sleep(1)                       -> sleeping        | RECALL DRAIN count_tokens RELEASE
    sleep(1, keep)                 -> sleeping        | pause_scheduling LAUNCHED RELEASE
    close                          -> closed          | END shutdown
draining
    add                            -> draining        | prepare validate
    abort                          -> draining        | END
    advance                        -> sleeping        | DRAIN count_tokens RELEASE
    cancel                         -> running         | RESUME READMIT
    close                          -> closed          | END shutdown
draining, to keep
    advance                        -> sleeping        | LAUNCHED RELEASE
    cancel                         -> running         | RESUME
    detach                         -> closed          | RESUME
    close                          -> closed          | END shutdown
asleep 0
    add                            -> sleeping        | prepare validate
    sleep(2)                       -> sleeping        | has_launched RELEASE
    wake_up                        -> running         | memory RESUME READMIT
    release_kv_cache_memory        -> partially_awake | has_work release_kv_cache_memory condition
    reload_weights                 -> sleeping        | call reset_caches missing_weights
    rpc                            -> sleeping        | call
    close                          -> closed          | shutdown
asleep 0, kept
    abort                          -> sleeping        | END
    sleep(1, abort)                -> sleeping        | END has_launched RELEASE
    sleep(1, keep)                 -> sleeping        | has_launched RELEASE
    wake_up                        -> running         | memory RESUME
    close                          -> closed          | END shutdown
asleep 0, to flush
    release_kv_cache_memory        -> partially_awake | has_work step release_kv_cache_memory condition
asleep 0, deepening
    add                            -> sleeping        | prepare validate
    abort                          -> sleeping        | END
    advance                        -> sleeping        | has_launched RELEASE
    close                          -> closed          | END shutdown
asleep 1
    add                            -> sleeping        | prepare validate
    wake_up                        -> running         | MAP resume_scheduling READMIT
    wake_up(weights)               -> partially_awake | MAP
    wake_up(kv_cache)              -> partially_awake | MAP
    rpc                            -> sleeping        | call
    close                          -> closed          | shutdown
asleep 1, kept
    abort                          -> sleeping        | END
    wake_up                        -> running         | MAP resume_scheduling
    close                          -> closed          | END shutdown
asleep 1, paused
    wake_up                        -> sleeping        | MAP pause_scheduling
asleep 2
    wake_up                        -> partially_awake | MAP discard_weights missing_weights
    wake_up(weights)               -> partially_awake | MAP discard_weights missing_weights
    close                          -> closed          | shutdown
    add                            -> sleeping        | prepare validate
    rpc                            -> sleeping        | call
asleep 2, kept
    wake_up                        -> partially_awake | MAP discard_weights missing_weights
    abort                          -> sleeping        | END
    close                          -> closed          | END shutdown
weights awake
    add                            -> partially_awake | prepare validate
    sleep(1)                       -> sleeping        | has_launched RELEASE
    wake_up                        -> running         | MAP resume_scheduling READMIT
    update                         -> partially_awake | call reset_caches
    apply_model                    -> partially_awake | call
    close                          -> closed          | shutdown
weights awake, going back
    add                            -> partially_awake | prepare validate
    advance                        -> sleeping        | has_launched RELEASE
    close                          -> closed          | shutdown
KV cache awake
    wake_up                        -> running         | MAP resume_scheduling READMIT
    add                            -> partially_awake | prepare validate
    rpc                            -> partially_awake | call
    close                          -> closed          | shutdown
weights awake, empty
    reload_weights                 -> partially_awake | call LOOK
    wake_up                        -> partially_awake | MAP missing_weights
all but valid
    add                            -> partially_awake | missing_weights prepare validate
    reload_weights                 -> running         | call LOOK RESUME READMIT
    update                         -> partially_awake | call reset_caches
    sleep(1)                       -> sleeping        | has_launched RELEASE
    close                          -> closed          | shutdown
all but valid, unseen load
    add                            -> running         | LOOK RESUME READMIT prepare
    wake_up                        -> running         | memory missing_weights RESUME READMIT
    mark_weights_loaded            -> running         | LOOK RESUME READMIT
    generate                       -> awake           | LOOK RESUME READMIT prepare step copy_output has_work
    generate, left by an exception -> running         | LOOK RESUME READMIT prepare step copy_output END
updating
    end of update                  -> running         | call reset_caches RESUME READMIT
    reload_weights                 -> running         | call reset_caches missing_weights RESUME READMIT
    add                            -> partially_awake | prepare validate
    sleep(1)                       -> sleeping        | has_launched RELEASE
    wake_up                        -> partially_awake | memory
    close                          -> closed          | shutdown
failed
    recover                        -> running         | shutdown condition READMIT
    close                          -> closed          | shutdown
"""


def _read_routes():
    for line in ROUTES_IN_WORDS.strip().splitlines():
        if not line.startswith(" "):
            scene = line
            continue
        what, follows, words = (part.strip() for part in re.split(r"->|\|", line))
        calls = " ".join(TOGETHER.get(word, word) for word in words.split())
        yield (scene, what), (list(dict.fromkeys(calls.split())), State(follows))


ROUTES = dict(_read_routes())

# -- what an engine may answer instead, and what must come of it -------------------------------------


no_memory = partial(OutOfDeviceMemory, "short", 4096)
half = partial(RuntimeError, "half")


class NoOutput:
    """An output without the fields of one."""


def _of_nobody():
    return RequestOutput("nobody", None, [], [], finished=True)


WRONG = {
    "condition": {
        "None": ({"returns": None}, "fails"),
        "unknown tags": ({"returns": Condition(resident=frozenset({"lora"}))}, "fails"),
    },
    "prepare": {"None": ({"returns": None}, "theirs")},
    "validate": {"something": ({"returns": "yes"}, "nothing")},
    "add": {
        "None": ({"returns": None, "when": "after"}, "fails"),
        "no text": ({"returns": 7, "when": "after"}, "fails"),
    },
    "step": {
        "None": ({"returns": None}, "fails"),
        "no list": ({"returns": {"r": 1}}, "fails"),
        "None for an output": ({"returns": [None]}, "fails"),
        "no fields": ({"returns": [NoOutput()]}, "fails"),
        "of nobody": ({"returns": [_of_nobody()]}, "nothing"),
        "twice": ({"effect": "output_duplicated"}, "nothing"),
    },
    "abort": {
        "ignored": ({"effect": "ignored"}, "ignored"),
        "something": ({"returns": 3, "when": "after"}, "nothing"),
    },
    "last_outputs": {
        "None": ({"returns": None}, "fails"),
        "no fields": ({"returns": [NoOutput()]}, "fails"),
    },
    "unstarted": {
        "None": ({"returns": None}, "fails"),
        "not asked about": ({"returns": ["unknown"]}, "fails"),
    },
    "tokens": {"None": ({"returns": None}, "fails")},
    "progress": {
        "None": ({"returns": None}, "fails"),
        "backwards": ({"returns": Progress(-5, frozenset())}, "nothing"),
    },
    "has_work": {"None": ({"returns": None}, "fails")},
    "has_launched": {"None": ({"returns": None}, "fails")},
    "pause_scheduling": {"not done": ({"returns": None}, "fails")},
    "resume_scheduling": {"not done": ({"returns": None}, "fails")},
    "sleep": {
        "not done": ({"returns": None}, "fails"),
        "freed nothing": ({"effect": "frees_nothing"}, "nothing"),
        "half": ({"effect": "tag_stays_awake"}, "fails"),
        "raises after half": (
            {"effect": "tag_stays_awake", "when": "after", "raises": half},
            "fails",
        ),
    },
    "wake_up": {
        "not done": ({"returns": None}, "retry"),
        "half": ({"effect": "tag_stays_asleep"}, "retry"),
        "no memory": ({"raises": no_memory}, "retry"),
        "no memory after half": (
            {"effect": "tag_stays_asleep", "when": "after", "raises": no_memory},
            "retry",
        ),
        "no memory after all": ({"when": "after", "raises": no_memory}, "fails"),
    },
    "release_kv_cache_memory": {"not done": ({"returns": None}, "fails")},
    "reset_caches": {
        "False": ({"returns": False}, "caches"),
        "None": ({"returns": None}, "caches"),
        "no bool": ({"returns": "done"}, "caches"),
    },
    "forget_media": {"something": ({"returns": 1}, "nothing")},
    "memory": {"None": ({"returns": None}, "fails")},
    "discard_weights": {"not done": ({"returns": None}, "fails")},
    "missing_weights": {"None": ({"returns": None}, "fails"), "a number": ({"returns": 7}, "fails")},
    "copy_output": {
        "None": ({"returns": None}, "fails"),
        "of nobody": ({"returns": _of_nobody()}, "fails"),
    },
    "count_tokens": {"None": ({"returns": None}, "fails")},
    "call": {"something": ({"returns": "?", "when": "after"}, "nothing")},
    "shutdown": {"something": ({"returns": 1, "when": "after"}, "nothing")},
}

# Which of them mean something else on some routes, and why.
WRONG_ELSEWHERE = {
    # Nothing more was asked for than the engine was in already.
    ("running", "sleep(1), rolled back", "resume_scheduling", "not done"): "nothing",
    ("draining", "cancel", "resume_scheduling", "not done"): "nothing",
    ("asleep 1, paused", "wake_up", "pause_scheduling", "not done"): "nothing",
    ("running", "pause", "sleep", "not done"): "nothing",
    ("running", "pause", "sleep", "half"): "nothing",
    ("running", "sleep(0)", "sleep", "half"): "nothing",
    # The step that was to flush the engine did not.
    ("asleep 0, to flush", "release_kv_cache_memory", "step", "of nobody"): "refused",
}

LOADS = frozenset({"reload_weights", "update", "end of update"})
CUTS = frozenset({"sleep(1, abort)", "sleep(1), falling through", "close", "detach"})


def outcome_of(scene, what, call, kind):
    """What a raising call leads to; wrong answers have their own column."""
    if call in {"prepare", "validate"}:
        return "theirs"
    if call == "call" and kind != "interrupt":
        return "taints" if what in LOADS else "theirs"
    if call == "shutdown" and what == "recover" and kind != "interrupt":
        return "nothing"
    return "fails"


# -- cells -----------------------------------------------------------------------------------------

CELLS = {
    (scene, what, call, kind)
    for (scene, what), (calls, _) in ROUTES.items()
    for call in calls
    for kind in KINDS
    if not (what == "attach" and kind == "hang")  # nobody has a lifecycle to ask yet
}
REACHED = set()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """`recover` collects garbage each time: let it not go through all that a test run has loaded."""
    collect, gc.collect = gc.collect, lambda: 0
    yield
    gc.collect = collect


@pytest.fixture(scope="module", autouse=True)
def _every_cell_is_reached(request):
    """At the end of this file all cells were run, and the matrix is printed."""
    yield
    here = [item for item in request.session.items if item.fspath == request.node.path]
    parametrized = [item for item in here if item.function is test_a_fault]
    if len(parametrized) == len(ROUTES) * len(KINDS):
        for line in matrix():
            report.say("fault matrix: in how many states each engine call failed in each way", line)
        assert CELLS == REACHED


def matrix():
    width = max(map(len, CALLS))
    yield f"{'':{width}} " + " ".join(f"{kind:>9}" for kind in KINDS)
    for call in CALLS:
        states = [len({cell[0] for cell in REACHED if cell[2:] == (call, kind)}) for kind in KINDS]
        yield f"{call:{width}} " + " ".join(f"{count:9}" for count in states)
    yield f"{len(REACHED)} of {len(CELLS)} cells reached, on {len(ROUTES)} routes from {len(SCENES)} states"


def cases(call, kind):
    """The faults of a cell, with their names, and the outcome where it is the fault's own."""
    if kind == "wrong":
        for name, (fault, outcome) in WRONG[call].items():
            yield name, fault, outcome
    elif kind == "interrupt":
        yield kind, {"raises": KeyboardInterrupt}, None
    else:
        yield kind, {"raises": partial(RuntimeError, f"{kind} {call}"), "when": kind}, None


class Case:
    """One fault on one route: run it, and judge what came of it."""

    def __init__(self, scene, what, call, nth=1):
        build, self.before = SCENES[scene]
        self.follows = ROUTES[scene, what][1]
        self.scene, self.what, self.call, self.nth = scene, what, call, nth
        self.world = build()
        self.in_flight = set(self.world.core.ledger.in_flight) if self.world.lifecycle else set()
        self.told = {}
        self.error = None

    # -- running ---------------------------------------------------------------------------------

    def script(self, fault):
        world = self.world
        if "raises" in fault:  # made anew each time: an exception that is kept keeps all it went through
            fault = {**fault, "raises": fault["raises"]()}
        if self.what == "attach" or (self.what == "recover" and self.call != "shutdown"):
            world.at_birth = [(self.call, {**fault, "at": self.nth})]
            self.place, self.start = len(world.engines), 0
        else:
            self.place, self.start = len(world.engines) - 1, len(world.engine.log)
            world.engine.faults.add(self.call, at=self.nth, **fault)

    def act(self):
        try:
            OPS[self.what](self.world)
        except BaseException as error:
            self.error = error
        self.world.at_birth = []

    @property
    def log(self):
        """Calls made by the route, of the engine that was struck."""
        return (
            self.world.engines[self.place].log[self.start :] if self.place < len(self.world.engines) else []
        )

    @property
    def since(self):
        """Engine calls after the one that was struck."""
        log = self.log
        places = [place for place, name in enumerate(log) if name == self.call]
        return log[places[self.nth - 1] + 1 :]

    # -- judging -----------------------------------------------------------------------------------

    def judge(self, outcome, kind):
        self.kind = kind
        self.sound()
        if self.what == "attach" and outcome == "fails":
            return self.was_not_born()
        if self.follows is State.CLOSED and outcome == "fails":
            return self.closed_all_the_same()
        getattr(self, outcome)()
        self.sound()
        return None

    def sound(self):
        if self.world.lifecycle is not None:
            self.world.sound()
            assert self.world.lifecycle.snapshot().operation in {None, str(self.world.core.transition)}

    def got(self, *types):
        """The caller got the interrupt, or one of these."""
        if self.kind == "interrupt":
            assert type(self.error) is KeyboardInterrupt, repr(self.error)
        else:
            assert type(self.error) in types, repr(self.error)

    def was_not_born(self):
        self.got(EngineFailed)
        assert self.world.lifecycle is None
        assert self.world.engine.closed

    def fails(self):
        """FAILED: the ended were told, nothing else reached the engine, a new one serves what was held."""
        world, life = self.world, self.world.lifecycle
        self.got(EngineFailed)
        assert life.state is State.FAILED
        reads = {"last_outputs"} if self.kind != "wrong" else CALLS_THAT_READ
        assert set(self.since) <= reads, self.since
        held = set(world.core.ledger.held)
        if self.kind != "interrupt":
            assert set(self.error.held) == held
        with contextlib.suppress(EngineFailed):
            world.finish()
        self.nothing_is_legal()
        self.all_told(held)
        admitted = life.recover()
        assert set(admitted) == held
        self.serves_anew(held)

    def all_told(self, held):
        world = self.world
        added = {call[4:-1] for engine in world.engines for call in engine.calls if call.startswith("add(")}
        for name in set(world.asked) - world.aborted:
            if name in held:
                assert not world.last(name), name
            elif name.startswith(("mine", "new")):  # its caller got the exception
                assert len(world.last(name)) <= 1, name
            else:
                assert world.is_right(name) or (world.is_cut(name) and name in added), name

    def nothing_is_legal(self):
        log = list(self.world.engine.log)
        for what in ("step", "add", "sleep(1)", "wake_up", "resume", "reload_weights", "rpc", "apply_model"):
            try:
                OPS[what](self.world)
            except EngineFailed:
                continue
            raise AssertionError(f"{what} is legal on a failed engine")
        self.world.asked.pop("new", None)
        assert self.world.engine.log == log

    def serves_anew(self, held=()):
        world = self.world
        world.add_of_all_kinds("anew", 3)
        world.finish()
        for name in [*held, *(name for name in world.asked if name.startswith("anew"))]:
            assert world.is_right(name), name
        world.lifecycle.sleep(1)
        world.lifecycle.close()

    def closed_all_the_same(self):
        """CLOSED whatever the engine says to it; what was in flight ended, and is there to be taken."""
        world = self.world
        self.got(EngineFailed, RuntimeError)
        assert world.lifecycle.state is State.CLOSED
        if self.what == "close" and (self.call, self.kind) not in {
            ("shutdown", "before"),
            ("shutdown", "interrupt"),
        }:
            assert world.engine.closed
        world.finish()
        self.all_told_at_the_end()

    def all_told_at_the_end(self):
        world = self.world
        told = set(world.asked) - world.aborted if self.what == "close" else set()
        for name in told:
            ended = world.is_right(name) or world.is_cut(name)
            assert ended or not world.outputs.get(name), name
            assert name not in self.in_flight or world.last(name), name

    def nothing(self):
        """As if nothing had been."""
        assert self.error is None, repr(self.error)
        assert self.world.lifecycle.state is self.follows
        self.all_right(over=False)

    def theirs(self):
        """The exception is the caller's; the rest never noticed."""
        self.got(RuntimeError, TypeError)
        state = State.RUNNING if self.scene == "all but valid, unseen load" else self.before
        assert self.world.lifecycle.state is state
        self.world.asked.pop("new", None)
        self.world.asked = {name: how for name, how in self.world.asked.items() if name[:4] != "mine"}
        self.all_right(over=False)

    def taints(self):
        """The exception is the caller's; nothing is served until the weights were loaded whole."""
        self.got(RuntimeError)
        assert self.world.lifecycle.state is State.PARTIALLY_AWAKE
        assert self.world.lifecycle.snapshot().weights == "tainted"
        self.all_right()

    def refused(self):
        """Nothing was done."""
        self.got(IllegalCall)
        assert self.world.lifecycle.state is self.before
        self.all_right(over=False)

    def caches(self):
        """Caches that were computed with the old weights are not served from."""
        self.got(CacheNotReset)
        assert self.world.lifecycle.state is State.PARTIALLY_AWAKE
        assert self.world.lifecycle.snapshot().weights == "tainted"
        self.world.asked.pop("new", None)
        self.all_right()

    def retry(self):
        """What came back is what the engine says, and the wake can be tried again."""
        life = self.world.lifecycle
        self.got(WakeFailed)
        assert life.snapshot().resident == self.world.engine.condition().resident
        assert life.is_sleeping()
        assert set(self.error.tags) == {"weights", "kv_cache"} - life.snapshot().resident & set(
            self.error.tags
        )
        self.all_right()

    def ignored(self):
        """What goes on in the engine reaches nobody, and its id is not given away before it ended."""
        world = self.world
        assert self.error is None, repr(self.error)
        assert world.lifecycle.state is self.follows
        before = {name: len(world.outputs.get(name, [])) for name in world.aborted}
        self.all_right(over=False)
        assert {name: len(world.outputs.get(name, [])) for name in world.aborted} == before
        if world.lifecycle.state is State.CLOSED:
            return
        while world.engine.has_work():
            world.step()
        for name in world.aborted:
            world.outputs.pop(name, None)
            world.lifecycle.add_request(name, *world.asked[name])
        world.finish()
        assert all(world.is_right(name) for name in world.aborted)

    def all_right(self, *, over=True):
        world = self.world
        if world.lifecycle.state is State.CLOSED:
            world.finish()
            self.all_told_at_the_end()
            return
        world.serve()
        world.finish()
        for name in set(world.asked) - world.aborted:
            cut = self.what in CUTS and name in self.in_flight and world.is_cut(name)
            assert world.is_right(name) or cut, name
        for name in world.aborted:
            assert not world.last(name), name
        if over:
            self.serves_anew()


CALLS_THAT_READ = frozenset(
    {
        "condition",
        "prepare",
        "validate",
        "last_outputs",
        "unstarted",
        "tokens",
        "progress",
        "has_work",
        "has_launched",
        "memory",
        "missing_weights",
        "copy_output",
        "count_tokens",
    }
)

# -- the matrix --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scene", "what"), ROUTES, ids=[f"{scene} - {what}" for scene, what in ROUTES])
def test_a_fault(scene, what, kind):
    """Each engine call of the route fails in this way; see `Case` for what each outcome means."""
    for call in ROUTES[scene, what][0]:
        if (scene, what, call, kind) not in CELLS:
            continue
        if kind == "hang":
            hang(scene, what, call)
        else:
            for name, fault, usual in cases(call, kind):
                outcome = WRONG_ELSEWHERE.get((scene, what, call, name), usual)
                case = Case(scene, what, call)
                case.script(dict(fault))
                try:
                    case.act()
                    case.judge(outcome or outcome_of(scene, what, call, kind), kind)
                except AssertionError as error:
                    error.add_note(
                        f"{scene} | {what} | {call} | {kind}: {name}; the caller got {case.error!r}"
                    )
                    raise
        REACHED.add((scene, what, call, kind))


# What a snapshot calls the operation while a call hangs: by the call, else by what the caller did.
SHOWN_BY_CALL = {
    "prepare": "add_request",
    "validate": "add_request",
    "add": "add_request",
    "forget_media": "add_request",
    "abort": "abort_request",
    "step": "step",
    "copy_output": "step",
    **{
        call: call
        for call in (
            "pause_scheduling",
            "resume_scheduling",
            "sleep",
            "wake_up",
            "release_kv_cache_memory",
            "reset_caches",
            "discard_weights",
            "missing_weights",
        )
    },
}
# Whether the engine schedules again is read at once.
RESUME_BY_THE_WAY = frozenset(
    {
        "add",
        "cancel",
        "generate",
        "generate, left by an exception",
        "end of update",
        "mark_weights_loaded",
        "reload_weights",
        "sleep(1), rolled back",
    }
)
SHOWN_BY_ROUTE = {
    "step": "step",
    "generate": "step",
    "generate, left by an exception": "abort_request",
    "abort": "abort_request",
    "sleep(0)": "sleep(level=0, mode=wait)",
    "sleep(1)": "sleep(level=1, mode=wait)",
    "sleep(2)": "sleep(level=2, mode=wait)",
    "sleep(1, wait_all)": "sleep(level=1, mode=wait_all)",
    "sleep(1, abort)": "sleep(level=1, mode=abort)",
    "sleep(1, keep)": "sleep(level=1, mode=keep)",
    "sleep(1), rolled back": "sleep(level=1, mode=wait)",
    "sleep(1), falling through": "sleep(level=1, mode=wait)",
    "pause": "pause(level=0, mode=keep)",
    "wake_up": "wake_up",
    "wake_up(weights)": "wake_up",
    "wake_up(kv_cache)": "wake_up",
    "release_kv_cache_memory": "release_kv_cache_memory",
    "reload_weights": "reload_weights",
    "update": "update_weights",
    "end of update": "finish_weight_update",
    "rpc": "collective_rpc('ping')",
    "apply_model": "apply_model",
    "reset_prefix_cache": "reset_prefix_cache",
    "recover": "recover",
    "detach": "detach",
    "close": "close",
}


def shown(case):
    if case.call in SHOWN_BY_CALL and case.scene != "asleep 0, to flush":
        return SHOWN_BY_CALL[case.call]
    if case.what == "advance":
        return str(case.world.sleep)
    if case.call == "condition" and case.what in RESUME_BY_THE_WAY:
        return "resume_scheduling"
    return SHOWN_BY_ROUTE[case.what]


def hang(scene, what, call):
    """A call that does not return is seen from a second thread at once, and nothing that only reads waits."""
    case = Case(scene, what, call)
    let_go = threading.Event()
    case.script({"hang": let_go})
    world = case.world
    acting = threading.Thread(target=case.act)
    acting.start()
    try:
        in_time(lambda: case.call in case.log)
        time.sleep(0.001)
        reading = threading.Thread(target=read_all, args=(world.lifecycle,))
        reading.start()
        reading.join(1)
        assert not reading.is_alive()
        seen = world.lifecycle.snapshot()
        assert seen.operation == shown(case), (scene, what, call)
        assert 0 < seen.operation_age_s < 5, (scene, what, call)
    finally:
        let_go.set()
        acting.join(5)
    assert not acting.is_alive()
    case.judge("nothing", "hang")


def in_time(condition, seconds=1.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.0005)
    raise AssertionError(f"not within {seconds} s")


def read_all(lifecycle):
    lifecycle.snapshot()
    lifecycle.events()
    lifecycle.is_sleeping()
    lifecycle.has_unfinished_requests()
    repr((lifecycle, lifecycle.state, lifecycle.capabilities))


def test_routes_make_the_calls_they_say():
    """Without a fault each route makes exactly the engine calls written beside it, and ends where it says."""
    for (scene, what), (calls, follows) in ROUTES.items():
        world = SCENES[scene][0]()
        start = [len(engine.log) for engine in world.engines]
        OPS[what](world)
        made = {
            name for engine, at_ in zip(world.engines, [*start, 0], strict=False) for name in engine.log[at_:]
        }
        assert (made, world.lifecycle.state) == (set(calls), follows), (scene, what)


def test_no_other_call_is_made_from_any_state():
    """Whatever a caller does in a state, legal or not, no engine call is made that the routes do not list."""
    unlisted = {}
    for scene, (build, _) in SCENES.items():
        listed = {
            call
            for (where, _), (calls, _) in ROUTES.items()
            if where.split(",")[0] == scene.split(",")[0]
            for call in calls
        }
        for what, act in OPS.items():
            world = build()
            if world.lifecycle is None or what == "attach":
                continue
            start = len(world.engine.log)
            with contextlib.suppress(Exception):
                act(world)
            if more := set(world.engines[0].log[start:]) - listed:
                unlisted[scene, what] = more
            world.sound()
    assert unlisted == {}


def test_every_call_of_the_protocol_is_on_a_route():
    """A method that is new in the protocol needs cells, and words for its wrong answers."""
    on_routes = {call for calls, _ in ROUTES.values() for call in calls}
    assert on_routes == set(CALLS)
    assert set(WRONG) == set(CALLS)
