"""A stand-in for `vllm.LLM` in its in-process mode, over a `SimulatedEngine`.

Theory of operation
-------------------
`SimulatedLLM` is what a trainer holds, and `llm.llm_engine`, a `SimulatedLLMEngine`, what it
reaches through. Both have the signatures of vLLM 0.32, and both are plain: nothing guards
them until `attach(llm)` does, exactly as for the real ones. The hazards are vLLM's own:

- `sleep(mode="wait")` raises ValueError, and the default mode, "abort", loses what is in
  flight: no output comes, and `has_unfinished_requests` stays true for ever.
- Adding is accepted asleep, and stepping does nothing. There a real engine spins for ever;
  this one naps at each such step, and after `SPINS` of them in a row raises, so that a
  test ends.
- Weights are whatever memory holds after level 2, and are served as they are.

Each of them is noted in `llm.misuse`.

*A model's names and values.* `parameters=[...]` gives the model the names of one's own. What
is loaded may be any tensor or array: its contents count. `worker_extension_cls` is vLLM's: a
class whose methods `collective_rpc` finds by name, with the worker as `self`. A name that is
nobody's does nothing there, so that a trainer's own worker class need not be at hand.

`attach` puts the lifecycle around `llm.simulated`, which implements `Engine` itself.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from engine_adapter.simulated import (
    PARAMETERS,
    OutputKind,
    RequestOutput,
    SamplingParams,
    SimulatedEngine,
    decode,
    encode,
)
from lifecycle.table import KV_CACHE, MEMORY_TAGS, SCHEDULING, WEIGHTS
from lifecycle.testing.faults import Faults

PAUSE_MODES: Final = ("abort", "wait", "keep")
SPINS: Final = 1_000
NAP_S: Final = 0.001

Messages = Sequence[Mapping[str, Any]]


class Tokenizer:
    """One token for each character, and small letters for what is generated."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002  (there are none)
        """Token ids of a text."""
        return encode(text)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:  # noqa: ARG002  (likewise)
        """The text of token ids."""
        return decode(token_ids)

    def apply_chat_template(
        self,
        conversation: Messages,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> str | list[int]:
        """The conversation as one prompt."""
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in conversation)
        text += "<assistant>" if add_generation_prompt else ""
        return encode(text) if tokenize else text


# -- what stands behind `model_executor` -----------------------------------------------------------


