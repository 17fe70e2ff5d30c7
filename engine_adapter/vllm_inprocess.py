"""vLLM in the caller's own process, as an `Engine`.

Theory of operation
-------------------
With `VLLM_ENABLE_V1_MULTIPROCESSING=0` an `LLMEngine` is three parts in one process:
the front end (`output_processor`: request states, detokenizers), a thin client, and the
engine core (scheduler, executor, batch queue). This adapter uses the engine's public
calls for everything that has one, and reads the rest from the parts listed in
`PRIVATE_SURFACE`, which is all that can break with a new release. `doctor()` says
what of it this release has, and what is lost where something is missing.

The engine's own `sleep` is called only when nothing is in flight or everything is
frozen, always in its `keep` mode: the drain is the lifecycle's, so neither a wait mode
that a later release may bring nor the loss of in-flight requests in `abort` mode can
reach a caller. Waking never resumes scheduling; the lifecycle says when.

Verified with vLLM 0.25.1 on an H200 and 0.32.0 on CPUs.
"""

import copy
import inspect
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.utils.deterministic
import vllm
import vllm.exceptions
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from lifecycle.engine import Call, Capabilities, Condition, Found, Memory, OutOfDeviceMemory, Progress
from lifecycle.errors import UnsupportedEngine
from lifecycle.table import LEVELS, MEMORY_TAGS, Weights

# Everything private that a drain can't do without, from the `LLMEngine` down, and why.
PRIVATE_SURFACE: Final[Mapping[str, str]] = {
    "engine_core.engine_core.scheduler.running": "drains: what started can't be told from what waits",
    "engine_core.engine_core.scheduler.requests": "recall: nothing can be taken back before it starts",
    "engine_core.engine_core.scheduler.set_pause_state": "keep: in-flight requests can't be frozen",
    "engine_core.engine_core.scheduler.pause_state": "attach: a paused engine can't be recognised",
    "engine_core.engine_core.scheduler.has_requests": "drains: their end can't be seen",
    "engine_core.engine_core.batch_queue": "drains: launched batches can't be seen",
    "engine_core.engine_core.model_executor.sleeping_tags": "verification of sleep and wake",
    "output_processor.request_states": "partial outputs: an abort loses the tokens so far",
    "output_processor.parent_requests": "partial outputs of n > 1",
}
# What this adapter uses where a release has it, and the guarantee that is lost where not.
OPTIONAL_SURFACE: Final[Mapping[str, str]] = {
    "input_processor.process_inputs": "bad arguments of a held request show only at the wake",
    "reset_encoder_cache": "the encoder cache is not dropped after a weight load",
    "release_kv_cache_memory": "the KV cache can't be released alone",
    "set_weight_version": "outputs do not name the weights that they were computed with",
}

# Parameters of these types can be filled with NaN and looked at again.
_CHECKABLE: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WAITING: Final = frozenset({"WAITING", "WAITING_FOR_FSM", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"})
_IMMUTABLE: Final = (int, float, str, type(None))
_EMPTY: Final[Mapping[type, Any]] = {list: [], set: set(), dict: {}}  # shared by snapshots, never changed
# What vLLM raises for a bad argument. Up to 0.25 all of it was ValueError.
BAD_ARGUMENT: Final = (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))
# vLLM's dummy load draws from a range this small; any real model leaves it.
_DUMMY_RANGE: Final = 1e-3
_REASONS: Final = {"abort": FinishReason.ABORT, "error": FinishReason.ERROR}


# -- run on every worker, through collective_rpc; `worker` is vLLM's own ------------------------


class _RankMemory(NamedTuple):
    used: int | None
    free: int | None
    mapped: int | None
    asleep: Mapping[str, int]
    backed_up: bool


def _allocations() -> Iterable[Any]:
    """The allocations of vLLM's sleep-mode allocator in this process, if it is in use."""
    if not current_platform.is_cuda_alike():
        return ()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().pointer_to_data.values() if CuMemAllocator.instance else ()


def _read_memory(worker: Any) -> _RankMemory:  # noqa: ARG001  (collective_rpc passes the worker)
    used = free = None
    if current_platform.is_cuda_alike():
        free, total = torch.cuda.mem_get_info()
        used = total - free
    mapped: int | None = None
    asleep: dict[str, int] = {}
    backed_up = False
    for data in _allocations():
        mapped = mapped or 0
        if getattr(data, "is_asleep", False):
            asleep[data.tag] = asleep.get(data.tag, 0) + data.handle[1]
            backed_up = backed_up or (data.tag == "weights" and data.cpu_backup_tensor is not None)
        else:
            mapped += data.handle[1]
    return _RankMemory(used, free, mapped, asleep, backed_up)


def _empty_cache(worker: Any) -> None:  # noqa: ARG001
    torch.cuda.empty_cache()


def _parameters(worker: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.data) for name, parameter in worker.get_model().named_parameters()]


