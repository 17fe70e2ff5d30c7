"""`Lifecycle`: the guarded engine for callers that step it themselves.

Theory of operation
-------------------
The surface is `LLMEngine`'s, plus what the machine adds. Every method takes the lock,
calls the core, and lets go; a sleep takes it anew for every step of its drain, so that
admission, abort and reading are served meanwhile. The lock is fair: a waiting thread
gets its turn after the step in progress.

A *scope* (`with lifecycle.scope("generate")`) is one blocking call of an `LLM`: inside
it, on its thread, `step`, `has_unfinished_requests` and the counts speak only of the
requests that it admitted. If another thread puts the engine to sleep, a scope waits
for the wake. Left by an exception, it aborts what it owns.

Ctrl-C while an engine call runs is deferred to the end of that call, because an
exception in the middle of a step poisons the engine. A second one is not deferred. Only
a `step` outside a scope pays for no handler: a Ctrl-C in it is a failure of the engine,
and where it lands in the library's own code the ledger is made whole again.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, Final, Self, TextIO

from lifecycle.audit.log import from_environment
from lifecycle.core import Core
from lifecycle.engine import Capabilities, Engine, LoadReport, SleepReport, Snapshot, WakeReport
from lifecycle.errors import IllegalCall
from lifecycle.events import EventLog, Sink, structlog_sink
from lifecycle.requests import Scope
from lifecycle.sleep import Sleep
from lifecycle.table import ASLEEP, Need, State
from lifecycle.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """What a `progress` callback is given after each step of a drain.

    remaining, drained, held: counts of requests. tokens: generated since the call.
    """

    remaining: int
    drained: int
    held: int
    steps: int
    tokens: int
    seconds: float


class _FairLock:
    """A lock that is granted in turn, and that knows its holder.

    Whoever waits stands in the turnstile, so the holder can't take the lock again first.
    Between `enter` and the `try` that follows it a Ctrl-C finds a gap, so it is used where
    that is held back. Elsewhere `with fair.lock` has none.
    """

    __slots__ = ("holder", "lock", "turnstile")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turnstile = threading.Lock()
        self.holder = 0

    def enter(self) -> None:
        """Take it: at once if nobody has it and nobody waits."""
        if self.turnstile.locked() or not self.lock.acquire(blocking=False):
            self._wait()
        self.holder = get_ident()

    def _wait(self) -> None:
        if self.holder == get_ident():
            msg = "the engine is being called from inside one of its own calls"
            raise IllegalCall(msg, call=None, state=None, needs=None, legal=(), operation=None)
        with self.turnstile:
            self.lock.acquire()

    def leave(self) -> None:
        """Let it go."""
        self.holder = 0
        self.lock.release()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()


class _DeferredInterrupt:
    """Holds back the first Ctrl-C while the main thread is inside an engine call.

    `with interrupt:` installs the handler for a blocking call, `begin_call()` and `end_call()`
    mark where a signal must wait; the end of either raises what was held back. A second one is
    for getting out of an engine call that hangs, so it does not wait there; in the library's
    own code, which never takes long, every one waits, and no bookkeeping is left half done.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._inside = 0
        self._pending = False
        self._depth = 0
        self._installed = False
        self._before: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    def __enter__(self) -> None:
        if get_ident() != self._main:
            return
        if self._depth == 0:
            before = signal.getsignal(signal.SIGINT)
            self._installed = callable(before)
            if callable(before):  # else Ctrl-C is ignored, or ends the process: that stays so
                self._before = before
                signal.signal(signal.SIGINT, self._on_signal)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth == 0 and self._installed:
            signal.signal(signal.SIGINT, self._before)
        if not self._inside:
            self.deliver()

    def begin_call(self) -> None:
        """From here on the first Ctrl-C must wait: before the lock is taken."""
        if get_ident() == self._main:
            self.__enter__()
            self._inside += 1

    def end_call(self) -> None:
        """The lock was let go: what was held back is raised."""
        if get_ident() == self._main:
            self._inside -= 1
            self.__exit__()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if _is_half_done(frame) or (self._inside and not self._pending):
            self._pending = True
        else:
            self._pending = False
            self._before(number, frame)

    def deliver(self) -> None:
        """Raise what was held back."""
        if self._pending and get_ident() == self._main:
            self._pending = False
            self._before(signal.SIGINT, None)


