"""An `AsyncLifecycle` whose thread and event loop move only when a test says so.

Theory of operation
-------------------
Two threads that run freely meet in ways that no test can repeat. Here they pass a *baton*: the engine's
thread, a real one on its real loop, waits at the beginning of each turn, where its queue is empty, and inside
an engine call that hangs. The test lets it run one `turn`, or has the event loop run one iteration (`tick`).
So every order of the two can be had, a task can be cancelled between any two of their moves, and a run is
the same every time.
"""

import ast
import asyncio
import gc
import threading
from collections import deque
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType

from engine_adapter.simulated import SimulatedEngine
from lifecycle import AsyncLifecycle, asynchronous
from tests.audit_runs import Replayed

NEVER_ENDS = 5_000  # turns after which something that should come to rest has not
SOURCE = Path(asynchronous.__file__)


class Inbox:
    """The queue of commands: where it is empty, the thread hands the baton back."""

    def __init__(self, baton):
        self._baton = baton
        self.commands = deque()

    def put(self, command):
        self.commands.append(command)

    def empty(self):
        return not self.commands

    def get(self):
        while not self.commands:
            self._baton.park(idle=True)
        return self.commands.popleft()


class Baton:
    """Whose move it is: the test's, or the engine's thread's."""

    def __init__(self, owner):
        self.idle = self.over = False
        self.hang = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._run, self._turn = owner._run, owner._turn
        self.inbox = owner._inbox = Inbox(self)
        owner._turn = self._paced
        self.thread = owner.thread = threading.Thread(target=self._alone, daemon=True)

    def _alone(self):
        self._go.acquire()
        try:
            self._run()
        finally:
            self.over = True
            self._back.release()

    def _paced(self, core):
        self.park()
        self._turn(core)

    def park(self, *, idle=False):
        """In the engine's thread: wait for its next turn."""
        self.idle = idle
        self._back.release()
        self._go.acquire()
        self.idle = False

    @property
    def rests(self):
        """Whether a turn would change nothing."""
        return self.over or self.hang or self.thread.ident is None or (self.idle and self.inbox.empty())

    def turn(self):
        """Let the thread run until it parks again; one that is inside a hanging call does not move."""
        if not (self.over or self.hang or self.thread.ident is None):
            self._go.release()
            assert self._back.acquire(timeout=60), "the engine's thread hangs by itself"

    def wait(self):
        """In the engine's thread: the `hang` of a fault. Passed to `faults.add` in place of an `Event`."""
        self.hang = True
        while self.hang:
            self.park()

    def go_on(self):
        """The call that hangs goes on."""
        if self.hang:
            self.hang = None
            self.turn()


