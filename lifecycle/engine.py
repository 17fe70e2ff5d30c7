"""What the lifecycle asks of an engine, and the records that it hands back.

`Engine` is the whole contract between the machine and an engine that is stepped by
its caller. An adapter implements it; `lifecycle.testing.contract` is the battery that
every adapter passes. The lifecycle never looks inside an output beyond `request_id` and
`finished`.

The calls come from one thread at a time, under the lifecycle's lock, and only in the
states the table allows: an adapter checks nothing about legality.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lifecycle.table import LEVELS, MEMORY_TAGS, Weights


class Output(Protocol):
    """The part of an engine's output that the lifecycle reads."""

    request_id: str
    finished: bool


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one `add_request`, kept so that it can be made again.

    prompt and options are the caller's own objects; params is a snapshot, shared by
    calls with equal parameters. samples is `n`. delta says that each output carries
    only its new tokens.
    """

    request_id: str
    prompt: Any
    params: Any
    arrival_time: float
    options: Mapping[str, Any]
    samples: int = 1
    delta: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A request that was in the engine before the lifecycle was attached to it."""

    request_id: str
    engine_id: str
    samples: int = 1
    delta: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """What an engine is really in, read from it.

    resident: tags whose memory is mapped. paused: it schedules nothing. requests:
    what is in flight. level: 0, 1, 2 or None when it can't be read; weights likewise.
    """

    resident: frozenset[str] = MEMORY_TAGS
    paused: bool = False
    level: int | None = None
    weights: Weights = Weights.VALID
    requests: tuple[Found, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this engine can do. A missing one costs a guarantee, named in `costs`.

    check_weights: contents of weights can be checked for holes.
    resleep_partial: goes back to sleep with the weights awake and the KV cache asleep.
    release_kv: `release_kv_cache_memory` exists.
    kv_first: the KV cache may wake before the weights after level 2.
    lockstep: several ranks step together, so one rank alone must not decide by its clock.
    levels: the sleep levels that this engine was built for.
    """

    name: str = "engine"
    versions: Mapping[str, str] = field(default_factory=dict)
    check_weights: bool = True
    resleep_partial: bool = True
    release_kv: bool = True
    kv_first: bool = True
    lockstep: bool = False
    levels: tuple[int, ...] = LEVELS
    costs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """A reading of memory in bytes; None where the platform can't tell.

    device: in use on the device, other processes included. host: resident in this
    process. asleepable: device bytes that a sleep would release now.
    """

    device: int | None = None
    host: int | None = None
    asleepable: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine is: anything that changes is progress.

    computed: tokens computed for the requests that run. running: their engine ids.
    """

    computed: int
    running: frozenset[str]


class OutOfDeviceMemory(Exception):
    """An engine's wake found too little free device memory and mapped nothing."""

    def __init__(self, message: str, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


@runtime_checkable
class Engine(Protocol):
    """An engine that its caller steps.

    `engine_id` below is what `add` returned. Any exception that a method does not
    document, and any answer that is not of the kind that it does, means that the engine
    can't be trusted any more. Only `prepare` and `validate` touch nothing, so whatever
    they raise concerns their caller alone.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do; constant."""

    def condition(self) -> Condition:
        """What the engine is in, read from it and not remembered."""

    def prepare(self, request_id: str, prompt: Any, params: Any, options: Mapping[str, Any]) -> Call:
        """The arguments as a `Call`, params as a snapshot. Does not touch the engine.

        Raises ValueError or TypeError for arguments that no state would accept.
        """

    def validate(self, call: Call) -> None:
        """Raise what `add` would raise for these arguments (ValueError, TypeError); touch nothing."""

    def add(self, call: Call) -> str:
        """Queue the request with its own arrival time and return its engine id.

        Raises ValueError or TypeError for bad arguments; no trace of the request is left then.
        """

    def step(self) -> list[Any]:
        """One scheduling step: its outputs, in order."""

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Forget these requests; no output follows. Unknown ids are ignored."""

    def last_outputs(self, engine_ids: Sequence[str], reason: str) -> list[Any]:
        """The last output of each of these requests, with the tokens it has; `abort` follows.

        reason is "abort" or "error". Read from the front end only, so that it also works on
        a poisoned engine. The last output of each request has `finished` set and shares no
        list with the engine. Unknown ids give none.
        """

    def unstarted(self, engine_ids: Sequence[str]) -> list[str]:
        """Those that never started: not scheduled, nothing computed, no sample ahead of the others."""

    def tokens(self, engine_id: str) -> int:
        """Tokens generated so far for a request in flight, over its samples."""

    def progress(self) -> Progress:
        """How far the running requests are."""

    def has_work(self) -> bool:
        """Anything to be scheduled, launched, or still to be flushed to the workers.

        While scheduling is paused no request counts: what is frozen is no work.
        """

    def has_launched(self) -> bool:
        """Batches launched whose outputs were not processed yet."""

    def pause_scheduling(self) -> None:
        """Schedule nothing more. What is launched can still be stepped out."""

    def resume_scheduling(self) -> None:
        """Schedule again."""

    def sleep(self, level: int) -> None:
        """Release memory (levels 1, 2) or only pause (0). The engine is quiet, or its requests kept.

        Synchronises the device and drops the caches; raises if the caches did not go.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Map these memory tags again; all of them are asleep. Never resumes scheduling.

        Raises OutOfDeviceMemory if nothing was mapped and it can be tried again.
        """

    def release_kv_cache_memory(self) -> None:
        """Drop the KV cache's memory only; the engine is paused and quiet."""

    def reset_caches(self, *, kept: bool = False) -> bool:
        """Drop the prefix and encoder caches; False if the engine would not.

        kept: also what the requests that a pause keeps have of KV, which is computed again.
        """

    def forget_media(self) -> None:
        """Drop the front end's multimodal cache, so that a request validated earlier is sent whole."""

    def memory(self) -> Memory:
        """Read memory now."""

    def discard_weights(self) -> None:
        """Fill the contents of the weights so that `missing_weights` finds what is never loaded."""

    def missing_weights(self) -> tuple[str, ...]:
        """Names of parameters that `discard_weights` filled and nothing has loaded since, on any rank."""

    def copy_output(self, output: Any) -> Any:
        """A snapshot of an output: no list shared with the engine."""

    @staticmethod
    def merge_outputs(earlier: Any, later: Any, *, delta: bool) -> Any:
        """Two outputs of one request as one: a consumer had not taken the earlier one yet.

        Both are snapshots, and may be used up. delta: the output kind, so that tokens are
        joined; else the later one stands for both, sample by sample. Without the engine:
        called from another thread than everything else, and also after its end.
        """

    def count_tokens(self, output: Any) -> int:
        """Token ids in this output, over its samples."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of the engine's own surface, by name."""

    def shutdown(self) -> None:
        """End the engine and drop every reference to it. Safe to call twice."""


@dataclass(slots=True)
class PassThrough:
    """An output of an engine that drives itself: where a request's own outputs are, or that it ended.

    outputs: makes the iterator of them, for the request's reader; it ends after the last one, or
    without it. final: the last one, where `outputs` does not have it. tokens: all of a finished request.
    outcome: why it ended, as vLLM's finish reasons say it.
    """

    request_id: str
    finished: bool = False
    outputs: Callable[[], AsyncGenerator[Any, None]] | None = None
    final: Any = None
    tokens: int = 0
    outcome: str = ""


def outcome_of(output: Any) -> str:
    """Why a request ended, by its last output: the finish reasons of its samples; "" if it says none."""
    if isinstance(output, PassThrough):
        return output.outcome
    samples = output.outputs if isinstance(output.outputs, list) else ()  # a pooling output has none
    return "+".join(sorted({str(sample.finish_reason) for sample in samples if sample.finish_reason}))


@runtime_checkable
class SelfDriven(Engine, Protocol):
    """An engine that computes by itself. Its `step` waits for nothing: it tells what began and what ended.

    All outputs of `step` and `last_outputs` are `PassThrough`.
    """

    def listen(self, notify: Callable[[BaseException | None], object]) -> None:
        """Have `notify(None)` called when `step` has something to tell, `notify(error)` when the engine died.

        It may be called from any thread.
        """


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (frozenset, set)) else value


class Report:
    """Base of the reports: `to_dict()` for logs, one line as `str()`."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for logs."""
        return {key: _plain(value) for key, value in asdict(self).items()}  # type: ignore[call-overload]  # every subclass is a dataclass


def _bytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**30:.2f} GiB"


