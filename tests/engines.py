"""Real vLLM engines for tests: one at a time, kept between tests, built anew when broken.

An engine takes a few seconds to build, and the end of one takes `torch.distributed` down
for the whole process, so two never live side by side.
"""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",  # a fork of a process with threads may hang
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from tests.tiny_model import make_tiny_model

MODEL_DIR = Path(tempfile.gettempdir()) / f"engine-lifecycle-tests-{os.getuid()}" / "tiny"
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",  # in bfloat16 another batch changes a token now and then
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,  # clearing a whole KV cache at each sleep is slow
    "disable_log_stats": True,
    "worker_cls": "tests.nan_worker.NanWorker",
}


def model_dir() -> Path:
    return make_tiny_model(MODEL_DIR)


def keep_plain_weights() -> None:
    """Have vLLM leave linear weights unpacked on CPUs, as they are on a GPU."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layer_utils

    ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda *_: False


class House:
    """Holds at most one engine. `llm(**overrides)` returns one with these arguments."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._arguments: dict[str, Any] | None = None
        self._keep = False

    def llm(self, **overrides: Any) -> Any:
        arguments = {"model": str(model_dir()), **DEFAULTS, **overrides}
        if self._llm is None or arguments != self._arguments:
            self.close()
            keep_plain_weights()
            from vllm import LLM

            self._llm, self._arguments = LLM(**arguments), arguments
        return self._llm

    def is_attached(self) -> bool:
        """Whether a lifecycle was left on the engine."""
        return self._llm is not None and hasattr(self._llm.llm_engine, "_engine_lifecycle")

    def condemn(self) -> None:
        """The engine was broken on purpose: the next test gets a new one."""
        self._arguments = None

    def close(self) -> None:
        llm, self._llm, self._arguments = self._llm, None, None
        if llm is not None:
            engine = getattr(llm.llm_engine, "_guarded_engine", llm.llm_engine)
            engine.engine_core.shutdown()
            del engine, llm
            gc.collect()


def worker(llm: Any) -> Any:
    """The worker object of an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.worker


def core(llm: Any) -> Any:
    """The engine core of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


def give_batch_queue(llm: Any) -> None:
    """Launch ahead, as asynchronous scheduling does on a GPU."""
    from collections import deque

    engine_core = core(llm)
    engine_core.batch_queue = deque(maxlen=2)
    engine_core.batch_queue_size = 2
    engine_core.step_fn = engine_core.step_with_batch_queue


def take_batch_queue(llm: Any) -> None:
    engine_core = core(llm)
    engine_core.batch_queue = None
    engine_core.batch_queue_size = 1
    engine_core.step_fn = engine_core.step
