"""The real engine of the benchmarks: an `LLM` on the tiny model, attached, beside its unguarded self."""

import copy
import functools
import os
from dataclasses import dataclass
from typing import Any

# One thread: more of them only wait for each other in a model this small, and for whatever else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from engine_adapter import attach
from lifecycle import Lifecycle
from tests.engines import House

MAX_NUM_SEQS = 4


@dataclass(frozen=True)
class Pair:
    """Two faces of one engine. Each is used only while the other has nothing in it.

    raw: a shallow copy made before the lifecycle was attached, so its engine is vLLM's own. guarded: the
    `LLM` that was attached.
    """

    raw: Any
    guarded: Any
    lifecycle: Lifecycle

    @property
    def engine(self) -> Any:
        return self.raw.llm_engine

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    def settle(self) -> None:
        """Flush what ended, and see that neither face has left a request to the other."""
        while self.core.scheduler.has_requests():  # finished ids wait for one more step
            assert self.engine.step() == []
        assert not self.core.batch_queue
        assert not self.engine.has_unfinished_requests()
        assert not self.lifecycle.has_unfinished_requests()
        assert not self.lifecycle.check()


@functools.cache
def pair() -> Pair:
    house = House()
    guarded = house.llm(worker_cls="auto", max_num_seqs=MAX_NUM_SEQS)
    raw = copy.copy(guarded)
    return Pair(raw, guarded, attach(guarded, sinks=()))
