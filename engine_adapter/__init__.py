"""Engines for `lifecycle`: vLLM in this process, and a simulated one.

Names are imported when they are first used, so that the simulated engine needs no vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_adapter.simulated import SimulatedEngine
    from engine_adapter.simulated_llm import SimulatedLLM
    from engine_adapter.standin import attach
    from engine_adapter.standin_async import attach_async
    from engine_adapter.vllm_inprocess import VllmInprocess

__all__ = ["SimulatedEngine", "SimulatedLLM", "VllmInprocess", "attach", "attach_async"]

_HOMES = {
    "attach": "engine_adapter.standin",
    "attach_async": "engine_adapter.standin_async",
    "SimulatedEngine": "engine_adapter.simulated",
    "SimulatedLLM": "engine_adapter.simulated_llm",
    "VllmInprocess": "engine_adapter.vllm_inprocess",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
