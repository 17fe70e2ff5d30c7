"""A finite-state machine around an inference engine: drain, sleep, wake, and no request lost.

`Lifecycle` guards an engine that its caller steps; `engine_adapter.attach` puts one
around a vLLM `LLM`. This package imports neither vLLM nor torch.

`Lifecycle` is imported when it is first used: what is here without it needs the standard
library only, so that the pytest plugin costs a run nothing.
"""

from typing import TYPE_CHECKING, Any

from lifecycle.engine import Capabilities, Engine, LoadReport, SleepReport, Snapshot, WakeReport
from lifecycle.errors import (
    AdmissionClosed,
    CacheNotReset,
    Closed,
    DrainCancelled,
    DrainError,
    DrainStalled,
    DrainTimeout,
    EngineError,
    EngineFailed,
    IllegalCall,
    InternalError,
    InvalidArgument,
    LifecycleError,
    ReleaseFailed,
    UnsupportedEngine,
    WakeFailed,
    WeightsNotValid,
)
from lifecycle.table import State, Weights

if TYPE_CHECKING:
    from lifecycle.blocking import DrainProgress, Lifecycle

__all__ = [
    "AdmissionClosed",
    "CacheNotReset",
    "Capabilities",
    "Closed",
    "DrainCancelled",
    "DrainError",
    "DrainProgress",
    "DrainStalled",
    "DrainTimeout",
    "Engine",
    "EngineError",
    "EngineFailed",
    "IllegalCall",
    "InternalError",
    "InvalidArgument",
    "Lifecycle",
    "LifecycleError",
    "LoadReport",
    "ReleaseFailed",
    "SleepReport",
    "Snapshot",
    "State",
    "UnsupportedEngine",
    "WakeFailed",
    "WakeReport",
    "Weights",
    "WeightsNotValid",
]


def __getattr__(name: str) -> Any:
    if name not in ("DrainProgress", "Lifecycle"):
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from lifecycle import blocking

    return getattr(blocking, name)
