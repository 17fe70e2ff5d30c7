"""An engine without a model: deterministic, quick, and hostile to misuse.

Theory of operation
-------------------
`SimulatedEngine` implements `lifecycle.engine.Engine` after vLLM's own structure: requests wait in
`waiting`, are scheduled into `running` within a token budget (long prompts in chunks) and a pool of KV
blocks, are preempted and recomputed when the blocks run out, and every `n > 1` request is `n` children
under one parent. With `batch_queue_size=2` a step launches a batch first and hands out the outputs of
the one before, as asynchronous scheduling does. Finished ids need one more step to be flushed.

*Tokens tell the truth.* A token is a pure function of the prompt, the seed, the sample, its position
and the contents of the weights that every part of its KV cache was computed with. So a lost, doubled or
swapped token, stale cache and half-loaded weights all show as tokens other than `expected_tokens`.

*Memory has contents.* `weights` maps parameter names to values. Level 1 keeps them aside, level 2 turns
them into `Garbage`; `discard_weights` writes `NAN`, which is what `missing_weights` looks for.

*Misuse is recorded, not raised.* The engine does what vLLM would do: it spins, ignores, loses requests
or is poisoned, and writes a line to `misuse`, which a caller that swallows exceptions can't hide. What
is misuse is stated here anew, without the lifecycle's table, so that a wrong table shows. `calls` lists
what reached the engine and took effect.

*Faults are scripted*: `engine.faults.add("step", at=3, raises=RuntimeError("lost"))`, see
`lifecycle.testing.faults`; those with an `effect` of the engine's own are listed in `EFFECTS`.
"""

import functools
import hashlib
import itertools
import threading
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Final, TypeVar, cast

from lifecycle.engine import Call, Capabilities, Condition, Found, Memory, Progress
from lifecycle.table import KV_CACHE, LEVELS, MEMORY_TAGS, WEIGHTS, Weights
from lifecycle.testing.faults import UNSET, Fault, Faults

GIB: Final = 2**30
MAX_MODEL_LEN: Final = 256
PARAMETERS: Final = (
    "embed_tokens",
    *(f"layers.{layer}.{part}" for layer in (0, 1) for part in ("q_proj", "k_proj", "v_proj", "up_proj")),
    "lm_head",
)
# Projections that vLLM keeps as one tensor: a reload that brings one of them makes the tensor anew.
_FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_VOCABULARY: Final = 32_000


# -- Requests and outputs, shaped like vLLM's ------------------------------------------------------


class OutputKind(IntEnum):
    """How much each output carries; values are those of vLLM's `RequestOutputKind`."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class SamplingParams:
    """What to generate. temperature and ignore_eos change nothing: there is no end-of-sequence token.

    vLLM's own `SamplingParams` are taken too, for the fields that are here.
    """

    n: int = 1
    max_tokens: int | None = 16
    seed: int | None = None
    temperature: float = 1.0
    stop: str | list[str] | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logprobs: int | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def _copy_params(params: Any) -> SamplingParams:
    """Return a copy of ours, or of anything that has vLLM's fields."""
    if isinstance(params, SamplingParams):
        return replace(params, stop=list(params.stops))
    if not (hasattr(params, "max_tokens") and hasattr(params, "n")):
        raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
    given = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    kind = given.pop("output_kind")
    copied = SamplingParams(**given, output_kind=OutputKind(getattr(kind, "value", kind)))
    return replace(copied, stop=list(copied.stops))


class Logprob(float):
    """A log probability: the number itself, and under the names that vLLM gives it."""

    __slots__ = ()
    rank = 1
    decoded_token: str | None = None

    @property
    def logprob(self) -> float:
        """The number."""
        return float(self)


@dataclass(slots=True)
class CompletionOutput:
    """One sample's part of an output. Lists of cumulative outputs are live, as in vLLM."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, "Logprob"]] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None

    def finished(self) -> bool:
        """Whether this sample is done."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What `step` hands out, under the caller's request id."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


def _snapshot(output: RequestOutput) -> RequestOutput:
    # Not `replace`, which takes four times as long: outputs cross to other threads by way of this.
    completions = [
        CompletionOutput(
            sample.index,
            sample.text,
            sample.token_ids[:],
            None if sample.logprobs is None else sample.logprobs[:],
            sample.finish_reason,
            sample.stop_reason,
        )
        for sample in output.outputs
    ]
    return RequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids[:], completions, output.finished
    )


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = earlier.logprobs
    if later.logprobs is not None:
        logprobs = [*(logprobs or ()), *later.logprobs]
    return CompletionOutput(
        later.index,
        earlier.text + later.text,
        [*earlier.token_ids, *later.token_ids],
        logprobs,
        later.finish_reason,
        later.stop_reason,
    )


