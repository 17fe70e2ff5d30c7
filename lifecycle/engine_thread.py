"""The thread that owns an engine: it builds it, serves commands, steps, drains and closes it.

Theory of operation
-------------------
An engine is not thread-safe and its calls block, so one thread alone enters the core.
Others *submit* commands, which it runs in order between two steps, also while it
drains. What a turn of its loop brought (outputs, ends of streams, answers to commands)
is handed over as one `Batch`, so that the crossing costs once per step and not once per
request. The thread knows no event loop: `hand_over` is whatever takes a batch.

A sleep under way belongs to this thread. Callers who asked for the same sleep wait for
the same answer; when the last of them gives up while it still drains, it is rolled back.
No legality is decided here: every command is a call of the core, which refuses.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

from lifecycle.core import Core, closed
from lifecycle.engine import Engine, SelfDriven
from lifecycle.errors import DrainStalled, IllegalCall, InternalError, LifecycleError
from lifecycle.events import EventLog
from lifecycle.requests import Scope
from lifecycle.sleep import Sleep
from lifecycle.table import ALIVE, State

# So many commands at most are run before the next step, lest a flood of requests starve those in flight.
COMMANDS_A_TURN = 256
# How long an engine that drives itself is left alone while it is drained, before the clock is looked at.
WATCH_S = 0.05


class Stream(Protocol):
    """Where the outputs of a request go. The thread says whose it is when it was admitted.

    delta: each output has the new tokens only, and shares no list. samples: `n` of the request.
    """

    request_id: str | None
    delta: bool
    samples: int


class Batch:
    """What one turn of the thread brought, in the order in which it is to be given out.

    outputs: (stream, output). ends: (stream, error or None), after its last output.
    answers: (what was submitted with the command, result, error).
    """

    __slots__ = ("answers", "ends", "last", "outputs")

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, Any]] = []
        self.ends: list[tuple[Any, BaseException | None]] = []
        self.answers: list[tuple[Any, Any, BaseException | None]] = []
        self.last = False  # the thread has ended

    def __bool__(self) -> bool:
        return bool(self.outputs or self.ends or self.answers)


class Command(NamedTuple):
    """A piece of work for the thread; its outcome goes to `answer`, unless that is None."""

    work: Callable[[], Any]
    answer: Any


class _Later:
    """Returned by a command that is answered by and by."""


LATER = _Later()


class _Streams(Scope):
    """The owner of every request: notes which of them ended without an output."""

    __slots__ = ("lost",)

    def __init__(self) -> None:
        super().__init__("generate")
        self.lost: list[tuple[str, Exception | None]] = []

    def lose(self, request_id: str, error: Exception | None) -> None:
        self.lost.append((request_id, error))


class EngineThread:
    """The owner of one engine. `submit` may be called from one other thread.

    build: makes the engine, in this thread. options: `Core`'s. owned: the engine is nobody
    else's; else it can't be built anew, and serves on when it was drained to be closed.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        events: EventLog,
        options: Mapping[str, Any],
    ) -> None:
        self.owned = True
        self._build = build
        self._events = events
        self._options = options
        self._hand_over: Callable[[Batch], object]
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._batch = Batch()
        self._owner = _Streams()
        self._streams: dict[str, Stream] = {}
        self._drives_itself = False
        self._sleep: Sleep | None = None
        self._sleepers: list[Any] = []  # whom to answer when it is over
        self._asked: tuple[Any, ...] = ()  # the arguments of that sleep
        self._failure: Exception | None = None  # the last one that was told
        self._closers: list[Any] = []
        self._close_by: float | None = None
        self.core: Core | None = None
        self.thread = Thread(target=self._run, name=f"engine of {events.engine}", daemon=True)

    # -- from the other thread -------------------------------------------------------------------------

    def submit(self, work: Callable[[], Any], answer: Any = None) -> None:
        """Have this thread run `work`; what it returns or raises is handed over with `answer`."""
        self._inbox.put(Command(work, answer))

    def run_left_over(self) -> Batch:
        """Run what came too late for the thread, which has ended: the core refuses it."""
        while not self._inbox.empty():
            self._execute(self._inbox.get())
        batch, self._batch = self._batch, Batch()
        return batch

    # -- the loop --------------------------------------------------------------------------------------

    def start(self, answer: Any, hand_over: Callable[[Batch], object]) -> None:
        """Build the engine and begin; the answer tells when it is there, or why not.

        hand_over takes each batch, in this thread; if it raises, nobody is there any more to
        take them, and the engine is closed.
        """
        self._hand_over = hand_over
        self._inbox.put(Command(self._adopt, answer))
        self.thread.start()

    def build(self) -> Engine:
        """Make an engine, in this thread, and listen to it if it drives itself."""
        engine = self._build()
        self._drives_itself = isinstance(engine, SelfDriven)
        if isinstance(engine, SelfDriven):
            engine.listen(lambda error: self.submit(partial(self._hear, error)))
        return engine

    def _hear(self, error: BaseException | None) -> None:
        """An engine that drives itself died, or has something to tell: the rest of the turn asks what."""
        if error is not None and self.core is not None and self.core.state in ALIVE:
            with contextlib.suppress(BaseException):  # those whom it concerns are told by `_collect`
                self.core.fail_with("the engine", error)

    def _adopt(self) -> None:
        engine = self.build()
        try:
            self.core = Core(
                engine, self._events, rebuildable=self.owned, anybody=self._owner, **self._options
            )
        except BaseException:
            engine.shutdown()  # nobody else has it
            raise

    def _run(self) -> None:
        died: BaseException | None = None
        try:
            self._execute(self._inbox.get())
            while self.core is not None and self.core.state is not State.CLOSED:
                self._turn(self.core)
        except BaseException as error:  # noqa: BLE001  (told to everybody below)
            died = error
        self._end(died)

    def _wait_for_command(self, core: Core) -> None:
        """Sleep while there is nothing to do; an engine that drives itself says when there is."""
        if core.ledger.mailbox or self._batch:
            return
        steps = core.open and core.ledger.in_flight and not self._drives_itself
        if not (self._sleep or self._closers or steps):
            self._execute(self._inbox.get())
        elif self._drives_itself and core.ledger.in_flight:
            with contextlib.suppress(Empty):
                self._execute(self._inbox.get(timeout=WATCH_S))

    def _turn(self, core: Core) -> None:
        self._wait_for_command(core)
        for _ in range(COMMANDS_A_TURN):
            if self._inbox.empty():
                break
            self._execute(self._inbox.get())
            if core.failure is not self._failure:  # the next command may be the one that recovers
                self._collect(core)
        if self._drives_itself:  # it is asked in this turn: the next may not come by itself
            self._collect(core)
        if self._sleep is not None:
            self._advance(self._sleep)
        elif core.open and core.ledger.in_flight and not core.ledger.mailbox:
            if self._batch.answers:  # whoever waits for one need not wait for a step
                self._flush()
            self._step(core)
        if self._closers:
            self._close_when_quiet(core)
        self._collect(core)
        self._flush()
        with contextlib.suppress(BaseException):  # nobody presses Ctrl-C in this thread: it is the sink's own
            self._events.deliver()

    def _step(self, core: Core) -> None:
        try:
            self._give(core, core.step())
        except BaseException:  # those whom it concerns are told by `_collect`
            if core.state is not State.FAILED:
                raise

    def _give(self, core: Core, outputs: list[Any]) -> None:
        """The outputs of a step. The lists of a cumulative one live on in the engine until its last."""
        broken: BaseException | None = None
        streams, given = self._streams, self._batch.outputs
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:  # its consumer is gone
                continue
            if output.finished:
                self._put(output)
                continue
            if not stream.delta:
                try:
                    output = core.snapshot_of(output)  # noqa: PLW2901  (it takes its place)
                except BaseException as cause:  # noqa: BLE001  (it fails with it, once the others have theirs)
                    broken = cause
            given.append((stream, output))
        if broken is not None:
            core.fail_with("step", broken)

    def _put(self, output: Any, error: Exception | None = None) -> None:
        """Into the batch with it, unless its consumer is gone. error: how a last one ends its stream."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        self._batch.outputs.append((stream, output))
        if output.finished:
            del self._streams[output.request_id]
            self._batch.ends.append((stream, error))

    def _execute(self, command: Command) -> None:
        try:
            result = command.work()
        except BaseException as error:  # noqa: BLE001  (it is the answer)
            self._answer(command.answer, None, error)
        else:
            if result is not LATER:
                self._answer(command.answer, result, None)

    def _answer(self, answer: Any, result: Any, error: BaseException | None) -> None:
        if answer is not None:
            self._batch.answers.append((answer, result, error))

    def _collect(self, core: Core) -> None:
        """Put what the mailbox holds, and who ended without an output, into the batch."""
        failed = frozenset[str]()
        if core.failure is not self._failure:
            self._failure = core.failure
            failed = frozenset(core.failure.in_flight if core.failure is not None else ())
        if core.ledger.mailbox:
            for output in core.ledger.take(None):
                self._put(output, self._failure if output.request_id in failed else None)
        for name, error in self._owner.lost:
            stream = self._streams.pop(name, None)
            if stream is not None:
                self._batch.ends.append((stream, error))
        self._owner.lost.clear()

    def _flush(self) -> None:
        batch = self._batch
        if batch or batch.last:
            self._batch = Batch()
            self._hand_over(batch)

    def _end(self, died: BaseException | None) -> None:
        """Nothing may wait for a thread that is gone."""
        core, error = self.core, died
        with contextlib.suppress(BaseException):
            if core is not None:  # before the close, which has an output for all: they did not end well
                self._collect(core)
        if core is not None and core.state is not State.CLOSED:  # it died, or nobody takes its batches
            error = InternalError(f"the thread of the engine died: {died!r}")
            error.__cause__ = died
            with contextlib.suppress(BaseException):
                core.operation = core.step_started = None
                core.close(shutdown=True)
        for answer in self._sleepers:
            self._answer(answer, None, error or closed("the sleep"))
        for answer in self._closers:
            self._answer(answer, None, error)
        for name, stream in self._streams.items():
            self._batch.ends.append((stream, error or closed(name)))
        self._streams.clear()
        self._sleep = None  # a command that comes too late must not join it
        self._events.end(clean=False)  # unless the close did: the build may have failed
        self._batch.last = True
        with contextlib.suppress(Exception):
            self._flush()

    # -- commands --------------------------------------------------------------------------------------

    def recover(self, core: Core) -> tuple[str, ...]:
        """Build the engine anew. Raises IllegalCall where it was not built here."""
        core.require("recover")
        if not self.owned:
            core.refuse(IllegalCall, "recover", "the engine was handed over without build=")
        return core.recover(self.build)

    def admit(
        self,
        stream: Stream,
        core: Core,
        request_id: str,
        prompt: Any,
        params: Any,
        options: Mapping[str, Any],
    ) -> str:
        """Admit or hold a request whose outputs go to `stream`. Returns its handle."""
        handle = core.add_request(request_id, prompt, params, options, None)
        [record] = core.ledger.find([handle])
        stream.request_id, stream.delta = record.request_id, record.call.delta
        stream.samples = record.call.samples
        self._streams[record.request_id] = stream
        return handle

    def withdraw(self, stream: Stream) -> None:
        """The stream's consumer is gone: end its request, if it was admitted and has not ended."""
        name, core = stream.request_id, self.core
        if core is not None and name is not None and self._streams.get(name) is stream:
            del self._streams[name]
            core.abort_request([name])
            self._collect(core)  # before its id is used again: that it was lost is said by its id

    def sleep(self, answer: Any, core: Core, *asked: Any, **limits: Any) -> Any:
        """Begin a sleep, or wait for the same one that is under way. Answered when it is over."""
        asked = (*asked, *sorted(limits.items()))
        if self._sleep is not None and core.transition is not self._sleep:
            self._advance(self._sleep)  # a command before this one ended it
        if self._sleep is None or asked != self._asked:
            if self._drives_itself and limits["max_steps"] is not None:
                raise core.invalid("sleep", "the engine steps by itself: bound its drain by timeout")
            sleep = core.begin_sleep(*asked[:2], **limits)
            if sleep.report is not None:  # there was nothing to do: whoever comes next asks for another
                return sleep.report
            self._sleep, self._asked = sleep, asked
        self._sleepers.append(answer)
        return LATER

    def give_up(self, answer: Any) -> None:
        """A caller of the sleep under way was cancelled. With the last of them it is rolled back."""
        if answer not in self._sleepers:
            return
        self._sleepers.remove(answer)
        if self._sleep is not None and not self._sleepers and self._sleep.cancel():
            self._sleep = None

    def _advance(self, sleep: Sleep) -> None:
        report, error = None, None
        try:
            report = sleep.advance()
        except BaseException as cause:  # noqa: BLE001  (it is the answer)
            error = cause
        if report is None and error is None:
            return
        self._sleep = None
        if isinstance(error, DrainStalled) and self._closers:  # it can't be drained
            self._close_by = 0.0
        sleepers, self._sleepers = self._sleepers, []
        for answer in sleepers:
            self._answer(answer, report, error)

    def close(self, answer: Any, *, drain: bool, timeout: float | None) -> Any:
        """Admit nothing more, let what is in flight end if asked to, and close. Answered at the end."""
        core = self.core
        if core is None:  # the build failed
            return None
        core.require("close")
        core.max_held = 0
        self._closers.append(answer)
        by = None if timeout is None else time.monotonic() + timeout
        if not drain:
            by = 0.0
        known = [limit for limit in (self._close_by, by) if limit is not None]
        self._close_by = min(known, default=None)
        return LATER

    def _close_when_quiet(self, core: Core) -> None:
        late = self._close_by is not None and time.monotonic() >= self._close_by
        if self._sleep is None and not late and core.state is State.RUNNING:
            with contextlib.suppress(LifecycleError):
                self._sleep, self._asked = core.begin_sleep(0, "wait_all"), ()  # nobody can join it
        if self._sleep is None or late:
            if not self.owned and core.state is State.SLEEPING and core.level == 0 and not core.paused:
                core.schedule(on=True)  # whoever goes on with it
            core.close(shutdown=True)
