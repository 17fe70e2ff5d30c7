"""A finite-state machine around an inference engine: drain, sleep, wake, and no request lost.

`Lifecycle` guards an engine that its caller steps; `engine_adapter.attach` puts one
around a vLLM `LLM`. This package imports neither vLLM nor torch.
"""

from lifecycle.blocking import DrainProgress, Lifecycle
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