def _mix(*values: int) -> int:
    """Hash integers well and cheaply; never 0."""
    mixed = 0
    for value in values:
        mixed = ((mixed ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed | 1


class Garbage(int):
    """Contents of a parameter that nobody loaded. `NAN` is what `discard_weights` writes."""

    __slots__ = ()


NAN: Final = Garbage(0)


def make_weights(version: int = 0, parameters: Iterable[str] = PARAMETERS) -> dict[str, int]:
    """Return the contents of all parameters for a version; distinct versions give distinct tokens."""
    return {name: _mix(version, place) for place, name in enumerate(parameters)}


def contents(value: Any) -> int:
    """Return what is kept of a parameter's value: an integer as it is, of all else a digest of its numbers.

    Tensors are told by their methods, so that neither torch nor numpy is imported.
    """
    if isinstance(value, int):
        return value
    for method in ("detach", "double", "cpu", "numpy"):  # an array has none of them
        value = getattr(value, method)() if hasattr(value, method) else value
    numbers = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "big") | 1


def _content(weights: Mapping[str, int]) -> int:
    return hash(tuple(weights.values())) | 1


def encode(text: str) -> list[int]:
    """Return the tokens of a text: one for each character, above the tokens that are generated."""
    return [_VOCABULARY + ord(character) for character in text]


def decode(token_ids: Iterable[int]) -> str:
    """Return the text of tokens: a generated one is a small letter."""
    return "".join(
        chr(token - _VOCABULARY) if token >= _VOCABULARY else _LETTERS[token % len(_LETTERS)]
        for token in token_ids
    )


def _tokenize(prompt: Any) -> tuple[str | None, list[int]]:
    text = None
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return text, list(prompt)
    raise TypeError(f"a prompt is a str, token ids or a mapping with either, not {type(prompt).__name__}")


class Request:
    """What the scheduler knows: one sample. `text` and the offset are the front end's."""

    def __init__(self, parent: "ParentRequest", index: int, request_id: str) -> None:
        params = parent.params
        self.request_id = request_id
        self.parent = parent
        self.index = index
        self.limit = parent.max_model_len - len(parent.prompt_token_ids)
        if params.max_tokens is not None:
            self.limit = min(self.limit, params.max_tokens)
        self.stops = params.stops
        self.held_back = max(map(len, self.stops), default=1) - 1
        self.base = _mix(*parent.prompt_token_ids, 0 if params.seed is None else params.seed, index)
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.text = ""
        self.text_offset = 0
        self.num_preemptions = 0
        self.placeholders = 0  # tokens launched whose outputs were not processed
        self.blocks = 0
        self.num_computed = 0
        self.kv = 0  # contents of the weights that the KV cache was computed with; 0: nothing computed

    @property
    def num_tokens(self) -> int:
        """Tokens there are, launched ones included."""
        return len(self.parent.prompt_token_ids) + len(self.token_ids) + self.placeholders

    def compute(self, count: int, content: int) -> None:
        """Extend the KV cache by tokens computed with these contents of the weights."""
        self.kv = content if self.kv in (0, content) else _mix(self.kv, content)
        self.num_computed += count

    def sample(self) -> int:
        """Return the next token."""
        position = len(self.token_ids) + self.placeholders
        return _mix(self.base, position, self.kv) % _VOCABULARY

    def append(self, token: int) -> tuple[str | None, str | None]:
        """Take a token and return finish and stop reason. One letter came: a stop string ends with it."""
        self.token_ids.append(token)
        self.text += decode([token])
        if self.logprobs is not None:
            self.logprobs.append({token: Logprob(-(token % 97) / 10)})
        for stop in self.stops:
            if self.text.endswith(stop):
                self.text = self.text[: -len(stop)]
                return "stop", stop
        return ("length" if len(self.token_ids) >= self.limit else None), None

    def completion(self, new: list[int], reason: str | None, stop_reason: str | None) -> CompletionOutput:
        """Return this sample's part of an output; text that may yet become a stop string is held back."""
        end = len(self.text) - (0 if reason else self.held_back)
        if self.parent.params.output_kind is not OutputKind.DELTA:
            text = self.text[: max(end, 0)]
            return CompletionOutput(self.index, text, self.token_ids, self.logprobs, reason, stop_reason)
        text = self.text[self.text_offset : max(end, self.text_offset)]
        self.text_offset = max(end, self.text_offset)
        logprobs = None if self.logprobs is None else self.logprobs[len(self.logprobs) - len(new) :]
        return CompletionOutput(self.index, text, new, logprobs, reason, stop_reason)


class ParentRequest:
    """What the caller added: `n` samples, reported under one id."""

    def __init__(self, call: Call, engine_id: str, max_model_len: int, order: int = 0) -> None:
        self.request_id = call.request_id
        self.engine_id = engine_id
        self.params: SamplingParams = call.params
        self.max_model_len = max_model_len
        self.prompt, self.prompt_token_ids = _tokenize(call.prompt)
        self.order = (call.options.get("priority", 0), call.arrival_time, order)
        self.block_hashes: list[int] = []
        samples = range(self.params.n)
        ids = [engine_id] if self.params.n == 1 else [f"{sample}_{engine_id}" for sample in samples]
        self.children = [Request(self, sample, ids[sample]) for sample in samples]
        self.live = list(self.children)
        self.completions: dict[int, CompletionOutput] = {}

    def make_output(
        self, request: Request, new: list[int], reason: str | None, stop_reason: str | None
    ) -> RequestOutput | None:
        """Return the output for new tokens of a child, or None where its kind shows nothing yet."""
        final_only = self.params.output_kind is OutputKind.FINAL_ONLY
        if reason is None and final_only:
            return None
        completion = request.completion(new, reason, stop_reason)
        if reason is not None:
            self.live.remove(request)
        completions = [completion]
        if final_only:
            self.completions[request.index] = completion
            if self.live:
                return None
            completions = [self.completions[index] for index in sorted(self.completions)]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, completions, not self.live)


