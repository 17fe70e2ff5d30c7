"""A sleep under way, as a step object: close admission, drain, release memory, verify.

Theory of operation
-------------------
`Core.begin_sleep` makes one. Each `advance()` runs one engine step of the drain, or one
phase, and returns the report once the engine sleeps; `cancel()` rolls back while it
drains. Whoever holds the object owns the transition, so `DRAINING` always has an owner.

The modes differ in what they do to requests in flight, and in when the engine is quiet:

`wait`
    what never started is *recalled*: aborted in the engine and held, to be admitted
    again after the wake. What started is stepped to its end, so that the scheduler is
    really empty and no started `n > 1` is split.
`wait_all`
    everything is stepped to its end.
`abort`
    everything ends now, with the tokens it has.
`keep`
    scheduling stops, launched batches are stepped out, requests freeze in the engine.
"""

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from lifecycle import table
from lifecycle.engine import Memory, Progress, SleepReport
from lifecycle.errors import (
    DrainCancelled,
    DrainError,
    DrainStalled,
    DrainTimeout,
    IllegalCall,
    ReleaseFailed,
    Unaudited,
    some,
)
from lifecycle.table import MEMORY_TAGS, WEIGHTS, State, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from lifecycle.core import Core

# A sleep that frees less than this part of what the engine holds did not really free it.
RELEASED_ENOUGH = 0.5
# A long drain says how far it is this often, in seconds.
PROGRESS_EVENT_S = 1.0
# With nothing in flight an engine is quiet after so many steps: one, and one for each batch launched ahead.
FLUSHES = 16
_NOTHING_OF_OURS = Progress(0, frozenset())


class SleepRequest(NamedTuple):
    """What the caller asked for, checked. timeout is in seconds; pause: until `resume()`.

    clear_cache: whether loads during the pause drop the KV of what it keeps; None: there are none.
    """

    level: int
    mode: str
    timeout: float | None
    on_timeout: str
    max_steps: int | None
    pause: bool
    clear_cache: bool | None = None

    def __str__(self) -> str:
        return f"{'pause' if self.pause else 'sleep'}(level={self.level}, mode={self.mode})"


