"""A finite-state machine around an inference engine: drain, sleep, wake, and no request lost.

`Lifecycle` guards an engine that its caller steps, `AsyncLifecycle` one that asyncio code
shares; `engine_adapter.attach` puts a guard around a vLLM `LLM`. This package imports
neither vLLM nor torch.

Both are imported when they are first used: what is here without them needs the standard
library only, so that the pytest plugin costs a run nothing.
"""

from importlib import import_module
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
    RequestAborted,
    Unaudited,
    UnsupportedEngine,
    WakeFailed,
    WeightsNotValid,
)
from lifecycle.table import State, Weights

if TYPE_CHECKING:
    from lifecycle.asynchronous import AsyncLifecycle
    from lifecycle.blocking import DrainProgress, Lifecycle

__all__ = [
    "AdmissionClosed",
    "AsyncLifecycle",
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
    "RequestAborted",
    "SleepReport",
    "Snapshot",
    "State",
    "Unaudited",
    "UnsupportedEngine",
    "WakeFailed",
    "WakeReport",
    "Weights",
    "WeightsNotValid",
]


_HOMES = {"AsyncLifecycle": "asynchronous", "DrainProgress": "blocking", "Lifecycle": "blocking"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"lifecycle.{_HOMES[name]}"), name)
