"""`PrometheusSink`: what happened, as metrics.

Theory of operation
-------------------
The sink only counts and remembers: each event becomes a few numbers in a registry of
`prometheus_client`. Whoever scrapes the registry takes no lock of the lifecycle's, so a
scrape is answered while the engine sleeps, drains or hangs.

*Labels.* Every metric named `lifecycle_` has `engine` and `rank`, the two names that every
event has. A label's value makes a series that lives as long as the process, so what may be
anybody's text (a call, an error, the reason why a request ended) is cut to the names that
this library knows, and to "other".

*vLLM's names.* Where vLLM has a metric of the same meaning it is kept under vLLM's name and
vLLM's labels, so that a dashboard made for vLLM works: `model_name` is the lifecycle's name,
and `engine`, which vLLM numbers, is the rank. An in-process engine with `disable_log_stats`,
the default of `LLM`, has none of its own. Where vLLM has registered its own they are left
alone; the requests are counted under names of this library as well, so nothing is lost.

*Requests between transitions.* A transition says how many requests are in flight and held.
From there on the requests' own events are added, each of which comes before the transition
that it leads to. They don't tell all (a drain takes back what never started, a wake admits
what was held), and the next transition corrects that.

*Operations.* Begins and ends are a stack. The gauge shows the outermost alone, since the time
that counts is that of the caller who waits.

Values are set, never moved up or down, because that is what the multi-process mode of
`prometheus_client` allows for a gauge that several processes have.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from lifecycle import errors
from lifecycle.engine import Engine
from lifecycle.table import NEEDS, RPC_NEEDS, State, Trigger

_LABELS: Final = ("engine", "rank")
_VLLM_LABELS: Final = ("model_name", "engine")  # the same two values
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200)
_STEPS: Final = (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)

# What a label may say, beside "other".
_STATES: Final = tuple(state.value for state in State)
_TRIGGERS: Final = tuple(trigger.value for trigger in Trigger)
_BLOCKING: Final = frozenset(
    {"generate", "chat", "beam_search", "encode", "embed", "classify", "score"}
    | {"enqueue", "enqueue_chat", "wait_for_completion"}
)
_OF_ENGINE: Final = frozenset(name for name in vars(Engine) if not name.startswith("_"))
_CALLS: Final = _BLOCKING | _OF_ENGINE | NEEDS.keys() | RPC_NEEDS.keys()
_ERRORS: Final = frozenset(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.LifecycleError)
)
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")  # why a request ends, to vLLM
_OUTCOMES: Final = (*_REASONS, "rejected", "closed")

# The levels behind the values of vLLM's label `sleep_state`. A pause, level 0, is none of them.
_SLEEP_STATES: Final[Mapping[str, int | None]] = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
_DRAINED: Final = Trigger.SLEPT.value  # the one end of a sleep that had requests to drain
_TOO_LARGE: Final = 2**63

_Metric = TypeVar("_Metric", Gauge, Counter)


class PrometheusSink:
    """A callable for `sinks=`. registry: where the metrics go, `prometheus_client.REGISTRY` by default.

    Any number of lifecycles may share a sink, and any number of sinks a registry. Make it once
    the engine is there, so that it sees which metrics are vLLM's own. Raises ValueError if
    somebody else has registered a metric of one of its names beginning with `lifecycle_`.
    """

    requests = True  # it is also told of each request: `request_admitted`, `request_finished`

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._metrics = _metrics_of(REGISTRY if registry is None else registry)
        self._series: dict[tuple[str, str], _Series] = {}
        self._lock = threading.RLock()  # a watchdog tells from a thread of its own

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count an event; the lifecycle calls this."""
        note = _NOTES.get(str(event.get("event")))
        if note is None:
            return
        labels = str(event.get("engine")), str(event.get("rank"))
        with self._lock:
            if labels not in self._series:
                self._series[labels] = _Series(self._metrics, labels)
            note(self._series[labels], event)


