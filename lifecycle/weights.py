"""Whether the contents of the weights can be served, and how anybody knows.

Theory of operation
-------------------
After level 2 the weights' memory comes back undefined. The three policies differ in who
says that it was loaded since:

`checked`
    every parameter is filled with NaN as soon as it is mapped, and a parameter with a
    NaN left was not loaded. This sees loads that nothing could watch, and single shards.
`declared`
    the caller says so, or a whole reload was seen.
`unchecked`
    waking is enough; recorded as such.

An update that failed, or began and has not finished, *taints*: only a whole load, the
end of the update, or the caller's word cures that.
"""

from collections.abc import Callable
from typing import Any, Final, NoReturn

from lifecycle.engine import Engine
from lifecycle.errors import InvalidArgument, UnsupportedEngine, names, some
from lifecycle.events import EventLog
from lifecycle.table import Weights

POLICIES: Final = ("checked", "declared", "unchecked")


class WeightsKeeper:
    """The condition of one engine's weights. `run` and `fail` are the core's own.

    epoch counts loads; version is the caller's own label for the last one.
    """

    def __init__(
        self,
        policy: str | None,
        *,
        checkable: bool,
        run: Callable[..., Any],
        fail: Callable[[str, BaseException], NoReturn],
        events: EventLog,
    ) -> None:
        self.policy = _resolve(policy, checkable=checkable)
        self.condition = Weights.VALID
        self.epoch = 0
        self.version: str | None = None
        self.missing: tuple[str, ...] = ()
        self._run = run
        self._fail = fail
        self._events = events
        self._filled = False
        self._before_update: Weights | None = None
        self._tainted_by = "an update of them never came to its end"  # as an engine may be found

    def found(self, condition: Weights) -> None:
        """What the engine's weights are in when it is taken over."""
        self.condition = condition
        self.missing, self._filled, self._before_update = (), False, None

    def discarded(self) -> None:
        """The engine slept at level 2."""
        self.found(Weights.DISCARDED)

    def mapped(self, engine: Engine, *, whole: bool) -> None:
        """Their memory is back. Only now can it be prepared for the check.

        Once only: what was loaded since may have been put aside by a sleep at level 1.
        whole: all other memory is back too, so that what was not missed can be served.
        """
        if self.condition is Weights.DISCARDED and self.policy == "checked" and not self._filled:
            self._run("discard_weights", engine.discard_weights)
            self._filled = True
            if not self.look(engine):
                self._fail("discard_weights", RuntimeError("discard_weights() returned, but filled nothing"))
        else:
            self.look(engine)
        if whole and not self.missing:
            self.judge(engine)

    def judge(self, engine: Engine) -> bool:
        """Everything is resident: were discarded weights loaded by now? True if that is new."""
        if self.condition is not Weights.DISCARDED or self.policy == "declared":
            return False
        # Mapped before we came, they were never filled, and there is nothing to see.
        if self.policy == "checked" and (not self._filled or self.look(engine)):
            return False
        self.valid(self.policy)
        return True

    def look(self, engine: Engine) -> tuple[str, ...]:
        """What was filled and never loaded since."""
        if self._filled:
            missing = self._run("missing_weights", engine.missing_weights)
            if not isinstance(missing, tuple):
                self._fail("missing_weights", TypeError(f"missing_weights() returned {missing!r}"))
            self.missing = missing
        return self.missing

    def loaded(self, call: str, engine: Engine, *, whole: bool, version: str | None) -> None:
        """A load was seen to succeed. whole: it alone loads every parameter."""
        if call == "finish_weight_update":
            if self._before_update is None:  # a part of the update failed: its end cures nothing
                return
            self.condition, self._before_update = self._before_update, None
        anew = call == "reload_weights" and self.policy == "checked"
        if anew:  # layers whole or in part, so that a hole shows over valid weights too
            self._filled = True
        # A look goes over every parameter: not after each of the many loads that bring one of them.
        if (whole or anew) and self.look(engine):
            self._has_holes()
        elif self.condition is Weights.VALID or whole:
            self.valid(call, version)

    def _has_holes(self) -> None:
        """A load lost what it did not bring."""
        if self.condition is Weights.VALID:
            self.condition = Weights.DISCARDED
            self._events.emit("weights", weights=self.condition.value)

    def way_out(self) -> str:
        """Why they can't be served, and what the caller must do before they can."""
        way = "reload_weights(), or load them yourself and then mark_weights_loaded()"
        if self.condition is Weights.TAINTED:
            return f"{self._tainted_by}, so they are neither the old nor the new; {way}"
        if not self._filled:
            return f"nobody has said that they were loaded since; {way}"
        return f"load the weights; never loaded: {some(self.missing)}"

    def taint(self, why: str, *, opens_update: bool) -> None:
        """An update failed, or began: the contents are neither the old nor the new."""
        self._tainted_by = why
        if not opens_update:
            self._before_update = None
        elif self._before_update is None:
            self._before_update = self.condition
        self.condition = Weights.TAINTED
        self._events.emit("weights", weights=self.condition.value)

    def valid(self, how: str, version: str | None = None) -> None:
        """They can be served; a new epoch begins."""
        self.condition = Weights.VALID
        self.missing, self._filled, self._before_update = (), False, None
        self.epoch += 1
        self.version = version
        self._events.emit(
            "weights", call=how, weights=self.condition.value, epoch=self.epoch, version=self.version
        )


def _resolve(policy: str | None, *, checkable: bool) -> str:
    if policy is None:
        return "checked" if checkable else "declared"
    if policy not in POLICIES:
        raise InvalidArgument(f"weights={policy!r} is not one of {names(POLICIES)}")
    if policy == "checked" and not checkable:
        raise UnsupportedEngine("weights='checked' needs floating-point parameters; use weights='declared'")
    return policy