class SimulatedModel:
    """The model object that weights are loaded into, past the engine's calls."""

    def __init__(self, simulated: SimulatedEngine) -> None:
        self._simulated = simulated

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Load values by name, all or some, and return the names. ValueError for an unknown one."""
        return self._simulated.load_into_model(weights)

    def named_parameters(self) -> Iterator[tuple[str, int]]:
        """Names, and what is kept of each value."""
        yield from list(self._simulated.weights.items())


class SimulatedWorker:
    """What a callable or a worker extension gets: `model_runner.model`, `get_model()`, the rank."""

    def __init__(self, model: SimulatedModel) -> None:
        self.model_runner = SimpleNamespace(model=model)
        self.rank = self.local_rank = 0

    def get_model(self) -> SimulatedModel:
        """The model object."""
        model: SimulatedModel = self.model_runner.model
        return model


class SimulatedExecutor:
    """`llm_engine.model_executor`: read for what sleeps, and walked through to the model."""

    def __init__(self, simulated: SimulatedEngine) -> None:
        self._simulated = simulated
        worker = simulated.worker
        self.driver_worker = SimpleNamespace(worker=worker, model_runner=worker.model_runner)

    @property
    def sleeping_tags(self) -> set[str]:
        """Memory that is not mapped."""
        return set(MEMORY_TAGS - self._simulated.resident)

    @property
    def is_sleeping(self) -> bool:
        """Whether any memory is not mapped; a pause is not seen here."""
        return bool(self.sleeping_tags)


# -- the engine ------------------------------------------------------------------------------------


class SimulatedLLMEngine:
    """The surface of vLLM's `LLMEngine`, unguarded."""

    def __init__(self, simulated: SimulatedEngine) -> None:
        self._simulated = simulated
        self._tokenizer = Tokenizer()
        self._spins = 0
        self.model_executor = SimulatedExecutor(simulated)
        self.model_config = SimpleNamespace(
            model="simulated",
            max_model_len=simulated.max_model_len,
            runner_type="generate",
            enable_sleep_mode=True,
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            parallel_config=SimpleNamespace(
                world_size=1, world_size_across_dp=1, tensor_parallel_size=1, data_parallel_size=1
            ),
            load_config=SimpleNamespace(load_format="dummy" if simulated.dummy_weights else "auto"),
            lora_config=None,
        )

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Queue a request, in any state, and return the engine's own id of it."""
        options = {
            "arrival_time": arrival_time,
            "lora_request": lora_request,
            "tokenization_kwargs": tokenization_kwargs,
            "trace_headers": trace_headers,
            "priority": priority,
            "session_id": session_id,
            "prompt_text": prompt_text,
            "kv_hints": kv_hints,
        }
        return self._simulated.add(self._simulated.prepare(request_id, prompt, params, options))

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Forget requests, by the callers' ids or by the engine's own; no output follows."""
        wanted = set(request_ids)
        found = [
            engine_id
            for engine_id, parent in self._simulated.parents.items()
            if (engine_id if internal else parent.request_id) in wanted
        ]
        if found:
            self._simulated.abort(found)

    def step(self) -> list[RequestOutput]:
        """One step. RuntimeError after `SPINS` steps in a row from which nothing can ever come."""
        outputs = self._simulated.step()
        self._spins = self._spins + 1 if self._simulated.idles else 0
        if self._spins:
            time.sleep(NAP_S)
        if self._spins >= SPINS:
            self._spins = 0
            raise RuntimeError(
                f"a real engine would spin here for ever: {SPINS} steps in a row did nothing, and "
                f"{self.get_num_unfinished_requests()} requests are unfinished; `misuse` says why"
            )
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether the front end waits for anything; what a sleep dropped too."""
        return bool(self._simulated.parents)

    def get_num_unfinished_requests(self) -> int:
        """The same as a number; each sample of `n` is one."""
        return sum(len(parent.live) for parent in list(self._simulated.parents.values()))

    # Sleep and wake

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Sleep at once. "abort" loses what is in flight, "keep" freezes it, "wait" is a ValueError."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        if mode == "abort":
            self._simulated.lose_requests(f"sleep({level}, mode='abort') with requests in flight")
        self._simulated.pause_scheduling()
        self._simulated.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Map memory again, and schedule once all is back. Returns whether it is.

        Tags that are unknown, empty or awake wake nothing; one given twice is a KeyError afterwards.
        """
        asleep = self.model_executor.sleeping_tags
        wanted = [tag for tag in (WEIGHTS, KV_CACHE) if tag in asleep] if tags is None else tags
        wanted = [tag for tag in wanted if tag != SCHEDULING]
        if asleep and wanted:
            self._simulated.wake_up(wanted)
        if not self.model_executor.is_sleeping and self._simulated.paused:
            self._simulated.resume_scheduling()
        twice = [tag for tag in wanted if wanted.count(tag) > 1]
        if asleep and twice:
            raise KeyError(twice[0])
        return not self.model_executor.is_sleeping

    def is_sleeping(self) -> bool:
        """Whether it is paused, or any memory is not mapped."""
        return self._simulated.paused or self.model_executor.is_sleeping

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory. RuntimeError unless paused and quiet, with all memory there."""
        if not self._simulated.paused or self._simulated.has_work():
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self.model_executor.is_sleeping:
            raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
        self._simulated.release_kv_cache_memory()

    # Workers, weights and caches

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a worker's method, or a callable that is given the worker."""
        result: list[Any] = self._simulated.call("collective_rpc", method, timeout, args, kwargs)
        return result

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run a function on the model of every worker."""
        return [self._simulated.call("apply_model", func)]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop the prefix cache; False while requests use it."""
        return bool(self._simulated.call("reset_prefix_cache", reset_running_requests, reset_connector))

    def reset_encoder_cache(self) -> None:
        """There is none."""
        self._simulated.call("reset_encoder_cache")

    def reset_mm_cache(self) -> None:
        """There is none."""
        self._simulated.call("reset_mm_cache")

    def set_weight_version(self, weight_version: str) -> None:
        """Name the weights."""
        self._simulated.call("set_weight_version", weight_version)

    def get_weight_version(self) -> str:
        """The name of the weights."""
        return self._simulated.weight_version

    def add_lora(self, lora_request: Any) -> bool:
        """Adapters change no tokens here."""
        self._simulated.call("add_lora", lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """See `add_lora`."""
        self._simulated.call("remove_lora", lora_id)
        return True

    def pin_lora(self, lora_id: int) -> bool:
        """See `add_lora`."""
        self._simulated.call("pin_lora", lora_id)
        return True

    def list_loras(self) -> set[int]:
        """See `add_lora`."""
        return set()

    # The rest

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer that the engine's own tokens agree with."""
        return self._tokenizer

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model is for."""
        return ("generate",)

    def get_metrics(self) -> list[Any]:
        """None are kept."""
        return []

    def do_log_stats(self) -> None:
        """None are kept."""

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Nothing is profiled."""
        self._simulated.call("start_profile", profile_prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """Nothing is profiled."""
        self._simulated.call("stop_profile")

    def __repr__(self) -> str:
        return "<SimulatedLLMEngine>"


# -- the LLM ---------------------------------------------------------------------------------------


class SimulatedLLM:
    """The surface of vLLM's `LLM`, unguarded.

    parameters: names of the model's weights. worker_extension_cls: a class with worker methods
    of one's own. options go to `SimulatedEngine` (`max_num_seqs`, `max_model_len`,
    `dummy_weights`, `batch_queue_size`, `capabilities`, ...).

    Beside vLLM's names there are `simulated`, the engine itself, and of it `faults`, `misuse`
    and `calls`.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[str] = PARAMETERS,
        worker_extension_cls: type | None = None,
        **options: Any,
    ) -> None:
        self.simulated = SimulatedEngine(parameters=parameters, **{"max_model_len": 4096, **options})
        model = SimulatedModel(self.simulated)
        extensions = () if worker_extension_cls is None else (worker_extension_cls,)
        self.simulated.worker = type("Worker", (*extensions, SimulatedWorker), {})(model)
        self.simulated.model = model
        self.llm_engine: Any = SimulatedLLMEngine(self.simulated)
        self.model_config = self.llm_engine.model_config
        self.request_counter = itertools.count()

    @property
    def faults(self) -> Faults:
        """The fault script; see `lifecycle.testing.faults`."""
        return self.simulated.faults

    @property
    def misuse(self) -> list[str]:
        """What the engine was asked that it should not have been, and how it took it."""
        return self.simulated.misuse

    @property
    def calls(self) -> list[str]:
        """What reached the engine and took effect."""
        return self.simulated.calls

    # Generation. What is not used has no meaning without a real model: bars, templates, media.

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002  (see above)
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        mm_processor_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> list[RequestOutput]:
        """Add all prompts, step until nothing is unfinished, and return the last outputs in order.

        A prompt is a str, token ids, or a dict with either. Only last outputs are made, as in vLLM.
        """
        self._add(prompts, sampling_params, lora_request, priority)
        return self._run_engine()

    def enqueue(
        self,
        prompts: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002
        tokenization_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        mm_processor_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> list[str]:
        """Add all prompts, and return the engine's ids. One bad prompt takes the others back out."""
        return self._add(prompts, sampling_params, lora_request, priority)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,  # noqa: ARG002
        chat_template_content_format: str = "auto",  # noqa: ARG002
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,  # noqa: ARG002
        tools: list[dict[str, Any]] | None = None,  # noqa: ARG002
        chat_template_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        tokenization_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        mm_processor_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> list[RequestOutput]:
        """`generate` for one conversation or several, each as one prompt."""
        prompts = self._prompts_of(messages, add_generation_prompt)
        self._add(prompts, sampling_params, lora_request, priority)
        return self._run_engine()

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,  # noqa: ARG002
        chat_template_content_format: str = "auto",  # noqa: ARG002
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,  # noqa: ARG002
        tools: list[dict[str, Any]] | None = None,  # noqa: ARG002
        chat_template_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        tokenization_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        mm_processor_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> list[str]:
        """`enqueue` for one conversation or several."""
        prompts = self._prompts_of(messages, add_generation_prompt)
        return self._add(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(
        self,
        output_type: type | tuple[type, ...] | None = None,  # noqa: ARG002
        *,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002
    ) -> list[RequestOutput]:
        """Step until nothing is unfinished, and return the last outputs in order."""
        return self._run_engine()

    def _prompts_of(self, messages: Any, add_generation_prompt: bool) -> list[Any]:
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self.get_tokenizer().apply_chat_template
        return [
            template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
            for conversation in conversations
        ]

    def _add(self, prompts: Any, sampling_params: Any, lora_request: Any, priority: Any) -> list[str]:
        if isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("params", sampling_params, len(prompts))
        loras = _one_each("lora_request", lora_request, len(prompts))
        priorities = _one_each("priority", priority or 0, len(prompts))
        added: list[str] = []
        try:
            for prompt, param, lora, urgency in zip(prompts, params, loras, priorities, strict=True):
                param.output_kind = type(param.output_kind)(OutputKind.FINAL_ONLY.value)
                request_id = str(next(self.request_counter))
                engine_id = self.llm_engine.add_request(
                    request_id, prompt, param, lora_request=lora, priority=urgency
                )
                added.append(engine_id)
        except Exception:
            if added:
                self.llm_engine.abort_request(added, internal=True)
            raise
        return added

    def _run_engine(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer that the engine's own tokens agree with."""
        tokenizer: Tokenizer = self.llm_engine.get_tokenizer()
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters that say nothing."""
        return SamplingParams()

    # Sleep, wake, and all else that goes to the engine

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `SimulatedLLMEngine.sleep`."""
        self.llm_engine.sleep(level=level, mode=mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """See `SimulatedLLMEngine.wake_up`."""
        awake: bool = self.llm_engine.wake_up(tags)
        return awake

    def release_kv_cache_memory(self) -> None:
        """See `SimulatedLLMEngine.release_kv_cache_memory`."""
        self.llm_engine.release_kv_cache_memory()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a worker's method, or a callable that is given the worker."""
        results: list[Any] = self.llm_engine.collective_rpc(method, timeout, args, kwargs)
        return results

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run a function on the model of every worker."""
        results: list[Any] = self.llm_engine.apply_model(func)
        return results

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop the prefix cache; False while requests use it."""
        done: bool = self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)
        return done

    def reset_mm_cache(self) -> None:
        """There is none."""
        self.llm_engine.reset_mm_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """One."""
        parallel = self.llm_engine.vllm_config.parallel_config
        size: int = parallel.world_size_across_dp if include_dp else parallel.world_size
        return size

    def get_metrics(self) -> list[Any]:
        """None are kept."""
        metrics: list[Any] = self.llm_engine.get_metrics()
        return metrics

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Nothing is profiled."""
        self.llm_engine.start_profile(
            profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
        )

    def stop_profile(self) -> None:
        """Nothing is profiled."""
        self.llm_engine.stop_profile()

    # Weight updates, each of them a worker's method

    def init_weight_transfer_engine(self, request: Any) -> None:
        """There is nothing to connect to."""
        self._worker("init_weight_transfer_engine", init_info=_part(request, "init_info"))

    def shutdown_weight_transfer_engine(self) -> None:
        """There is nothing to disconnect from."""
        self._worker("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """From here to `finish_weight_update` the weights are neither the old nor the new."""
        self._worker("start_weight_update")

    def start_draft_weight_update(self) -> None:
        """There is no draft model."""
        self._worker("start_draft_weight_update")

    def update_weights(self, request: Any) -> None:
        """Give new values to the parameters that the update info lists under "names"."""
        self._worker("update_weights", update_info=_part(request, "update_info"))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights are the new ones."""
        self._worker("finish_weight_update")
        if weight_version is not None:
            self.llm_engine.set_weight_version(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        self.llm_engine.set_weight_version(new_version)

    def get_weight_version(self) -> str:
        """The name of the weights."""
        version: str = self.llm_engine.get_weight_version()
        return version

    def _worker(self, method: str, **kwargs: Any) -> None:
        if kwargs:
            self.llm_engine.collective_rpc(method, kwargs=kwargs)
        else:
            self.llm_engine.collective_rpc(method)


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """A value for each of `count` prompts, from one for all of them or a sequence."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"The lengths of prompts ({count}) and {name} ({len(value)}) must be the same.")
    return value


def _part(request: Any, name: str) -> Any:
    """One part of a request, which vLLM takes as a dict or as an object."""
    return request[name] if isinstance(request, Mapping) else getattr(request, name)
