"""A lifecycle in any state with requests in it, on an engine that keeps a log: for the tests of faults."""

import contextlib
import functools
from typing import NamedTuple

from engine_adapter.simulated import (
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    expected_tokens,
    make_weights,
)
from lifecycle import DrainTimeout, Lifecycle, State
from lifecycle.engine import Engine
from tests.audit_runs import Replayed

# `merge_outputs` is not among them: it touches no engine, and only streams need it (see test_asynchronous).
CALLS = tuple(
    name
    for name, method in vars(Engine).items()
    if name[0] != "_" and callable(method) and name != "merge_outputs"
)


class Watched(SimulatedEngine):
    """Lists every call of the protocol, reads included, when it is made."""

    def __post_init__(self):
        super().__post_init__()
        self.log = []


def _listed(name):
    method = getattr(SimulatedEngine, name)

    def call(self, *args, **kwargs):
        self.log.append(name)
        return method(self, *args, **kwargs)

    return call


for _name in CALLS:
    setattr(Watched, _name, _listed(_name))


class Seen(NamedTuple):
    """What a caller keeps of an output."""

    tokens: list[int]
    reason: str | None
    finished: bool


@functools.cache
def _undisturbed(prompt, tokens, seed):
    return expected_tokens(prompt, SamplingParams(max_tokens=tokens, seed=seed))


def undisturbed(prompt, params):
    return _undisturbed(prompt, params.max_tokens, params.seed)


class World:
    """A lifecycle around engines of its own making, what was asked of it, and what came out.

    at_birth: faults scripted on the next engine before the lifecycle sees it.
    """

    def __init__(self, *, born=None, options=None, requests=False, **engine):
        self.engines = []
        self.at_birth = []
        self._born = born
        self._requests = requests  # whether each is told to a sink
        self._engine = {"max_num_seqs": 3, **engine}
        self._options = options or {}
        self.asked = {}
        self.outputs = {}
        self.aborted = set()
        self.sleep = None  # a step object under way
        self.lifecycle = None

    def start(self):
        self.told = Replayed(requests=self._requests)
        self.lifecycle = Lifecycle(self._build, sinks=(self.told,), **self._options)
        return self

    def _build(self):
        engine = Watched(**self._engine)
        if self._born and not self.engines:
            self._born(self, engine)
        self.engines.append(engine)
        engine.log.clear()
        for call, fault in self.at_birth:
            engine.faults.add(call, **fault)
        return engine

    @property
    def engine(self):
        return self.engines[-1]

    @property
    def core(self):
        return self.lifecycle._core

    # -- requests ----------------------------------------------------------------------------------

    def params(self, name, tokens, kind):
        params = SamplingParams(max_tokens=tokens, seed=sum(map(ord, name)), output_kind=kind)
        self.asked[name] = (name[-8:], params)
        return self.asked[name]

    def add(self, name, tokens=6, kind=OutputKind.CUMULATIVE):
        self.lifecycle.add_request(name, *self.params(name, tokens, kind))

    def add_of_all_kinds(self, mark, tokens):
        for place, kind in enumerate(OutputKind):
            self.add(f"{mark}-{kind.name.lower()}", tokens + place, kind)

    def take(self, outputs):
        for output in outputs:
            sample = output.outputs[0]
            seen = Seen(list(sample.token_ids), sample.finish_reason, output.finished)
            self.outputs.setdefault(output.request_id, []).append(seen)

    def step(self, times=1):
        for _ in range(times):
            self.take(self.lifecycle.step())

    def finish(self):
        """What a caller's loop does."""
        for _ in range(2000):
            if not self.lifecycle.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("the caller's loop spins")

    # -- what came out -----------------------------------------------------------------------------

    def last(self, name):
        return [output for output in self.outputs.get(name, []) if output.finished]

    def tokens(self, name):
        outputs = self.outputs.get(name, [])
        if self.asked[name][1].output_kind is OutputKind.DELTA:
            return [token for output in outputs for token in output.tokens]
        return outputs[-1].tokens if outputs else []

    def is_right(self, name):
        """It ended once, with exactly the tokens of an undisturbed run."""
        return len(self.last(name)) == 1 and self.tokens(name) == undisturbed(*self.asked[name])

    def is_cut(self, name):
        """It ended once, before its time, with tokens that are the beginning of the right ones."""
        last, tokens = self.last(name), self.tokens(name)
        return (
            len(last) == 1
            and last[0].reason in {"abort", "error"}
            and tokens == undisturbed(*self.asked[name])[: len(tokens)]
        )

    def sound(self):
        assert self.lifecycle.check() == []
        assert [engine.misuse for engine in self.engines] == [[] for _ in self.engines]
        assert self.told.check(self.core) == []

    # -- back to service ---------------------------------------------------------------------------

    def serve(self):
        """Whatever the state, do what its error message says until the engine serves."""
        life = self.lifecycle
        if self.sleep is not None and life._core.transition is self.sleep:
            while self.sleep.advance() is None:
                pass
        for _ in range(4):
            if life.state in (State.AWAKE, State.RUNNING):
                return
            if life.state is State.FAILED:
                life.recover()
                continue
            with contextlib.suppress(Exception):
                self.take(life.step())
            life.resume()
            life.wake_up()
            if life.is_sleeping():
                if life.snapshot().in_flight and life.snapshot().weights == "valid":
                    continue
                life.reload_weights()
        raise AssertionError(f"it can't be brought to serve: {life!r}")


# -- states, and the way to each -------------------------------------------------------------------


def awake():
    return World().start()


def idle_after_work():
    world = awake()
    world.add_of_all_kinds("early", 3)
    world.finish()
    world.step()
    return world