@dataclass(frozen=True, slots=True)
class SleepReport(Report):
    """What a sleep did. Ids are the caller's; seconds and bytes are measured.

    level, mode: as asked, or the mode fallen through to at a deadline. drained: finished
    during the drain. aborted: ended with the tokens they had. kept: frozen inside the
    engine, to be computed on after the wake. held: outside the engine, admitted at the
    wake. tokens: generated during the drain. noop: the engine was already there.
    """

    level: int
    mode: str
    drained: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    steps: int = 0
    tokens: int = 0
    epoch: int = 0
    drain_s: float = 0.0
    release_s: float = 0.0
    device_before: int | None = None
    device_after: int | None = None
    host_before: int | None = None
    host_after: int | None = None
    warnings: tuple[str, ...] = ()
    noop: bool = False

    @property
    def released_bytes(self) -> int | None:
        """Device bytes that the sleep freed, None where they can't be measured."""
        if self.device_before is None or self.device_after is None:
            return None
        return self.device_before - self.device_after

    def __str__(self) -> str:
        if self.noop:
            return f"sleep(level={self.level}): already there"
        parts = [
            f"sleep(level={self.level}, mode={self.mode}): {len(self.drained)} drained",
            f"{len(self.aborted)} aborted, {len(self.kept)} kept, {len(self.held)} held",
            f"{self.steps} steps and {self.tokens} tokens in {self.drain_s:.3f} s",
            f"released {_bytes(self.released_bytes)} in {self.release_s:.3f} s",
        ]
        return "; ".join([*parts, *(f"warning: {text}" for text in self.warnings)])