class _Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, what: str, *labels: str, first: tuple[str, str] = _LABELS) -> Gauge:
            return Gauge(name, what, (*first, *labels), registry=registry, multiprocess_mode="mostrecent")

        def counter(name: str, what: str, *labels: str, first: tuple[str, str] = _LABELS) -> Counter:
            return Counter(name, what, (*first, *labels), registry=registry)

        def histogram(name: str, what: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, (*_LABELS, *labels), registry=registry, buckets=buckets)

        self.state = gauge("lifecycle_state", "1 for the state that the engine is in.", "state")
        self.transitions = counter(
            "lifecycle_transitions_total", "Moves of the machine.", "trigger", "source", "dest"
        )
        self.refusals = counter(
            "lifecycle_refusals_total",
            "Calls refused; the repeats of one are added at the end of that state.",
            "call",
            "error",
        )
        self.failures = counter("lifecycle_failures_total", "Engine calls that failed the engine.")
        self.stalls = counter("lifecycle_stalls_total", "Times that a watchdog saw a call not return.")
        self.operation_start = gauge(
            "lifecycle_operation_start_time_seconds",
            "When the operation under way began, since the epoch; 0 while there is none.",
            "call",
        )
        self.operations = histogram(
            "lifecycle_operation_duration_seconds",
            "Operations that came to their end without an error.",
            "call",
            buckets=_SECONDS,
        )
        self.drain_seconds = histogram(
            "lifecycle_drain_duration_seconds",
            "From the call of a sleep to a quiet engine.",
            buckets=_SECONDS,
        )
        self.drain_steps = histogram(
            "lifecycle_drain_steps", "Engine steps that a drain took.", buckets=_STEPS
        )
        self.in_flight = gauge("lifecycle_requests_in_flight", "Unfinished requests inside the engine.")
        self.held = gauge("lifecycle_requests_held", "Requests kept outside the engine until it wakes.")
        self.finished = counter(
            "lifecycle_requests_finished_total", "Requests that came to their end.", "outcome"
        )
        self.device = gauge(
            "lifecycle_device_memory_bytes", "Device memory in use after the last sleep or wake."
        )
        self.released = gauge(
            "lifecycle_device_memory_released_bytes", "Device memory that the last sleep released."
        )
        self.vllm_sleep_state = _unless_taken(
            lambda: gauge(
                "vllm:engine_sleep_state",
                "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
                "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
                "sleep_state",
                first=_VLLM_LABELS,
            )
        )
        self.vllm_running = _unless_taken(
            lambda: gauge(
                "vllm:num_requests_running", "Unfinished requests inside the engine.", first=_VLLM_LABELS
            )
        )
        self.vllm_waiting = _unless_taken(
            lambda: gauge(
                "vllm:num_requests_waiting", "Requests held until the engine wakes.", first=_VLLM_LABELS
            )
        )
        self.vllm_success = _unless_taken(
            lambda: counter(
                "vllm:request_success_total",
                "Count of successfully processed requests.",
                "finished_reason",
                first=_VLLM_LABELS,
            )
        )


def _unless_taken(make: Callable[[], _Metric]) -> _Metric | None:
    """A metric under a name of vLLM's, or None where vLLM has registered its own."""
    try:
        return make()
    except ValueError:
        return None


_registered: "WeakKeyDictionary[CollectorRegistry, _Metrics]" = WeakKeyDictionary()
_registering = threading.Lock()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    """The metrics of a registry, made with its first sink: a name can be registered only once."""
    with _registering:
        if registry not in _registered:
            _registered[registry] = _Metrics(registry)
        return _registered[registry]