class Bench:
    """A lifecycle on simulated engines, its loop, its thread, and what went wrong unseen."""

    def __init__(self, make=SimulatedEngine, **options):
        self._make = make
        self.engines = []
        self.errors = []
        self.build_fault = None
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.told = Replayed()
        self.life = AsyncLifecycle(self.build, **{**options, "sinks": (*options.get("sinks", ()), self.told)})
        self.owner = self.life._owner
        self.baton = Baton(self.owner)

    def build(self):
        if self.build_fault is not None:
            raise self.build_fault
        self.engines.append(self._make())
        return self.engines[-1]

    @property
    def engine(self):
        return self.engines[-1]

    @property
    def core(self):
        return self.owner.core

    def spawn(self, coroutine):
        return self.loop.create_task(coroutine)

    def turn(self):
        self.baton.turn()

    def tick(self):
        """One iteration of the event loop."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def rest(self):
        """Until neither has anything left to do, or an engine call hangs."""
        for _ in range(NEVER_ENDS):
            while self.loop._ready:
                self.tick()
            if self.baton.rests:
                return
            self.turn()
        raise AssertionError("it never comes to rest")

    def run(self, coroutine):
        """What comes of it, at rest. It must come to its end."""
        task = self.spawn(coroutine)
        self.rest()
        assert task.done(), f"nobody ends {coroutine}"
        return task.result()

    def put_away(self):
        """Whatever state it is in: no thread and no loop is left."""
        try:
            self.baton.go_on()
            if self.baton.thread.ident is not None and not self.baton.over:
                for engine in self.engines:
                    engine.faults.clear()
                self.spawn(self.life.close(drain=False))
                self.rest()
                self.baton.go_on()
                self.rest()
                assert self.baton.over
        finally:
            asynchronous._living.discard(self.life)  # the interpreter need not wait for one that a test broke
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            while self.loop._ready:
                self.tick()
            self.loop.close()

    # -- what must hold whenever the thread is between two turns ---------------------------------------

    def broken(self):
        """Broken promises; empty unless the library has a bug."""
        found = [f"unseen: {context}" for context in self.errors]
        found += [f"misuse: {line}" for engine in self.engines for line in engine.misuse]
        if self.core is not None and not self.baton.hang:
            found += self.core.check()
            found += self.told.check(self.core)
            found += self._disowned(self.core.transition)
        return found

    def _disowned(self, sleep):
        """The thread has the sleep under way in hand, and its drain has someone who waits or just left."""
        owner = self.owner
        if sleep is None:
            return []
        if self.baton.over or owner._sleep is not sleep:
            return [f"nobody carries on {sleep}"]
        waits = [answer for answer in owner._sleepers if not answer.done()]
        leaving = owner._sleepers and (self.loop._ready or any(map(_gives_up, self.baton.inbox.commands)))
        wanted = waits or owner._closers or leaving or not sleep.draining
        return [] if wanted else [f"nobody waits for {sleep}"]


def _gives_up(command):
    return "give_up" in getattr(command.work, "__code__", _gives_up.__code__).co_names


# -- await points --------------------------------------------------------------------------------------


def await_points():
    """Every place of the source where a coroutine or an async generator may stand still.

    Maps (function, line, what) to the lines of it, smallest first.
    """
    points = {}

    def visit(node, function):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            function = f"{function}.{node.name}".strip(".")
        lines = range(node.lineno, node.end_lineno + 1) if hasattr(node, "lineno") else range(0)
        if isinstance(node, (ast.AsyncFor, ast.AsyncWith)):
            lines = range(node.lineno, node.body[0].lineno)
        kinds = {
            ast.Await: "await",
            ast.AsyncFor: "async for",
            ast.AsyncWith: "async with",
            ast.Yield: "yield",
        }
        if kind := kinds.get(type(node)):
            what = ast.get_source_segment(text, node).splitlines()[0].split("  #")[0]
            points[function, kind, what, node.lineno] = lines
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    text = SOURCE.read_text()
    visit(ast.parse(text), "")
    return points


def stands_at(*awaitables):
    """The await points at which a task, or a generator that somebody holds, is suspended now."""
    places, seen, left = [], set(), [*awaitables]
    while left:
        found = left.pop()
        if isinstance(found, asyncio.Task):
            found = found.get_coro()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, CoroutineType):
            frame, inner = found.cr_frame, found.cr_await
        elif isinstance(found, AsyncGeneratorType):
            frame, inner = found.ag_frame, found.ag_await
        else:  # what `anext` and `aclose` make: the generator is inside
            left += [each for each in gc.get_referents(found) if _may_stand(each)]
            continue
        if frame is None:
            continue
        left.append(inner)
        left += [each for each in frame.f_locals.values() if isinstance(each, AsyncGeneratorType)]
        started = frame.f_lineno != frame.f_code.co_firstlineno
        if started and frame.f_code.co_filename == str(SOURCE):
            places.append((frame.f_code.co_qualname, frame.f_lineno))
    return places


def _may_stand(found):
    return isinstance(found, (CoroutineType, AsyncGeneratorType)) or "async_gen" in type(found).__name__


def point_of(place, points):
    """The await point of a place of `stands_at`: the smallest that has its line."""
    function, line = place
    inside = [point for point, lines in points.items() if point[0] == function and line in lines]
    return min(inside, key=lambda point: len(points[point])) if inside else None
