"""The machine: one funnel through which every trigger and every guarded call passes.

Theory of operation
-------------------
`Core` owns the state, the facts, the ledger and the engine. It is synchronous, knows
no lock, no thread and no event loop; its caller makes sure that one call at a time is
inside it. Three rules:

1. *Guard, then act, then record.* `require` checks the table before anything is
   touched; `run` runs the effect and notes what is under way, so that another thread
   can see a hang; `fire` moves the machine and only then emits the event.
2. *A transition under way is a step object.* `begin_sleep` returns a `Sleep` that its
   caller advances. An engine that drives itself fits behind the same object: its
   `advance()` waits where this one steps.
3. *An exception that an engine call does not document, or an answer that it can't give,
   means that the engine can't be trusted*: `fail_with` ends every request in flight with
   the tokens it has, keeps what is held, and leaves nothing legal but to read, to abort,
   to recover and to close. What the engine says it did is believed once it was read.

No trigger fires on the path of a step, except when the engine becomes busy or idle.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar

from transitions import Machine

from lifecycle import table
from lifecycle.engine import (
    Call,
    Condition,
    Engine,
    LoadReport,
    Memory,
    Operation,
    OutOfDeviceMemory,
    Snapshot,
    WakeReport,
)
from lifecycle.errors import (
    AdmissionClosed,
    CacheNotReset,
    Closed,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    LifecycleError,
    RequestAborted,
    Unaudited,
    WakeFailed,
    WeightsNotValid,
    names,
    some,
)
from lifecycle.events import EventLog
from lifecycle.request_log import RequestLog
from lifecycle.requests import Ledger, Record, Scope
from lifecycle.sleep import Sleep, SleepRequest
from lifecycle.table import KV_CACHE, MEMORY_TAGS, SCHEDULING, WEIGHTS, Facts, Need, State, Trigger, Weights
from lifecycle.weights import WeightsKeeper

ON_TIMEOUT: Final = ("raise", "abort", "keep")
_LOST_CONTEXT: Final = ("illegal memory access", "device-side assert", "unspecified launch failure")
_UPDATE_BEGINS: Final = ("start_weight_update", "start_draft_weight_update")


_Answer = TypeVar("_Answer")


class _Cursor:
    """The private object on which `transitions` keeps the state and its trigger methods."""

    state: State
    trigger: Callable[[str], bool]


class Core:
    """The state machine around one engine. The parameters are `Lifecycle`'s.

    anybody: who owns the requests that no blocking call does.
    """

    def __init__(
        self,
        engine: Engine,
        events: EventLog,
        *,
        weights: str | None,
        max_held: int | None,
        stall_s: float,
        strict_release: bool,
        rpc_needs: Mapping[str, str] | None,
        rebuildable: bool,
        anybody: Scope | None = None,
    ) -> None:
        if max_held is not None and (type(max_held) is not int or max_held < 0):
            raise InvalidArgument(f"max_held must be None or an integer >= 0, not {max_held!r}")
        if not is_duration(stall_s):
            raise InvalidArgument(f"stall_s must be a number of seconds >= 0, not {stall_s!r}")
        self.events = events
        self.ledger = Ledger(anybody)
        self.request_log = RequestLog(self) if events.requests else None
        if self.request_log is not None:
            self.ledger.on_begin, self.ledger.on_end = self.request_log.began, self.request_log.ended
        self.max_held = max_held
        self.stall_s = stall_s
        self.strict_release = strict_release
        self.rebuildable = rebuildable
        self.rpc_needs = _own_needs(rpc_needs or {})
        self.paused = False
        self.clear_cache: bool | None = None  # what the last pause said, until the engine serves
        self.forked = False
        self.cause: BaseException | None = None
        self.failure: EngineFailed | None = None
        self.operation: Operation | None = None
        self.step_started: float | None = None
        self.transition: Sleep | None = None
        self.capabilities = engine.capabilities
        self.weights = WeightsKeeper(
            weights,
            checkable=engine.capabilities.check_weights,
            run=self.run,
            fail=self.fail_with,
            events=events,
        )
        self.state = State.FAILED  # until it was looked at
        with self.reading_engine("attach"):
            self._adopt(engine)
        found = table.match(Trigger.ATTACH, None, self.facts())
        if found is None:
            raise InternalError(f"no row of the table fits the engine as it was found: {self.facts()}")
        self.state = found.dest
        self._cursor = _Cursor()
        Machine(
            model=self._cursor,
            states=State,
            initial=self.state,
            auto_transitions=False,
            transitions=[
                {"trigger": rule.trigger, "source": rule.source, "dest": rule.dest, "conditions": holds}
                for rule in table.RULES
                if rule.source is not None
                for holds in [self._condition(rule.guard)]
            ],
        )
        self._set_open()
        events.emit(
            "attached",
            dest=self.state.value,
            table=table.TABLE_VERSION,
            policy=self.weights.policy,
            costs=self.capabilities.costs or None,
            **self._fields(),
        )

    def _condition(self, guard: str) -> Callable[[], bool]:
        holds = table.GUARDS[guard][0]
        return lambda: holds(self.facts())

    def _adopt(self, engine: Engine) -> None:
        """Take over an engine in whatever condition it really is."""
        self._engine: Engine | None = engine
        self._step, self._has_work = engine.step, engine.has_work
        self.merge_outputs = engine.merge_outputs  # without the engine, so that outputs outlive it
        self.capabilities = engine.capabilities
        self.unaborted: dict[str, str] = {}
        condition = self.condition()
        self.resident = condition.resident
        self.level = condition.level
        whole = self.resident >= MEMORY_TAGS
        if whole and condition.paused:
            self.level = 0
        if not whole and condition.level is None:
            self.level = 2  # it can't be read, so nothing may be believed of the contents
        unknown = not whole and self.level != 1
        self.weights.found(Weights.DISCARDED if unknown else condition.weights)
        if whole:  # discarded all the same: a dummy load, whose memory is already here
            self.weights.mapped(engine, whole=True)
        for found in condition.requests:
            call = Call(found.request_id, None, None, time.time(), {}, found.samples, found.delta)
            self.ledger.admit(call, found.engine_id, None, self.weights.epoch)

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine; only states that have one may ask."""
        if self._engine is None:
            raise InternalError("an engine call in a state that has no engine")
        return self._engine

    def read(self, name: str, kind: type[_Answer]) -> _Answer:
        """What the engine answers now to the read of that name. An answer of another kind raises."""
        answer = getattr(self.engine, name)()
        if not isinstance(answer, kind):
            raise TypeError(f"{name}() returned {answer!r}")
        return answer

    def condition(self) -> Condition:
        """The engine's condition, read now. One that no engine can be in raises."""
        condition = self.read("condition", Condition)
        if not (condition.resident <= MEMORY_TAGS and condition.level in (None, *table.LEVELS)):
            raise TypeError(f"condition() returned {condition!r}")
        return condition

    def facts(self) -> Facts:
        """What the guards read, now."""
        partial = not self.resident >= MEMORY_TAGS
        return Facts(
            resident=self.resident,
            level=self.level,
            weights=self.weights.condition,
            paused=self.paused,
            in_flight=len(self.ledger.in_flight),
            held=len(self.ledger.held),
            undelivered=len(self.ledger.undelivered),
            can_resleep=not partial or (WEIGHTS in self.resident and self.capabilities.resleep_partial),
            kept_may_load=self.clear_cache is not None and self.state in table.ASLEEP,
        )

    def under_way(self) -> Operation | None:
        """The engine call that has not returned yet. From any thread."""
        operation, step_started = self.operation, self.step_started
        if operation is not None or step_started is None:
            return operation
        return Operation("step", step_started)

    def snapshot(self) -> Snapshot:
        """A view without a lock, from any thread: every field is read once."""
        operation, transition = self.under_way(), self.transition
        call, started = None, None
        if operation is not None:
            call, started = operation
        elif transition is not None:
            call, started = str(transition), transition.started
        return Snapshot(
            state=self.state.value,
            level=self.level,
            resident=self.resident,
            weights=self.weights.condition.value,
            weights_version=self.weights.version,
            epoch=self.weights.epoch,
            paused=self.paused,
            in_flight=len(self.ledger.in_flight),
            held=len(self.ledger.held),
            undelivered=len(self.ledger.undelivered),
            operation=call,
            operation_age_s=None if started is None else time.monotonic() - started,
            cause=repr(self.cause) if self.cause else None,
            seq=self.events.seq,
        )

    def _fields(self) -> dict[str, Any]:
        """What every transition says beside itself."""
        return {
            "counts": {
                "in_flight": len(self.ledger.in_flight),
                "held": len(self.ledger.held),
                "undelivered": len(self.ledger.undelivered),
            },
            "resident": sorted(self.resident),
            "level": self.level,
            "weights": self.weights.condition.value,
        }

    def check(self) -> list[str]:
        """Broken invariants of the machine and its ledger; empty unless this library has a bug."""
        facts, serving = self.facts(), self.state in table.SERVING
        promises = {
            "a drain has an owner": (self.state is State.DRAINING)
            == bool(self.transition and self.transition.draining),
            "awake means that nothing is in flight": self.state is not State.AWAKE or not facts.in_flight,
            "running means that something is in flight": self.state is not State.RUNNING or facts.in_flight,
            "serving means that all memory is back and valid": not serving or facts.servable,
            "serving means that nothing is held": not serving or not facts.held,
            "nothing is in flight after the end": self.state in table.ALIVE or not facts.in_flight,
        }
        return [*self.ledger.check(), *(promise for promise, kept in promises.items() if not kept)]

    # -- the funnel ------------------------------------------------------------------------------------

    def require(self, call: str, need: Need | None = None) -> None:
        """Raise unless `call` is legal now. No engine call that changes anything precedes this."""
        need = need or table.NEEDS.get(call, Need.SERVING)
        if self.forked:
            self.refuse(Closed, call, "the engine belongs to the parent process; build one in this one")
        if self.operation is not None and need is not Need.NOTHING:
            self.refuse(IllegalCall, call, f"{self.operation.call} is under way inside the engine")
        if self.transition is not None and need not in (Need.NOTHING, Need.ALIVE, Need.ABORT):
            self.refuse(IllegalCall, call, f"{self.transition} is under way")
        if need in (Need.SERVING, Need.ALIVE) and self.state is State.PARTIALLY_AWAKE:
            self._look_again()
        if table.meets(need, self.state, self.facts()):
            return
        if self.state is State.FAILED:
            error = EngineFailed(
                f"cannot {call}: the engine failed ({self.cause!r}); legal now: {names(self._legal())}",
                call=call,
                in_flight=(),
                held=tuple(self.ledger.held),
                restart=_lost_context(self.cause),
            )
            self._note_refusal(call, error)
            raise error from self.cause
        if self.state is State.CLOSED:
            self.refuse(Closed, call, "it was closed or detached")
        if need is Need.SERVING and self.state is State.PARTIALLY_AWAKE and self.resident >= MEMORY_TAGS:
            self.refuse(WeightsNotValid, call, self.weights.way_out())
        why = f"it needs {table.NEED_CHECKS[need].words}"
        if need is Need.LOADING and self.ledger.in_flight:
            why += f" (in flight: {some(tuple(self.ledger.in_flight))})"
        self.refuse(IllegalCall, call, why)

    def refuse(self, kind: type[IllegalCall], call: str, why: str) -> NoReturn:
        """Raise the error that says what was called, in which state, why not, and what is legal."""
        legal = self._legal()
        error = kind(
            f"cannot {call} while {self.describe()}: {why}; legal now: {names(legal)}",
            call=call,
            state=self.state.value,
            needs=why,
            legal=legal,
            operation=self.operation.call if self.operation else (str(self.transition or "") or None),
            weights=self.weights.condition.value,
            missing=self.weights.missing,
        )
        self._note_refusal(call, error)
        raise error

    def invalid(self, call: str, why: str) -> InvalidArgument:
        """An `InvalidArgument` that was recorded; the caller raises it."""
        error = InvalidArgument(f"{call}: {why}", call=call)
        self._note_refusal(call, error)
        return error

    def _note_refusal(self, call: str, error: LifecycleError) -> None:
        self.events.emit_repeatable(
            "refused", call=call, state=self.state.value, error=f"{type(error).__name__}: {error}"
        )

    def _legal(self) -> tuple[str, ...]:
        if self.forked:
            return ()
        legal = table.legal_calls(self.state, self.facts())
        return tuple(call for call in legal if call != "recover" or self.rebuildable)

    def describe(self) -> str:
        """The state in words: "sleeping (level 1)", "partially awake (weights resident, ...)"."""
        words = self.state.value.replace("_", " ")
        if self.state is State.SLEEPING:
            return f"{words} (level {self.level}{', paused' if self.paused else ''})"
        if self.state is State.PARTIALLY_AWAKE:
            return f"{words} ({names(sorted(self.resident))} resident, weights {self.weights.condition})"
        return words

    def fire(self, trigger: Trigger, **fields: Any) -> None:
        """Move the machine, then tell. A row that does not exist is our bug."""
        source = self.state
        if not self._cursor.trigger(trigger):
            raise InternalError(f"no row for {trigger} from {source} with {self.facts()}")
        self.state = self._cursor.state
        self._set_open()
        self._tell_move(trigger, source, self.state, **fields)

    def _tell_move(self, trigger: Trigger, source: State, dest: State, **fields: Any) -> None:
        self.events.emit(
            "transition",
            trigger=trigger.value,
            source=source.value,
            dest=dest.value,
            **{**self._fields(), **fields},
        )

    def forget_parent(self) -> None:
        """In a forked child: the engine is not there, so everything is refused."""
        self.forked = True
        self.events.forget_parent()
        self._set_open()

    def _set_open(self) -> None:
        """Whether `step` may skip `require`: serving, in the process that owns the engine."""
        self.open = self.state in table.SERVING and not self.forked
        if self.open:
            self.clear_cache = None

    def run(
        self,
        call: str,
        effect: Callable[[], Any],
        *,
        passes: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """Run an engine call, visible from other threads while it runs.

        An exception of a type in `passes` is the caller's to see; any other one is the
        engine's failure.
        """
        started = time.monotonic()
        around, self.operation = self.operation, Operation(call, started)
        try:
            return effect()
        except passes:
            raise
        except BaseException as cause:  # noqa: BLE001  (fail_with raises)
            self.fail_with(call, cause)
        finally:
            self.operation = around

    @contextmanager
    def reading_engine(self, call: str) -> Iterator[None]:
        """An exception of an engine that is only being read is a failure like any other.

        Reads are visible from other threads as the call that they belong to.
        """
        around = self.operation
        if around is None and call != str(self.transition):
            self.operation = Operation(call, time.monotonic())
        try:
            yield
        except LifecycleError:
            raise
        except BaseException as cause:
            if cause is self.cause:  # it was seen where it was raised
                raise
            self.fail_with(call, cause)
        finally:
            self.operation = around

    def begin_operation(self, call: str, *, audited: bool = False) -> None:
        """Say what begins: if it hangs or the process dies, this is the last that is known.

        audited: raise Unaudited, before anything is touched, where somebody must record it and can't.
        """
        self.events.emit("operation_begin", call=call, state=self.state.value, **self._fields())
        why = self.events.unaudited() if audited else None
        if why is not None:
            self.end_operation(call, error="not begun")
            self.refuse(Unaudited, call, why)

    def end_operation(self, call: str, started: float | None = None, error: str | None = None) -> None:
        """Say that it is over, and how. started: by the monotonic clock, where it is known."""
        duration_s = None if started is None else time.monotonic() - started
        self.events.emit("operation_end", call=call, duration_s=duration_s, error=error)

    @contextmanager
    def announced(self, call: str, *, audited: bool = False) -> Iterator[None]:
        """What can block is said before and after."""
        self.begin_operation(call, audited=audited)
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.end_operation(
                call, started, repr(error.__cause__ if isinstance(error, EngineFailed) else error)
            )
            raise
        self.end_operation(call, started)

    def fail_with(self, call: str, cause: BaseException) -> NoReturn:
        """Fail, and raise what the caller gets: a KeyboardInterrupt stays what it is."""
        error, interrupt = self._fail(call, cause)
        if interrupt is not None:
            raise interrupt
        raise error from cause

    def _fail(self, call: str, cause: BaseException) -> tuple[EngineFailed, BaseException | None]:
        """The engine can't be trusted: end what is in flight, keep what is held."""
        self.cause = cause
        interrupt = None if isinstance(cause, Exception) else cause
        ended = tuple(self.ledger.in_flight)
        lost = []
        for record in list(self.ledger.in_flight.values()):
            try:
                self._end(record, "error")
            except BaseException as why:  # noqa: BLE001  (a broken engine may not even tell)
                self.events.emit("request_rejected", call=record.request_id, error=repr(why))
                interrupt = interrupt or (None if isinstance(why, Exception) else why)
                lost.append(record)
        given_up, self.transition = self.transition, None
        restart = _lost_context(cause)
        hint = "recover() or close()" if self.rebuildable else "close(), and build a new one"
        if restart:
            hint = "restart the process: its device context is lost"
        error = EngineFailed(
            f"{call} failed inside the engine: {cause!r}; {len(ended)} requests ended with the tokens "
            f"they had, {len(self.ledger.held)} are held; {hint}",
            call=call,
            in_flight=ended,
            held=tuple(self.ledger.held),
            restart=restart,
        )
        error.__cause__ = cause
        self.failure = error
        for record in lost:
            self.ledger.drop(record, error)
        if self.state is not State.FAILED:
            self.fire(Trigger.FAIL, call=call)
        self.events.emit("failed", call=call, error=f"{type(cause).__name__}: {cause}")
        if given_up is not None:
            given_up.abandon(repr(cause))
        return error, interrupt

    def interrupted(self, cause: BaseException, *, stepped: bool) -> None:
        """A Ctrl-C came out of this library's own code. What it left half done is made one again.

        stepped: the outputs of a step may be lost, so that nobody knows what their requests have.
        """
        self._tell_untold()
        if cause is self.cause or self.state is State.CLOSED:
            return
        moved, self.state = self.state, self._cursor.state
        broken = self.check()
        if stepped or broken or moved is not self.state:
            self.operation = self.step_started = None
            self.ledger.mend()
            self._fail("step" if stepped else "an interrupted call", cause)
            self._set_open()

    def _tell_untold(self) -> None:
        """It came between what happened and the event of it. Only one move can be untold."""
        told, now = self.events.mend(), self._cursor.state
        if told is not None and told != now:
            rule = next(rule for rule in table.RULES if (rule.source, rule.dest) == (told, now))
            self._tell_move(rule.trigger, State(told), now)
        if self.request_log is not None:
            self.request_log.mend()

    def _end(self, record: Record, reason: str) -> None:
        """Post the last outputs of a request in flight. Raises if they can't be had."""
        outputs = self.engine.last_outputs([record.engine_id], reason)
        ends = [output.finished for output in outputs if output.request_id == record.request_id]
        if len(ends) != len(outputs) or ends != [False] * (len(ends) - 1) + [True]:
            raise RuntimeError(f"last_outputs() of {record.request_id} returned {outputs!r}")
        if self.request_log is not None:
            self.request_log.count(outputs)
        for output in outputs:
            self.ledger.post(record, output)

    # -- requests --------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: Any, params: Any, options: Mapping[str, Any], owner: Scope | None
    ) -> str:
        """Admit a request, or hold it while admission is closed. Returns its handle."""
        self.require("add_request")
        around, self.operation = self.operation, Operation("add_request", time.monotonic())
        try:
            call = self._checking(lambda: self._prepare(request_id, prompt, params, options))
            if self.ledger.is_live(call.request_id):
                why = f"request id {call.request_id!r} is live until its last output was taken"
                raise self.invalid("add_request", why)
            if call.request_id in self.unaborted:
                self._refuse_unaborted(call.request_id)
            if not table.admits(self.state):
                return self._hold(call, owner).handle
            record = self.ledger.admit(call, self._add(call), owner, self.weights.epoch)
        finally:
            self.operation = around
        if self.state is State.AWAKE:
            self.fire(Trigger.ADMIT)
        return record.handle

    def _prepare(self, *arguments: Any) -> Call:
        call: Any = self.engine.prepare(*arguments)
        if not isinstance(call, Call):
            raise TypeError(f"prepare() returned {call!r}")
        return call

    def _refuse_unaborted(self, request_id: str) -> None:
        """Outputs carry the caller's id alone: those of two requests could not be told apart."""
        with self.reading_engine("add_request"):
            left = self.engine.last_outputs([self.unaborted[request_id]], "abort")
        if left:
            why = f"request id {request_id!r} belongs to an aborted request that the engine goes on with"
            raise self.invalid("add_request", why)
        del self.unaborted[request_id]

    def _hold(self, call: Call, owner: Scope | None) -> Record:
        if self.max_held is not None and len(self.ledger.held) >= self.max_held:
            self.refuse(AdmissionClosed, "add_request", f"admission is closed and max_held={self.max_held}")
        self._checking(lambda: self.engine.validate(call))
        return self.ledger.hold(call, owner, self.weights.epoch)

    def _add(self, call: Call) -> str:
        """Pass a request to the engine. Bad arguments are the caller's; anything else is a failure."""
        engine_id: str = self._checking(
            lambda: self.run("add_request", lambda: self._added(call), passes=(ValueError, TypeError))
        )
        return engine_id

    def _added(self, call: Call) -> str:
        engine_id: Any = self.engine.add(call)
        if not isinstance(engine_id, str) or not self.ledger.is_new_handle(engine_id, call.request_id):
            raise RuntimeError(f"add() returned {engine_id!r} as the id of {call.request_id}")
        return str(engine_id)

    def _checking(self, read: Callable[[], Any]) -> Any:
        """Turn the engine's complaint about an argument into ours."""
        try:
            return read()
        except ValueError as error:
            if isinstance(error, LifecycleError):
                raise
            raise self.invalid("add_request", str(error)) from error

    def abort_request(self, ids: Iterable[str], *, tell: bool = False) -> None:
        """End requests at their own caller's wish. Unknown ids are ignored.

        tell: somebody still waits for their outputs, so what they have is handed out as the last.
        """
        self.require("abort_request")
        doomed = {}
        for record in self.ledger.find(ids):
            in_flight = record.request_id in self.ledger.in_flight
            if in_flight:
                doomed[record.engine_id] = record.request_id
            if tell and in_flight:
                with self.reading_engine("abort_request"):
                    self._end(record, "abort")
            elif not tell:
                self.ledger.drop(record)  # whatever the engine says: its caller gave it up
            elif record.request_id in self.ledger.held:
                self.ledger.drop(record, RequestAborted(f"{record.request_id} was aborted before it started"))
        self._abort(doomed)
        self._settle()

    def _abort(self, doomed: Mapping[str, str]) -> frozenset[str]:
        """Abort requests by their engine ids. Returns the ids of those that the engine would not let go.

        Whatever such a request still puts out reaches nobody, and its id is not used again.
        """
        if not doomed:
            return frozenset()
        engine_ids = list(doomed)
        self.run("abort_request", lambda: self.engine.abort(engine_ids))
        with self.reading_engine("abort_request"):
            left = frozenset(output.request_id for output in self.engine.last_outputs(engine_ids, "abort"))
        for engine_id, request_id in doomed.items():
            if request_id in left:
                self.unaborted[request_id] = engine_id
                self.events.emit_repeatable("noop", call="abort_request", error="the engine goes on with it")
        return left

    def _settle(self) -> None:
        if self.state is State.RUNNING and not self.ledger.in_flight:
            self.fire(Trigger.SETTLE)

    def step(self, owner: Scope | None = None) -> list[Any]:
        """Hand out what waits for this caller; with nothing waiting, step the engine."""
        ledger = self.ledger
        if ledger.mailbox and (taken := ledger.take(owner)):
            return taken
        if not self.open:
            self.require("step")
        outputs = self.step_engine()
        if outputs:
            if owner is None and not ledger.scoped:
                return self._hand_out(outputs)
            return self.share(outputs, owner)
        return outputs

    def _freezes(self) -> bool:
        """Scheduling stands still for a drain that keeps: the engine counts no request as work."""
        return self.transition is not None and self.transition.mode == "keep"

    def lost(self) -> RuntimeError:
        """What is wrong with an engine that has no work while requests are in flight."""
        return RuntimeError(f"the engine has no work, but {some(tuple(self.ledger.in_flight))} never ended")

    def _hand_out(self, outputs: list[Any]) -> list[Any]:
        """The outputs of one step, where nobody else may take any of them."""
        ledger = self.ledger
        in_flight = ledger.in_flight
        strays: list[int] = []
        ended: list[tuple[int, Record]] = []
        try:
            for place, output in enumerate(outputs):
                record = in_flight.get(output.request_id)
                if record is None:
                    strays.append(place)
                elif output.finished:
                    ended.append((place, record))
        except Exception as error:  # noqa: BLE001  (it fails with it)
            self._fail_with_outputs(outputs, error)
        for place, record in ended:
            if not ledger.finished(record, outputs[place]):  # twice
                strays.append(place)
        if not in_flight:
            self._settle()
        return self._without(strays, outputs) if strays else outputs

    def _without(self, strays: list[int], outputs: list[Any]) -> list[Any]:
        for place in strays:
            self.note_stray(outputs[place])
        return [output for place, output in enumerate(outputs) if place not in strays]

    def share(self, outputs: list[Any], owner: Scope | None, *, all_wait: bool = False) -> list[Any]:
        """Split the outputs of one step: this caller's are returned, the others wait in the mailbox.

        all_wait: nobody can take any now. Nothing is changed before all were looked at.
        """
        ledger = self.ledger
        looked_at: list[tuple[Any, Any]] = []
        self.step_started = time.monotonic()
        try:
            for output in outputs:
                record = ledger.in_flight.get(output.request_id)
                waits = record is not None and (all_wait or not ledger.takes(owner, record))
                looked_at.append((output, self.snapshot_of(output) if waits else None))
        except BaseException as error:  # noqa: BLE001  (it fails with it)
            self._fail_with_outputs(outputs, error)
        finally:
            self.step_started = None
        mine = []
        for output, snapshot in looked_at:
            record = ledger.in_flight.get(output.request_id)
            if record is None:
                self.note_stray(output)
            elif snapshot is not None:
                ledger.post(record, snapshot)
            else:
                mine.append(output)
                if output.finished:
                    ledger.finished(record, output)
                    ledger.hand_out(record, output, owner)
        self._settle()
        return mine

    def snapshot_of(self, output: Any) -> Any:
        """A copy of an output that shares no list with the engine."""
        snapshot = self.engine.copy_output(output)
        if (snapshot.request_id, snapshot.finished) != (output.request_id, output.finished):
            raise RuntimeError(f"copy_output() of {output!r} returned {snapshot!r}")
        return snapshot

    def _fail_with_outputs(self, outputs: list[Any], cause: BaseException) -> NoReturn:
        """Not all outputs of a step can be understood: fail, and nobody loses those that can be."""
        for output in outputs:
            name = getattr(output, "request_id", None)
            record = self.ledger.in_flight.get(name) if isinstance(name, str) else None
            if record is not None and hasattr(output, "finished"):
                self.ledger.post(record, output)
        self.fail_with("step", cause)

    def step_for_others(self) -> list[Any]:
        """One engine step whose outputs all wait in the mailbox, as snapshots. Returns the originals."""
        outputs = self.step_engine()
        self.share(outputs, None, all_wait=True)
        return outputs

    def step_engine(self) -> list[Any]:
        """One engine step: its outputs, each once. With none, there is work left for what is in flight."""
        self.step_started = time.monotonic()
        try:
            outputs = self._step()
            lost = not outputs and self.ledger.in_flight and not self._freezes() and not self._has_work()
        except BaseException as cause:  # noqa: BLE001  (fail_with raises)
            self.fail_with("step", cause)
        finally:
            self.step_started = None
        if lost:
            self.fail_with("step", self.lost())
        if type(outputs) is not list:
            self.fail_with("step", TypeError(f"step() returned {outputs!r}, not a list"))
        if outputs and len(set(map(id, outputs))) < len(outputs):
            outputs = self._each_once(outputs)
        if outputs and self.request_log is not None:
            self.request_log.count(outputs)
        return outputs

    def _each_once(self, outputs: list[Any]) -> list[Any]:
        seen: dict[int, Any] = {}
        for output in outputs:
            if id(output) in seen:
                self.note_stray(output)
            seen[id(output)] = output
        return list(seen.values())

    def note_stray(self, output: Any) -> None:
        """An output of a request that already ended, or never began, reaches nobody."""
        self.events.emit_repeatable("unexpected_output", call=str(getattr(output, "request_id", None)))

    # -- sleep: what a `Sleep` is made of --------------------------------------------------------------

    def begin_sleep(
        self,
        level: int,
        mode: str,
        *,
        timeout: float | None = None,
        on_timeout: str = "raise",
        max_steps: int | None = None,
        pause: bool = False,
        clear_cache: bool | None = None,
    ) -> Sleep:
        """Check everything, close admission, and return the step object that does the rest."""
        call = "pause" if pause else "sleep"
        wrong = self._wrong_with_sleep(level, mode, timeout, on_timeout, max_steps)
        if wrong:
            raise self.invalid(call, wrong)
        self.require(call)
        request = SleepRequest(level, mode, timeout, on_timeout, max_steps, pause, clear_cache)
        with self.reading_engine(str(request)):
            return Sleep(self, request)

    def _wrong_with_sleep(
        self, level: Any, mode: Any, timeout: Any, on_timeout: Any, max_steps: Any
    ) -> str | None:
        if type(level) is not int or level not in table.LEVELS:
            return f"level must be 0, 1 or 2, not {level!r}"
        if level not in self.capabilities.levels:
            return f"level {level} needs an engine built with enable_sleep_mode=True"
        if mode not in table.MODES:
            return f"mode must be one of {names(table.MODES)}, not {mode!r}"
        if on_timeout not in ON_TIMEOUT:
            return f"on_timeout must be one of {names(ON_TIMEOUT)}, not {on_timeout!r}"
        if timeout is not None and not is_duration(timeout):
            return f"timeout must be a number of seconds >= 0, not {timeout!r}"
        if max_steps is not None and (type(max_steps) is not int or max_steps < 0):
            return f"max_steps must be an integer >= 0, not {max_steps!r}"
        if timeout is not None and self.capabilities.lockstep:
            return "ranks that step together can't be bound by one rank's clock: use max_steps"
        return None

    def recall(self) -> None:
        """Take what never started out of the engine, to be admitted again after the wake."""
        inside = {record.engine_id: record for record in self.ledger.in_flight.values() if record.recallable}
        unstarted = self.engine.unstarted(list(inside))
        if len(set(unstarted)) != len(unstarted) or not inside.keys() >= set(unstarted):
            raise RuntimeError(f"unstarted() returned {unstarted!r}, asked about {list(inside)}")
        for engine_id in unstarted:  # first of all: if the abort fails, they still never started
            self.ledger.recall(inside[engine_id])
        left = self._abort({engine_id: inside[engine_id].request_id for engine_id in unstarted})
        for engine_id in unstarted:
            if inside[engine_id].request_id in left:  # it is drained like any other
                del self.unaborted[inside[engine_id].request_id]
                self.ledger.into_engine(inside[engine_id], engine_id)

    def end_all(self, reason: str) -> tuple[str, ...]:
        """End everything in flight with the tokens it has. Returns the ids."""
        doomed = {record.engine_id: record.request_id for record in self.ledger.in_flight.values()}
        for record in list(self.ledger.in_flight.values()):
            self._end(record, reason)
        self._abort(doomed)
        return tuple(doomed.values())

    def readmit(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Pass what is held to the engine, oldest first. Returns (readmitted, rejected) ids."""
        readmitted: list[str] = []
        rejected: list[str] = []
        if self.ledger.held:
            self.run("add_request", lambda: self._readmit(readmitted, rejected))
        return tuple(readmitted), tuple(rejected)

    def _readmit(self, readmitted: list[str], rejected: list[str]) -> None:
        self.engine.forget_media()
        for record in self.ledger.oldest_first():
            try:
                engine_id = self._added(record.call)
            except (ValueError, TypeError) as error:
                # It was valid when it was held; an adapter may have been removed meanwhile.
                why = f"{record.request_id} was held, and refused at the wake: {error}"
                self.ledger.drop(record, InvalidArgument(why, call="add_request"))
                rejected.append(record.request_id)
                self.events.emit("request_rejected", call=record.request_id, error=str(error))
            else:
                record.epoch = self.weights.epoch
                self.ledger.into_engine(record, engine_id)
                readmitted.append(record.request_id)

    def fell_asleep(self, level: int, resident: frozenset[str]) -> None:
        """The engine proved that it sleeps."""
        self.level, self.resident = level, resident
        if WEIGHTS not in resident and level != 1:
            self.weights.discarded()

    def note_pause(self, request: SleepRequest) -> None:
        """The sleep that was asked for is here; a pause lasts longer than that."""
        if request.pause:
            self.paused, self.clear_cache = True, request.clear_cache

    def note_progress(self, call: str, **fields: Any) -> None:
        """Record how far a drain is."""
        self.events.emit("drain_progress", call=call, state=self.state.value, **fields)

    def note_memory(self, call: str, before: Memory, after: Memory, **fields: Any) -> None:
        """Record a measurement of memory, in bytes."""
        self.events.emit(
            "memory",
            call=call,
            bytes={
                "device_before": before.device,
                "device_after": after.device,
                "host_before": before.host,
                "host_after": after.host,
            },
            **fields,
        )

    # -- wake ------------------------------------------------------------------------------------------

    def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Map memory again, by tags or whole; serve once all is back and the weights are valid."""
        wanted = self._wanted_tags(tags)
        self.require("wake_up")
        asleep = MEMORY_TAGS - self.resident
        todo = tuple(tag for tag in (WEIGHTS, KV_CACHE) if tag in wanted & asleep)
        completes = asleep <= set(todo)
        resumes = self.state is State.SLEEPING and not asleep and not self.paused and SCHEDULING in wanted
        judges = not asleep and self.weights.condition is not Weights.VALID
        if not (todo or resumes or judges):
            return self._nothing_to_wake("wake_up")
        if todo == (KV_CACHE,) and WEIGHTS in asleep and self.level != 1 and not self.capabilities.kv_first:
            why = "this vLLM corrupts the model's buffers if the KV cache wakes first: wake_up(['weights'])"
            self.refuse(IllegalCall, "wake_up", why)
        with self.reading_engine("wake_up"):
            return self._wake(todo, completes=completes, arrives=resumes or judges)

    def _wake(self, todo: tuple[str, ...], *, completes: bool, arrives: bool) -> WakeReport:
        """Map `todo`. completes: it is all that sleeps; arrives: the state may change without it."""
        started = time.monotonic()
        before, was = self.read("memory", Memory), self.resident
        # Weights that were loaded are looked at before the KV cache takes the rest of the memory.
        if completes and WEIGHTS not in todo:
            self.weights.judge(self.engine)
        short = self._map(todo) if todo else None
        not_back = frozenset(todo) - self.resident
        if WEIGHTS in self.resident - was:
            self.weights.mapped(self.engine, whole=completes and not not_back)
        readmitted: tuple[str, ...] = ()
        rejected: tuple[str, ...] = ()
        if arrives or self.resident != was:
            readmitted, rejected = self._arrive(Trigger.WAKE)
        after = self.read("memory", Memory)
        self.note_memory("wake_up", before, after)
        if not_back:
            did = f"found too little device memory ({short})" if short else "returned"
            raise WakeFailed(
                f"wake_up({list(todo)}) {did}, and {sorted(not_back)} did not come back; "
                f"the engine is {self.describe()}; free device memory and call it again",
                tags=tuple(tag for tag in todo if tag in not_back),
                missing_bytes=short.missing_bytes if short else None,
            ) from short
        return WakeReport(
            awake=self.state in table.SERVING,
            state=self.describe(),
            tags=todo,
            resident=self.resident,
            readmitted=readmitted,
            rejected=rejected,
            missing=self.weights.missing,
            seconds=time.monotonic() - started,
            device_before=before.device,
            device_after=after.device,
        )

    def _wanted_tags(self, tags: Any) -> frozenset[str]:
        if tags is None:
            return table.TAGS
        known = f"a list of {names(sorted(table.TAGS))}, or None for all"
        if not isinstance(tags, (list, tuple, set, frozenset)):
            raise self.invalid("wake_up", f"tags must be {known}, not {tags!r}")
        if not tags:
            raise self.invalid("wake_up", f"tags must not be empty: give {known}")
        unknown = [tag for tag in tags if tag not in table.TAGS]
        if unknown:
            raise self.invalid("wake_up", f"unknown tags {unknown!r}: give {known}")
        if len(set(tags)) != len(tags):
            raise self.invalid("wake_up", f"a tag is given twice: {list(tags)!r}")
        return frozenset(tags)

    def _nothing_to_wake(self, call: str) -> WakeReport:
        self.events.emit_repeatable("noop", call=call, state=self.state.value)
        return WakeReport(
            awake=self.state in table.SERVING,
            state=self.describe(),
            resident=self.resident,
            missing=self.weights.missing,
            noop=True,
        )

    def _map(self, tags: tuple[str, ...]) -> OutOfDeviceMemory | None:
        """Have the engine map these tags, and read what came back. Returns why not all of it."""
        short: OutOfDeviceMemory | None = None
        try:
            with self.announced("wake_up"):
                self.run("wake_up", lambda: self.engine.wake_up(tags), passes=(OutOfDeviceMemory,))
        except OutOfDeviceMemory as cause:
            short = cause
        resident = self.condition().resident
        if not resident >= self.resident:
            raise RuntimeError(f"wake_up({list(tags)}) took away {sorted(self.resident - resident)}")
        if short and resident >= set(tags):  # mapped, but who knows with what in it
            raise short
        self.resident = resident
        return short

    def schedule(self, *, on: bool) -> None:
        """Have the engine schedule again, or no more, and look whether it does."""
        call = "resume_scheduling" if on else "pause_scheduling"
        self.run(call, self.engine.resume_scheduling if on else self.engine.pause_scheduling)
        with self.reading_engine(call):
            if self.condition().paused is on:
                raise RuntimeError(f"{call}() returned, but the engine is {'' if on else 'not '}paused")

    def _arrive(self, trigger: Trigger) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Memory or weights changed: serve if everything holds now, and tell."""
        readmitted: tuple[str, ...] = ()
        rejected: tuple[str, ...] = ()
        if self.facts().servable:
            if self.paused or (trigger is Trigger.WEIGHTS_VALID and self.level == 0):
                self.schedule(on=False)
                self.level = 0
            else:
                self.schedule(on=True)
                self.level = None
                readmitted, rejected = self.readmit()
        elif trigger is Trigger.WAKE and self.level == 0 and self.resident >= MEMORY_TAGS and not self.paused:
            self.level = None  # the pause is over: the load that is missing comes back to no pause
        self.fire(trigger)
        return readmitted, rejected

    def _look_again(self) -> None:
        """Everything is back but the weights were not valid: perhaps somebody loaded them unseen."""
        if self.transition is None and self.resident >= MEMORY_TAGS and self.weights.judge(self.engine):
            self._drop_caches("load")
            self._arrive(Trigger.WEIGHTS_VALID)

    def resume(self) -> WakeReport:
        """End a pause (level 0). Asleep deeper than that, only the next wake is affected."""
        self.require("resume")
        self.paused = False
        if self.level == 0 and self.resident >= MEMORY_TAGS:
            return self.wake_up([SCHEDULING])
        return self._nothing_to_wake("resume")

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory while paused with nothing in flight."""
        self.require("release_kv_cache_memory")
        if not self.capabilities.release_kv:
            self.refuse(IllegalCall, "release_kv_cache_memory", "this vLLM can't (0.32 can)")
        with self.reading_engine("release_kv_cache_memory"):
            if self.read("has_work", bool):  # ids of finished requests, which the workers must still be told
                self.step_for_others()
            if self.read("has_work", bool):
                self.refuse(IllegalCall, "release_kv_cache_memory", "the engine still has work to flush")
        with self.announced("release_kv_cache_memory"):
            self.run("release_kv_cache_memory", self.engine.release_kv_cache_memory)
        with self.reading_engine("release_kv_cache_memory"):
            condition = self.condition()
            if not condition.paused or condition.resident != {WEIGHTS}:
                raise RuntimeError(f"release_kv_cache_memory() returned, but the engine is {condition}")
        self.resident = condition.resident
        self.fire(Trigger.RELEASE_KV)

    # -- weights ---------------------------------------------------------------------------------------

    def load(self, call: str, effect: Callable[[], Any], *, whole: bool, version: str | None = None) -> Any:
        """Run a weight load or update, and drop the caches computed with the old weights.

        whole: this call alone loads every parameter. An exception of the load is the
        caller's to see; the weights are tainted by it.
        """
        self.require(call, Need.LOADING)
        opens = call in _UPDATE_BEGINS
        with self.announced(call, audited=True):
            try:
                result = self.run(call, effect, passes=(Exception,))
            except Exception as error:
                self._taint(f"{call} failed ({error!r})")
                raise
        if opens:
            self._taint(f"{call} began an update that has not finished", opens_update=True)
            return result
        self._drop_caches(call)
        self.weights.loaded(call, self.engine, whole=whole, version=version)
        self._serve_if_valid()
        return result

    def _serve_if_valid(self) -> None:
        """The weights changed: serve with them, or stop serving."""
        valid = self.weights.condition is Weights.VALID
        if valid and self.state is State.PARTIALLY_AWAKE and self.facts().servable:
            self._arrive(Trigger.WEIGHTS_VALID)
        elif not valid and self.state in (State.AWAKE, State.SLEEPING):
            self.schedule(on=False)
            self.fire(Trigger.WEIGHTS_TAINTED)

    def _taint(self, why: str, *, opens_update: bool = False) -> None:
        self.weights.taint(why, opens_update=opens_update)
        self._serve_if_valid()

    def _drop_caches(self, call: str) -> None:
        """What was computed with the old weights must not be served, unless the caller said so."""
        kept = bool(self.ledger.in_flight)
        if kept and self.level == 0 and self.clear_cache is False:
            self.events.emit_repeatable("stale_kv", call=call, state=self.state.value, **self._fields())
            return
        if self.run("reset_caches", lambda: self.engine.reset_caches(kept=kept)) is not True:
            why = f"{call}: the engine kept caches computed with the old weights"
            self._taint(why)
            raise CacheNotReset(why, call=call)

    def mark_weights_loaded(self, version: str | None = None) -> LoadReport:
        """The caller says that the weights are loaded. Checked where they can be."""
        self.require("mark_weights_loaded")
        started = time.monotonic()
        missing = self.weights.look(self.engine)
        if missing:
            self.refuse(WeightsNotValid, "mark_weights_loaded", f"never loaded: {some(missing)}")
        self._drop_caches("mark_weights_loaded")
        self.weights.valid("declared", version)
        self._serve_if_valid()
        return self._load_report(started)

    def reload_weights(self, version: str | None = None, **kwargs: Any) -> LoadReport:
        """The engine's own reload, from its checkpoint or as vLLM's keywords say."""
        started = time.monotonic()
        self.load(
            "reload_weights",
            lambda: self.engine.call("collective_rpc", "reload_weights", kwargs=kwargs),
            whole=_loads_whole("reload_weights", kwargs),
            version=version,
        )
        self._look_again()
        return self._load_report(started)

    def _load_report(self, started: float) -> LoadReport:
        keeper = self.weights
        return LoadReport(
            valid=keeper.condition is Weights.VALID,
            epoch=keeper.epoch,
            version=keeper.version,
            missing=keeper.missing,
            seconds=time.monotonic() - started,
        )

    # -- everything else of the engine's surface -------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call that changes nothing the machine knows of. Its exceptions are the caller's to see."""
        if name in table.OWN_CALLS and self.state is not State.CLOSED:
            self.refuse(IllegalCall, name, f"it would go behind the machine; use the lifecycle's own {name}")
        self.require(name)
        return self.run(name, lambda: self.engine.call(name, *args, **kwargs), passes=(Exception,))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the prefix cache. False, recorded as such, while requests use it."""
        done = bool(self.call("reset_prefix_cache", *args, **kwargs))
        if not done:
            self.events.emit_repeatable("noop", call="reset_prefix_cache", error="returned False")
        return done

    def collective_rpc(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a worker method, by what `RPC_NEEDS` and the caller's `rpc_needs` say.

        args and kwargs are those of the engine's own `collective_rpc`, after the method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        label = f"collective_rpc({name!r})"
        need = table.rpc_need(name, self.rpc_needs)
        if need is Need.MACHINE and self.state is not State.CLOSED:
            self.refuse(IllegalCall, label, f"it would go behind the machine; use the lifecycle's own {name}")
        if need is Need.LOADING:
            inner = kwargs.get("kwargs") or dict(enumerate(args)).get(2) or {}  # timeout, args, kwargs
            return self.load(
                name,
                lambda: self.engine.call("collective_rpc", method, *args, **kwargs),
                whole=_loads_whole(name, inner),
            )
        self.require(label, need)
        return self.run(
            label, lambda: self.engine.call("collective_rpc", method, *args, **kwargs), passes=(Exception,)
        )

    # -- the end ---------------------------------------------------------------------------------------

    def recover(self, build: Callable[[], Engine]) -> tuple[str, ...]:
        """Shut the failed engine down, build a new one, and admit what was held. Returns its ids."""
        self.require("recover")
        if _lost_context(self.cause):
            self.refuse(IllegalCall, "recover", "the device context is lost: restart the process")
        with self.announced("recover"):
            return self._recover(build)

    def _recover(self, build: Callable[[], Engine]) -> tuple[str, ...]:
        started = time.monotonic()
        self.operation = Operation("recover", started)
        try:
            # The old engine's shutdown takes torch.distributed down for the whole process,
            # so nothing of it may be left once the new one exists.
            with suppress(Exception), self.announced("shutdown"):  # of an engine that is known to be broken
                self.let_go(shutdown=True)
            _forget_frames(self.cause)
            gc.collect()
            engine = build()
            self.paused = False
            with self.reading_engine("recover"):
                self._adopt(engine)
            readmitted = self.readmit()[0] if self.facts().servable and self.level is None else ()
        finally:
            self.operation = None
        self.cause = self.failure = None
        self.fire(Trigger.RECOVER, duration_s=time.monotonic() - started)
        return readmitted

    def let_go(self, *, shutdown: bool) -> None:
        """Drop every reference to the engine, and shut it down if it is ours to."""
        engine, self._engine = self._engine, None
        self._step = self._has_work = _no_step
        if shutdown and engine is not None:
            engine.shutdown()

    def close(self, *, shutdown: bool) -> None:
        """End. With `shutdown`, what is in flight ends with the tokens it has, still to be taken.

        Without, the engine goes on elsewhere: a drain under way is rolled back first.
        """
        if self.state is State.CLOSED:
            return
        self.require("close")
        self.operation = Operation("close" if shutdown else "detach", time.monotonic())
        try:
            if self.transition is not None and not shutdown:
                self.transition.cancel()
            if shutdown and self.ledger.in_flight:
                with self.reading_engine("close"):
                    self.end_all("abort")
        finally:  # whatever the engine says to that, it is the end
            try:
                self._leave(shutdown=shutdown)
                self.let_go(shutdown=shutdown)
            finally:
                self.operation = None

    def _leave(self, *, shutdown: bool) -> None:
        unserved = list(self.ledger.held)
        for record in [*self.ledger.held.values(), *self.ledger.in_flight.values()]:
            self.ledger.drop(record, closed(record.request_id))
        if self.transition is not None:
            self.transition.abandon("closed")
        self.fire(Trigger.CLOSE)
        self.events.emit("closed" if shutdown else "detached", counts={"unserved": len(unserved)})
        self.events.end(clean=True)


def closed(what: str) -> Closed:
    """What whoever waits for it is told."""
    return Closed(
        f"{what} did not come to its end: the engine was closed",
        call=None,
        state=State.CLOSED.value,
        needs=None,
        legal=(),
        operation=None,
    )


def _no_step() -> Any:
    raise InternalError("a step without an engine")


def is_duration(value: Any) -> bool:
    """Whether it is a finite number of seconds, at least 0."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _loads_whole(method: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call alone loads every parameter; an iterator may give only some."""
    return method in ("reload_weights", "finish_weight_update") and "weights_iterator" not in kwargs


def _forget_frames(cause: BaseException | None) -> None:
    """The frames that an exception went through hold what they worked on, the old engine among it."""
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _own_needs(given: Mapping[str, str]) -> dict[str, Need]:
    known = (Need.QUIET, Need.WEIGHTS, Need.LOADING, Need.SERVING)
    wrong = {name: need for name, need in given.items() if need not in known}
    if wrong:
        raise InvalidArgument(f"rpc_needs {wrong!r}: a need is one of {names(known)}")
    return {name: Need(need) for name, need in given.items()}


def _lost_context(cause: BaseException | None) -> bool:
    """Whether the device context of this process is beyond repair."""
    return any(words in str(cause).lower() for words in _LOST_CONTEXT)
