"""A CPU worker whose sleep levels are real.

vLLM's own CPU worker does nothing to memory at sleep. This one does what a GPU does to
contents: at level 1 the weights are kept aside, at level 2 they are gone, and the KV
cache is gone at both. Gone means NaN while asleep, so that any use of it shows, and
after the wake some number or other, as in freshly mapped memory.
"""

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class NanWorker(CPUWorker):
    _kept: dict[str, Any] | None = None
    fail_next_sleep: BaseException | None = None
    fail_next_wake: BaseException | None = None
    step_s = 0.0

    def fail_next(self, call: str) -> None:
        """Have the next "sleep" or "wake" raise; `collective_rpc` reaches this in another process too."""
        setattr(self, f"fail_next_{call}", RuntimeError(f"told to fail the {call}"))

    def _parameters(self) -> dict[str, Any]:
        return {name: parameter.data for name, parameter in self.get_model().named_parameters()}

    def _fill_kv(self, value: float) -> None:
        for cache in self.model_runner.kv_caches:
            cache.fill_(value)

    def sleep(self, level: int = 1) -> None:
        failure, self.fail_next_sleep = self.fail_next_sleep, None
        if failure is not None:
            raise failure
        parameters = self._parameters()
        self._kept = {name: data.clone() for name, data in parameters.items()} if level == 1 else None
        for data in parameters.values():
            data.fill_(float("nan"))
        self._fill_kv(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        failure, self.fail_next_wake = self.fail_next_wake, None
        if failure is not None:
            raise failure
        if tags is None or "weights" in tags:
            for name, data in self._parameters().items():
                data.copy_(self._kept[name]) if self._kept is not None else data.fill_(0.01)
            self._kept = None
        if tags is None or "kv_cache" in tags:
            # Freshly mapped memory is not NaN either; kernels read past the written end and mask it.
            self._fill_kv(0.0)

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self._fill_kv(float("nan"))

    def take_time(self, seconds: float) -> None:
        """Have each step take so much longer, so that a test can look between two of them."""
        self.step_s = seconds

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if self.step_s:
            time.sleep(self.step_s)
        return super().execute_model(*args, **kwargs)

    # What trainers bring as worker methods of their own.

    def update_weight(self, name: str, factor: float) -> None:
        """One parameter comes anew: OpenRLHF broadcasts it, here it is the old one times a factor."""
        self._parameters()[name].mul_(factor)

    def update_weights_from_path(self, path: str | None = None) -> None:
        """All parameters come anew, from a checkpoint."""
        self.reload_weights()
