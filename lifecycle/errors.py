"""The exceptions, and whose move each of them is.

    LifecycleError
    |-- IllegalCall (RuntimeError)      yours: the call is wrong in this state; nothing changed
    |   |-- AdmissionClosed             yours: not admitted while asleep, and holding is full or off
    |   |-- WeightsNotValid             yours: load the weights first
    |   |-- Unaudited                   the disk's: a strict audit log can't record it
    |   `-- Closed                      yours: closed, detached, or in a forked child
    |-- InvalidArgument (ValueError)    yours: the argument is wrong in any state; nothing changed
    |-- RequestAborted                  yours: it was aborted while it was held, so it has no output
    |-- DrainError                      yours: the drain was rolled back, the engine serves again
    |   |-- DrainTimeout (TimeoutError)
    |   |-- DrainStalled
    |   `-- DrainCancelled
    |-- EngineError                     the engine's
    |   |-- WakeFailed                  the wake can be tried again: not all came back
    |   |-- ReleaseFailed               the engine sleeps but freed far less than it holds
    |   |-- CacheNotReset               the engine would not drop its caches
    |   |-- EngineFailed                the engine can't be trusted: recover() or close()
    |   `-- UnsupportedEngine           this engine can't be guarded as asked
    `-- InternalError                   ours: please report it

All of them pickle with their fields, since they cross process boundaries (Ray).
"""

from collections.abc import Iterable, Sequence
from typing import Any


class LifecycleError(Exception):
    """Base of everything this library raises on purpose.

    Fields are keyword-only, listed in `fields`, and survive pickling.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not ordinary attributes.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        msg = f"{type(self).__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[LifecycleError], message: str, fields: dict[str, Any]) -> LifecycleError:
    return cls(message, **fields)


class IllegalCall(LifecycleError, RuntimeError):
    """The call is not legal in this state. Nothing was changed and nothing reached the engine.

    Fields: `call`, `state`, `needs`, `legal` (the calls that are legal now), and
    `operation` where one is under way.
    """


class AdmissionClosed(IllegalCall):
    """A new request came while admission is closed, and no more can be held.

    Raised where `max_held` is reached; 0 holds none.
    """


class WeightsNotValid(IllegalCall):
    """All memory is awake, but the contents of the weights can't be served.

    Fields, beside `IllegalCall`'s: `weights` (their condition) and `missing`, the names
    of parameters never loaded, where that can be seen.
    """


class Unaudited(IllegalCall):
    """A strict audit log could not put on disk that this sleep or load begins. It did not begin.

    Raised while the disk takes nothing; the log says so itself when it does again.
    """


class Closed(IllegalCall):
    """The lifecycle was closed or detached, or this is a forked child of the process that owns it."""


class InvalidArgument(LifecycleError, ValueError):
    """The argument is wrong whatever the state. Raised before anything is touched."""


class RequestAborted(LifecycleError):
    """Another task aborted this request while it was held: it never started, and has no output."""


class DrainError(LifecycleError):
    """A drain did not come to its end and was rolled back: admission is open, nothing was lost.

    Fields: `remaining` (ids still in flight), `steps`, `seconds`.
    """


class DrainTimeout(DrainError, TimeoutError):
    """The deadline (`timeout` or `max_steps`) passed before the engine was quiet."""


class DrainStalled(DrainError):
    """The engine says that it has work but computed nothing for the stall limit."""


class DrainCancelled(DrainError):
    """The drain was cancelled by a progress callback that raised; the cause is chained."""


class EngineError(LifecycleError):
    """The engine did not do what it was asked to do."""


class WakeFailed(EngineError):
    """Not all memory came back, and the wake can be tried again. What did is in the snapshot.

    Fields: `tags` (what did not come back), `missing_bytes` (None where it can't be told).
    """


class ReleaseFailed(EngineError):
    """The engine sleeps but released far less memory than it holds (`strict_release=True`).

    Fields: `released_bytes`, `expected_bytes`, `report`.
    """


class CacheNotReset(EngineError):
    """The engine would not drop its prefix cache although its weights changed."""


class EngineFailed(EngineError):
    """The engine can't be trusted any more. `recover()` builds a new one; else `close()`.

    The cause is chained. Fields: `call` (what was under way), `in_flight` (ids that ended
    with it, partial tokens kept where they can be told), `held` (ids that wait for `recover`),
    and `restart` where no new engine can live in this process.
    """


class UnsupportedEngine(EngineError):
    """This engine, or this release of it, can't be guarded as asked."""


class InternalError(LifecycleError):
    """A bug of this library. The message says which promise was broken."""


def names(calls: Iterable[str]) -> str:
    """A readable list for a message: "wake_up, abort_request, close", or "nothing"."""
    return ", ".join(calls) or "nothing"


def some(ids: Sequence[str], most: int = 5) -> str:
    """The first few of many, for a message: "a, b and 98 more"."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"{names(ids[:most])}{more}"