def _not_rebuilt(weights: Mapping[str, int], loaded: set[str]) -> Iterator[str]:
    """Parameters whose old contents a reload of `loaded` destroys: the rest of each fused tensor."""
    for group, name in itertools.product(_FUSED, loaded):
        for part in group:
            if f".{part}" in name:
                yield from {name.replace(part, other) for other in group} & weights.keys() - loaded


def expected_output(
    prompt: Any,
    params: SamplingParams,
    sample: int = 0,
    weights: Mapping[str, int] | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> CompletionOutput:
    """Return what an uninterrupted run gives for one sample in the end."""
    parent = ParentRequest(Call("", prompt, params, 0.0, {}), "", max_model_len)
    request = parent.children[sample]
    request.kv = _content(make_weights() if weights is None else weights)
    while True:
        reason, stop_reason = request.append(request.sample())
        if reason:
            return replace(request.completion([], reason, stop_reason), token_ids=request.token_ids)


def expected_tokens(
    prompt: Any,
    params: SamplingParams,
    sample: int = 0,
    weights: Mapping[str, int] | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> list[int]:
    """Return the tokens of `expected_output`."""
    return expected_output(prompt, params, sample, weights, max_model_len).token_ids


# -- The engine ------------------------------------------------------------------------------------

# The misbehaviours that a scripted fault can have, and the call that each belongs to. Those on outputs wait
# for a step that has one.
EFFECTS: Final = {
    "frees_nothing": "sleep",
    "tag_stays_awake": "sleep",
    "tag_stays_asleep": "wake_up",
    "ignored": "abort",
    "output_dropped": "step",
    "output_duplicated": "step",
}

_F = TypeVar("_F", bound=Callable[..., Any])

# Legal once a step failed: the requests must still be told what they have.
_LEGAL_WHEN_POISONED: Final = frozenset({"abort", "shutdown"})
# Methods behind `call`, by what they do; written out here so that the lifecycle's table is not its own judge.
_TOUCH_WEIGHTS: Final = frozenset({"apply_model", "add_lora", "remove_lora", "pin_lora"})
_LOADS: Final = (
    "load_weights",
    "reload_weights",
    "load_model",
    "update_weight",
    "start_weight",
    "finish_weight",
)
_BEHIND: Final = frozenset({"sleep", "wake_up", "discard"})
_READS: Final = frozenset(
    {"get_tokenizer", "get_supported_tasks", "get_metrics", "do_log_stats", "list_loras"}
)
_COUNTS: Final = frozenset({"get_num_unfinished_requests", "has_unfinished_requests", "is_sleeping"})
_QUIET: Final = frozenset({"reset_encoder_cache", "reset_mm_cache", "start_profile", "stop_profile"})


def _name(value: Any) -> str:
    if isinstance(value, Call):
        return value.request_id
    if isinstance(value, (list, tuple)):
        return ",".join(map(_name, value))
    return str(value) if isinstance(value, (str, int)) else getattr(value, "__name__", type(value).__name__)


def _reaches_engine(method: _F) -> _F:
    """Notice a second thread, a dead engine and scripted faults, and record the call."""
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: "SimulatedEngine", *args: Any, **kwargs: Any) -> Any:
        entered = self._inside.acquire(blocking=False)
        if entered:
            self._inside_thread = threading.get_ident()
        try:
            if not entered:
                self.record_misuse(f"{name} while another call is inside the engine")
            if self.closed and name != "shutdown":
                self.record_misuse(f"{name} after shutdown")
            elif self.poisoned and name not in _LEGAL_WHEN_POISONED:
                self.record_misuse(f"{name} on a poisoned engine")
            fault = None
            if self.faults:
                fault = self.faults.due([name, *map(_name, args[:2])] if name == "call" else [name])
            if fault is None:
                if name == "add":  # bad arguments raise before anything takes effect
                    SimulatedEngine.validate.__wrapped__(self, *args)  # type: ignore[attr-defined]  # already inside
                self.record_call(name, args)
                return method(self, *args, **kwargs)
            return self._strike(fault, name, lambda: method(self, *args, **kwargs), args)
        finally:
            if entered:
                self._inside_thread = 0
                self._inside.release()

    return cast("_F", guarded)


def _reads(method: _F) -> _F:
    """Notice a second thread and scripted faults in a call that only reads."""
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: "SimulatedEngine", *args: Any, **kwargs: Any) -> Any:
        if self._inside.locked():
            self.record_misuse(f"{name} while another call is inside the engine")
        fault = self.faults.due([name]) if self.faults else None
        if fault is None:
            return method(self, *args, **kwargs)
        return self._strike(fault, name, lambda: method(self, *args, **kwargs), args, reads=True)

    return cast("_F", guarded)


