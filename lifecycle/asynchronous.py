"""`AsyncLifecycle`: the guarded in-process engine for asyncio callers.

Theory of operation
-------------------
The surface is that of vLLM's `AsyncLLM`, plus what the machine adds. The engine lives in a
thread of its own (`EngineThread`), which alone enters the core. A call here submits a
command to it and awaits the answer; a step's outputs come back as one batch, in one
callback of the event loop, and are put into the streams of their requests, some at a time.

A *stream* holds at most one output, beside the one that wakes its consumer: what comes
meanwhile is merged into it, so a slow consumer costs no memory and loses no token. It ends
with the request's last output, or with the error that ended it.

Cancelling a caller never leaves anything behind. A `generate` that is cancelled, closed or
dropped has its request aborted. A `sleep` is rolled back while it drains, unless somebody
else waits for the same one; once memory is being released it goes through, and only the
wait is abandoned. Any other call that reached the engine comes to its end.

Nothing here decides what is legal: the core does, in the engine's thread.
"""

import asyncio
import atexit
import contextlib
import importlib
import os
import signal
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TextIO

from lifecycle.audit.log import from_environment
from lifecycle.core import Core, is_duration
from lifecycle.engine import Engine, LoadReport, PassThrough, SleepReport, Snapshot, WakeReport
from lifecycle.engine_thread import Batch, EngineThread
from lifecycle.errors import Closed, IllegalCall, InvalidArgument, names
from lifecycle.events import EventLog, Sink, structlog_sink
from lifecycle.table import ASLEEP, State
from lifecycle.watchdog import Watchdog

# So many outputs of a step are given out in one turn of the event loop; what else runs comes in between.
_OUTPUTS_A_TURN: Final = 64
# How long the end of the interpreter waits for the engine to be shut down, in seconds.
_AT_EXIT_S: Final = 10.0


