"""The machine: one funnel through which every trigger and every guarded call passes.

Theory of operation
-------------------
`Core` owns the state, the facts, the ledger and the engine. It is synchronous, knows
no lock, no thread and no event loop; its caller makes sure that one call at a time is
inside it. Three rules:

1. *Guard, then act, then record.* `require` checks the table before anything is
   touched; `_in_engine` runs the effect and notes what is under way, so that another
   thread can see a hang; `_fire` moves the machine and only then emits the event.
2. *A transition under way is a step object.* `begin_sleep` returns a `Sleep`;
   `advance()` runs one engine step or one phase, `cancel()` rolls back. Whoever holds
   it owns the transition. An engine that drives itself fits behind the same object:
   its `advance()` waits where this one steps.
3. *An exception that an engine call does not document means that the engine can't be
   trusted*: `fail` ends every request in flight with the tokens it has, keeps what is
   held, and leaves nothing legal but to read, to abort, to recover and to close.

No trigger fires on the path of a step, except when the engine becomes busy or idle.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from transitions import Machine

from lifecycle import table
from lifecycle.audit import EventLog
from lifecycle.engine import (
    Call,
    Engine,
    LoadReport,
    Operation,
    OutOfDeviceMemory,
    Progress,
    SleepReport,
    Snapshot,
    WakeReport,
)
from lifecycle.errors import (
    AdmissionClosed,
    CacheNotReset,
    Closed,
    DrainCancelled,
    DrainError,
    DrainStalled,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    LifecycleError,
    ReleaseFailed,
    UnsupportedEngine,
    WakeFailed,
    WeightsNotValid,
    names,
)
from lifecycle.requests import Ledger, Record, Scope
from lifecycle.table import (
    KV_CACHE,
    MEMORY_TAGS,
    SCHEDULING,
    WEIGHTS,
    Facts,
    Need,
    State,
    Trigger,
    Weights,
)

WEIGHTS_POLICIES: Final = ("checked", "declared", "unchecked")
ON_TIMEOUT: Final = ("raise", "abort", "keep")
# A sleep that frees less than this part of what the engine holds did not really free it.
RELEASED_ENOUGH: Final = 0.5


class _Cursor:
    """The private object on which `transitions` keeps the state and its trigger methods."""

    state: State
    trigger: Callable[[str], bool]


class Core:
    """The state machine around one engine. See the module's docstring.

    weights: "checked", "declared", "unchecked", or None for "checked" where possible.
    max_held: how many requests may wait outside the engine (None: no limit, 0: none).
    stall_s: seconds without progress after which a drain is `DrainStalled`.
    strict_release: raise `ReleaseFailed` when a sleep frees far less than the engine holds.
    rpc_needs: what worker methods of the caller's own need, by name.
    """

    def __init__(
        self,
        engine: Engine,
        events: EventLog,
        *,
        weights: str | None = None,
        max_held: int | None = None,
        stall_s: float = 120.0,
        strict_release: bool = False,
        rpc_needs: Mapping[str, str] | None = None,
    ) -> None:
        self.events = events
        self.ledger = Ledger()
        self.max_held = max_held
        self.stall_s = stall_s
        self.strict_release = strict_release
        self.rpc_needs = dict(rpc_needs or {})
        self.epoch = 0
        self.version: str | None = None
        self.paused = False
        self.missing: tuple[str, ...] = ()
        self.cause: BaseException | None = None
        self.operation: Operation | None = None
        self.step_started: float | None = None
        self.transition: Sleep | None = None
        self.forked = False
        self._update_before: Weights | None = None
        self._filled = False  # discarded weights were filled, so that holes can be seen
        self._capabilities = engine.capabilities
        self.policy = self._policy(weights)
        self._adopt(engine)
        found = table.match(Trigger.ATTACH, None, self.facts())
        if found is None:
            msg = f"no row of the table fits the engine as it was found: {self.facts()}"
            raise InternalError(msg)
        self.state = found.dest
        self._cursor = _Cursor()
        Machine(
            model=self._cursor,
            states=State,
            initial=self.state,
            auto_transitions=False,
            transitions=[
                {"trigger": rule.trigger, "source": rule.source, "dest": rule.dest, "conditions": check}
                for rule in table.RULES
                if rule.source is not None
                for check in [self._guard(rule.guard)]
            ],
        )
        self.events.emit(
            "attached", dest=self.state.value, table=table.TABLE_VERSION, policy=self.policy, **self._facts_fields()
        )
        self._set_open()

    def _guard(self, name: str) -> Callable[[], bool]:
        holds = table.GUARDS[name][0]
        return lambda: holds(self.facts())

    def _adopt(self, engine: Engine) -> None:
        """Take over an engine in whatever condition it really is."""
        self._engine: Engine | None = engine
        self._step = engine.step
        self._capabilities = engine.capabilities
        condition = engine.condition()
        self.resident = condition.resident
        self.weights = condition.weights
        asleep = condition.paused or not self.resident >= MEMORY_TAGS
        self.level = condition.level if condition.level is not None else (None if not asleep else 0)
        if not self.resident >= MEMORY_TAGS and condition.level is None:
            # Found asleep at a level that can't be read: only a load makes the weights good.
            self.level, self.weights = 2, Weights.DISCARDED
        if self.weights is Weights.DISCARDED and self.resident >= MEMORY_TAGS:  # a dummy load
            self._weights_came_back(last=True)
        for found in condition.requests:
            call = Call(found.request_id, None, None, time.time(), {}, found.samples, found.delta)
            self.ledger.admit(call, found.engine_id, None, self.epoch)

    def _policy(self, asked: str | None) -> str:
        if asked is None:
            return "checked" if self._capabilities.check_weights else "declared"
        if asked not in WEIGHTS_POLICIES:
            msg = f"weights={asked!r} is not one of {names(WEIGHTS_POLICIES)}"
            raise InvalidArgument(msg)
        if asked == "checked" and not self._capabilities.check_weights:
            msg = "weights='checked' needs floating-point parameters to fill; use weights='declared'"
            raise UnsupportedEngine(msg)
        return asked

    # -- reading -------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            msg = "an engine call in a state that has no engine"
            raise InternalError(msg)
        return self._engine

    def facts(self) -> Facts:
        """What the guards read, now."""
        ledger = self.ledger
        partial = not self.resident >= MEMORY_TAGS
        weights_asleep = WEIGHTS not in self.resident
        return Facts(
            resident=self.resident,
            level=self.level,
            weights=self.weights,
            paused=self.paused,
            in_flight=len(ledger.in_flight),
            held=len(ledger.held),
            undelivered=len(ledger.undelivered),
            can_resleep=not partial or (not weights_asleep and self._capabilities.resleep_partial),
        )

    def snapshot(self) -> Snapshot:
        """A view without a lock, from any thread: each field is read once."""
        operation, transition, step_started = self.operation, self.transition, self.step_started
        name, started = None, None
        if operation is not None:
            name, started = operation
        elif step_started is not None:
            name, started = "step", step_started
        elif transition is not None:
            name, started = str(transition), transition.started
        return Snapshot(
            state=self.state.value,
            level=self.level,
            resident=self.resident,
            weights=self.weights.value,
            weights_version=self.version,
            epoch=self.epoch,
            paused=self.paused,
            in_flight=len(self.ledger.in_flight),
            held=len(self.ledger.held),
            undelivered=len(self.ledger.undelivered),
            operation=name,
            operation_age_s=None if started is None else time.monotonic() - started,
            cause=repr(self.cause) if self.cause else None,
            seq=self.events.seq,
        )

    def _facts_fields(self) -> dict[str, Any]:
        return {
            "counts": {
                "in_flight": len(self.ledger.in_flight),
                "held": len(self.ledger.held),
                "undelivered": len(self.ledger.undelivered),
            },
            "resident": sorted(self.resident),
            "level": self.level,
            "weights": self.weights.value,
        }

    def check(self) -> list[str]:
        """Broken invariants of the machine and its ledger; empty unless this library has a bug."""
        wrong = self.ledger.check()
        if (self.state is State.DRAINING) != (self.transition is not None and self.transition.draining):
            wrong.append("a drain without an owner")
        if self.state is State.AWAKE and self.facts().busy:
            wrong.append("awake, though requests are in flight or held")
        if self.state is State.RUNNING and not self.ledger.in_flight:
            wrong.append("running, though nothing is in flight")
        if self.state in table.SERVING and not self.facts().servable:
            wrong.append("serving, though memory is asleep or the weights are not valid")
        if self.state in table.SERVING and self.ledger.held:
            wrong.append("serving, though requests are held")
        return wrong

    # -- the funnel ------------------------------------------------------------------------

    def require(self, call: str, need: Need | None = None) -> None:
        """Raise unless `call` is legal now. Nothing is touched before this returns."""
        need = need or table.NEEDS.get(call, Need.SERVING)
        if self.forked:
            self._refuse(Closed, call, "the engine belongs to the parent process; build one in this process")
        if self.operation is not None and need is not Need.NOTHING:
            self._refuse(IllegalCall, call, f"{self.operation.call} is under way inside the engine")
        if self.transition is not None and need not in (Need.NOTHING, Need.ALIVE, Need.ABORT):
            self._refuse(IllegalCall, call, f"{self.transition} is under way")
        if need in (Need.SERVING, Need.ALIVE) and self.state is State.PARTIALLY_AWAKE:
            self._look_again()
        if table.meets(need, self.state, self.facts()):
            return
        if self.state is State.FAILED and need is not Need.MACHINE:
            error = EngineFailed(
                f"cannot {call}: the engine failed ({self.cause!r}); legal now: {names(self.legal())}",
                call=call,
                in_flight=(),
                held=tuple(self.ledger.held),
            )
            self._note_refusal(call, error)
            raise error from self.cause
        needs = table.NEED_CHECKS[need].words
        if self.state is State.CLOSED:
            self._refuse(Closed, call, "it was closed or detached")
        if self.state is State.PARTIALLY_AWAKE and self.facts().all_resident and need is Need.SERVING:
            missing = f"; never loaded: {_some(self.missing)}" if self.missing else ""
            self._refuse(
                WeightsNotValid,
                call,
                f"all memory is awake but the weights are {self.weights}: load them, "
                f"then wake_up() or mark_weights_loaded(){missing}",
            )
        self._refuse(IllegalCall, call, f"it needs {needs}")

    def legal(self) -> tuple[str, ...]:
        return table.legal_calls(self.state, self.facts())

    def describe(self) -> str:
        """The state in words: "sleeping (level 1)", "partially awake (weights)"."""
        words = self.state.value.replace("_", " ")
        if self.state is State.SLEEPING:
            return f"{words} (level {self.level}{', paused' if self.paused else ''})"
        if self.state is State.PARTIALLY_AWAKE:
            return f"{words} ({names(sorted(self.resident))} resident, weights {self.weights})"
        return words

    def _refuse(self, kind: type[IllegalCall], call: str, why: str) -> None:
        legal = self.legal()
        operation = self.operation.call if self.operation else (str(self.transition or "") or None)
        error = kind(
            f"cannot {call} while {self.describe()}: {why}; legal now: {names(legal)}",
            call=call,
            state=self.state.value,
            needs=why,
            legal=legal,
            operation=operation,
            weights=self.weights.value,
            missing=self.missing,
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

    def _fire(self, trigger: Trigger, **fields: Any) -> None:
        """Move the machine, then tell. A row that does not exist is our bug."""
        source = self.state
        if not self._cursor.trigger(trigger):
            msg = f"no row for {trigger} from {source} with {self.facts()}"
            raise InternalError(msg)
        self.state = self._cursor.state
        self._set_open()
        self.events.emit(
            "transition",
            trigger=trigger.value,
            source=source.value,
            dest=self.state.value,
            **{**self._facts_fields(), **fields},
        )

    def _set_open(self) -> None:
        """Whether `step` may take the short way: serving, and nobody else's turn."""
        self.open = self.state in table.SERVING and self.transition is None and not self.forked

    def _in_engine(self, call: str, run: Callable[[], Any], *, announce: bool = True) -> Any:
        """Run one engine call, visible from other threads while it runs.

        An exception that escapes `run` is the engine's failure.
        """
        if announce:
            self.events.emit("operation_begin", call=call, state=self.state.value, **self._facts_fields())
        started = time.monotonic()
        self.operation = Operation(call, started)
        try:
            result = run()
        except BaseException as cause:
            self.operation = None
            error = self.fail(call, cause)
            if isinstance(cause, Exception):
                raise error from cause
            raise  # KeyboardInterrupt and SystemExit stay what they are
        finally:
            self.operation = None
        if announce:
            self.events.emit("operation_end", call=call, duration_s=time.monotonic() - started)
        return result

    def fail(self, call: str, cause: BaseException) -> EngineFailed:
        """The engine can't be trusted: end what is in flight, keep what is held."""
        self.operation = None
        self.transition = None
        self.cause = cause
        ended = list(self.ledger.in_flight.values())
        for record in ended:
            self._end(record, "error")
        self._fire(Trigger.FAIL, call=call)
        self.events.emit("failed", call=call, error=f"{type(cause).__name__}: {cause}")
        restart = _lost_context(cause)
        hint = "restart the process: its device context is lost" if restart else "recover() or close()"
        return EngineFailed(
            f"{call} failed inside the engine: {cause!r}; "
            f"{len(ended)} requests ended with the tokens they had, "
            f"{len(self.ledger.held)} are held; {hint}",
            call=call,
            in_flight=tuple(record.request_id for record in ended),
            held=tuple(self.ledger.held),
            restart=restart,
        )

    def _end(self, record: Record, reason: str) -> None:
        """Post the last outputs of a request in flight; with none to be had, just end it."""
        try:
            outputs = self.engine.last_outputs([record.engine_id or ""], reason)
        except Exception as error:  # a poisoned engine may not even tell
            self.events.emit("request_rejected", call=reason, error=repr(error))
            outputs = []
        for output in outputs:
            self.ledger.post(record, output)
        if record.request_id in self.ledger.in_flight:
            self.ledger.drop(record)

    # -- requests ---------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        options: Mapping[str, Any],
        owner: Scope | None = None,
    ) -> str:
        """Admit a request, or hold it while admission is closed. Returns its handle."""
        self.require("add_request")
        try:
            call = self.engine.prepare(request_id, prompt, params, options)
        except (ValueError, TypeError) as error:
            raise self._bad_request(error) from error
        if self.ledger.is_live(call.request_id):
            why = f"request id {call.request_id!r} is live; an id can be used again once its last output was taken"
            raise self.invalid("add_request", why)
        if not (table.admits(self.state) and self.transition is None):
            return self._hold(call, owner)
        record = self.ledger.admit(call, self._add(call), owner, self.epoch)
        if self.state is State.AWAKE:
            self._fire(Trigger.ADMIT)
        return record.handle

    def _hold(self, call: Call, owner: Scope | None) -> str:
        if self.max_held is not None and len(self.ledger.held) >= self.max_held:
            self._refuse(AdmissionClosed, "add_request", f"admission is closed and max_held={self.max_held}")
        try:
            self.engine.validate(call)
        except (ValueError, TypeError) as error:
            raise self._bad_request(error) from error
        return self.ledger.hold(call, owner, self.epoch).handle

    def _add(self, call: Call) -> str:
        """Pass a request to the engine. Bad arguments are the caller's; anything else is a failure."""
        try:
            return self.engine.add(call)
        except (ValueError, TypeError) as error:
            raise self._bad_request(error) from error
        except BaseException as cause:
            error = self.fail("add_request", cause)
            if isinstance(cause, Exception):
                raise error from cause
            raise

    def _bad_request(self, error: Exception) -> Exception:
        return error if isinstance(error, TypeError) else self.invalid("add_request", str(error))

    def abort_request(self, ids: Iterable[str]) -> tuple[str, ...]:
        """End requests at their own caller's wish; no output is handed out. Unknown ids are ignored."""
        self.require("abort_request")
        records = self.ledger.find(ids)
        inside = [record for record in records if record.request_id in self.ledger.in_flight]
        if inside and self.state is not State.FAILED:
            engine_ids = [record.engine_id or "" for record in inside]
            self._in_engine("abort_request", lambda: self.engine.abort(engine_ids), announce=False)
        for record in records:
            self.ledger.drop(record)
        self._settle()
        return tuple(record.request_id for record in records)

    def _settle(self) -> None:
        if self.state is State.RUNNING and self.transition is None and not self.ledger.in_flight:
            self._fire(Trigger.SETTLE)

    def step(self, owner: Scope | None = None) -> list[Any]:
        """Hand out what waits for this caller; with nothing waiting, step the engine."""
        ledger = self.ledger
        if ledger.mailbox:
            taken = ledger.take(owner)
            if taken:
                return taken
        if not self.open or self.operation is not None:
            self.require("step")
        outputs = self._step_engine()
        if not outputs:
            return outputs
        in_flight = ledger.in_flight
        if owner is None and not ledger.scoped:
            strays = None
            for output in outputs:
                record = in_flight.get(output.request_id)
                if record is None:
                    strays = [*(strays or ()), output]
                elif output.finished:
                    ledger.finished(record)
            if strays:
                outputs = self._without(outputs, strays)
            if not in_flight:
                self._settle()
            return outputs
        return self._share(outputs, owner)

    def _share(self, outputs: list[Any], owner: Scope | None) -> list[Any]:
        """Split the outputs of one step: this caller's go out, the others' to the mailbox."""
        ledger = self.ledger
        mine, strays = [], []
        for output in outputs:
            record = ledger.in_flight.get(output.request_id)
            if record is None:
                strays.append(output)
            elif ledger.takes(owner, record):
                mine.append(output)
                if output.finished:
                    ledger.finished(record)
                    ledger.hand_out(record, output, owner)
            else:
                ledger.post(record, self.engine.copy_output(output))
        if strays:
            self._without(outputs, strays)
        self._settle()
        return mine

    def _without(self, outputs: list[Any], strays: list[Any]) -> list[Any]:
        """Outputs of requests that already ended, or never began, reach nobody; they are recorded."""
        for output in strays:
            self.events.emit_repeatable("unexpected_output", call="step", error=str(output.request_id))
        unwanted = {id(output) for output in strays}
        return [output for output in outputs if id(output) not in unwanted]

    def _step_engine(self) -> list[Any]:
        self.step_started = time.monotonic()
        try:
            outputs = self._step()
        except BaseException as cause:
            self.step_started = None
            error = self.fail("step", cause)
            if isinstance(cause, Exception):
                raise error from cause
            raise
        self.step_started = None
        return outputs

    # -- sleep ----------------------------------------------------------------------------------

    def begin_sleep(
        self,
        level: int = 1,
        mode: str = "wait",
        *,
        timeout: float | None = None,
        on_timeout: str = "raise",
        max_steps: int | None = None,
        pause: bool = False,
    ) -> "Sleep":
        """Check everything, close admission, and return the step object that does the rest."""
        call = "pause" if pause else "sleep"
        if type(level) is not int or level not in table.LEVELS:
            raise self.invalid(call, f"level must be 0, 1 or 2, not {level!r}")
        if level not in self._capabilities.levels:
            why = f"level {level} needs an engine built with enable_sleep_mode=True"
            raise self.invalid(call, why)
        if not isinstance(mode, str) or mode not in table.MODES:
            raise self.invalid(call, f"mode must be one of {names(table.MODES)}, not {mode!r}")
        if on_timeout not in ON_TIMEOUT:
            raise self.invalid(call, f"on_timeout must be one of {names(ON_TIMEOUT)}, not {on_timeout!r}")
        if timeout is not None and not _is_duration(timeout):
            raise self.invalid(call, f"timeout must be a number of seconds >= 0, not {timeout!r}")
        if max_steps is not None and (type(max_steps) is not int or max_steps < 0):
            raise self.invalid(call, f"max_steps must be an integer >= 0, not {max_steps!r}")
        if timeout is not None and self._capabilities.lockstep:
            raise self.invalid(call, "ranks that step together can't use a wall-clock timeout; use max_steps")
        self.require(call)
        sleep = Sleep(self, level, mode, timeout, on_timeout, max_steps, pause=pause)
        sleep.begin()
        return sleep

    def _recall(self) -> None:
        """Take what never started out of the engine, to be admitted again after the wake."""
        candidates = {
            record.engine_id: record for record in self.ledger.in_flight.values() if record.recallable
        }
        unstarted = self.engine.unstarted([engine_id for engine_id in candidates if engine_id])
        if unstarted:
            self._in_engine("abort_request", lambda: self.engine.abort(unstarted), announce=False)
        for engine_id in unstarted:
            self.ledger.recall(candidates[engine_id])

    def _end_all(self) -> tuple[str, ...]:
        """End everything in flight with the tokens it has."""
        records = list(self.ledger.in_flight.values())
        engine_ids = [record.engine_id or "" for record in records]
        for record in records:
            self._end(record, "abort")
        if engine_ids:
            self._in_engine("abort_request", lambda: self.engine.abort(engine_ids), announce=False)
        return tuple(record.request_id for record in records)

    def _readmit(self) -> tuple[list[str], list[str]]:
        """Pass what is held to the engine, oldest first. Returns (readmitted, rejected) ids."""
        readmitted: list[str] = []
        rejected: list[str] = []
        records = self.ledger.oldest_first()
        if records:
            self.engine.forget_media()
        for record in records:
            try:
                engine_id = self._add(record.call)
            except (InvalidArgument, TypeError) as error:
                # It was valid when it was held; an adapter may have been removed meanwhile.
                self.ledger.drop(record)
                rejected.append(record.request_id)
                self.events.emit("request_rejected", call=record.request_id, error=str(error))
            else:
                record.epoch = self.epoch
                self.ledger.into_engine(record, engine_id)
                readmitted.append(record.request_id)
        return readmitted, rejected

    # -- wake -------------------------------------------------------------------------------------

    def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Map memory again, by tags or whole; serve once all is back and the weights are valid."""
        wanted = self._wanted_tags(tags)
        self.require("wake_up")
        asleep = MEMORY_TAGS - self.resident
        todo = [tag for tag in (WEIGHTS, KV_CACHE) if tag in wanted and tag in asleep]
        resumes = self.state is State.SLEEPING and not asleep and not self.paused and SCHEDULING in wanted
        last = not asleep - set(todo)
        judge = last and not self.facts().servable
        if not todo and not resumes and not (judge and self.state is State.PARTIALLY_AWAKE):
            self.events.emit_repeatable("noop", call="wake_up", state=self.state.value)
            return WakeReport(
                awake=self.state in table.SERVING,
                state=self.describe(),
                resident=self.resident,
                missing=self.missing,
                noop=True,
            )
        if self.level == 2 and todo == [KV_CACHE] and WEIGHTS in asleep and not self._capabilities.kv_first:
            self._refuse(
                IllegalCall,
                "wake_up",
                "this vLLM corrupts restored buffers if the KV cache wakes before the weights: "
                "wake_up(['weights']) first",
            )
        started = time.monotonic()
        before = self.engine.memory()
        if last and WEIGHTS not in todo:
            self._judge_weights()
        if todo:
            self._map(todo)
            if WEIGHTS in todo:
                self._weights_came_back(last=last)
        readmitted, rejected = self._arrive(Trigger.WAKE)
        after = self.engine.memory()
        self.events.emit("memory", call="wake_up", bytes={"before": before.device, "after": after.device})
        return WakeReport(
            awake=self.state in table.SERVING,
            state=self.describe(),
            tags=tuple(todo),
            resident=self.resident,
            readmitted=tuple(readmitted),
            rejected=tuple(rejected),
            missing=self.missing,
            seconds=time.monotonic() - started,
            device_before=before.device,
            device_after=after.device,
        )

    def _wanted_tags(self, tags: Sequence[str] | None) -> frozenset[str]:
        if tags is None:
            return table.TAGS
        known = f"a list of {names(sorted(table.TAGS))}, or None for all"
        if isinstance(tags, str) or not isinstance(tags, (list, tuple, set, frozenset)):
            raise self.invalid("wake_up", f"tags must be {known}, not {tags!r}")
        if not tags:
            raise self.invalid("wake_up", f"tags must not be empty: give {known}")
        unknown = [tag for tag in tags if tag not in table.TAGS]
        if unknown:
            raise self.invalid("wake_up", f"unknown tags {unknown!r}: give {known}")
        if len(set(tags)) != len(tags):
            raise self.invalid("wake_up", f"tags are given twice: {list(tags)!r}")
        return frozenset(tags)

    def _map(self, tags: list[str]) -> None:
        """Have the engine map these tags, and look whether it did."""
        self.events.emit("operation_begin", call="wake_up", state=self.state.value, resident=tags)
        started = time.monotonic()
        self.operation = Operation("wake_up", started)
        try:
            self.engine.wake_up(tags)
        except OutOfDeviceMemory as cause:
            error: LifecycleError = WakeFailed(
                f"wake_up({tags}) found too little device memory ({cause}); nothing was mapped, "
                "free some and call it again",
                tags=tuple(tags),
                missing_bytes=cause.missing_bytes,
            )
            self.events.emit("operation_end", call="wake_up", error=str(error))
            raise error from cause
        except BaseException as cause:
            error = self.fail("wake_up", cause)
            if isinstance(cause, Exception):
                raise error from cause
            raise
        finally:
            self.operation = None
        self.resident = self.engine.condition().resident
        not_back = set(tags) - self.resident
        self.events.emit("operation_end", call="wake_up", duration_s=time.monotonic() - started)
        if not_back:
            self._arrive(Trigger.WAKE)
            msg = f"wake_up({tags}) returned, but {sorted(not_back)} did not come back"
            raise WakeFailed(msg, tags=tuple(tags), missing_bytes=None)

    def _weights_came_back(self, *, last: bool) -> None:
        """Their memory is mapped; after level 2 the contents are undefined until they are loaded."""
        if self.weights is not Weights.DISCARDED:
            return
        if self.policy == "checked":
            self._in_engine("discard_weights", self.engine.discard_weights, announce=False)
            self._filled = True
            self.missing = self.engine.missing_weights()
        elif self.policy == "unchecked" and last:
            self._judge_weights()

    def _judge_weights(self) -> None:
        """Decide, by the policy, whether discarded weights were loaded by now."""
        if self.weights is not Weights.DISCARDED or self._update_before is not None:
            return
        if self.policy == "checked" and self._filled:
            self.missing = self._in_engine("missing_weights", self.engine.missing_weights, announce=False)
            if not self.missing:
                self._weights_are_valid("checked")
        elif self.policy == "unchecked":
            self._weights_are_valid("unchecked")

    def _weights_are_valid(self, how: str, version: str | None = None) -> None:
        self.weights = Weights.VALID
        self.missing = ()
        self._filled = False
        self.epoch += 1
        self.version = version if version is not None else self.version
        self.events.emit("weights", call=how, weights="valid", epoch=self.epoch, version=self.version)

    def _look_again(self) -> None:
        """Everything is back but the weights were not: perhaps somebody loaded them unseen."""
        facts = self.facts()
        if facts.all_resident and not facts.servable and self.policy == "checked":
            self._judge_weights()
            if self.weights is Weights.VALID:
                self._drop_caches("wake_up")
                self._arrive(Trigger.WEIGHTS_VALID)

    def _arrive(self, trigger: Trigger) -> tuple[list[str], list[str]]:
        """Memory or weights changed: serve if everything holds now, and tell."""
        readmitted: list[str] = []
        rejected: list[str] = []
        if self.facts().servable:
            if self.paused:
                self._in_engine("pause_scheduling", self.engine.pause_scheduling, announce=False)
                self.level = 0
            else:
                self._in_engine("resume_scheduling", self.engine.resume_scheduling, announce=False)
                self.level = None
                readmitted, rejected = self._readmit()
        self._fire(trigger)
        return readmitted, rejected

    def resume(self) -> WakeReport:
        """End an explicit pause. Asleep deeper than that, only the next wake is affected."""
        self.require("resume")
        self.paused = False
        if self.state is State.SLEEPING and self.level == 0:
            return self.wake_up([SCHEDULING])
        self.events.emit_repeatable("noop", call="resume", state=self.state.value)
        return WakeReport(
            awake=self.state in table.SERVING, state=self.describe(), resident=self.resident, noop=True
        )

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory while paused with nothing in flight."""
        self.require("release_kv_cache_memory")
        if not self._capabilities.release_kv:
            self._refuse(IllegalCall, "release_kv_cache_memory", "this vLLM has no such call (0.32 has)")
        self._in_engine("release_kv_cache_memory", self.engine.release_kv_cache_memory)
        self.resident = self.engine.condition().resident
        self._fire(Trigger.RELEASE_KV)

    # -- weights ------------------------------------------------------------------------------------

    def load(
        self, call: str, run: Callable[[], Any], *, whole: bool = False, version: str | None = None
    ) -> Any:
        """Run a weight load or update, and drop the caches computed with the old weights.

        whole: this call alone loads every parameter. An exception of the load is the
        caller's to see; the weights are tainted by it.
        """
        self.require(call, Need.LOADING)
        before = self.weights
        opens = call in ("start_weight_update", "start_draft_weight_update")
        self.events.emit("operation_begin", call=call, state=self.state.value, weights=before.value)
        started = time.monotonic()
        self.operation = Operation(call, started)
        try:
            result = run()
        except BaseException as error:
            self.operation = None
            self.events.emit("operation_end", call=call, error=repr(error))
            self._taint()
            raise
        self.operation = None
        self.events.emit("operation_end", call=call, duration_s=time.monotonic() - started)
        if opens:
            self._update_before = before
            self._taint()
            return result
        if call == "finish_weight_update" and self._update_before is not None:
            self.weights, self._update_before = self._update_before, None
        self._drop_caches(call)
        if whole and self.weights is not Weights.VALID and self._loaded_whole():
            self._weights_are_valid(call, version)
        elif self.weights is Weights.VALID:
            self._weights_are_valid(call, version)
        if self.state is State.PARTIALLY_AWAKE and self.facts().servable:
            self._arrive(Trigger.WEIGHTS_VALID)
        return result

    def _loaded_whole(self) -> bool:
        """A whole load makes weights valid, unless the check can see a hole."""
        if self._filled and self.weights is Weights.DISCARDED:
            self.missing = self._in_engine("missing_weights", self.engine.missing_weights, announce=False)
        return not self.missing

    def _taint(self) -> None:
        self.weights = Weights.TAINTED
        self.events.emit("weights", call="load", weights="tainted")
        if self.state in (State.AWAKE, State.SLEEPING):
            self._in_engine("pause_scheduling", self.engine.pause_scheduling, announce=False)
            self._fire(Trigger.WEIGHTS_TAINTED)

    def _drop_caches(self, call: str) -> None:
        """What was computed with the old weights must not be served."""
        if not self._in_engine("reset_caches", self.engine.reset_caches, announce=False):
            self._taint()
            msg = f"{call}: the engine would not drop the caches that were computed with the old weights"
            raise CacheNotReset(msg, call=call)

    def mark_weights_loaded(self, version: str | None = None) -> LoadReport:
        """The caller says that the weights are loaded. Checked where they can be."""
        self.require("mark_weights_loaded")
        self._update_before = None
        if self.weights is Weights.DISCARDED and self.policy == "checked":
            self._judge_weights()
            if self.missing:
                self._refuse(
                    WeightsNotValid, "mark_weights_loaded", f"never loaded: {_some(self.missing)}"
                )
        if not self.ledger.in_flight:
            self._drop_caches("mark_weights_loaded")
        self._weights_are_valid("declared", version)
        if self.state is State.PARTIALLY_AWAKE and self.facts().servable:
            self._arrive(Trigger.WEIGHTS_VALID)
        return LoadReport(valid=True, epoch=self.epoch, version=self.version)

    def reload_weights(self, version: str | None = None, **kwargs: Any) -> LoadReport:
        """The engine's own reload: from its checkpoint, or from `weights_iterator` / `weights_path`."""
        started = time.monotonic()
        self.load(
            "reload_weights",
            lambda: self.engine.call("collective_rpc", "reload_weights", kwargs=kwargs),
            whole="weights_iterator" not in kwargs,
            version=version,
        )
        if self.weights is Weights.DISCARDED and self.policy == "checked":
            self._look_again()
        return LoadReport(
            valid=self.weights is Weights.VALID,
            epoch=self.epoch,
            version=self.version,
            missing=self.missing,
            seconds=time.monotonic() - started,
        )

    # -- everything else of the engine's surface ---------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call that changes nothing the machine knows of. Its exceptions are the caller's to see."""
        self.require(name)
        return self._pass(name, name, args, kwargs)

    def collective_rpc(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a worker method, by what `RPC_NEEDS` and the caller's `rpc_needs` say of its name.

        args and kwargs are those of the engine's own `collective_rpc`, after the method.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        need = table.rpc_need(name, self.rpc_needs)
        if need is Need.MACHINE:
            if self.state is State.CLOSED:
                self.require("collective_rpc")
            self._refuse(
                IllegalCall,
                f"collective_rpc({name!r})",
                f"it would go behind the machine; use the lifecycle's own {name}",
            )
        if need is Need.LOADING:
            inner = kwargs.get("kwargs") or (args[2] if len(args) > 2 else None) or {}  # noqa: PLR2004  (timeout, args, kwargs)
            whole = name in ("reload_weights", "finish_weight_update") and "weights_iterator" not in inner
            return self.load(
                name, lambda: self.engine.call("collective_rpc", method, *args, **kwargs), whole=whole
            )
        self.require(f"collective_rpc({name!r})", need)
        return self._pass(f"collective_rpc({name!r})", "collective_rpc", (method, *args), kwargs)

    def _pass(self, label: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.operation = Operation(label, time.monotonic())
        try:
            return self.engine.call(name, *args, **kwargs)
        except KeyboardInterrupt as cause:
            self.fail(label, cause)
            raise
        finally:
            self.operation = None

    # -- the end ----------------------------------------------------------------------------------------

    def recover(self, build: Callable[[], Engine]) -> tuple[str, ...]:
        """Shut the failed engine down, build a new one, and admit what was held. Returns its ids."""
        self.require("recover")
        if isinstance(self.cause, BaseException) and _lost_context(self.cause):
            self._refuse(IllegalCall, "recover", "the device context is lost: restart the process")
        old = self._engine
        # Nothing may reach the old engine once the new one exists: its shutdown takes
        # torch.distributed down for the whole process.
        self._engine, self._step = None, _no_step
        if old is not None:
            old.shutdown()
        del old
        self.events.emit("operation_begin", call="recover", state=self.state.value)
        started = time.monotonic()
        self.operation = Operation("recover", started)
        try:
            engine = build()
        finally:
            self.operation = None
        self.paused = self._filled = False
        self.missing = ()
        self._update_before = None
        self.epoch += 1
        self._adopt(engine)
        self.cause = None
        readmitted = self._readmit()[0] if self.facts().servable else []
        self._fire(Trigger.RECOVER, duration_s=time.monotonic() - started)
        return tuple(readmitted)

    def close(self, *, shutdown: bool) -> None:
        """End. What is in flight ends with the tokens it has; its last outputs can still be taken."""
        if self.state is State.CLOSED:
            return
        self.require("close")
        if self.transition is not None:
            self.transition.cancel()
        unserved = tuple(self.ledger.held)
        if shutdown:
            for record in list(self.ledger.in_flight.values()):
                self._end(record, "abort")
        for record in [*self.ledger.held.values(), *self.ledger.in_flight.values()]:
            self.ledger.drop(record)
        self._fire(Trigger.CLOSE)
        self.events.emit("closed" if shutdown else "detached", counts={"held": len(unserved)})
        engine, self._engine, self._step = self._engine, None, _no_step
        if shutdown and engine is not None:
            engine.shutdown()


class Sleep:
    """One sleep under way: closes admission, drains, releases memory, verifies.

    `advance()` runs one engine step or one phase, and returns the report once it is
    done. `cancel()` rolls back while it drains, and does nothing after that:
    released memory can't be taken back by forgetting about it.
    """

    def __init__(
        self,
        core: Core,
        level: int,
        mode: str,
        timeout: float | None,
        on_timeout: str,
        max_steps: int | None,
        *,
        pause: bool,
    ) -> None:
        self._core = core
        self.level = level
        self.mode = mode
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._max_steps = max_steps
        self._pause = pause
        self._trigger = Trigger.SLEPT
        self._phase: Callable[[], None] = self._drain
        self.draining = False
        self.started = time.monotonic()
        self.drained: list[str] = []
        self.aborted: tuple[str, ...] = ()
        self.steps = 0
        self.tokens = 0
        self.warnings: list[str] = []
        self.report: SleepReport | None = None
        self._progress: Progress | None = None
        self._progress_at = self.started

    def __str__(self) -> str:
        return f"sleep(level={self.level}, mode={self.mode})"

    # -- the beginning ------------------------------------------------------------------------

    def begin(self) -> None:
        """Refuse, find nothing to do, or start."""
        core = self._core
        if core.state in table.SERVING:
            self._begin_drain()
        elif self._is_already_there():
            core.paused = core.paused or self._pause
            core.events.emit_repeatable("noop", call=str(self), state=core.state.value)
            self.report = SleepReport(level=core.level or 0, mode=self.mode, noop=True)
        else:
            self._begin_from_sleep()

    def _is_already_there(self) -> bool:
        core = self._core
        if core.state is State.SLEEPING:
            return self.level == core.level or (self._pause and self.level == 0)
        return self._pause  # a pause of a partly awake engine: nothing runs, and the wake will stop at it

    def _begin_drain(self) -> None:
        core = self._core
        core.events.emit("operation_begin", call=str(self), state=core.state.value, **core._facts_fields())
        self.draining = True
        core.transition = self
        core._fire(Trigger.DRAIN)
        self._enter(self.mode)

    def _begin_from_sleep(self) -> None:
        core = self._core
        facts = core.facts()
        if core.state is State.SLEEPING:
            self._trigger = Trigger.DEEPEN
            if not table.GUARDS["level_0"][0](facts) or self.level == 0:
                core._refuse(
                    IllegalCall,
                    str(self),
                    f"the engine sleeps at level {core.level} and vLLM ignores another level: wake_up() first",
                )
        else:
            self._trigger = Trigger.RESLEEP
            if self.level == 0:
                core._refuse(IllegalCall, str(self), "it is asleep deeper than that; pause() holds a later wake")
            if not facts.can_resleep:
                hint = (
                    "wake_up(['weights']) first, which needs no more KV memory"
                    if WEIGHTS not in facts.resident
                    else "this vLLM ignores sleep while the KV cache sleeps: wake_up(['kv_cache']) first, "
                    "or close() to free the weights without KV memory"
                )
                core._refuse(IllegalCall, str(self), f"the engine would silently free nothing; {hint}")
        if facts.in_flight and self.mode in ("wait", "wait_all"):
            core._refuse(
                IllegalCall,
                str(self),
                f"{facts.in_flight} kept requests can't finish while asleep: use mode='keep' or mode='abort'",
            )
        core.transition = self
        if self.mode == "abort":
            self.aborted = core._end_all()
        self._phase = self._release

    # -- the drain -----------------------------------------------------------------------------

    def _enter(self, mode: str) -> None:
        """Apply a mode to what is in flight now."""
        core = self._core
        self.mode = mode
        if mode == "wait":
            core._recall()
        elif mode == "abort":
            self.aborted = core._end_all()
        elif mode == "keep":
            core._in_engine("pause_scheduling", core.engine.pause_scheduling, announce=False)

    def _is_quiet(self) -> bool:
        engine = self._core.engine
        return not (engine.has_launched() if self.mode == "keep" else engine.has_work())

    def advance(self) -> SleepReport | None:
        """Run one engine step or one phase; the report once the engine sleeps.

        Raises DrainTimeout, DrainStalled (rolled back), EngineFailed, ReleaseFailed.
        """
        if self.report is None:
            self._phase()
        return self.report

    def _drain(self) -> None:
        if self._is_quiet():
            self._phase = self._release
            return
        seconds = time.monotonic() - self.started
        late = self._timeout is not None and seconds >= self._timeout
        if late or (self._max_steps is not None and self.steps >= self._max_steps):
            self._expire(seconds)
            return
        self._one_step()
        self._look_for_progress()

    def _one_step(self) -> None:
        core = self._core
        ledger, engine = core.ledger, core.engine
        before = {
            record.request_id: engine.tokens(record.engine_id or "") for record in ledger.in_flight.values()
        }
        outputs = core._step_engine()
        self.steps += 1
        for output in outputs:
            record = ledger.in_flight.get(output.request_id)
            if record is None:
                core._without(outputs, [output])
                continue
            count = engine.count_tokens(output)
            if output.finished:
                self.drained.append(record.request_id)
                self.tokens += count - (0 if record.call.delta else before[record.request_id])
            ledger.post(record, engine.copy_output(output))
        for record in ledger.in_flight.values():
            self.tokens += engine.tokens(record.engine_id or "") - before[record.request_id]

    def _look_for_progress(self) -> None:
        core = self._core
        progress, now = core.engine.progress(), time.monotonic()
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at >= core.stall_s:
            self._roll_back(DrainStalled, f"computed nothing for {core.stall_s} s although it says it has work")

    def _expire(self, seconds: float) -> None:
        """The deadline passed: roll back, or fall through to a mode that ends now."""
        if self._on_timeout == "raise" or (self._on_timeout == self.mode):
            limit = f"{self._timeout} s" if self._timeout is not None else f"{self._max_steps} steps"
            self._roll_back(DrainTimeout, f"was not quiet after {limit}")
        self.warnings.append(f"deadline after {seconds:.3f} s: fell through to mode {self._on_timeout!r}")
        self._timeout = self._max_steps = None
        self._enter(self._on_timeout)

    def remaining(self) -> tuple[str, ...]:
        return tuple(self._core.ledger.in_flight)

    def _roll_back(self, kind: type[DrainError], why: str) -> None:
        remaining, seconds = self.remaining(), time.monotonic() - self.started
        self.cancel()
        raise kind(
            f"{self} was rolled back: the engine {why}; {len(remaining)} requests remain: {_some(remaining)}",
            remaining=remaining,
            steps=self.steps,
            seconds=seconds,
        )

    def cancel(self) -> bool:
        """Roll back: admission reopens, what was recalled or held is admitted. False if too late."""
        core = self._core
        if not self.draining or core.transition is not self:
            return False
        self.draining = False
        core.transition = None
        core._in_engine("resume_scheduling", core.engine.resume_scheduling, announce=False)
        core._readmit()
        core._fire(Trigger.ROLL_BACK, call=str(self), duration_s=time.monotonic() - self.started)
        return True

    def cancelled(self, why: str) -> DrainCancelled:
        """The error of a drain that `cancel()` rolled back."""
        return DrainCancelled(f"{self} was rolled back: {why}", remaining=self.remaining(), steps=self.steps)

    # -- memory ----------------------------------------------------------------------------------

    def _release(self) -> None:
        core = self._core
        drain_s = time.monotonic() - self.started
        before = core.engine.memory()
        released_at = time.monotonic()
        core._in_engine("sleep", lambda: core.engine.sleep(self.level))
        condition = core.engine.condition()
        if not condition.paused or (self.level > 0 and condition.resident):
            cause = RuntimeError(f"sleep({self.level}) returned, but the engine is {condition}")
            raise core.fail("sleep", cause) from cause
        after = core.engine.memory()
        release_s = time.monotonic() - released_at
        core.resident = condition.resident
        core.level = self.level
        core.paused = core.paused or self._pause
        if self.level == 2:  # noqa: PLR2004  (the level that discards)
            core.weights = Weights.DISCARDED
            core._update_before = None
            core._filled = False
            core.missing = ()
        self.draining = False
        core.transition = None
        core._fire(self._trigger, duration_s=time.monotonic() - self.started)
        short = self._short_of(before.device, after.device, before.asleepable)
        self.report = SleepReport(
            level=self.level,
            mode=self.mode,
            drained=tuple(self.drained),
            aborted=self.aborted,
            kept=tuple(core.ledger.in_flight),
            held=tuple(core.ledger.held),
            steps=self.steps,
            tokens=self.tokens,
            epoch=core.epoch,
            drain_s=drain_s,
            release_s=release_s,
            device_before=before.device,
            device_after=after.device,
            host_before=before.host,
            host_after=after.host,
            warnings=tuple([*self.warnings, *([short] if short else [])]),
        )
        core.events.emit(
            "memory",
            call="sleep",
            bytes={"before": before.device, "after": after.device, "asleepable": before.asleepable},
            error=short,
        )
        if short and core.strict_release:
            raise ReleaseFailed(
                f"{self}: {short}",
                released_bytes=self.report.released_bytes,
                expected_bytes=before.asleepable,
                report=self.report,
            )

    def _short_of(self, before: int | None, after: int | None, expected: int | None) -> str | None:
        """A warning if far less was released than the engine held."""
        if self.level == 0 or before is None or after is None or not expected:
            return None
        released = before - after
        if released >= RELEASED_ENOUGH * expected:
            return None
        return f"released {released} bytes of the {expected} that the engine holds"


def _no_step() -> list[Any]:
    msg = "a step without an engine"
    raise InternalError(msg)


def _is_duration(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _some(ids: Sequence[str], most: int = 5) -> str:
    """The first few names of many, for a message."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"{', '.join(ids[:most]) or 'none'}{more}"


def _lost_context(cause: BaseException) -> bool:
    """Whether the device context of this process is beyond repair."""
    text = str(cause).lower()
    return any(words in text for words in ("illegal memory access", "device-side assert", "unspecified launch"))