@dataclass(kw_only=True, eq=False)
class SimulatedEngine:
    """The engine. All sizes are in tokens, blocks or bytes.

    num_blocks: by default enough for all. batch_queue_size: 2 behaves as asynchronous scheduling.
    policy: "fcfs" or "priority" (a lower `priority` option goes first). parameters: names of the
    weights. dummy_weights: built with contents that were never loaded. record: whether to keep
    `calls`.
    """

    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    block_size: int = 4
    num_blocks: int | None = None
    prefix_caching: bool = True
    policy: str = "fcfs"
    batch_queue_size: int = 1
    weights_bytes: int = 16 * GIB
    kv_bytes: int = 32 * GIB
    base_bytes: int = GIB
    parameters: Sequence[str] = PARAMETERS
    dummy_weights: bool = False
    capabilities: Capabilities = Capabilities("simulated", {"simulated": "1"})  # noqa: RUF009  (frozen)
    record: bool = True

    def __post_init__(self) -> None:
        whole = -(-self.max_model_len // self.block_size)
        self.free_blocks = whole * self.max_num_seqs if self.num_blocks is None else self.num_blocks
        if self.free_blocks < whole:
            raise ValueError(f"one request may need {whole} blocks, and there are {self.free_blocks}")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.launched: deque[list[tuple[Request, int | None]]] = deque()
        self.requests: dict[str, Request] = {}  # the scheduler's, by child id
        self.parents: dict[str, ParentRequest] = {}  # the front end's, by engine id
        self.live_ids: Counter[str] = Counter()  # the callers'
        self.finished_ids: set[str] = set()  # still to be flushed
        self.prefix_cache: dict[int, int] = {}  # hash of a prompt's prefix -> contents it was computed with
        self.paused = False

        self.resident = set(MEMORY_TAGS)
        self.tag_bytes = {WEIGHTS: self.weights_bytes, KV_CACHE: self.kv_bytes}
        self.level: int | None = None
        self.checkpoint = make_weights(0, self.parameters)  # what `reload_weights` reads
        self.weights = dict(self.checkpoint)
        self.weight_version = "default"
        self.torn = False  # a load raised half-way and was not tried again, or an update is unfinished
        self._updating = False  # between `start_weight_update` and `finish_weight_update`
        self._broken = False  # a part of that update failed
        self.worker: Any = self  # what a callable is given by `collective_rpc`
        self.model: Any = self.weights  # and by `apply_model`
        self._updates = 0
        self._aside: dict[str, int] | None = None
        self._not_freed: set[str] = set()
        self._garbage = 0

        self.calls: list[str] = []
        self.misuse: list[str] = []
        self.faults = Faults(EFFECTS)
        self.poisoned = False
        self.closed = False
        self._effect = ""
        self._inside = threading.Lock()
        self._inside_thread = 0
        self._added = 0
        self._snapshots: dict[str, SamplingParams] = {}
        if self.dummy_weights:
            self._destroy_weights()

    def record_misuse(self, text: str) -> None:
        """Note a call that should never have come, and how the engine took it."""
        self.misuse.append(text)

    def record_call(self, name: str, args: tuple[Any, ...]) -> None:
        """Note a call that takes effect, as "sleep(1)" or "add(r1)"."""
        if self.record and not (name == "call" and args[0] in _READS | _COUNTS | {"get_weight_version"}):
            self.calls.append(f"{name}({','.join(map(_name, args))})" if args else name)

    def _strike(
        self,
        fault: Fault,
        name: str,
        method: Callable[[], Any],
        args: tuple[Any, ...],
        *,
        reads: bool = False,
    ) -> Any:
        if fault.hang is not None and fault.when == "before":
            fault.hang.wait()
        self._effect = fault.effect or self._effect
        result = fault.returns
        if fault.when == "after" or not fault.replaces_result:
            if not reads:
                self.record_call(name, args)
            value = method()
            result = value if result is UNSET else result
        if fault.hang is not None and fault.when == "after":
            fault.hang.wait()
        if fault.raises is None:
            return result
        if name == "step":
            self.poisoned = True
        if any(isinstance(value, str) and value.startswith(_LOADS) for value in (name, *args[:2])):
            self._broken = self._updating
        if name == "sleep":
            self.paused = True  # vLLM pauses first: nothing is asleep, and the scheduler stays paused
        raise fault.raises

    def _take(self, effect: str) -> bool:
        taken = self._effect == effect
        if taken:
            self._effect = ""
        return taken

    @_reads
    def condition(self) -> Condition:
        """Return what the engine is in; the level can be read here."""
        level = self.level if self.resident != MEMORY_TAGS else (0 if self.paused else None)
        weights = Weights.TAINTED if self.torn else Weights.VALID
        if any(type(value) is Garbage for value in (self._aside or self.weights).values()):
            weights = Weights.DISCARDED
        found = tuple(
            Found(p.request_id, p.engine_id, p.params.n, p.params.output_kind is OutputKind.DELTA)
            for p in self.parents.values()
        )
        return Condition(frozenset(self.resident), self.paused, level, weights, found)

    # Requests

    @_reads
    def prepare(self, request_id: str, prompt: Any, params: Any, options: Mapping[str, Any]) -> Call:
        """Return the arguments as a `Call`; equal parameters share one snapshot."""
        snapshot = _copy_params(params)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, not {type(request_id).__name__}")
        snapshot = self._snapshots.setdefault(repr(snapshot), snapshot)
        arrival_time = options.get("arrival_time")
        if arrival_time is None:
            arrival_time = time.time()
        delta = snapshot.output_kind is OutputKind.DELTA
        return Call(request_id, prompt, snapshot, arrival_time, options, snapshot.n, delta)

    @_reads
    def validate(self, call: Call) -> None:
        """Raise what `add` would raise."""
        params, length = call.params, len(_tokenize(call.prompt)[1])
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.n < 1 or (params.max_tokens is not None and params.max_tokens < 1):
            raise ValueError(f"n and max_tokens must be at least 1, got {params.n} and {params.max_tokens}")
        if "" in params.stops:
            raise ValueError("stop cannot contain an empty string")
        if not length:
            raise ValueError("the prompt cannot be empty")
        if length >= self.max_model_len:
            raise ValueError(f"a prompt of {length} tokens leaves no room in a model of {self.max_model_len}")

    @_reaches_engine
    def add(self, call: Call) -> str:
        """Queue the request and return its engine id."""
        if self.live_ids[call.request_id]:
            self.record_misuse(f"add({call.request_id}): the id is live already; accepted")
        if self.resident != MEMORY_TAGS:
            self.record_misuse(f"add({call.request_id}) while memory is asleep; accepted")
        engine_id = f"{call.request_id}-{self._added:08x}"
        parent = ParentRequest(call, engine_id, self.max_model_len, self._added)
        self._added += 1
        if self.prefix_caching:
            parent.block_hashes = list(self._block_hashes(parent.prompt_token_ids))
        self.parents[engine_id] = parent
        self.live_ids[call.request_id] += 1
        for request in parent.children:
            self.requests[request.request_id] = request
            self._queue(request)
        return engine_id

    @_reaches_engine
    def abort(self, engine_ids: Sequence[str]) -> None:
        """Forget these requests; no output follows."""
        if self._take("ignored"):
            return
        for parent in self._known(engine_ids):
            self._forget(parent)

    @_reads
    def last_outputs(self, engine_ids: Sequence[str], reason: str) -> list[RequestOutput]:
        """Last outputs with the tokens there are: one for each live sample, or one of all samples."""
        outputs = []
        for parent in self._known(engine_ids):
            ended = {request.index: request.completion([], reason, None) for request in parent.live}
            batches = [[completion] for completion in ended.values()]
            if parent.params.output_kind is OutputKind.FINAL_ONLY:
                batches = [[completion for _, completion in sorted((parent.completions | ended).items())]]
            for batch in batches:
                output = RequestOutput(
                    parent.request_id, parent.prompt, parent.prompt_token_ids, batch, batch is batches[-1]
                )
                outputs.append(_snapshot(output))
        return outputs

    @_reads
    def unstarted(self, engine_ids: Sequence[str]) -> list[str]:
        """Those of which no sample was ever scheduled."""
        return [
            parent.engine_id
            for parent in self._known(engine_ids)
            if not any(
                child.num_computed or child.num_preemptions or child.token_ids or child.placeholders
                for child in parent.children
            )
        ]

    @_reads
    def tokens(self, engine_id: str) -> int:
        """Tokens so far, over the samples; 0 for an unknown id."""
        return sum(len(child.token_ids) for p in self._known([engine_id]) for child in p.children)

    @_reads
    def progress(self) -> Progress:
        """How far the running requests are."""
        computed = sum(request.num_computed for request in self.running)
        return Progress(computed, frozenset(request.request_id for request in self.running))

    @_reads
    def has_work(self) -> bool:
        """Anything to be scheduled, launched or to be flushed; paused, vLLM counts no request."""
        schedulable = not self.paused and (self.running or self.waiting)
        return bool(schedulable or self.launched or self.finished_ids)

    @_reads
    def has_launched(self) -> bool:
        """Batches launched whose outputs were not processed."""
        return bool(self.launched)

    @property
    def idles(self) -> bool:
        """Whether a step can bring nothing: paused, broken, or without work."""
        return self.poisoned or self.closed or self.paused or not self.has_work()

    @_reads
    def copy_output(self, output: RequestOutput) -> RequestOutput:
        """Return a snapshot that shares no list with the engine."""
        return _snapshot(output)

    @staticmethod
    def merge_outputs(earlier: RequestOutput, later: RequestOutput, *, delta: bool) -> RequestOutput:
        """Join the tokens of deltas; otherwise replace each sample by its later state."""
        samples = {sample.index: sample for sample in earlier.outputs}
        for sample in later.outputs:
            before = samples.get(sample.index)
            samples[sample.index] = _joined(before, sample) if delta and before else sample
        joined = [samples[index] for index in sorted(samples)]
        return RequestOutput(later.request_id, later.prompt, later.prompt_token_ids, joined, later.finished)

    @_reads
    def count_tokens(self, output: RequestOutput) -> int:
        """Token ids in this output."""
        return sum(len(completion.token_ids) for completion in output.outputs)

    def _known(self, engine_ids: Iterable[str]) -> list[ParentRequest]:
        return [self.parents[engine_id] for engine_id in engine_ids if engine_id in self.parents]

    def _forget(self, parent: ParentRequest) -> None:
        del self.parents[parent.engine_id]
        self.live_ids[parent.request_id] -= 1
        if not self.live_ids[parent.request_id]:
            del self.live_ids[parent.request_id]
        for request in parent.children:
            self._finish(request)

    # Scheduling

    @_reaches_engine
    def step(self) -> list[RequestOutput]:
        """Schedule a batch, launch it, and process the oldest one once the queue is full."""
        if self.poisoned or self.closed:
            return []
        if self.paused:
            if not (self.launched or self.finished_ids):
                self.record_misuse("step while paused or asleep: nothing happens")
                return []
        elif self.resident != MEMORY_TAGS:
            asleep = ", ".join(sorted(MEMORY_TAGS - self.resident))
            self.poisoned = bool(self.requests)
            self.record_misuse(f"step while {asleep} is asleep{': poisoned' if self.poisoned else ''}")
            return []
        batch = self._launch(self._schedule())
        if batch:
            self.launched.append(batch)
            if len(self.launched) < self.batch_queue_size:
                return []
        outputs = self._process(self.launched.popleft()) if self.launched else []
        return self._tamper(outputs) if self._effect else outputs

    @_reaches_engine
    def pause_scheduling(self) -> None:
        """Schedule nothing more."""
        self.paused = True

    @_reaches_engine
    def resume_scheduling(self) -> None:
        """Schedule again."""
        if self.resident != MEMORY_TAGS:
            self.record_misuse("resume_scheduling while memory is asleep")
        self.paused = False
        self.level = None

    def _queue(self, request: Request) -> None:
        if self.policy == "priority":
            insort(self.waiting, request, key=lambda other: (other.parent.order, other.index))
        elif request.num_preemptions:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _schedule(self) -> dict[Request, int]:
        """Return how many tokens to compute for whom: what runs first, then what waits."""
        self.finished_ids.clear()
        scheduled: dict[Request, int] = {}
        if self.paused:
            return scheduled
        budget = self.max_num_batched_tokens
        preempted = False
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed, budget)
            last_launched = len(request.token_ids) + request.placeholders >= request.limit
            if count <= 0 or last_launched or not request.blocks:  # no blocks: preempted just now
                continue
            while not self._allocate(request, count):
                preempted = True
                victim = self._victim()
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
                if victim is request:
                    break
            if request.blocks:
                scheduled[request] = count
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            self._find_cached_prefix(request)
            count = min(request.num_tokens - request.num_computed, budget)
            if request.placeholders or not self._allocate(request, count):
                request.num_computed = request.kv = 0
                break
            self.running.append(self.waiting.popleft())
            scheduled[request] = count
            budget -= count
        return scheduled

    def _allocate(self, request: Request, count: int) -> bool:
        needed = -(-(request.num_computed + count) // self.block_size) - request.blocks
        if needed > self.free_blocks:
            return False
        request.blocks += needed
        self.free_blocks -= needed
        return True

    def _victim(self) -> Request:
        """Return the last in, or the least urgent."""
        if self.policy == "priority":
            return max(self.running, key=lambda request: (request.parent.order, request.index))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Take away its KV cache; it is computed anew when it runs again."""
        self.running.remove(request)
        self._free(request)
        request.num_computed = request.kv = 0
        request.num_preemptions += 1
        self._queue(request)

    def _free(self, request: Request) -> None:
        self.free_blocks += request.blocks
        request.blocks = 0

    def _launch(self, scheduled: dict[Request, int]) -> list[tuple[Request, int | None]]:
        """Compute: sample a token for each request whose tokens are all computed now."""
        if not scheduled:
            return []
        unloaded = [name for name, value in self.weights.items() if type(value) is Garbage]
        if unloaded or self.torn:
            what = ", ".join(unloaded) or "an unfinished update"
            self.record_misuse(f"step with weights not loaded: {what}; tokens are garbage")
        content = _content(self.weights)
        batch: list[tuple[Request, int | None]] = []
        for request, count in scheduled.items():
            first = request.num_computed // self.block_size
            request.compute(count, content)
            for block_hash in request.parent.block_hashes[first : request.num_computed // self.block_size]:
                self.prefix_cache.setdefault(block_hash, request.kv)
            token = None
            if request.num_computed == request.num_tokens:
                token = request.sample()
                request.placeholders += 1
            batch.append((request, token))
        return batch

    def _process(self, batch: list[tuple[Request, int | None]]) -> list[RequestOutput]:
        """Turn computed tokens into outputs; those of requests aborted meanwhile are dropped."""
        outputs = []
        for request, token in batch:
            if token is None:
                continue
            request.placeholders -= 1
            if request.request_id not in self.requests:
                continue
            reason, stop_reason = request.append(token)
            parent = request.parent
            output = parent.make_output(request, [token], reason, stop_reason)
            if reason is not None:
                self._finish(request)
                if not parent.live:
                    self._forget(parent)
            if output is not None:
                outputs.append(output)
        return outputs

    def _finish(self, request: Request) -> None:
        """Take a request out of the scheduler, wherever it is."""
        if self.requests.pop(request.request_id, None) is None:
            return
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free(request)
        self.finished_ids.add(request.request_id)

    def _block_hashes(self, tokens: list[int]) -> Iterator[int]:
        block_hash = 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block_hash = _mix(block_hash, *tokens[end - self.block_size : end])
            yield block_hash

    def _find_cached_prefix(self, request: Request) -> None:
        """Start behind the blocks that are cached; at least one token is left to compute."""
        usable = (len(request.parent.prompt_token_ids) - 1) // self.block_size
        for block_hash in request.parent.block_hashes[:usable]:
            if block_hash not in self.prefix_cache:
                break
            request.compute(self.block_size, self.prefix_cache[block_hash])

    def _tamper(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        if outputs and self._take("output_dropped"):
            return outputs[:-1]
        if outputs and self._take("output_duplicated"):
            return [*outputs, outputs[-1]]
        return outputs  # the effect waits for a step with outputs

    # Memory

    @_reaches_engine
    def sleep(self, level: int) -> None:
        """Pause, and at levels 1 and 2 drop the KV cache and put the weights aside or drop them."""
        frees, stays_awake = not self._take("frees_nothing"), self._take("tag_stays_awake")
        if level not in LEVELS:
            self.record_misuse(f"sleep({level}): there is no such level; accepted")
        if self.launched:
            self.record_misuse(f"sleep({level}) with a batch launched: its outputs are lost")
            self.launched.clear()
        if not self.paused:
            self.lose_requests(f"sleep({level}) while not paused")
        self.paused = True
        partly = self.resident == {WEIGHTS} and self.capabilities.resleep_partial
        if (self.resident != MEMORY_TAGS and not (partly and level >= 1)) or (level < 1 and self.level == 0):
            self.record_misuse(f"sleep({level}) while asleep at level {self.level}: silently ignored")
            return
        self.level = max(0, min(level, 2))
        if self.level == 0:
            return
        for request in reversed(list(self.running)):
            self._preempt(request)
        self.prefix_cache.clear()
        self._aside = dict(self.weights) if self.level == 1 else None
        if self.level == 2:  # noqa: PLR2004  (the level that destroys)
            self.torn = self._updating = False
        self._destroy_weights()
        if not frees:
            self._not_freed = set(self.resident)
        self.resident = set(sorted(self.resident)[:1]) if stays_awake else set()

    def lose_requests(self, why: str) -> None:
        """Drop what the scheduler has. The front end is not told, and waits for it for ever."""
        if self.requests:
            self.record_misuse(f"{why}: {len(self.requests)} requests lost")
        for request in list(self.requests.values()):
            self._finish(request)

    @_reaches_engine
    def wake_up(self, tags: Sequence[str]) -> None:
        """Map these tags again; weights put aside come back, all else is undefined."""
        stays_asleep = self._take("tag_stays_asleep")
        if not tags or not set(tags) <= MEMORY_TAGS - self.resident:
            self.record_misuse(f"wake_up([{_name(list(tags))}]): empty, unknown or awake; nothing woken")
            return
        if len(set(tags)) < len(tags):
            self.record_misuse(f"wake_up([{_name(list(tags))}]): a tag twice")
        first_kv = tags[0] == KV_CACHE and WEIGHTS not in self.resident
        if first_kv and self.level == 2 and not self.capabilities.kv_first:  # noqa: PLR2004  (a level)
            self.record_misuse("wake_up: kv_cache before weights after level 2")
        woken = set(tags[:-1] if stays_asleep else tags)
        if WEIGHTS in woken and self._aside is not None:
            self.weights.update(self._aside)
            self._aside = None
        self.resident |= woken
        self._not_freed -= woken
        if self.resident == MEMORY_TAGS:
            self.level = None

    @_reaches_engine
    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory only."""
        if not self.paused or self.requests or self.launched or self.finished_ids:
            self.record_misuse("release_kv_cache_memory while not paused or not quiet: refused")
        elif self.resident != MEMORY_TAGS or not self.capabilities.release_kv:
            self.record_misuse("release_kv_cache_memory with memory asleep, or not there: refused")
        else:
            self.prefix_cache.clear()
            self.resident.remove(KV_CACHE)
            self.level = 0

    @_reaches_engine
    def reset_caches(self, *, kept: bool = False) -> bool:
        """Drop the prefix cache; False while requests hold KV blocks."""
        return self._reset_caches(reset_running_requests=kept)

    @_reaches_engine
    def forget_media(self) -> None:
        """There is no multimodal cache here; the call is recorded."""

    @_reads
    def memory(self) -> Memory:
        """Return what is mapped on the device, and the weights kept aside on the host."""
        mapped = sum(self.tag_bytes[tag] for tag in self.resident | self._not_freed)
        host = self.base_bytes + (0 if self._aside is None else self.tag_bytes[WEIGHTS])
        asleepable = sum(self.tag_bytes[tag] for tag in self.resident)
        return Memory(self.base_bytes + mapped, host, asleepable)

    def _reset_caches(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,  # noqa: ARG002  (the signature is vLLM's)
    ) -> bool:
        if reset_running_requests:
            for request in reversed(list(self.running)):
                self._preempt(request)
        if self.running:
            return False
        self.prefix_cache.clear()
        return True

    # Weights

    @_reaches_engine
    def discard_weights(self) -> None:
        """Write NAN over the contents of every parameter."""
        if not self._weights_at_hand("discard_weights"):
            return
        if not self.torn and not any(type(value) is Garbage for value in self.weights.values()):
            self.record_misuse("discard_weights over valid weights")
        self.torn = self._updating = False
        self.weights.update(dict.fromkeys(self.weights, NAN))

    @_reads
    def missing_weights(self) -> tuple[str, ...]:
        """Names of the parameters that are still NAN."""
        self._weights_at_hand("missing_weights")
        return tuple(name for name, value in self.weights.items() if type(value) is Garbage and not value)

    @_reaches_engine
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Load contents by name, all or some, and return the names. See `contents`."""
        return self._load("load_weights", weights)

    def load_into_model(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """The same for the model object, which a worker's method may use inside of a call."""
        if self._inside_thread == threading.get_ident():
            return self._load("load_weights", weights)
        return self.load_weights(weights)

    @_reaches_engine
    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of the surface; `apply_model` hands out `model`: a dict of contents."""
        if name == "collective_rpc":
            return [self._worker(*args, **kwargs)]
        unfinished = sum(len(parent.live) for parent in self.parents.values())
        if name == "get_num_unfinished_requests":
            return unfinished
        if name == "has_unfinished_requests":
            return bool(unfinished)
        if name == "is_sleeping":
            return self.paused or self.resident != MEMORY_TAGS
        if name == "reset_prefix_cache":
            return self._reset_caches(*args, **kwargs)
        if name == "set_weight_version":
            self.weight_version = args[0]
        elif name == "get_weight_version":
            return self.weight_version
        elif name in _TOUCH_WEIGHTS | _BEHIND or name.startswith(_LOADS):
            return self._worker(name, None, args, kwargs)
        elif name not in _READS | _QUIET:
            raise AttributeError(f"the simulated engine has no method {name!r}")
        return None

    def _worker(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ARG002  (the signature is vLLM's)
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a worker's method; unknown names do nothing."""
        kwargs = kwargs or {}
        if not isinstance(method, str):
            return method(self.worker, *args, **kwargs)
        if method in _BEHIND:
            self.record_misuse(f"{method} behind the machine")
        elif self.worker is not self and hasattr(self.worker, method):
            return getattr(self.worker, method)(*args, **kwargs)
        elif method.startswith(_LOADS):
            return self._load(method, *args, **kwargs)
        elif method in _TOUCH_WEIGHTS and self._weights_at_hand(method) and method == "apply_model":
            return args[0](self.model)
        return None

    def _load(
        self,
        name: str,
        weights: Iterable[tuple[str, Any]] | None = None,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
        update_info: Mapping[str, Any] | None = None,
    ) -> set[str]:
        """Load from whichever source is given.

        update_info names parameters whose values would come from the trainer by a broadcast;
        they are drawn from the number of the update.
        """
        loaded: set[str] = set()
        if not self._weights_at_hand(name):
            return loaded
        stale = sum(child.num_computed > 0 for child in self.requests.values())
        if stale:  # requests that a sleep froze are computed anew; others keep the old weights' KV
            self.record_misuse(f"{name} under {stale} requests that were computed with other weights")
        source = weights_iterator if weights is None else weights
        if update_info is not None:
            self._updates += 1
            drawn = make_weights(-self._updates, self.weights)
            source = [(name, drawn.get(name, 0)) for name in update_info.get("names", ())]
        if source is None and name in {"reload_weights", "load_model"}:
            source = self.checkpoint.items()
            self._updating = False  # all anew: an update under way is over
        torn = self.torn and self._updating
        broken = self._broken and not name.startswith("start_")
        self._broken = self._updating  # until this part of it is over
        source = source or ()
        for parameter, value in source:
            if parameter not in self.weights:
                raise ValueError(
                    f"there is no parameter named {parameter!r}; `parameters=` gives the model names of yours"
                )
            self.torn = True  # stays so if the rest never comes
            self.weights[parameter] = contents(value)
            loaded.add(parameter)
        if name == "reload_weights":
            self.weights.update(dict.fromkeys(_not_rebuilt(self.weights, loaded), NAN))
        self.torn = torn and loaded != set(self.weights)
        if name.startswith(("start_", "finish_")):
            self._updating = name.startswith("start_")
            self.torn = self._updating or broken
        self._broken = broken and self._updating
        return loaded

    def _weights_at_hand(self, name: str) -> bool:
        if WEIGHTS not in self.resident:
            self.record_misuse(f"{name} while the weights are asleep")
        return WEIGHTS in self.resident

    def _destroy_weights(self) -> None:
        self._garbage += 1
        for place, name in enumerate(self.weights):
            self.weights[name] = Garbage(_mix(self._garbage, place, 0xDEAD))

    @_reaches_engine
    def shutdown(self) -> None:
        """End the engine and drop every request."""
        self.closed = True
        for held in (self.waiting, self.running, self.launched, self.requests, self.parents):
            held.clear()
        self.live_ids.clear()
        self.finished_ids.clear()
        self.resident.clear()


class NullEngine(SimulatedEngine):
    """Costs next to nothing, for benchmarks: each step hands out the same list, one output a request.

    Requests run at once and never finish by themselves. Nothing is recorded.
    """

    def __init__(self) -> None:
        super().__init__(record=False)
        self.steps = 0
        self.outputs: list[RequestOutput] = []
        self._live: dict[str, RequestOutput] = {}

    def add(self, call: Call) -> str:  # noqa: D102  (these are described by the engine)
        engine_id = f"{call.request_id}-{self._added:08x}"
        self._added += 1
        output = RequestOutput(call.request_id, None, [0], [CompletionOutput(0, "a", [0])], finished=False)
        self._live[engine_id] = output
        self.outputs.append(output)
        return engine_id

    def step(self) -> list[RequestOutput]:  # noqa: D102
        self.steps += 1
        return self.outputs

    def abort(self, engine_ids: Sequence[str]) -> None:  # noqa: D102
        for engine_id in engine_ids:
            self._live.pop(engine_id, None)
        self.outputs = list(self._live.values())

    def last_outputs(self, engine_ids: Sequence[str], reason: str) -> list[RequestOutput]:  # noqa: D102
        ended = [self._live[engine_id] for engine_id in engine_ids if engine_id in self._live]
        last = CompletionOutput(0, "a", [0], finish_reason=reason)
        return [replace(output, outputs=[replace(last)], finished=True) for output in ended]

    def tokens(self, engine_id: str) -> int:  # noqa: D102
        return self.steps if engine_id in self._live else 0

    def progress(self) -> Progress:  # noqa: D102
        return Progress(self.steps, frozenset(self._live))

    def has_work(self) -> bool:  # noqa: D102
        return bool(self._live)