# Between two of their lines something may be taken or counted that is not yet noted.
_OURS: Final = (os.path.dirname(__file__), contextlib.__file__)  # noqa: PTH120  (compared as text)


def _is_half_done(frame: FrameType | None) -> bool:
    """Whether a signal came in the middle of this library's own work; waiting for another thread is none."""
    if frame is None or frame.f_code is _FairLock._wait.__code__:  # noqa: SLF001  (the same module)
        return False
    return frame.f_code.co_filename.startswith(_OURS)


# Every change is told to those who wait; this is a net under that, in seconds.
_LOOK_AGAIN_S: Final = 1.0

_living: "weakref.WeakSet[Lifecycle]" = weakref.WeakSet()


def _after_fork() -> None:
    for lifecycle in list(_living):
        lifecycle._forget_parent()  # noqa: SLF001  (the same module)


os.register_at_fork(after_in_child=_after_fork)


class Lifecycle:
    """A state machine around one engine, with the engine's own surface.

    engine: an `Engine`, or a callable that builds one (then `recover()` works).
    weights: "checked" (default where possible), "declared" or "unchecked".
    max_held: requests that may wait outside the engine while it sleeps (None: any number).
    stall_s: seconds without progress after which a drain raises `DrainStalled`.
    strict_release: a sleep that frees far less than the engine holds raises `ReleaseFailed`.
    rpc_needs: what worker methods of your own need, by name: "quiet", "weights", "loading".
    sinks: callables that receive every event; structlog by default.
    """

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        *,
        weights: str | None = None,
        max_held: int | None = None,
        stall_s: float = 120.0,
        strict_release: bool = False,
        rpc_needs: Mapping[str, str] | None = None,
        name: str = "engine",
        rank: int = 0,
        sinks: Sequence[Sink] = (structlog_sink,),
        event_capacity: int = 4096,
    ) -> None:
        self._build: Callable[[], Engine] | None = None
        events = EventLog(name, rank, (*sinks, *from_environment(rank)), event_capacity)
        try:
            if isinstance(engine, type) or not isinstance(engine, Engine):
                self._build, engine = engine, engine()
            self._core = Core(
                engine,
                events,
                weights=weights,
                max_held=max_held,
                stall_s=stall_s,
                strict_release=strict_release,
                rpc_needs=rpc_needs,
                rebuildable=self._build is not None,
            )
            self._core.events.deliver()
        except BaseException:
            events.end(clean=False)
            if self._build is not None and isinstance(engine, Engine):  # nobody else has it to shut it down
                engine.shutdown()
            raise
        self._owned = True
        self._undo: list[Callable[[], None]] = []
        self._lock = _FairLock()
        self._changed = threading.Condition()
        self._changes = 0
        self._interrupt = _DeferredInterrupt()
        self._scopes = threading.local()
        self._any_scope = False
        _living.add(self)
        # The core is in reference cycles with its machine; the engine must not wait for a collection.
        weakref.finalize(self, self._core.let_go, shutdown=False).atexit = False
        weakref.finalize(self, events.end, clean=False)

    def _forget_parent(self) -> None:
        """In a forked child: refuse everything, and wait for no lock of a thread that is gone."""
        self._lock = _FairLock()
        self._changed = threading.Condition()
        self._core.forget_parent()

    # -- reading: no lock ------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """State, facts, counts, and what is under way with its age. From any thread, never blocks."""
        return self._core.snapshot()

    @property
    def state(self) -> State:
        """Where the engine is, now."""
        return self._core.state

    def events(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last events, oldest first, as dicts."""
        return self._core.events.tail(count)

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do, and in `costs` what it can't."""
        return self._core.capabilities

    def watch(
        self, limit_s: float = 60.0, *, signum: int | None = None, out: TextIO | None = None
    ) -> Watchdog:
        """Start a `Watchdog`: an engine call older than `limit_s` becomes a `stalled` event with stacks."""
        return Watchdog(self._core, limit_s=limit_s, signum=signum, out=out)

    def is_sleeping(self) -> bool:
        """True in SLEEPING and PARTIALLY_AWAKE."""
        return self._core.state in ASLEEP

    def check(self) -> list[str]:
        """Broken invariants; empty unless this library has a bug. For tests."""
        with self._engine():
            return self._core.check()

    def _scope(self) -> Scope | None:
        return getattr(self._scopes, "current", None)

    def has_unfinished_requests(self) -> bool:
        """Whether this caller has something held, in flight or not yet delivered."""
        return self._core.ledger.busy(self._scope() if self._any_scope else None)

    def get_num_unfinished_requests(self) -> int:
        """Unfinished requests as vLLM counts them: each sample of `n` is one."""
        with self._engine():
            return self._core.ledger.samples(self._scope())

    # -- requests --------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **options: Any,
    ) -> str:
        """Admit a request; while admission is closed it is held and admitted at the wake.

        Returns the engine's id of it, or one of the same form for a held request; both
        can be given to `abort_request`. Raises InvalidArgument for arguments that the
        engine would not take and for a live id, AdmissionClosed where `max_held` is
        reached, EngineFailed or Closed after the end.
        """
        options.update(
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        with self._engine():
            return self._core.add_request(request_id, prompt, params, options, self._scope())

    @contextmanager
    def _engine(self, *, stepped: bool = False) -> Iterator[None]:
        """The lock, with Ctrl-C held back. A second one is not: then nothing is left half done.

        Whatever happened under it is told to those who wait. stepped: what is done under it is a
        step, whose outputs are lost if a Ctrl-C comes out of it, so that the engine has failed.
        One that came before is raised before.
        """
        self._interrupt.begin_call()
        try:
            with self._lock:
                if stepped:
                    self._interrupt.deliver()
                seq = self._core.events.seq
                try:
                    try:
                        yield
                    finally:
                        self._core.events.deliver()
                    self._interrupt.deliver()
                except Exception:
                    raise
                except BaseException as cause:
                    self._core.interrupted(cause, stepped=stepped)
                    raise
                finally:
                    if self._core.events.seq != seq:
                        self._notify()
        finally:
            self._interrupt.end_call()

    def abort_request(self, request_ids: Sequence[str], internal: bool = False) -> None:  # noqa: ARG002  (vLLM's signature)
        """End requests without an output. Ids of either kind are understood; unknown ones ignored."""
        if isinstance(request_ids, str):
            raise self._core.invalid("abort_request", f"request_ids must be a list, not {request_ids!r}")
        with self._engine():
            self._core.abort_request(request_ids)
            self._notify()  # it may tell nothing, and yet somebody has nothing left to wait for

    def step(self) -> list[Any]:
        """One step of the engine, or what waits in the mailbox: the outputs this caller may have.

        Raises IllegalCall where the engine does not serve and nothing waits, and
        EngineFailed if the step failed. Inside a scope it waits for the wake instead.
        """
        if self._any_scope and (scope := self._scope()) is not None:
            return self._step_in_scope(scope)
        fair = self._lock
        if fair.turnstile.locked() or fair.lock.locked() or not self._core.open:
            with self._engine(stepped=True):
                return self._core.step()
        with fair.lock:  # nobody waits: the turnstile would cost more than the rest of the way
            fair.holder = get_ident()
            try:
                outputs = self._core.step()
                self._core.events.deliver()
            except BaseException as cause:
                if not isinstance(cause, Exception):
                    self._core.interrupted(cause, stepped=True)
                raise
            else:
                return outputs
            finally:
                fair.holder = 0

    def _step_in_scope(self, scope: Scope) -> list[Any]:
        core = self._core
        while True:
            seen = self._changes
            with self._engine():
                steps = core.forked or core.state not in (State.DRAINING, *ASLEEP)
                outputs = core.step(scope) if steps else core.ledger.take(scope)
            if outputs or steps or not scope.live:
                return outputs
            self._wait_for_change(seen)

    # -- change, for those who wait --------------------------------------------------------------------

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _wait_for_change(self, seen: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout=_LOOK_AGAIN_S)

    # -- scopes ----------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, call: str, *, claims_enqueued: bool = False, enqueues: bool = False) -> Iterator[None]:
        """One blocking call on this thread. See the module's docstring.

        claims_enqueued: it owns what was enqueued and not delivered (`wait_for_completion`).
        enqueues: what it admits is left for such a call (`enqueue`). A scope inside a scope
        is the outer one. Raises IllegalCall if nothing could serve it now.
        """
        if getattr(self._scopes, "current", None) is not None:
            yield
            return
        ledger = self._core.ledger
        scope = Scope(call, keeps=claims_enqueued)
        with self._interrupt:
            try:
                with self._engine():
                    if not enqueues and not (claims_enqueued and ledger.all_delivered(ledger.enqueued)):
                        self._core.require(call, Need.SERVING)
                    if claims_enqueued:
                        ledger.own(ledger.owned_by(ledger.enqueued), scope)
                        scope.error, ledger.enqueued.error = ledger.enqueued.error, None
                    self._scopes.current = scope
                    self._any_scope = True
                yield
                self._interrupt.deliver()  # came in our own code, while the block was at its end
                if scope.error is not None:  # the call would return less than it was asked for
                    raise scope.error  # noqa: TRY301  (left like any scope that fails)
            except BaseException:
                with self._engine():
                    self._abandon(scope)
                raise
            finally:
                self._scopes.current = None
            with self._engine():
                heir = ledger.enqueued if enqueues or claims_enqueued else ledger.anybody
                ledger.own(ledger.owned_by(scope), heir)

    def _abandon(self, scope: Scope) -> None:
        """A scope was left by an exception: nobody will take what it owns."""
        core = self._core
        owned = core.ledger.owned_by(scope)
        keep = [record for record in owned if scope.keeps and record.request_id in core.ledger.undelivered]
        core.ledger.own(keep, core.ledger.enqueued)
        rest = [record.handle for record in owned if record not in keep]
        if core.state is not State.CLOSED and not core.forked:
            core.abort_request(rest)
        core.ledger.give_back(scope)

    # -- sleep and wake --------------------------------------------------------------------------------

    def sleep(
        self,
        level: int = 1,
        mode: str = "wait",
        *,
        timeout: float | None = None,
        on_timeout: str = "raise",
        max_steps: int | None = None,
        progress: Callable[[DrainProgress], Any] | None = None,
    ) -> SleepReport:
        """Close admission, drain, release memory, verify. Returns when the engine sleeps.

        level: 0 pauses, 1 offloads the weights and drops the KV cache, 2 drops both.
        mode: "wait" finishes what started and holds the rest; "wait_all" finishes all;
        "abort" ends all with the tokens they have; "keep" freezes all, to go on after the
        wake. timeout in seconds (0: only if quiet now) and max_steps bound the drain;
        on_timeout is "raise" (rolled back), "abort" or "keep". progress is called after
        each step without the lock, and may only read.

        Raises InvalidArgument, IllegalCall, DrainTimeout, DrainStalled, DrainCancelled,
        EngineFailed, ReleaseFailed.
        """
        return self._sleep(level, mode, progress, timeout=timeout, on_timeout=on_timeout, max_steps=max_steps)

    def pause(
        self,
        mode: str = "keep",
        *,
        timeout: float | None = None,
        on_timeout: str = "raise",
        max_steps: int | None = None,
        progress: Callable[[DrainProgress], Any] | None = None,
    ) -> SleepReport:
        """Sleep at level 0 until `resume()`: a sleep and a wake in between do not end it."""
        return self._sleep(
            0, mode, progress, timeout=timeout, on_timeout=on_timeout, max_steps=max_steps, pause=True
        )

    def _sleep(
        self, level: int, mode: str, progress: Callable[[DrainProgress], Any] | None, **limits: Any
    ) -> SleepReport:
        sleep: Sleep | None = None
        with self._interrupt:
            try:
                with self._engine():
                    sleep = self._core.begin_sleep(level, mode, **limits)
                seen = 0
                while (report := self._advance(sleep)) is None:
                    if progress is not None and sleep.steps > seen:
                        seen = sleep.steps
                        self._report_progress(sleep, progress)
            except BaseException:
                if sleep is not None:
                    with self._engine():
                        sleep.cancel()
                raise
        return report

    def _advance(self, sleep: Sleep) -> SleepReport | None:
        with self._engine():
            return sleep.advance()

    def _report_progress(self, sleep: Sleep, progress: Callable[[DrainProgress], Any]) -> None:
        view = DrainProgress(
            remaining=len(sleep.remaining()),
            drained=len(sleep.drained),
            held=len(self._core.ledger.held),
            steps=sleep.steps,
            tokens=sleep.tokens,
            seconds=time.monotonic() - sleep.started,
        )
        try:
            progress(view)
        except Exception as error:
            raise sleep.cancelled(f"the progress callback raised {error!r}") from error

    def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Map memory again: all of it, or `tags` of "weights", "kv_cache", "scheduling".

        The report is falsy while the engine is only partly awake. Raises InvalidArgument,
        IllegalCall, WakeFailed (try again), EngineFailed.
        """
        with self._engine():
            return self._core.wake_up(tags)

    def resume(self) -> WakeReport:
        """End a pause (level 0); asleep deeper than that, the next wake will not stop at it."""
        with self._engine():
            return self._core.resume()

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory while paused (level 0) with nothing in flight."""
        with self._engine():
            self._core.release_kv_cache_memory()

    # -- weights ---------------------------------------------------------------------------------------

    def reload_weights(self, version: str | None = None, **kwargs: Any) -> LoadReport:
        """Reload the weights through the engine: from its checkpoint, or as vLLM's own keywords say."""
        with self._engine():
            return self._core.reload_weights(version, **kwargs)

    def mark_weights_loaded(self, version: str | None = None) -> LoadReport:
        """Say that the weights are loaded. Raises WeightsNotValid, naming what is not."""
        with self._engine():
            return self._core.mark_weights_loaded(version)

    # -- the rest of the engine's surface --------------------------------------------------------------

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method of every worker. What it needs goes by its name; see `lifecycle.table.RPC_NEEDS`."""
        with self._engine():
            result: list[Any] = self._core.collective_rpc(method, args, kwargs)
        return result

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other call of the engine's surface, by name; unknown ones need a serving engine."""
        with self._engine():
            return self._core.call(name, *args, **kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run a function on the model of every worker. Needs resident weights."""
        result: list[Any] = self.call("apply_model", func)
        return result

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the prefix cache. False, recorded as such, while requests use it."""
        with self._engine():
            return self._core.reset_prefix_cache(*args, **kwargs)

    def reset_encoder_cache(self) -> None:
        """Drop the encoder cache."""
        self.call("reset_encoder_cache")

    def reset_mm_cache(self) -> None:
        """Drop the multimodal caches."""
        self.call("reset_mm_cache")

    # -- the end ---------------------------------------------------------------------------------------

    def recover(self) -> tuple[str, ...]:
        """After a failure: shut the old engine down, build a new one, admit what was held.

        Returns the ids admitted. Raises IllegalCall where the engine was not built here.
        """
        with self._engine():
            self._core.require("recover")
            if self._build is None:
                msg = "cannot recover an engine that was handed over: build a new one and attach to it"
                raise IllegalCall(msg, call="recover", state=self.state.value, needs="an engine built here")
            return self._core.recover(self._build)

    def disown(self, undo: Callable[[], None]) -> None:
        """The engine is somebody else's: never shut it down, and run `undo` at the end."""
        self._owned = False
        self._undo.append(undo)

    def detach(self) -> None:
        """Let go of the engine as it is. Refused while something is held or undelivered."""
        core = self._core
        try:
            with self._engine():
                if core.state is not State.CLOSED and (core.ledger.held or core.ledger.undelivered):
                    msg = (
                        f"cannot detach: {len(core.ledger.held)} requests are held and "
                        f"{len(core.ledger.undelivered)} not delivered; wake_up() and step(), or abort them"
                    )
                    raise IllegalCall(msg, call="detach", state=core.state.value, needs="nothing held")
                core.close(shutdown=False)
        finally:
            while core.state is State.CLOSED and self._undo:
                self._undo.pop()()

    def close(self) -> None:
        """End, and shut the engine down; one that was attached to is only let go of, see `detach`."""
        if not self._owned:
            self.detach()
            return
        with self._engine():
            self._core.close(shutdown=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except IllegalCall:
            if kind is None:  # else the caller's own exception is the one to see
                raise

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        return (
            f"<Lifecycle {snapshot.state}, {snapshot.in_flight} in flight, "
            f"{snapshot.held} held, {snapshot.undelivered} undelivered>"
        )