class Sleep:
    """One sleep under way. See the module's docstring."""

    def __init__(self, core: "Core", request: SleepRequest) -> None:
        self._core = core
        self._request = request
        self.mode = request.mode  # changes when a deadline falls through to another
        self.draining = False
        self.started = time.monotonic()
        self.drained: list[str] = []
        self.aborted: tuple[str, ...] = ()
        self.steps = 0
        self.tokens = 0
        self.report: SleepReport | None = None
        self._deadline = request.timeout
        self._last_step = request.max_steps
        self._flushes = 0  # steps with nothing in flight
        self._warnings: list[str] = []
        self._counts: dict[str, int] = {}
        self._progress: Progress | None = None
        self._progress_at = self._said_at = self.started
        self._trigger = Trigger.SLEPT
        self._advancing = False
        self._abandoned: str | None = None  # why, while its phase still runs
        self._phase: Callable[[], None] = self._drain
        if core.state in table.SERVING:
            self._begin_drain()
        elif self._is_already_there():
            core.note_pause(request)
            core.events.emit_repeatable("noop", call=str(self), state=core.state.value)
            self.report = SleepReport(level=core.level or 0, mode=self.mode, noop=True)
        else:
            self._begin_asleep()

    def __str__(self) -> str:
        return str(self._request)

    def advance(self) -> SleepReport | None:
        """Run one engine step or one phase; the report once the engine sleeps.

        Raises DrainTimeout, DrainStalled (both rolled back), EngineFailed, ReleaseFailed; and
        where another call ended it meanwhile, EngineFailed, Closed or DrainCancelled.
        """
        if self.report is None:
            if self._core.transition is not self:
                self._core.require("sleep")  # it failed, or was closed
                raise self.cancelled("another call ended it")
            self._advancing = True
            try:
                with self._core.reading_engine(str(self)):
                    self._phase()
            finally:
                self._advancing = False
                if self._abandoned is not None:
                    self.abandon(self._abandoned)
        return self.report

    def remaining(self) -> tuple[str, ...]:
        """Ids still in flight."""
        return tuple(self._core.ledger.in_flight)

    # -- the beginning ---------------------------------------------------------------------------------

    def _begin_drain(self) -> None:
        core = self._core
        core.begin_operation(str(self), audited=True)
        core.transition = self
        self.draining = True
        core.fire(Trigger.DRAIN)
        self._enter(self.mode)

    def _is_already_there(self) -> bool:
        core, request = self._core, self._request
        if request.pause:  # nothing runs, and the next wake will stop at the pause
            return True
        return core.state is State.SLEEPING and core.level == request.level

    def _begin_asleep(self) -> None:
        """From one sleep to another, where the engine really does it."""
        core = self._core
        facts = core.facts()
        self._trigger = Trigger.DEEPEN if core.state is State.SLEEPING else Trigger.RESLEEP
        if self._request.level == 0 or not table.may_begin(self._trigger, core.state, facts):
            core.refuse(IllegalCall, str(self), self._why_not(facts))
        if facts.in_flight and self.mode in ("wait", "wait_all"):
            core.refuse(
                IllegalCall,
                str(self),
                f"{facts.in_flight} kept requests can't finish while asleep: use mode='keep' or mode='abort'",
            )
        core.begin_operation(str(self), audited=True)
        core.transition = self
        if self.mode == "abort":
            self.aborted = core.end_all("abort")
        self._phase = self._flush

    def _why_not(self, facts: table.Facts) -> str:
        """Why the engine would free nothing, with a way out that needs no KV memory where there is one."""
        if self._request.level == 0:
            return "it is asleep deeper than that; pause() holds the next wake at level 0"
        if self._core.state is State.SLEEPING:
            return f"vLLM ignores a change from level {facts.level}: wake_up() first"
        if WEIGHTS not in facts.resident:
            return "vLLM ignores it while the weights sleep: wake_up(['weights']) first, then sleep"
        return (
            "this vLLM ignores it while the KV cache sleeps: wake_up(['kv_cache']) first, "
            "or close() to free the weights without KV memory"
        )

    # -- the drain -------------------------------------------------------------------------------------

    def _enter(self, mode: str) -> None:
        """Apply a mode to what is in flight now."""
        core = self._core
        self.mode = mode
        if mode == "wait":
            core.recall()
        elif mode == "abort":
            self.aborted = core.end_all("abort")
        elif mode == "keep":
            core.schedule(on=False)

    def _drain(self) -> None:
        core = self._core
        keeps = self.mode == "keep"
        if not core.read("has_launched" if keeps else "has_work", bool):
            if not keeps and core.ledger.in_flight:
                raise core.lost()
            self._phase = self._release
            return
        seconds = time.monotonic() - self.started
        if self._is_late(seconds):
            self._expire(seconds)
            return
        self._step()
        self._look_for_progress()

    def _is_late(self, seconds: float) -> bool:
        """A deadline is about requests: what the engine only has to flush may take its few steps."""
        if not self._core.ledger.in_flight:
            self._flushes += 1
            if self._flushes <= FLUSHES:
                return False
        late = self._deadline is not None and seconds >= self._deadline
        return late or (self._last_step is not None and self.steps >= self._last_step)

    def _step(self) -> None:
        """One engine step; its outputs wait in the mailbox as snapshots."""
        core = self._core
        if self.steps == 0:
            self._counts = self._count()
        before, in_flight = self._counts, dict(core.ledger.in_flight)
        outputs = core.step_for_others()
        self.steps += 1
        for output in outputs:
            record = in_flight.get(output.request_id)
            if record is not None and output.finished:
                del in_flight[output.request_id]
                self.drained.append(record.request_id)
                old = 0 if record.call.delta else before[record.request_id]
                self.tokens += core.engine.count_tokens(output) - old
        self._counts = self._count()
        self.tokens += sum(count - before[name] for name, count in self._counts.items())

    def _count(self) -> dict[str, int]:
        """Tokens so far of what is in flight."""
        tokens: Callable[[str], Any] = self._core.engine.tokens
        counts = {name: tokens(record.engine_id) for name, record in self._core.ledger.in_flight.items()}
        wrong = [count for count in counts.values() if not isinstance(count, int)]
        if wrong:
            raise TypeError(f"tokens() returned {wrong[0]!r}")
        return counts

    def _look_for_progress(self) -> None:
        core = self._core
        progress, now = core.read("progress", Progress), time.monotonic()
        if not core.ledger.in_flight:  # what it still computes is nobody's
            progress = _NOTHING_OF_OURS
        if now - self._said_at >= PROGRESS_EVENT_S:
            self._said_at = now
            core.note_progress(
                str(self), remaining=len(self.remaining()), steps=self.steps, tokens=self.tokens
            )
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at >= core.stall_s and not core.capabilities.lockstep:
            self._give_up(
                DrainStalled, f"computed nothing of ours for {core.stall_s} s, though it says it has work"
            )

    def _expire(self, seconds: float) -> None:
        """The deadline passed: roll back, or fall through to a mode that ends now."""
        on_timeout = self._request.on_timeout
        if on_timeout == "raise":
            limit = f"{self._deadline} s" if self._deadline is not None else f"{self._last_step} steps"
            self._give_up(DrainTimeout, f"was not quiet after {limit}")
        self._warnings.append(f"deadline after {seconds:.3f} s: fell through to mode {on_timeout!r}")
        self._deadline = self._last_step = None
        self._enter(on_timeout)

    def _give_up(self, kind: type[DrainError], why: str) -> None:
        remaining, seconds = self.remaining(), time.monotonic() - self.started
        self.cancel()
        raise kind(
            f"{self} was rolled back: the engine {why}; {len(remaining)} requests remain: {some(remaining)}",
            remaining=remaining,
            steps=self.steps,
            seconds=seconds,
        )

    def cancel(self) -> bool:
        """Roll back: admission reopens, what is held is admitted. False once it is too late."""
        core = self._core
        if not self.draining or core.transition is not self:
            return False
        self.draining = False
        core.schedule(on=True)
        core.readmit()
        core.transition = None
        core.fire(Trigger.ROLL_BACK, **self._fields())
        core.end_operation(str(self), self.started, "rolled back")
        return True

    def abandon(self, why: str) -> None:
        """It will not come to its end: the engine failed, or is closed. Said once its phase is over."""
        self._core.transition = None
        if self._advancing:
            self._abandoned = why
        else:
            self._abandoned = None
            self._core.end_operation(str(self), self.started, why)

    def _fields(self) -> dict[str, Any]:
        """What the transition at its end says of it."""
        seconds = time.monotonic() - self.started
        return {"call": str(self), "duration_s": seconds, "steps": self.steps, "tokens": self.tokens}

    def cancelled(self, why: str) -> DrainCancelled:
        """The error of a drain that `cancel()` rolled back."""
        return DrainCancelled(
            f"{self} was rolled back: {why}",
            remaining=self.remaining(),
            steps=self.steps,
            seconds=time.monotonic() - self.started,
        )

    def _flush(self) -> None:
        """Step out the batches that an aborted request left behind: nothing else is to be waited for."""
        core = self._core
        if not core.read("has_launched", bool):
            self._phase = self._release
        elif self._flushes == FLUSHES:
            core.fail_with("sleep", RuntimeError(f"batches are still launched after {FLUSHES} steps"))
        else:
            self._flushes += 1
            self._step()

    # -- memory ----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Have the engine release its memory, and look whether it did."""
        core, level = self._core, self._request.level
        drained_at = time.monotonic()
        before = core.read("memory", Memory)
        try:
            with core.announced("sleep", audited=True):
                core.run("sleep", lambda: core.engine.sleep(level))
        except Unaudited:
            if not self.cancel():
                self.abandon("not begun")
            raise
        condition = core.condition()
        if not condition.paused or condition.resident != (frozenset() if level else MEMORY_TAGS):
            core.fail_with("sleep", RuntimeError(f"sleep({level}) returned, but the engine is {condition}"))
        after = core.read("memory", Memory)
        core.fell_asleep(level, condition.resident)
        core.note_pause(self._request)
        self.draining = False
        core.transition = None
        core.fire(self._trigger, **self._fields(), drain_s=drained_at - self.started)
        short = self._falls_short(before, after)
        self.report = SleepReport(
            level=level,
            mode=self.mode,
            drained=tuple(self.drained),
            aborted=self.aborted,
            kept=self.remaining(),
            held=tuple(core.ledger.held),
            steps=self.steps,
            tokens=self.tokens,
            epoch=core.weights.epoch,
            drain_s=drained_at - self.started,
            release_s=time.monotonic() - drained_at,
            device_before=before.device,
            device_after=after.device,
            host_before=before.host,
            host_after=after.host,
            warnings=(*self._warnings, *((short,) if short else ())),
        )
        core.note_memory("sleep", before, after, error=short)
        core.end_operation(str(self), self.started)
        if short and core.strict_release:
            raise ReleaseFailed(
                f"{self}: {short}",
                released_bytes=self.report.released_bytes,
                expected_bytes=before.asleepable,
                report=self.report,
            )

    def _falls_short(self, before: Memory, after: Memory) -> str | None:
        """A warning if far less was released than the engine held."""
        if self._request.level == 0 or before.device is None or after.device is None or not before.asleepable:
            return None
        released = before.device - after.device
        if released >= RELEASED_ENOUGH * before.asleepable:
            return None
        return f"released {released} bytes of the {before.asleepable} that the engine holds"