class _Series:
    """One lifecycle's series, and what must be remembered to write them."""

    def __init__(self, metrics: _Metrics, labels: tuple[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels
        self._operations: list[tuple[str, str]] = []  # each as its event names it, and as its label does
        self._level: object = None
        self._in_flight = self._held = 0
        self._held_ids: set[str] = set()
        # A series that begins with its first increment hides that from `increase()`.
        metrics.failures.labels(*labels)
        metrics.stalls.labels(*labels)
        for outcome in (*_OUTCOMES, "other"):
            metrics.finished.labels(*labels, outcome)
        if metrics.vllm_success is not None:
            for reason in _REASONS:
                metrics.vllm_success.labels(*labels, reason)

    # -- the machine -----------------------------------------------------------------------------------

    def attached(self, event: Mapping[str, Any]) -> None:
        self._show_state(event)
        self._show_counts(event)

    def transition(self, event: Mapping[str, Any]) -> None:
        metrics, labels = self._metrics, self._labels
        trigger = event.get("trigger")
        source, dest = (_known(event.get(end), _STATES) for end in ("source", "dest"))
        metrics.transitions.labels(*labels, _known(trigger, _TRIGGERS), source, dest).inc()
        self._show_state(event)
        self._show_counts(event)
        if trigger == _DRAINED:
            _observe(metrics.drain_seconds.labels(*labels), event.get("drain_s"))
            _observe(metrics.drain_steps.labels(*labels), event.get("steps"))

    def _show_state(self, event: Mapping[str, Any]) -> None:
        dest, level = event.get("dest"), event.get("level")
        if dest not in _STATES:
            return
        self._level = level
        for state in _STATES:
            self._metrics.state.labels(*self._labels, state).set(state == dest)
        if self._metrics.vllm_sleep_state is not None:
            for name, its_level in _SLEEP_STATES.items():
                holds = level == its_level and dest != State.CLOSED
                self._metrics.vllm_sleep_state.labels(*self._labels, name).set(holds)

    def refused(self, event: Mapping[str, Any]) -> None:
        self._refuse(event, 1)

    def repeated(self, event: Mapping[str, Any]) -> None:
        """Only the first of equal refusals was told; this is how many there were."""
        count = _number(event.get("count"))
        if event.get("repeats") == "refused" and count is not None:
            self._refuse(event, max(count - 1, 0))

    def _refuse(self, event: Mapping[str, Any], times: float) -> None:
        error = str(event.get("error")).partition(":")[0]
        self._metrics.refusals.labels(*self._labels, _call(event), _known(error, _ERRORS)).inc(times)

    def failed(self, _: Mapping[str, Any]) -> None:
        self._metrics.failures.labels(*self._labels).inc()

    def stalled(self, _: Mapping[str, Any]) -> None:
        self._metrics.stalls.labels(*self._labels).inc()

    def memory(self, event: Mapping[str, Any]) -> None:
        measured = event.get("bytes")
        if not isinstance(measured, Mapping):
            return
        before, after = _number(measured.get("device_before")), _number(measured.get("device_after"))
        if after is not None:
            self._metrics.device.labels(*self._labels).set(after)
        slept = event.get("call") == "sleep" and self._level  # a pause, level 0, has nothing to release
        if slept and before is not None and after is not None:
            self._metrics.released.labels(*self._labels).set(before - after)

    # -- operations ------------------------------------------------------------------------------------

    def operation_begin(self, event: Mapping[str, Any]) -> None:
        name = _call(event)
        if not self._operations:
            self._show_operation(name, _number(event.get("time")) or 0)
        elif name == "sleep":
            name = "release"  # the part of a sleep in which memory is released
        self._operations.append((str(event.get("call")), name))

    def operation_end(self, event: Mapping[str, Any]) -> None:
        call = str(event.get("call"))
        if call not in (told for told, _ in self._operations):
            return  # it began before this sink was there
        told = name = ""
        while told != call:
            told, name = self._operations.pop()
        if "error" not in event:
            _observe(self._metrics.operations.labels(*self._labels, name), event.get("duration_s"))
        if not self._operations:
            self._show_operation(name, 0)

    def ended(self, _: Mapping[str, Any]) -> None:
        """Nothing is under way any more, whatever was left open."""
        if self._operations:
            self._show_operation(self._operations[0][1], 0)
            self._operations.clear()

    def _show_operation(self, name: str, began: float) -> None:
        self._metrics.operation_start.labels(*self._labels, name).set(began)

    # -- requests --------------------------------------------------------------------------------------

    def request_admitted(self, event: Mapping[str, Any]) -> None:
        request = str(event.get("request"))
        if event.get("held"):
            self._held_ids.add(request)
            self._set_counts(self._in_flight, self._held + 1)
        elif self._leaves_held(request):
            self._set_counts(self._in_flight + 1, self._held - 1)
        else:
            self._set_counts(self._in_flight + 1, self._held)

    def request_finished(self, event: Mapping[str, Any]) -> None:
        outcome = event.get("outcome")
        self._metrics.finished.labels(*self._labels, _known(outcome, _OUTCOMES)).inc()
        if outcome in _REASONS and self._metrics.vllm_success is not None:
            self._metrics.vllm_success.labels(*self._labels, outcome).inc()
        if self._leaves_held(str(event.get("request"))) or not self._in_flight:  # taken back by a drain
            self._set_counts(self._in_flight, self._held - 1)
        else:
            self._set_counts(self._in_flight - 1, self._held)

    def _leaves_held(self, request: str) -> bool:
        was_held = request in self._held_ids
        self._held_ids.discard(request)
        return was_held

    def _show_counts(self, event: Mapping[str, Any]) -> None:
        counts = event.get("counts")
        if not isinstance(counts, Mapping):
            return
        in_flight, held = _number(counts.get("in_flight")), _number(counts.get("held"))
        if in_flight is None or held is None:
            return
        if not held:
            self._held_ids.clear()
        self._set_counts(int(in_flight), int(held))

    def _set_counts(self, in_flight: int, held: int) -> None:
        """Show these numbers of requests; none is below 0, even where this sink came late."""
        metrics, labels = self._metrics, self._labels
        self._in_flight, self._held = max(in_flight, 0), max(held, 0)
        for gauge, count in (
            (metrics.in_flight, self._in_flight),
            (metrics.held, self._held),
            (metrics.vllm_running, self._in_flight),
            (metrics.vllm_waiting, self._held),
        ):
            if gauge is not None:
                gauge.labels(*labels).set(count)


# What is done with which event. One that is not here changes nothing.
_NOTES: Final[Mapping[str, Callable[[_Series, Mapping[str, Any]], None]]] = {
    "attached": _Series.attached,
    "transition": _Series.transition,
    "refused": _Series.refused,
    "repeated": _Series.repeated,
    "failed": _Series.failed,
    "stalled": _Series.stalled,
    "memory": _Series.memory,
    "operation_begin": _Series.operation_begin,
    "operation_end": _Series.operation_end,
    "request_admitted": _Series.request_admitted,
    "request_finished": _Series.request_finished,
    "closed": _Series.ended,
    "detached": _Series.ended,
}


def _known(value: object, names: Collection[str]) -> str:
    """The value if it is one of these names, else "other"."""
    return value if isinstance(value, str) and value in names else "other"


def _call(event: Mapping[str, Any]) -> str:
    """The name of an event's call, without its arguments: "sleep" of "sleep(level=1, mode=wait)"."""
    return _known(str(event.get("call")).partition("(")[0], _CALLS)


def _number(value: object) -> float | None:
    """The value if it is a number that a metric can show."""
    return value if isinstance(value, int | float) and abs(value) < _TOO_LARGE else None


def _observe(histogram: Histogram, value: object) -> None:
    number = _number(value)
    if number is not None:
        histogram.observe(number)