def running(**engine):
    """Three have started, one of each kind; three have not."""
    world = World(**engine).start()
    world.add_of_all_kinds("started", 8)
    world.add_of_all_kinds("waiting", 4)
    world.step(3)
    return world


def silent():
    """Nothing but a final-only request: its steps have no outputs."""
    world = awake()
    world.add("silent", 8, OutputKind.FINAL_ONLY)
    world.step(2)
    return world


def launching_ahead():
    return running(batch_queue_size=2)


def _begun(world, *args, steps=0, **kwargs):
    world.sleep = world.core.begin_sleep(*args, **kwargs)
    for _ in range(steps):
        world.sleep.advance()
    return world


def draining():
    return _begun(running(), 1, "wait", steps=2)


def draining_to_keep():
    return _begun(launching_ahead(), 1, "keep")


def asleep(level, mode="wait", build=running):
    world = build()
    world.lifecycle.sleep(level, mode)
    return world


def paused_to_flush():
    """Kept requests were aborted at a pause: the workers must still be told."""
    world = asleep(0, "keep")
    world.aborted = set(world.asked)
    world.lifecycle.abort_request(list(world.asked))
    return world


def deepening():
    return _begun(asleep(0, "keep"), 1, "keep")


def resleeping():
    world = partly(1, "weights")
    return _begun(world, 1, "wait")


def partly(level, *tags):
    world = asleep(level)
    world.lifecycle.wake_up(list(tags))
    return world


def all_but_valid():
    world = asleep(2)
    world.lifecycle.wake_up()
    return world


def loaded_unseen():
    world = all_but_valid()
    world.engine.load_weights(make_weights().items())
    return world


def updating():
    world = idle_after_work()
    world.lifecycle.collective_rpc("start_weight_update")
    world.add("during")
    return world


def paused_and_asleep():
    world = running()
    world.lifecycle.pause("keep")
    world.lifecycle.sleep(1, "keep")
    return world


def failed():
    world = running()
    world.lifecycle.sleep(0)
    world.take(world.lifecycle.step())
    world.lifecycle.add_request("unserved", *world.params("unserved", 5, OutputKind.DELTA))
    world.engine.faults.add("sleep", raises=RuntimeError("half"))
    with contextlib.suppress(Exception):
        world.lifecycle.sleep(1)
    return world


def found_busy():
    def born(world, engine):
        for place, kind in enumerate(OutputKind):
            name = f"found-{kind.name.lower()}"
            engine.add(engine.prepare(name, *world.params(name, 5 + place, kind), {}))

    return World(born=born)


def found_dummy():
    return World(dummy_weights=True)


# -- what callers do -------------------------------------------------------------------------------


class Left(Exception):
    """What a caller's own code raises inside a blocking call."""


def _abort(world):
    names = [name for name in ("started-cumulative", "waiting-delta") if name in world.asked]
    world.aborted |= {name for name in names if not world.last(name)}
    world.lifecycle.abort_request(names)


def _rolled_back(world):
    with contextlib.suppress(DrainTimeout):
        world.lifecycle.sleep(1, max_steps=1)


def _advance(world):
    while world.sleep.advance() is None:
        pass


def _generate(world):
    """A blocking call beside others' requests."""
    with world.lifecycle.scope("generate"):
        for place, kind in enumerate(OutputKind):
            world.add(f"mine-{kind.name.lower()}", 3 + place, kind)
        world.finish()


def _left(world):
    with contextlib.suppress(Left), world.lifecycle.scope("generate"):
        world.aborted.add("mine")
        world.add("mine")
        world.step()
        raise Left


OPS = {
    "attach": World.start,
    "step": World.step,
    "add": lambda world: world.add("new", 5, OutputKind.DELTA),
    "abort": _abort,
    "generate": _generate,
    "generate, left by an exception": _left,
    "sleep(0)": lambda world: world.lifecycle.sleep(0),
    "sleep(1)": lambda world: world.lifecycle.sleep(1),
    "sleep(2)": lambda world: world.lifecycle.sleep(2),
    "sleep(1, wait_all)": lambda world: world.lifecycle.sleep(1, "wait_all"),
    "sleep(1, abort)": lambda world: world.lifecycle.sleep(1, "abort"),
    "sleep(1, keep)": lambda world: world.lifecycle.sleep(1, "keep"),
    "sleep(1), rolled back": _rolled_back,
    "sleep(1), falling through": lambda world: world.lifecycle.sleep(1, max_steps=1, on_timeout="abort"),
    "pause": lambda world: world.lifecycle.pause(),
    "advance": _advance,
    "cancel": lambda world: world.sleep.cancel(),
    "wake_up": lambda world: world.lifecycle.wake_up(),
    "wake_up(weights)": lambda world: world.lifecycle.wake_up(["weights"]),
    "wake_up(kv_cache)": lambda world: world.lifecycle.wake_up(["kv_cache"]),
    "resume": lambda world: world.lifecycle.resume(),
    "release_kv_cache_memory": lambda world: world.lifecycle.release_kv_cache_memory(),
    "reload_weights": lambda world: world.lifecycle.reload_weights(),
    "update": lambda world: world.lifecycle.collective_rpc("update_weights"),
    "end of update": lambda world: world.lifecycle.collective_rpc("finish_weight_update"),
    "mark_weights_loaded": lambda world: world.lifecycle.mark_weights_loaded(),
    "rpc": lambda world: world.lifecycle.collective_rpc("ping"),
    "apply_model": lambda world: world.lifecycle.apply_model(len),
    "reset_prefix_cache": lambda world: world.lifecycle.reset_prefix_cache(),
    "recover": lambda world: world.lifecycle.recover(),
    "detach": lambda world: world.lifecycle.detach(),
    "close": lambda world: world.lifecycle.close(),
}