def _can_check(worker: Any) -> bool:
    return all(data.dtype in _CHECKABLE and data.numel() for _, data in _parameters(worker))


def _looks_dummy(worker: Any) -> bool:
    return all(
        not data.is_floating_point() or bool((data.abs() <= _DUMMY_RANGE).all())
        for _, data in _parameters(worker)
    )


def _fill_with_nan(worker: Any) -> None:
    for _, data in _parameters(worker):
        data.fill_(float("nan"))


def _reload_over_nan(worker: Any, *args: Any, **kwargs: Any) -> Any:
    """`reload_weights`, with every tensor that it allocates filled with NaN first.

    vLLM reloads a layer into new tensors and copies them over the old: without this a part
    that was never loaded would be whatever lay in memory, and would not show.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return worker.reload_weights(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _find_nan(worker: Any) -> list[str]:
    parameters = _parameters(worker)
    unborn = [name for name, data in parameters if data.is_meta]  # a reload broke before it came to them
    born = {name: data.isnan().any() for name, data in parameters if not data.is_meta}
    # All in one, for each look at a value waits for the device.
    holes = torch.stack([*born.values()]).tolist() if born else []
    return [*unborn, *compress(born, holes)]


# -- the adapter ----------------------------------------------------------------------------------


class VllmFrontEnd:
    """What vLLM's front end alone answers, wherever the engine core is: request states, outputs."""

    def __init__(self, engine: Any) -> None:
        self._states = engine.output_processor.request_states
        self._parents = engine.output_processor.parent_requests
        self._last_params: Any = None
        self._input = engine.input_processor
        process = getattr(self._input, "process_inputs", None)
        self._accepts = inspect.signature(process).parameters if process else {}

    def _supported_tasks(self) -> Any:
        """What the model is for, as the input processing wants to know."""
        raise NotImplementedError

    def prepare(self, request_id: Any, prompt: Any, params: Any, options: Mapping[str, Any]) -> Call:
        """The call with a snapshot of its parameters; equal ones in a row share one."""
        if isinstance(prompt, EngineCoreRequest):
            request_id, params = prompt.request_id, prompt.params
        if not isinstance(request_id, str):
            msg = f"request_id must be a string, not {request_id!r}"
            raise TypeError(msg)
        if not isinstance(params, (SamplingParams, PoolingParams)):
            msg = f"params must be SamplingParams or PoolingParams, not {type(params).__name__}"
            raise TypeError(msg)
        given = {key: value for key, value in options.items() if value is not None}
        if not given.get("priority"):  # the scheduler may not know of any
            given.pop("priority", None)
        arrival = given.pop("arrival_time", None)
        if arrival is None:
            arrival = (prompt.get("arrival_time") if isinstance(prompt, dict) else None) or time.time()
        if params != self._last_params:
            self._last_params = _snapshot(params)
        return Call(
            request_id=request_id,
            prompt=prompt,
            params=self._last_params,
            arrival_time=arrival,
            options=given,
            samples=getattr(params, "n", 1),
            delta=params.output_kind == RequestOutputKind.DELTA,
        )

    def validate(self, call: Call) -> None:
        """Run the front end's own input processing and throw the result away."""
        if isinstance(call.prompt, EngineCoreRequest) or not self._accepts:
            return
        arguments = {"supported_tasks": self._supported_tasks(), **call.options}
        try:
            self._input.process_inputs(
                call.request_id,
                call.prompt,
                call.params,
                arrival_time=call.arrival_time,
                **{name: value for name, value in arguments.items() if name in self._accepts},
            )
        except BAD_ARGUMENT as error:
            raise as_value_error(error) from error

    def _children(self, engine_id: str) -> list[str]:
        """The ids under which the engine core knows a request: its own, or one for each sample."""
        parent = self._parents.get(engine_id)
        return [engine_id] if parent is None else [f"{index}_{engine_id}" for index in range(parent.n)]

    def last_outputs(self, engine_ids: Sequence[str], reason: str) -> list[Any]:
        """The outputs that vLLM's front end would have made had it been asked before the abort."""
        outputs = []
        for engine_id in engine_ids:
            for child in self._children(engine_id):
                state = self._states.get(child)
                if state is None:
                    continue
                pooling = torch.empty(0) if state.detokenizer is None else None
                output = state.make_request_output([], pooling, _REASONS[reason], None)
                if output is not None:
                    outputs.append(_without_history(self.copy_output(output), state.output_kind))
        return outputs

    def tokens(self, engine_id: str) -> int:
        """Read from the detokenizers."""
        states = (self._states.get(child) for child in self._children(engine_id))
        return sum(state.detokenizer.num_output_tokens() for state in states if state and state.detokenizer)

    def count_tokens(self, output: Any) -> int:
        """Token ids in an output; a pooling output has none."""
        samples = output.outputs if isinstance(output.outputs, list) else ()
        return sum(len(sample.token_ids) for sample in samples)

    def copy_output(self, output: Any) -> Any:
        """Cumulative outputs carry the detokenizer's live lists: copy them."""
        if not isinstance(output.outputs, list):
            return output
        snapshot = copy.copy(output)
        snapshot.outputs = [copy.copy(sample) for sample in output.outputs]
        for sample in snapshot.outputs:
            sample.token_ids = list(sample.token_ids)
            if sample.logprobs is not None:
                sample.logprobs = sample.logprobs[:]
        return snapshot

    @staticmethod
    def merge_outputs(earlier: Any, later: Any, *, delta: bool) -> Any:
        """As vLLM's own asynchronous front end merges them; a pooling output comes only once."""
        if not isinstance(later.outputs, list):
            return later
        earlier.add(later, aggregate=delta)
        return earlier

    def _find_requests(self) -> Iterable[Found]:
        seen = set()
        for state in self._states.values():
            engine_id = engine_id_of(state)
            if engine_id not in seen:
                seen.add(engine_id)
                samples = state.parent_req.n if state.parent_req else 1
                delta = state.output_kind == RequestOutputKind.DELTA
                yield Found(state.external_req_id, engine_id, samples, delta)