class _Stream:
    """The outputs of one request on their way to its consumer. Used in the event loop's thread only."""

    __slots__ = ("_error", "_merge", "delta", "ended", "output", "request_id", "samples", "waiter")

    def __init__(self, merge: Callable[..., Any]) -> None:
        self._merge = merge
        self.output: Any = None  # came and was not taken yet
        self._error: BaseException | None = None
        self.waiter: asyncio.Future[Any] | None = None  # gets the next output, or None: look again
        self.ended = False
        # Set by the engine's thread when it was admitted.
        self.request_id: str | None = None
        self.delta = False
        self.samples = 1

    def put(self, output: Any) -> None:
        """An output came: to whoever waits for it, or part of one that was not taken yet."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(output)
                return
        waiting = self.output
        self.output = output if waiting is None else self._merge(waiting, output, delta=self.delta)

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come. Only the first end counts."""
        if not self.ended:
            self.ended, self._error = True, error
            waiter, self.waiter = self.waiter, None
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def check(self) -> None:
        """At the end: raise what ended it, if that was an error."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # it may be told to many


_living: "weakref.WeakSet[AsyncLifecycle]" = weakref.WeakSet()


def _after_fork() -> None:
    for lifecycle in list(_living):
        lifecycle._forget_parent()  # noqa: SLF001  (the same module)


def _at_exit() -> None:
    for lifecycle in list(_living):
        lifecycle._leave()  # noqa: SLF001  (the same module)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


class AsyncLifecycle:
    """A state machine around one in-process engine, for the coroutines of one event loop.

    build: makes the engine; called in the thread that will own it, by `start` and `recover`.
    The other options are `Lifecycle`'s. Use `async with`, or `start()` and `close()`.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
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
        if not callable(build):
            raise InvalidArgument(f"build must be a callable that makes an engine, not {build!r}")
        note = weakref.WeakMethod(self._note_event)  # else the log would keep this object for ever
        sinks = (*sinks, *from_environment(rank), lambda _: _call(note))
        self._events = EventLog(name, rank, sinks, event_capacity)
        options = {
            "weights": weights,
            "max_held": max_held,
            "stall_s": stall_s,
            "strict_release": strict_release,
            "rpc_needs": rpc_needs,
        }
        self._owner = EngineThread(build, self._events, options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone = False  # nobody runs commands any more
        self._streams: set[_Stream] = set()
        self._arrived: deque[Batch] = deque()  # what was not given out yet
        self._told: asyncio.Future[None] | None = None  # of whoever waits for the next event, or the end
        self._signals: list[int] = []
        self._undo: list[Callable[[], object]] = []  # what is done once all is over
        self._closing: asyncio.Task[None] | None = None
        _living.add(self)
        weakref.finalize(self, _abandon, self._owner).atexit = False
        weakref.finalize(self, self._events.end, clean=False)

    @classmethod
    def from_async_llm(
        cls, async_llm: Any, *, build: Callable[[], Any] | None = None, **options: Any
    ) -> Self:
        """A lifecycle around an `AsyncLLM` that exists, whatever it does: serve, pause, sleep.

        To be called in the event loop in which the `AsyncLLM` is used; `start` reads its condition.
        Whoever else calls it goes behind the machine; `engine_adapter.attach_async` prevents that.

        build: makes another `AsyncLLM` for `recover`, in the engine's thread. With it the engine is
        the lifecycle's own, and `close` shuts it down; without it `close` leaves it to go on, and
        `recover` is refused. options are those of the class. Raises InvalidArgument for an
        `AsyncLLM` that is guarded already.
        """
        adapter = importlib.import_module("engine_adapter.vllm_async")
        lifecycle = cls(adapter.handed_over(async_llm, build), **options)
        lifecycle._owner.owned = build is not None
        return lifecycle

    # -- the beginning and the end ---------------------------------------------------------------------

    async def start(self) -> Self:
        """Build the engine in its thread. What the build raises is raised; then nothing was started.

        Raises IllegalCall if it was started before.
        """
        if self._loop is not None:
            raise IllegalCall("it was started before", call="start", state=self._state(), needs="a new one")
        self._loop = loop = asyncio.get_running_loop()
        receive = weakref.WeakMethod(self._receive)  # else the thread would keep this object for ever
        answer = loop.create_future()
        self._owner.start(answer, lambda batch: loop.call_soon_threadsafe(_call, receive, batch))
        try:
            await answer
        except asyncio.CancelledError:
            self._leave(wait=False)
            raise
        return self

    async def close(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  (the engine keeps it)
    ) -> None:
        """Admit nothing more, let what is in flight finish, shut the engine down and end its thread.

        drain=False: what is in flight ends now, with the tokens it has; so it does with `drain`
        after `timeout` seconds. What is held ends with Closed. Cancelling the caller does not
        stop it. Closing again waits for the same end.
        """
        if timeout is not None and not is_duration(timeout):
            raise InvalidArgument(f"close: timeout must be a number of seconds >= 0, not {timeout!r}")
        if self._loop is None:
            self._loop, self._gone = asyncio.get_running_loop(), True
        if self._gone:
            return
        answer = self._running_loop("close").create_future()
        self._owner.submit(lambda: self._owner.close(answer, drain=drain, timeout=timeout), answer)
        with contextlib.suppress(Closed):  # it was, before this came to the thread
            await answer

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=kind is None)

    def close_on_signal(self, number: int = int(signal.SIGTERM), *, timeout: float | None = 30.0) -> None:
        """From now on this signal closes: what is in flight may end within `timeout` seconds.

        In the main thread's event loop only, as asyncio has it. `wait_for("closed")` tells when it is over.
        """
        loop = self._running_loop("close_on_signal")

        def begin() -> None:
            if self._closing is None:
                self._closing = loop.create_task(self.close(timeout=timeout))

        loop.add_signal_handler(number, begin)
        self._signals.append(number)

    def at_end(self, undo: Callable[[], object]) -> None:
        """Have this called, in the event loop, once everything is closed."""
        self._undo.append(undo)

    def _leave(self, *, wait: bool = True) -> None:
        """End without an event loop: at the interpreter's exit, or when nobody is left to wait."""
        if self._loop is None or self._gone:
            return
        _abandon(self._owner)
        if wait:
            self._owner.thread.join(_AT_EXIT_S)

    def _forget_parent(self) -> None:
        """In a forked child: the thread is not there, and everything is refused."""
        self._gone = True
        if self._owner.core is not None:
            self._owner.core.forget_parent()

    # -- between the loop and the thread ---------------------------------------------------------------

    def _running_loop(self, call: str) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise IllegalCall("start() first", call=call, state=self._state(), needs="a started engine")
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalCall(
                "it was started in another event loop", call=call, state=self._state(), needs="that loop"
            )
        return self._loop

    def _state(self) -> str | None:
        return None if self._owner.core is None else self._owner.core.state.value

    def _core(self, call: str) -> Core:
        core = self._owner.core
        if core is None:
            raise IllegalCall("start() first", call=call, state=None, needs="a started engine")
        return core

    async def _command(self, call: str, work: Callable[[Any], Any]) -> Any:
        """Have the thread run `work(answer)`, and wait for the answer. Who is cancelled gives it up."""
        self._core(call)
        if self._gone:  # nobody else is inside: the core itself refuses
            return work(None)
        answer = self._running_loop(call).create_future()
        self._owner.submit(lambda: work(answer), answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self._owner.submit(lambda: self._owner.give_up(answer))
            raise

    async def _ask(self, call: str, work: Callable[[Core], Any]) -> Any:
        """Have the thread make this call of the core."""
        core = self._core(call)
        return await self._command(call, lambda _: work(core))

    def _receive(self, batch: Batch) -> None:
        """One turn of the thread, in the event loop."""
        self._arrived.append(batch)
        if len(self._arrived) == 1:
            self._give_out(0)

    def _give_out(self, begin: int) -> None:
        """Give out the oldest batch, from this output on, so many at a time; then what else it brought."""
        loop, batch, end = asyncio.get_running_loop(), self._arrived[0], begin + _OUTPUTS_A_TURN
        completes = end >= len(batch.outputs)
        try:
            for stream, output in batch.outputs[begin:end]:
                try:
                    stream.put(output)
                except Exception as cause:  # noqa: BLE001  (the engine can't merge: its consumer is told)
                    stream.end(cause)
                    self._owner.submit(partial(self._owner.withdraw, stream))
            if completes:
                self._complete(batch)
        finally:  # even a Ctrl-C here must not keep what comes later from being given out
            if completes:
                self._arrived.popleft()
            if self._arrived:
                loop.call_soon(self._give_out, 0 if completes else end)

    def _complete(self, batch: Batch) -> None:
        for stream, error in batch.ends:
            self._streams.discard(stream)
            stream.end(error)
        for answer, result, error in batch.answers:
            _resolve(answer, result, error)
        if batch.last:
            self._gone = True
            for answer, result, error in self._owner.run_left_over().answers:
                _resolve(answer, result, error)
            for number in self._signals:
                asyncio.get_running_loop().remove_signal_handler(number)
            while self._undo:
                self._undo.pop()()
            self._tell()

    def _change(self) -> "asyncio.Future[None]":
        """Done once something has happened after this call."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._told)

    def _note_event(self) -> None:
        """An event was recorded, in any thread."""
        if self._told is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        told, self._told = self._told, None
        if told is not None and not told.done():
            told.set_result(None)

    # -- requests --------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """The outputs of one request, as its `output_kind` says, until the last.

        While admission is closed the request is held and admitted at the wake. Leaving the
        iterator early aborts the request. Raises InvalidArgument for arguments that the engine
        would not take and for a live id, AdmissionClosed where `max_held` is reached,
        RequestAborted and Closed for a request that ended while it was held, and EngineFailed,
        after the tokens there were.
        """
        core = self._core("generate")
        options.update(
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        owner, stream = self._owner, _Stream(core.merge_outputs)
        self._streams.add(stream)
        try:
            await self._command(
                "generate", lambda _: owner.admit(stream, core, request_id, prompt, sampling_params, options)
            )
            create_future = asyncio.get_running_loop().create_future
            while True:  # no calls here that need not be: this runs for every output
                output = stream.output
                if output is not None:
                    stream.output = None
                elif stream.ended:
                    stream.check()
                    return
                else:
                    stream.waiter = create_future()
                    output = await stream.waiter
                    if output is None:
                        continue
                if type(output) is not PassThrough:
                    yield output
                    continue
                if output.outputs is not None:
                    async for own in output.outputs():
                        yield own
                if output.final is not None:
                    yield output.final
        finally:
            self._streams.discard(stream)
            if not stream.ended:
                owner.submit(lambda: owner.withdraw(stream))

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """The output of one pooling request. See `generate`."""
        async with contextlib.aclosing(
            self.generate(prompt, pooling_params, request_id, **options)  # type: ignore[type-var]  # an async generator
        ) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their streams get what there is as the last output, with the reason "abort".

        A held one has nothing, and raises RequestAborted. Unknown ids are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._ask("abort", lambda core: core.abort_request(ids, tell=True))

    def get_num_unfinished_requests(self) -> int:
        """Requests whose streams have not ended, as vLLM counts them: each sample of `n` is one."""
        return sum(stream.samples for stream in self._streams)

    # -- sleep and wake --------------------------------------------------------------------------------

    async def sleep(
        self,
        level: int = 1,
        mode: str = "wait",
        *,
        timeout: float | None = None,  # noqa: ASYNC109  (of the drain, not of the wait)
        on_timeout: str = "raise",
        max_steps: int | None = None,
    ) -> SleepReport:
        """Close admission, drain, release memory, verify. See `Lifecycle.sleep` for arguments and errors.

        The same sleep asked for twice is one. Cancelled while it drains, it is rolled back.
        """
        return await self._sleep(
            "sleep", level, mode, timeout=timeout, on_timeout=on_timeout, max_steps=max_steps, pause=False
        )

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        clear_cache: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  (of the drain, not of the wait)
        on_timeout: str = "raise",
        max_steps: int | None = None,
    ) -> SleepReport:
        """Pause until `resume_generation`: a sleep and a wake in between do not end it.

        mode: "abort", "wait", "wait_all" or "keep". clear_cache: drop the prefix cache as well, and
        what kept requests have of KV, which is computed again; so weights may be loaded meanwhile.
        With clear_cache=False kept requests go on with the KV they have, also after a load, which is
        recorded as `stale_kv`.
        """
        report = await self._sleep(
            "pause_generation",
            0,
            mode,
            timeout=timeout,
            on_timeout=on_timeout,
            max_steps=max_steps,
            pause=True,
            clear_cache=bool(clear_cache),
        )
        if clear_cache:
            kept = {"reset_running_requests": True} if self.snapshot().in_flight else {}
            with contextlib.suppress(IllegalCall):  # somebody sleeps deeper meanwhile: no cache
                await self.reset_prefix_cache(**kept)
        return report

    async def _sleep(self, call: str, level: int, mode: str, **limits: Any) -> SleepReport:
        core = self._core(call)
        report: SleepReport = await self._command(
            call, lambda answer: self._owner.sleep(answer, core, level, mode, **limits)
        )
        return report

    async def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Map memory again, all of it or by tags. See `Lifecycle.wake_up`."""
        report: WakeReport = await self._ask("wake_up", lambda core: core.wake_up(tags))
        return report

    async def resume_generation(self) -> WakeReport:
        """End a pause; asleep deeper than that, the next wake will not stop at it."""
        report: WakeReport = await self._ask("resume_generation", lambda core: core.resume())
        return report

    async def is_sleeping(self) -> bool:
        """True in SLEEPING and PARTIALLY_AWAKE."""
        return self._core("is_sleeping").state in ASLEEP

    async def is_paused(self) -> bool:
        """Whether the caller paused and has not resumed."""
        return self._core("is_paused").paused

    async def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory while paused with nothing in flight."""
        await self._ask("release_kv_cache_memory", lambda core: core.release_kv_cache_memory())

    # -- weights, and the rest of the engine's surface -------------------------------------------------

    async def reload_weights(self, version: str | None = None, **kwargs: Any) -> LoadReport:
        """Reload the weights through the engine. See `Lifecycle.reload_weights`."""
        report: LoadReport = await self._ask(
            "reload_weights", lambda core: core.reload_weights(version, **kwargs)
        )
        return report

    async def mark_weights_loaded(self, version: str | None = None) -> LoadReport:
        """Say that the weights are loaded. Raises WeightsNotValid, naming what is not."""
        report: LoadReport = await self._ask(
            "mark_weights_loaded", lambda core: core.mark_weights_loaded(version)
        )
        return report

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109  (vLLM's signature; the engine applies it)
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker. What it needs goes by its name; see `lifecycle.table.RPC_NEEDS`."""
        given = {"timeout": timeout, "args": args, "kwargs": kwargs}
        result: list[Any] = await self._ask(
            "collective_rpc", lambda core: core.collective_rpc(method, (), given)
        )
        return result

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the prefix cache. False, recorded as such, while requests use it."""
        done: bool = await self._ask(
            "reset_prefix_cache", lambda core: core.reset_prefix_cache(*args, **kwargs)
        )
        return done

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other call of the engine's surface, by name; unknown ones need a serving engine."""
        return await self._ask(name, lambda core: core.call(name, *args, **kwargs))

    async def recover(self) -> tuple[str, ...]:
        """After a failure: shut the old engine down, build a new one, admit what was held.

        Returns the ids admitted. Raises IllegalCall for an engine that was handed over without `build`.
        """
        admitted: tuple[str, ...] = await self._ask("recover", self._owner.recover)
        return admitted

    # -- reading ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """State, facts, counts, and what is under way with its age. From any thread, never blocks."""
        return self._core("snapshot").snapshot()

    @property
    def state(self) -> State:
        """Where the engine is, now."""
        return self._core("state").state

    def watch(
        self, limit_s: float = 60.0, *, signum: int | None = None, out: TextIO | None = None
    ) -> Watchdog:
        """Start a `Watchdog`: an engine call older than `limit_s` becomes a `stalled` event with stacks."""
        return Watchdog(self._core("watch"), limit_s=limit_s, signum=signum, out=out)

    async def events(self, since: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Events as they happen: from now on, or from after the one of this `seq`. Ends when all is closed.

        The log keeps the last `event_capacity`. Who reads slower gets {"event": "missed", "count": n}
        in place of n events.
        """
        self._running_loop("events")
        last = self._events.seq if since is None else since
        while True:
            for event in self._events.since(last):
                if event["seq"] > last + 1:
                    yield {"event": "missed", "count": event["seq"] - last - 1}
                last = event["seq"]
                yield event
            change = self._change()  # first of all, or what happens before the next line would be missed
            if self._events.seq == last:
                if self._gone:
                    return
                await change

    async def wait_for(self, state: State | str, timeout: float | None = None) -> None:  # noqa: ASYNC109  (a shorthand for asyncio.timeout)
        """Return once the engine is, or has meanwhile been, in this state.

        Raises TimeoutError after `timeout` seconds, and Closed if it can't be any more.
        """
        try:
            wanted = State(state)
        except ValueError:
            known = names([known.value for known in State])
            raise InvalidArgument(f"wait_for: state must be one of {known}, not {state!r}") from None
        core = self._core("wait_for")
        seq = self._events.seq
        async with asyncio.timeout(timeout):
            if core.state is wanted:
                return
            async with contextlib.aclosing(self.events(seq)) as events:  # type: ignore[type-var]  # an async generator
                async for event in events:
                    if event.get("dest") == wanted or core.state is wanted:
                        return
        raise Closed(
            f"it was closed and will not be {wanted}", call="wait_for", state=self._state(), needs=None
        )

    def __repr__(self) -> str:
        if self._owner.core is None:
            return "<AsyncLifecycle, not started>"
        snapshot = self.snapshot()
        return (
            f"<AsyncLifecycle {snapshot.state}, {snapshot.in_flight} in flight, "
            f"{snapshot.held} held, {len(self._streams)} streams>"
        )


def _call(method: "weakref.WeakMethod[Any]", *arguments: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*arguments)


def _abandon(owner: EngineThread) -> None:
    """Nobody is left to wait for it."""
    owner.submit(lambda: owner.close(None, drain=False, timeout=None))


def _resolve(answer: "asyncio.Future[Any] | None", result: Any, error: BaseException | None) -> None:
    if answer is None or answer.done():  # its caller was cancelled
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