@dataclass(frozen=True, slots=True)
class WakeReport(Report):
    """What a wake did. Falsy while the engine is only partly awake, as vLLM's return is.

    tags: memory mapped by this call. resident: mapped now. readmitted: held requests
    passed to the engine. missing: parameters not loaded since the weights were discarded.
    """

    awake: bool
    state: str
    tags: tuple[str, ...] = ()
    resident: frozenset[str] = frozenset()
    readmitted: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    seconds: float = 0.0
    device_before: int | None = None
    device_after: int | None = None
    noop: bool = False

    def __bool__(self) -> bool:
        return self.awake

    def __str__(self) -> str:
        if self.noop:
            return f"wake_up: nothing to do, {self.state}"
        text = f"wake_up({', '.join(self.tags)}): {self.state}"
        text += f" in {self.seconds:.3f} s; {len(self.readmitted)} readmitted"
        if self.missing:
            text += f"; {len(self.missing)} parameters not loaded"
        return text


@dataclass(frozen=True, slots=True)
class LoadReport(Report):
    """What a weight load did. valid: the weights can be served; missing: what was not loaded."""

    valid: bool
    epoch: int
    version: str | None = None
    missing: tuple[str, ...] = ()
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.valid


class Operation(NamedTuple):
    """What is under way inside the engine. started is `time.monotonic()` at its beginning."""

    call: str
    started: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A view of the whole lifecycle, taken without a lock.

    operation and operation_age_s say what is under way, for how long, in seconds; counts
    are of requests, not of their samples.
    """

    state: str
    level: int | None
    resident: frozenset[str]
    weights: str
    weights_version: str | None
    epoch: int
    paused: bool
    in_flight: int
    held: int
    undelivered: int
    operation: str | None
    operation_age_s: float | None
    cause: str | None
    seq: int

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for logs."""
        return {key: _plain(value) for key, value in asdict(self).items()}