class VllmInprocess(VllmFrontEnd):
    """An in-process vLLM engine behind the `Engine` protocol.

    source: an `LLM`, an `LLMEngine`, or an `EngineArgs` to build from; keywords alone are
    engine arguments. Raises UnsupportedEngine for a multiprocess client, for in-process
    data parallelism, and where an indispensable part of vLLM is missing.
    """

    def __init__(self, source: Any = None, **engine_args: Any) -> None:
        self._engine = _resolve(source, engine_args)
        _refuse_unsafe(self._engine)
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._executor = self._core.model_executor
        super().__init__(self._engine)
        self._level: int | None = None
        load_format = getattr(self._engine.vllm_config.load_config, "load_format", "")
        self._was_dummy = getattr(load_format, "value", load_format) == "dummy"
        self.capabilities = self._probe()

    def _probe(self) -> Capabilities:
        config = self._engine.vllm_config
        parallel = config.parallel_config
        sleep_mode = config.model_config.enable_sleep_mode or not current_platform.is_sleep_mode_available()
        # From 0.32 `is_sleeping` is a property of the tags, and sleep ignored only while the weights sleep.
        by_tags = isinstance(inspect.getattr_static(type(self._executor), "is_sleeping", None), property)
        weights_asleep = "weights" in self._executor.sleeping_tags
        checkable = weights_asleep or all(self._on_workers(_can_check))
        return Capabilities(
            name="vllm-inprocess",
            versions={"vllm": vllm.__version__, "torch": str(torch.__version__)},
            check_weights=checkable,
            resleep_partial=by_tags,
            release_kv=hasattr(self._engine, "release_kv_cache_memory"),
            kv_first=by_tags,
            lockstep=parallel.world_size > 1
            and str(parallel.distributed_executor_backend) == "external_launcher",
            levels=LEVELS if sleep_mode else (0,),
            costs=tuple(self._costs(by_tags=by_tags, checkable=checkable)),
        )

    def _costs(self, *, by_tags: bool, checkable: bool) -> Iterable[str]:
        yield from (cost for name, cost in OPTIONAL_SURFACE.items() if not _has(self._engine, name))
        if not by_tags:
            yield "no way back to sleep while only the KV cache sleeps; after level 2 the weights wake first"
        if not checkable:
            yield "weights can't be checked for holes: some parameters can't hold NaN"

    def _on_workers(self, function: Callable[[Any], Any]) -> list[Any]:
        result: list[Any] = self._engine.engine_core.collective_rpc(function)
        return result

    # -- condition -------------------------------------------------------------------------------------

    def condition(self) -> Condition:
        """Residency from the executor, pause from the scheduler, level where the allocator tells."""
        resident = MEMORY_TAGS - set(self._executor.sleeping_tags)
        paused = self._scheduler.pause_state != PauseState.UNPAUSED
        dummy = self._was_dummy and not ("weights" in resident and self._was_loaded())
        return Condition(
            resident=resident,
            paused=paused or not resident >= MEMORY_TAGS,
            level=self._read_level(resident, paused=paused),
            weights=Weights.DISCARDED if dummy else Weights.VALID,
            requests=tuple(self._find_requests()),
        )

    def _was_loaded(self) -> bool:
        """A dummy load that somebody made good before we came stays good."""
        if not all(self._on_workers(_looks_dummy)):
            self._was_dummy = False
        return not self._was_dummy

    def _read_level(self, resident: frozenset[str], *, paused: bool) -> int | None:
        if resident >= MEMORY_TAGS:
            return 0 if paused else None
        if self._level is not None or "weights" in resident:
            return self._level
        ranks = self._on_workers(_read_memory)
        if not all(rank.asleep.get("weights") for rank in ranks):
            return None
        return 1 if all(rank.backed_up for rank in ranks) else 2

    # -- requests --------------------------------------------------------------------------------------

    def _supported_tasks(self) -> Any:
        return self._engine.get_supported_tasks()

    def add(self, call: Call) -> str:
        """Queue the request; whatever a failed call left behind is removed again."""
        prompt = copy.copy(call.prompt) if isinstance(call.prompt, EngineCoreRequest) else call.prompt
        try:
            engine_id: str | None = self._engine.add_request(
                call.request_id, prompt, call.params, arrival_time=call.arrival_time, **call.options
            )
        except Exception as error:
            # By internal ids, as ever: an abort by the caller's id would leave the parent of samples behind.
            left = [found.engine_id for found in self._find_requests() if found.request_id == call.request_id]
            if left:
                self.abort(left)
            raise as_value_error(error) from error
        # A release that doesn't say: the newest state is of this request, or of its last sample.
        return engine_id or engine_id_of(next(reversed(self._states.values())))

    def step(self) -> list[Any]:
        """`LLMEngine.step`: schedule, execute, detokenize."""
        outputs: list[Any] = self._engine.step()
        return outputs

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Abort by internal ids: every sample, then the parent, or it would leak."""
        ids: list[str] = []
        for engine_id in engine_ids:
            children = self._children(engine_id)
            ids += children if children == [engine_id] else [*children, engine_id]
        self._engine.abort_request(ids, internal=True)

    def unstarted(self, engine_ids: Sequence[str]) -> list[str]:
        """Those whose every sample still waits, with nothing computed and no preemption."""
        requests = self._scheduler.requests
        return [
            engine_id
            for engine_id in engine_ids
            if all(_never_ran(requests.get(child)) for child in self._children(engine_id))
        ]

    # -- scheduling ------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Computed tokens of the running set: rises at every healthy step, long prefills included."""
        running = self._scheduler.running
        return Progress(
            computed=sum(request.num_computed_tokens for request in running),
            running=frozenset(request.request_id for request in running),
        )

    def has_work(self) -> bool:
        """Requests, finished ids still to be flushed, or launched batches."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def has_launched(self) -> bool:
        """Batches in the queue of asynchronous scheduling or pipeline parallelism."""
        return bool(self._core.batch_queue)

    def pause_scheduling(self) -> None:
        """`PAUSED_ALL`: nothing is scheduled, launched batches can still be stepped out."""
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def resume_scheduling(self) -> None:
        """`UNPAUSED`."""
        if self._scheduler.pause_state != PauseState.UNPAUSED:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)
        self._level = None

    # -- memory ----------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """The engine's own sleep in `keep` mode, which neither drops nor steps requests."""
        if "mode" in inspect.signature(self._engine.sleep).parameters:
            self._engine.sleep(level, mode="keep")
        else:
            self.pause_scheduling()
            self._engine.sleep(level)
        self._level = level

    def wake_up(self, tags: Sequence[str]) -> None:
        """Look whether the memory is there before mapping it: a wake that fails half-way can't be retried."""
        missing = self._missing_bytes(tags)
        if missing > 0:
            self._on_workers(_empty_cache)
            missing = self._missing_bytes(tags)
        if missing > 0:
            msg = f"{missing / 2**20:.0f} MiB of device memory are missing"
            raise OutOfDeviceMemory(msg, missing)
        self._engine.wake_up(list(tags))
        # A wake of the last tag resumes the scheduler, up to 0.23 that of any tag.
        self.pause_scheduling()

    def _missing_bytes(self, tags: Sequence[str]) -> int:
        """How much the rank that is worst off lacks."""
        ranks = [rank for rank in self._on_workers(_read_memory) if rank.free is not None]
        return max((sum(rank.asleep.get(tag, 0) for tag in tags) - rank.free for rank in ranks), default=0)

    def release_kv_cache_memory(self) -> None:
        """The engine's own call, from 0.32 on."""
        self._engine.release_kv_cache_memory()

    def reset_caches(self, *, kept: bool = False) -> bool:
        """Prefix and encoder caches, and by a preemption the KV blocks of what is kept."""
        done = bool(self._engine.reset_prefix_cache(**({"reset_running_requests": True} if kept else {})))
        if done and hasattr(self._engine, "reset_encoder_cache"):
            self._engine.reset_encoder_cache()
        return done

    def forget_media(self) -> None:
        """Validating a held request may have told the front end that the workers know its media."""
        renderer = getattr(self._engine, "renderer", None)
        if getattr(renderer, "mm_processor_cache", None) is not None:
            self._engine.reset_mm_cache()

    def memory(self) -> Memory:
        """Device bytes over all ranks, as the driver sees them; resident bytes of this process."""
        ranks = self._on_workers(_read_memory)
        return Memory(
            device=_total(rank.used for rank in ranks),
            host=_resident_bytes(),
            asleepable=_total(rank.mapped for rank in ranks),
        )

    def discard_weights(self) -> None:
        """Fill every parameter with NaN. Buffers are vLLM's own to restore."""
        self._on_workers(_fill_with_nan)

    def missing_weights(self) -> tuple[str, ...]:
        """Parameters with a NaN left on any rank; vLLM's fused names."""
        found = (name for names in self._on_workers(_find_nan) for name in names)
        return tuple(dict.fromkeys(found))

    # -- the rest --------------------------------------------------------------------------------------

    @property
    def raw(self) -> Any:
        """The `LLMEngine` itself, unguarded."""
        return self._engine

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of `LLMEngine`."""
        if name == "collective_rpc" and args[:1] == ("reload_weights",) and self.capabilities.check_weights:
            args = (_reload_over_nan, *args[1:])
        return getattr(self._engine, name)(*args, **kwargs)

    def shutdown(self) -> None:
        """End the engine core. vLLM takes `torch.distributed` down with it, for the whole process."""
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = self._core = self._scheduler = self._executor = None
        self._states, self._parents, self._input = {}, {}, None


def _resolve(source: Any, engine_args: dict[str, Any]) -> Any:
    """The `LLMEngine` in, or made from, what the caller gave."""
    if source is not None and engine_args:
        msg = "give an engine or engine arguments, not both"
        raise TypeError(msg)
    if source is None:
        source = EngineArgs(**engine_args)
    if isinstance(source, EngineArgs):
        config = source.create_engine_config()
        return LLMEngine(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=not source.disable_log_stats,
            multiprocess_mode=False,
        )
    return getattr(source, "llm_engine", source)


def _refuse_unsafe(engine: Any) -> None:
    if not _has(engine, "engine_core.engine_core"):
        msg = (
            "this engine runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before "
            "vllm is imported, and build it again"
        )
        raise UnsupportedEngine(msg)
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        msg = "in-process data parallelism steps in lockstep with other ranks and can't be guarded from one"
        raise UnsupportedEngine(msg)
    refuse_without(engine, PRIVATE_SURFACE)


def refuse_without(engine: Any, surface: Mapping[str, str]) -> None:
    """Raise UnsupportedEngine, naming what of this surface the engine lacks, and what that costs."""
    lost = [f"{name} ({cost})" for name, cost in surface.items() if not _has(engine, name)]
    if lost:
        msg = f"vLLM {vllm.__version__} lacks what a drain needs: {'; '.join(lost)}"
        raise UnsupportedEngine(msg)


def _has(engine: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(engine, name):
            return False
        engine = getattr(engine, name)
    return True


def engine_id_of(state: Any) -> str:
    """The internal id of the request that a state of the front end belongs to: a sample's is its parent's."""
    engine_id: str = (state.parent_req or state).request_id
    return engine_id


def as_value_error(error: Exception) -> Exception:
    """Whatever class a release gives to a bad argument, it leaves here as a ValueError."""
    return ValueError(str(error)) if isinstance(error, BAD_ARGUMENT) else error


def _snapshot(params: Any) -> Any:
    """Parameters that share nothing mutable with the caller's.

    vLLM's own `clone` is a deep copy that takes five times as long and twice the memory.
    The engine clones what it is given before it changes it, except where `skip_clone` says
    not to: empty containers may be shared only without that.
    """
    if getattr(params, "skip_clone", True) or not hasattr(params, "__struct_fields__"):
        return copy.deepcopy(params)
    mine = copy.copy(params)
    for name in mine.__struct_fields__:
        value = getattr(mine, name)
        if not isinstance(value, _IMMUTABLE):
            empty = None if value else _EMPTY.get(type(value))
            setattr(mine, name, copy.deepcopy(value) if empty is None else empty)
    return mine


def _never_ran(request: Any) -> bool:
    return (
        request is not None
        and request.status.name in _WAITING
        and not request.num_computed_tokens
        and not request.num_output_tokens
        and not request.num_preemptions
    )


def _without_history(output: Any, kind: Any) -> Any:
    """Up to 0.25.1 a delta without new tokens carries the logprobs of all earlier ones."""
    if kind == RequestOutputKind.DELTA:
        for sample in output.outputs:
            if sample.logprobs is not None and not sample.token_ids:
                sample.logprobs = sample.logprobs[:0]
    return output


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:  # not on Linux
        return None


def doctor() -> list[tuple[str, str]]:
    """Lines for `lifecycle doctor`: versions, and what this release of vLLM has of what is used."""
    from vllm.v1.core.sched.scheduler import Scheduler

    homes = {"LLMEngine": LLMEngine, "Scheduler": Scheduler}
    surface = {
        "LLMEngine.sleep": "nothing can sleep",
        "LLMEngine.wake_up": "nothing can wake",
        "Scheduler.set_pause_state": PRIVATE_SURFACE["engine_core.engine_core.scheduler.set_pause_state"],
        "Scheduler.pause_state": PRIVATE_SURFACE["engine_core.engine_core.scheduler.pause_state"],
        "Scheduler.has_requests": PRIVATE_SURFACE["engine_core.engine_core.scheduler.has_requests"],
        **{f"LLMEngine.{name}": cost for name, cost in OPTIONAL_SURFACE.items() if "." not in name},
    }
    rows = [
        ("vllm", vllm.__version__),
        ("torch", str(torch.__version__)),
        ("platform", current_platform.device_name or "unknown"),
    ]
    for name, cost in surface.items():
        home, _, attribute = name.partition(".")
        rows.append((name, "yes" if hasattr(homes[home], attribute) else f"missing: {cost}"))
    by_tags = isinstance(inspect.getattr_static(Executor, "is_sleeping", None), property)
    rows.append(("sleep again from partly awake", "yes" if by_tags else "missing: only once all is awake"))
    rows.append(("KV cache first after level 2", "yes" if by_tags else "missing: the weights wake first"))
    return rows
