"""Metrics and spans: scraped, or received over OTLP, as a service would; and compared with what happened."""

import ast
import asyncio
import http.server
import importlib.util
import math
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter as Tally
from pathlib import Path

import prometheus_client
import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from engine_adapter.simulated import GIB, SamplingParams, SimulatedEngine
from lifecycle import (
    AsyncLifecycle,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    Lifecycle,
    table,
)
from lifecycle.exporters.opentelemetry import OpenTelemetrySink
from lifecycle.exporters.prometheus import PrometheusSink

ROOT = Path(__file__).parent.parent
OPENMETRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"  # as Prometheus 3 asks
OURS = {"engine": "rollout", "rank": "3"}


def params(tokens=8, seed=0):
    return SamplingParams(max_tokens=tokens, seed=seed)


def named(events, name, **fields):
    return [
        event
        for event in events
        if event["event"] == name and all(event.get(key) == value for key, value in fields.items())
    ]


# -- Prometheus ----------------------------------------------------------------------------------------


def samples(text, parser=prometheus_client.parser):
    """What a scrape says: (name, labels) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


class Metered:
    """A lifecycle with a `PrometheusSink`, and what its metrics say."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.engine = SimulatedEngine(max_num_seqs=2)
        self.lifecycle = Lifecycle(
            lambda: self.engine, sinks=[PrometheusSink(self.registry)], name="rollout", rank=3
        )

    def text(self):
        return generate_latest(self.registry).decode()

    def value(self, name, **labels):
        """One of this lifecycle's series; 0 where there is none."""
        return samples(self.text()).get((name, frozenset((OURS | labels).items())), 0)

    def of_vllm(self, name, **labels):
        found = {"model_name": "rollout", "engine": "3"} | labels
        return samples(self.text())[name, frozenset(found.items())]

    def series(self, name):
        """All series of this name: the values of the labels beside engine and rank -> value."""
        return {
            tuple(value for key, value in sorted(labels) if key not in OURS): value
            for (found, labels), value in samples(self.text()).items()
            if found == name
        }

    def add(self, *names, tokens=8):
        for name in names:
            self.lifecycle.add_request(name, f"prompt of {name}", params(tokens))

    def finish(self):
        while self.lifecycle.has_unfinished_requests():
            self.lifecycle.step()


@pytest.fixture
def metered():
    return Metered()


@pytest.fixture
def scrape(metered):
    """Reads the metrics from `prometheus_client`'s own server, as a scraper that accepts this format."""
    server, thread = start_http_server(0, "127.0.0.1", metered.registry)

    def read(accept):
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        request = urllib.request.Request(address, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  (our own server)
            return answer.read().decode()

    yield read
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_state_is_that_of_the_snapshot(metered):
    """One state has a 1, and it is the snapshot's; all seven are there from the first moment."""
    lifecycle, seen = metered.lifecycle, []

    def look(_=None):
        states = {state: value for (state,), value in metered.series("lifecycle_state").items()}
        assert states.keys() == {state.value for state in table.State}
        assert [state for state, value in states.items() if value] == [lifecycle.snapshot().state]
        seen.append(lifecycle.snapshot().state)

    look()
    metered.add("a")
    look()
    lifecycle.sleep(1, progress=look)
    look()
    lifecycle.wake_up(["weights"])
    look()
    lifecycle.wake_up()
    metered.engine.faults.add("add", raises=RuntimeError("lost"))
    with pytest.raises(EngineFailed):
        metered.add("b")
    look()
    lifecycle.close()
    look()
    assert set(seen) == {state.value for state in table.State}


def test_both_formats_say_the_same(metered, scrape):
    """The text format and OpenMetrics are both read by their parsers, to the same values."""
    metered.add("a", "b", "c")
    metered.lifecycle.sleep(2)
    plain = samples(scrape("text/plain"))
    openmetrics = samples(scrape(OPENMETRICS), prometheus_client.openmetrics.parser)
    assert {key: value for key, value in plain.items() if not key[0].endswith("_created")} == {
        key: value for key, value in openmetrics.items() if not key[0].endswith("_created")
    }
    assert plain["lifecycle_state", frozenset((OURS | {"state": "sleeping"}).items())] == 1


def test_names_follow_the_conventions():
    """Counters end in `_total`; what has a unit says so last; everything of ours begins with `lifecycle_`."""
    registry = CollectorRegistry()
    PrometheusSink(registry)
    units = {"_seconds", "_bytes"}
    for family in registry.collect():
        assert family.name.startswith(("lifecycle_", "vllm:")), family.name
        assert family.documentation.endswith("."), family.name
        for word in ("duration", "time", "memory"):
            assert word not in family.name or any(family.name.endswith(unit) for unit in units), family.name
    families = generate_latest(registry).decode()
    counters = [line.split()[2] for line in families.splitlines() if line.endswith(" counter")]
    assert counters
    assert all(name.endswith("_total") for name in counters)


def test_transitions_are_counted_as_they_were_told(metered):
    """Each transition of the events is one in the counter, under its trigger, source and dest."""
    metered.add("a", "b", "c")
    metered.lifecycle.sleep(1)
    metered.lifecycle.wake_up()
    metered.finish()
    metered.lifecycle.sleep(0)
    metered.lifecycle.sleep(2)
    told = Tally(
        (event["dest"], event["source"], event["trigger"])
        for event in named(metered.lifecycle.events(), "transition")
    )
    assert metered.series("lifecycle_transitions_total") == told
    assert len(told) >= 6


def test_every_refusal_is_counted(metered):
    """Refusals are counted by call and error; of equal ones the repeats too, once the state is over."""
    lifecycle = metered.lifecycle
    lifecycle.sleep(1)
    for _ in range(5):
        with pytest.raises(IllegalCall):
            lifecycle.step()
    with pytest.raises(IllegalCall):
        lifecycle.call("sleep")
    with pytest.raises(InvalidArgument):
        lifecycle.wake_up(["everything"])
    assert metered.value("lifecycle_refusals_total", call="step", error="IllegalCall") == 1
    lifecycle.wake_up()
    assert metered.series("lifecycle_refusals_total") == {
        ("step", "IllegalCall"): 5,
        ("sleep", "IllegalCall"): 1,
        ("wake_up", "InvalidArgument"): 1,
    }


def test_repeats_are_those_of_refusals_alone(metered):
    """Repeated no-ops are no refusals, and a repeat of something older than the last refusals is left out."""
    lifecycle = metered.lifecycle
    lifecycle.sleep(1)
    for _ in range(4):
        lifecycle.sleep(1)
    for number in range(100):
        with pytest.raises(IllegalCall):
            lifecycle.collective_rpc("sleep") if number == 0 else lifecycle.call("step")
    lifecycle.wake_up()
    assert sum(metered.series("lifecycle_refusals_total").values()) == 100


def test_a_failure_and_a_stall_are_counted_from_zero(metered):
    """Their series are there before anything went wrong, or `increase()` would not see the first."""
    assert metered.text().count("lifecycle_failures_total{") == 1
    assert metered.text().count("lifecycle_stalls_total{") == 1
    metered.add("a")
    metered.engine.faults.add("step", raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed):
        metered.lifecycle.step()
    assert metered.value("lifecycle_failures_total") == 1


def test_an_operation_that_hangs_is_seen(metered, scrape):
    """While a call hangs in the engine a scrape is answered, and says since when, and that it stalled."""
    back, began = threading.Event(), time.time()
    metered.engine.faults.add("sleep", hang=back)
    stalls = "lifecycle_stalls_total", frozenset(OURS.items())
    since = "lifecycle_operation_start_time_seconds", frozenset((OURS | {"call": "sleep"}).items())
    sleeper = threading.Thread(target=metered.lifecycle.sleep, args=(1,), daemon=True)
    with metered.lifecycle.watch(limit_s=0.1):
        sleeper.start()
        while not (found := samples(scrape("text/plain"))).get(stalls):
            time.sleep(0.02)
        back.set()
        sleeper.join()
    assert began <= found[since] <= time.time()
    assert metered.series("lifecycle_operation_start_time_seconds") == {("sleep",): 0}
    counts = metered.series("lifecycle_operation_duration_seconds_count")
    assert counts == {("sleep",): 1, ("release",): 1}


def test_an_operation_with_an_error_has_no_duration(metered):
    """How long an operation takes is said by those that did what they should; nothing stays open."""
    metered.add("a", "b")
    metered.lifecycle.step()
    with pytest.raises(DrainTimeout):
        metered.lifecycle.sleep(1, max_steps=1)
    assert metered.series("lifecycle_operation_duration_seconds_count") == {}
    assert metered.series("lifecycle_operation_start_time_seconds") == {("sleep",): 0}


@pytest.mark.parametrize("end", ["closed", "detached"])
def test_nothing_is_under_way_after_the_end(metered, end):
    """An operation whose end was never told is over when the engine is: no alert fires for ever."""
    sink, common = metered.lifecycle._core.events.sinks[0], {"engine": "rollout", "rank": 3, "time": 1000.0}
    for call in ("recover", "sleep"):
        sink(common | {"event": "operation_begin", "call": call})
    assert metered.series("lifecycle_operation_start_time_seconds") == {("recover",): 1000}
    sink(common | {"event": end})
    assert metered.series("lifecycle_operation_start_time_seconds") == {("recover",): 0}


def test_an_end_ends_what_is_inside_too(metered):
    """An operation that is over leaves nothing inside it under way."""
    sink, common = metered.lifecycle._core.events.sinks[0], {"engine": "rollout", "rank": 3, "time": 1000.0}
    for call in ("recover", "sleep"):
        sink(common | {"event": "operation_begin", "call": call})
    sink(common | {"event": "operation_end", "call": "recover", "duration_s": 2.5})
    assert metered.series("lifecycle_operation_start_time_seconds") == {("recover",): 0}
    assert metered.series("lifecycle_operation_duration_seconds_sum") == {("recover",): 2.5}


def test_durations_are_those_of_the_events(metered):
    """The sum of the durations is the sum of what the ends of the operations said."""
    for level in (1, 2):
        metered.lifecycle.sleep(level)
        metered.lifecycle.wake_up()
        metered.lifecycle.reload_weights()
    told = Tally()
    for event in named(metered.lifecycle.events(), "operation_end"):
        label = "release" if event["call"] == "sleep" else event["call"].partition("(")[0]
        told[label,] += event["duration_s"]
    measured = metered.series("lifecycle_operation_duration_seconds_sum")
    assert measured == pytest.approx(dict(told))
    assert measured.keys() == {("sleep",), ("release",), ("wake_up",), ("reload_weights",)}


def test_a_drain_is_measured_once_it_is_over(metered):
    """Seconds and steps of a drain are those that the transition and the report say."""
    metered.add("a", "b", tokens=12)
    metered.lifecycle.step()
    report = metered.lifecycle.sleep(1)
    slept = named(metered.lifecycle.events(), "transition", trigger="slept")[-1]
    assert metered.value("lifecycle_drain_steps_count") == 1
    assert metered.value("lifecycle_drain_steps_sum") == report.steps == slept["steps"] > 10
    assert metered.value("lifecycle_drain_duration_seconds_sum") == pytest.approx(slept["drain_s"])
    assert report.drain_s == pytest.approx(slept["drain_s"])


def test_a_sleep_that_drains_nothing_is_no_drain(metered):
    """From one sleep to another there is nothing to drain, so nothing is measured."""
    metered.lifecycle.sleep(0)
    metered.lifecycle.sleep(1)
    assert named(metered.lifecycle.events(), "transition", trigger="deepen")
    assert metered.value("lifecycle_drain_steps_count") == 1


def test_memory_is_what_was_measured(metered):
    """Device memory is the last measurement; released is what the last sleep gave back, in bytes."""
    metered.lifecycle.sleep(1)
    assert metered.value("lifecycle_device_memory_bytes") == GIB
    assert metered.value("lifecycle_device_memory_released_bytes") == 48 * GIB
    metered.lifecycle.wake_up(["weights"])
    assert metered.value("lifecycle_device_memory_bytes") == 17 * GIB
    metered.lifecycle.wake_up()
    metered.lifecycle.sleep(0)  # a pause releases nothing, and is not asked about
    assert metered.value("lifecycle_device_memory_bytes") == 49 * GIB
    assert metered.value("lifecycle_device_memory_released_bytes") == 48 * GIB


def test_requests_are_counted_between_transitions_too(metered):
    """In flight and held are the snapshot's after every call, and each request ends under its outcome."""
    lifecycle = metered.lifecycle

    def same():
        snapshot, found = lifecycle.snapshot(), samples(metered.text())
        ours, of_vllm = frozenset(OURS.items()), frozenset({"model_name": "rollout", "engine": "3"}.items())
        for mine, its_own, count in (
            ("lifecycle_requests_in_flight", "vllm:num_requests_running", snapshot.in_flight),
            ("lifecycle_requests_held", "vllm:num_requests_waiting", snapshot.held),
        ):
            assert found[mine, ours] == found[its_own, of_vllm] == count

    same()
    for name in "abcde":
        metered.add(name)
        same()
    lifecycle.step()
    lifecycle.abort_request(["a"])
    same()
    lifecycle.sleep(1)  # the first are drained, the others are taken back
    same()
    metered.add("f", "g")
    same()
    lifecycle.abort_request(["g", "e"])  # one was held at once, the other taken back
    same()
    lifecycle.wake_up()
    metered.add("h", tokens=12)  # still there when those that were held end
    same()
    while lifecycle.has_unfinished_requests():
        lifecycle.step()
        same()
    ended = {
        key: value for key, value in metered.series("lifecycle_requests_finished_total").items() if value
    }
    assert ended == {("abort",): 3, ("length",): 5}
    assert metered.of_vllm("vllm:request_success_total", finished_reason="length") == 5


def test_a_sink_that_comes_late_counts_nothing_below_zero(metered):
    """The end of a request whose beginning was not told leaves both counts at 0."""
    sink = metered.lifecycle._core.events.sinks[0]
    for request in "ab":
        sink({"event": "request_finished", "engine": "rollout", "rank": 3, "request": request})
    assert metered.value("lifecycle_requests_in_flight") == metered.value("lifecycle_requests_held") == 0
    assert metered.value("lifecycle_requests_finished_total", outcome="other") == 2


def test_requests_that_end_with_the_engine(metered):
    """A failure ends what is in flight as an error, a close what is held as closed; both leave none."""
    metered.add("a", "b")
    metered.lifecycle.step()
    metered.engine.faults.add("step", raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed):
        metered.lifecycle.step()
    assert metered.value("lifecycle_requests_finished_total", outcome="error") == 2
    assert metered.value("lifecycle_requests_in_flight") == 0
    metered.lifecycle.step()
    metered.engine = SimulatedEngine()
    metered.lifecycle.recover()
    metered.lifecycle.sleep(1)
    metered.add("c")
    metered.lifecycle.close()
    assert metered.value("lifecycle_requests_finished_total", outcome="closed") == 1
    assert metered.value("lifecycle_requests_held") == 0


@pytest.mark.parametrize(
    ("level", "expected"),
    [(None, (1, 0, 0)), (0, (0, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1))],
)
def test_the_sleep_state_is_vllms(metered, level, expected):
    """The sleep state has the values that vLLM gives it, for each level and after the end."""

    def shown():
        names = ("awake", "weights_offloaded", "discard_all")
        return tuple(metered.of_vllm("vllm:engine_sleep_state", sleep_state=name) for name in names)

    if level is not None:
        metered.lifecycle.sleep(level)
    assert shown() == expected
    if level == 1:
        metered.lifecycle.wake_up(["kv_cache"])
        assert shown() == expected  # not before all is back
    metered.lifecycle.close()
    assert shown() == (0, 0, 0)


def test_metrics_of_vllm_are_left_alone():
    """Where vLLM has registered its own, they keep their values and labels; everything of ours is there."""
    registry = CollectorRegistry()
    its_own = prometheus_client.Gauge(
        "vllm:num_requests_running", "vLLM's own.", ["model_name", "engine"], registry=registry
    )
    its_own.labels("smol", "0").set(7)
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[PrometheusSink(registry), PrometheusSink(registry)])
    lifecycle.add_request("a", "prompt", params())
    found = samples(generate_latest(registry).decode())
    running = {key: value for key, value in found.items() if key[0] == "vllm:num_requests_running"}
    assert running == {
        ("vllm:num_requests_running", frozenset({"model_name": "smol", "engine": "0"}.items())): 7
    }
    assert found["lifecycle_requests_in_flight", frozenset({"engine": "engine", "rank": "0"}.items())] == 1
    assert ("vllm:num_requests_waiting", frozenset({"model_name": "engine", "engine": "0"}.items())) in found


def test_a_vllm_that_comes_later_takes_its_names():
    """A vLLM drops all `vllm:` metrics when it registers its own; the sink goes on with what is its own."""
    registry = CollectorRegistry()
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[PrometheusSink(registry)])
    for collector in list(registry._collector_to_names):  # as vLLM's `unregister_vllm_metrics` does it
        if collector._name.startswith("vllm:"):
            registry.unregister(collector)
    prometheus_client.Gauge("vllm:engine_sleep_state", "vLLM's own.", ["engine"], registry=registry)
    lifecycle.sleep(1)
    assert "vllm:engine_sleep_state{" not in generate_latest(registry).decode()
    assert lifecycle._core.events.sink_failures == 0
    again = Lifecycle(SimulatedEngine(), name="again", sinks=[PrometheusSink(registry)])
    again.sleep(1)
    assert again._core.events.sink_failures == 0


@pytest.mark.vllm
def test_the_names_and_labels_are_those_of_the_installed_vllm():
    """Metrics under a name of vLLM's have the type, the labels and the values that vLLM gives them."""
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    source = (root / "v1/metrics/loggers.py").read_text("utf-8")
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            fields = {keyword.arg: keyword.value for keyword in node.keywords}
            if isinstance(fields.get("name"), ast.Constant) and "labelnames" in fields:
                found[fields["name"].value] = ast.unparse(node.func), ast.unparse(fields["labelnames"])
    assert 'labelnames = ["model_name", "engine"]' in source
    ours = {
        "vllm:engine_sleep_state": ("self._gauge_cls", "labelnames + ['sleep_state']"),
        "vllm:num_requests_running": ("self._gauge_cls", "labelnames"),
        "vllm:num_requests_waiting": ("self._gauge_cls", "labelnames"),
        "vllm:request_success": ("self._counter_cls", "labelnames + ['finished_reason']"),
    }
    assert {name: found[name] for name in ours} == ours
    registry = CollectorRegistry()
    PrometheusSink(registry)
    assert {family.name for family in registry.collect() if family.name.startswith("vllm:")} == ours.keys()
    assert 'sleep_state = ["awake", "weights_offloaded", "discard_all"]' in source
    reasons = 'FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")'
    assert reasons in (root / "v1/engine/__init__.py").read_text("utf-8")


def test_lifecycles_share_a_sink_and_sinks_a_registry():
    """Two lifecycles with one sink, and a third with a sink of its own: each has its series, no more."""
    registry = CollectorRegistry()
    shared = PrometheusSink(registry)
    for rank, sink in ((0, shared), (1, shared), (2, PrometheusSink(registry))):
        lifecycle = Lifecycle(SimulatedEngine(), rank=rank, sinks=[sink])
        for _ in range(rank + 1):
            lifecycle.sleep(1)
            lifecycle.wake_up()
    found = samples(generate_latest(registry).decode())
    slept = {"engine": "engine", "trigger": "slept", "source": "draining", "dest": "sleeping"}
    counts = [
        found["lifecycle_transitions_total", frozenset((slept | {"rank": str(r)}).items())] for r in range(3)
    ]
    assert counts == [1, 2, 3]


def on_threads(work, count):
    """`work(0)`, `work(1)` and so on at once; returns when all are done."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_lose_no_count():
    """Lifecycles on threads of their own, one sink: the totals are exact."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)

    def cycle(rank):
        lifecycle = Lifecycle(SimulatedEngine(), rank=rank % 2, sinks=[sink])
        for _ in range(50):
            lifecycle.sleep(1)
            lifecycle.wake_up()

    on_threads(cycle, 4)
    found = samples(generate_latest(registry).decode())
    assert sum(value for (name, _), value in found.items() if name == "lifecycle_transitions_total") == 600


def test_labels_are_bounded():
    """Whatever calls, errors and reasons there are, the number of series stays what it is."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)

    def tell(text):
        common = {"engine": "e", "rank": 0, "seq": text, "time": 1.0}
        for event in (
            {"event": "refused", "call": f"collective_rpc('{text}')", "error": f"IllegalCall: {text}"},
            {"event": "refused", "call": text, "error": f"{text}: lost"},
            {"event": "repeated", "repeats": "refused", "call": text, "error": f"{text}: lost", "count": 3},
            {"event": "request_finished", "request": text, "outcome": text},
            {"event": "operation_begin", "call": text},
            {"event": "operation_end", "call": text, "duration_s": 1.0},
            {"event": "transition", "trigger": text, "source": text, "dest": text},
            {"event": "failed", "call": text, "error": text},
            {"event": "stalled", "call": text},
        ):
            sink(common | event)

    tell("first")
    before = samples(generate_latest(registry).decode()).keys()
    for number in range(100):
        tell(f"text {number}")
    assert samples(generate_latest(registry).decode()).keys() == before
    labels = {value for _, pairs in before for _, value in pairs}
    assert "collective_rpc" in labels
    assert "first" not in labels


def test_several_processes_add_up(tmp_path):
    """In the multi-process mode of `prometheus_client` the sink works, and gauges are the latest."""
    code = """if True:
    from engine_adapter.simulated import SimulatedEngine
    from lifecycle import Lifecycle
    from lifecycle.exporters.prometheus import PrometheusSink
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[PrometheusSink()])
    lifecycle.sleep(1)
    assert lifecycle._core.events.sink_failures == 0
    """
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
    collect = """if True:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", collect], check=True, env=environment, capture_output=True, text=True
    )
    found = samples(done.stdout)
    ours = {"engine": "engine", "rank": "0"}
    assert found["lifecycle_state", frozenset((ours | {"state": "sleeping"}).items())] == 1
    slept = ours | {"trigger": "slept", "source": "draining", "dest": "sleeping"}
    assert found["lifecycle_transitions_total", frozenset(slept.items())] == 2


def test_the_page_has_every_metric():
    """The page gives each metric with its type and labels, no others, and its alerts use what there is."""
    page = (ROOT / "docs/metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z_:]+)` \| (gauge|counter|histogram) \| (.*?) ?\|", page, re.MULTILINE)
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    registry = CollectorRegistry()
    PrometheusSink(registry)
    registered = {
        metric._name + "_total" * (metric._type == "counter"): (metric._type, metric._labelnames[2:])
        for metric in registry._collector_to_names
    }
    assert listed == registered
    (alerts,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"lifecycle_\w+", alerts)) < registered.keys()


# -- OpenTelemetry -------------------------------------------------------------------------------------


class Receiver(http.server.ThreadingHTTPServer):
    """An OTLP/HTTP endpoint: the spans that real exporters send, as they arrive."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Receives)
        self.received = []
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self):
        self.shutdown()
        self.server_close()
        self.thread.join()


class _Receives(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                assert scope.scope.name in ("lifecycle", "trainer")
                self.server.received.extend(map(Got, scope.spans))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def plain(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes(pairs):
    return {pair.key: plain(pair.value) for pair in pairs}


class Got:
    """A span as it was received."""

    def __init__(self, span):
        self.name = span.name
        self.id, self.parent_id, self.trace_id = span.span_id, span.parent_span_id, span.trace_id
        self.began, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.failed = span.status.code == Status.STATUS_CODE_ERROR
        self.message = span.status.message
        self.attributes = attributes(span.attributes)
        self.events = [
            (event.name, event.time_unix_nano, attributes(event.attributes)) for event in span.events
        ]

    def told(self, name):
        """The attributes of its events of this name."""
        return [found for event, _, found in self.events if event == name]


class Traced:
    """A lifecycle whose spans go by way of the SDK and its OTLP exporter to a server."""

    def __init__(self):
        self.receiver = Receiver()
        self.provider = TracerProvider()
        address = f"http://127.0.0.1:{self.receiver.server_port}/v1/traces"
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address)))
        self.sink = OpenTelemetrySink(self.provider)
        self.engine = SimulatedEngine(max_num_seqs=2)
        self.lifecycle = Lifecycle(lambda: self.engine, sinks=[self.sink], name="rollout", rank=3)

    def spans(self):
        """All spans so far, the first to begin first."""
        assert self.provider.force_flush()
        return sorted(self.receiver.received, key=lambda span: (span.began, -span.ended))

    def one(self, name):
        (found,) = [span for span in self.spans() if span.name == name]
        return found

    def tree(self):
        """(name, name of the parent or None) of all spans."""
        spans = self.spans()
        names = {span.id: span.name for span in spans}
        return [(span.name, names.get(span.parent_id)) for span in spans]

    def at(self, name, **fields):
        """When the last such event was, in nanoseconds."""
        return nanoseconds(named(self.lifecycle.events(), name, **fields)[-1])

    def add(self, *names, tokens=8):
        for name in names:
            self.lifecycle.add_request(name, f"prompt of {name}", params(tokens))


def nanoseconds(event):
    return round(event["time"] * 1e9)


@pytest.fixture
def traced():
    made = Traced()
    yield made
    made.provider.shutdown()
    made.receiver.close()


SLEEP = "sleep(level=1, mode=wait)"


def test_a_sleep_is_a_span_with_its_phases(traced):
    """A sleep has a drain and a release as children, at the times of their events, and what it did."""
    traced.add("a", "b", "c")
    traced.lifecycle.step()
    report = traced.lifecycle.sleep(1)
    assert traced.tree() == [("sleep", None), ("drain", "sleep"), ("release", "sleep")]
    sleep, drain, release = traced.spans()
    assert len({span.trace_id for span in (sleep, drain, release)}) == 1
    assert (sleep.began, sleep.ended) == (
        traced.at("operation_begin", call=SLEEP),
        traced.at("operation_end", call=SLEEP),
    )
    assert (drain.began, drain.ended) == (
        traced.at("transition", trigger="drain"),
        traced.at("operation_begin", call="sleep"),
    )
    assert (release.began, release.ended) == (
        traced.at("operation_begin", call="sleep"),
        traced.at("operation_end", call="sleep"),
    )
    assert [span.failed for span in (sleep, drain, release)] == [False] * 3
    expected = {
        "lifecycle.engine": "rollout",
        "lifecycle.rank": 3,
        "lifecycle.call": SLEEP,
        "lifecycle.state": "running",
        "lifecycle.counts.in_flight": 3,
        "lifecycle.level": 1,
        "lifecycle.mode": "wait",
        "lifecycle.steps": report.steps,
        "lifecycle.tokens": report.tokens,
    }
    assert {key: sleep.attributes.get(key) for key in expected} == expected
    assert release.attributes["lifecycle.engine"] == drain.attributes["lifecycle.engine"] == "rollout"
    (memory,) = sleep.told("memory")
    assert memory["lifecycle.bytes.device_before"] - memory["lifecycle.bytes.device_after"] == 48 * GIB
    assert [event["lifecycle.dest"] for event in sleep.told("transition")] == ["draining", "sleeping"]
    assert [at for name, at, _ in sleep.events if name == "memory"] == [traced.at("memory", call="sleep")]


def test_every_operation_is_a_span(traced):
    """Pauses, wakes, loads and recoveries are spans by the names of their calls."""
    traced.lifecycle.pause()
    traced.lifecycle.resume()
    traced.lifecycle.sleep(2)
    traced.lifecycle.wake_up(["weights"])
    traced.lifecycle.collective_rpc("reload_weights")
    traced.lifecycle.wake_up()
    traced.engine.faults.add("add", raises=RuntimeError("lost"))
    with pytest.raises(EngineFailed):
        traced.add("a")
    traced.engine = SimulatedEngine()
    traced.lifecycle.recover()
    roots = [name for name, parent in traced.tree() if parent is None]
    operations = ["pause", "sleep", "wake_up", "reload_weights", "wake_up", "add_request", "recover"]
    assert roots == operations
    pause = traced.one("pause").attributes
    assert (pause["lifecycle.level"], pause["lifecycle.mode"]) == (0, "keep")


def test_a_sleep_from_another_sleep_has_no_drain(traced):
    """Where nothing is drained there is no such span."""
    traced.lifecycle.sleep(0)
    traced.lifecycle.sleep(1)
    assert traced.tree()[3:] == [("sleep", None), ("release", "sleep")]


def test_a_rolled_back_sleep_says_so(traced):
    """A drain that was given up ends with its sleep, both with an error that says why."""
    traced.add("a", "b")
    traced.lifecycle.step()
    with pytest.raises(DrainTimeout):
        traced.lifecycle.sleep(1, max_steps=2)
    assert traced.tree() == [("sleep", None), ("drain", "sleep")]
    for span in traced.spans():
        assert (span.failed, span.message) == (True, "rolled back")
        assert span.ended == traced.at("operation_end", call=SLEEP)
        assert "error.type" not in span.attributes
    traced.lifecycle.sleep(1)
    assert not traced.spans()[-1].failed


def test_a_failure_in_a_drain(traced):
    """The span in which it happened has the exception; what is around it has the status and the cause."""
    traced.add("a")
    traced.lifecycle.step()
    traced.engine.faults.add("step", at=3, raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed):
        traced.lifecycle.sleep(1)
    assert traced.tree() == [("sleep", None), ("drain", "sleep")]
    sleep, drain = traced.spans()
    for span in (sleep, drain):
        assert (span.failed, span.message) == (True, "RuntimeError: the device is gone")
        assert span.attributes["error.type"] == "RuntimeError"
    assert sleep.told("exception") == []
    assert drain.told("exception") == [
        {"exception.type": "RuntimeError", "exception.message": "RuntimeError: the device is gone"}
    ]
    assert [at for name, at, _ in drain.events if name == "exception"] == [traced.at("failed")]


def test_a_failure_of_the_release(traced):
    """A release that fails is where the exception is, and its drain was good."""
    traced.engine.faults.add("sleep", raises=RuntimeError("no memory pool"))
    with pytest.raises(EngineFailed):
        traced.lifecycle.sleep(1)
    assert traced.tree() == [("sleep", None), ("drain", "sleep"), ("release", "sleep")]
    sleep, drain, release = traced.spans()
    assert (sleep.failed, drain.failed, release.failed) == (True, False, True)
    assert len(release.told("exception")) == 1


def test_a_failure_outside_of_any_operation(traced):
    """A step that fails is a span of no length: no failure is without one."""
    traced.add("a")
    traced.engine.faults.add("step", raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed):
        traced.lifecycle.step()
    step = traced.one("step")
    assert step.began == step.ended == traced.at("failed")
    assert (step.failed, step.message) == (True, "RuntimeError: the device is gone")
    assert [found["exception.type"] for found in step.told("exception")] == ["RuntimeError"]


def test_an_error_that_the_caller_sees(traced):
    """A load that raises to its caller has the error as its status, and the class of it."""
    traced.engine.faults.add("reload_weights", raises=ValueError("no such file"))
    with pytest.raises(ValueError, match="no such file"):
        traced.lifecycle.reload_weights()
    load = traced.one("reload_weights")
    assert (load.failed, load.message) == (True, "ValueError('no such file')")
    assert load.attributes["error.type"] == "ValueError"


def test_what_happens_meanwhile_is_on_the_innermost_span(traced):
    """Refusals while it drains are events of the drain, at their times."""
    traced.add("a")
    traced.lifecycle.step()

    def refused(_):
        with pytest.raises(IllegalCall):
            traced.lifecycle.wake_up()

    traced.lifecycle.sleep(1, progress=refused)
    (refusal,) = traced.one("drain").told("refused")
    assert refusal["lifecycle.call"] == "wake_up"
    assert refusal["lifecycle.state"] == "draining"
    assert refusal["lifecycle.error"].startswith("IllegalCall: ")
    assert "lifecycle.seq" not in refusal


def test_a_stall_is_on_the_span_that_hangs(traced):
    """What a watchdog tells from its own thread is an event of the open span, without the stacks."""
    back = threading.Event()
    traced.engine.faults.add("sleep", hang=back)
    sleeper = threading.Thread(target=traced.lifecycle.sleep, args=(1,), daemon=True)
    with traced.lifecycle.watch(limit_s=0.1):
        sleeper.start()
        while not named(traced.lifecycle.events(), "stalled"):
            time.sleep(0.02)
        back.set()
        sleeper.join()
    stalled = traced.one("release").told("stalled")[0]
    assert stalled["lifecycle.duration_s"] >= 0.1
    assert stalled.keys() == {"lifecycle.call", "lifecycle.duration_s"}


def test_an_operation_hangs_below_its_callers_span(traced):
    """Where the caller has a span around its call, the operation is a child of it."""
    with traced.provider.get_tracer("trainer").start_as_current_span("training step"):
        traced.lifecycle.sleep(1)
        traced.lifecycle.wake_up()
    tree = traced.tree()
    assert ("sleep", "training step") in tree
    assert ("wake_up", "training step") in tree
    assert ("drain", "sleep") in tree
    assert len({span.trace_id for span in traced.spans()}) == 1


@pytest.mark.parametrize("end", ["closed", "detached"])
def test_what_never_ended_is_exported_at_the_end(traced, end):
    """An operation without an end is exported when the engine is let go of, and its status says so."""
    common = {"engine": "e", "rank": 0}
    traced.sink(common | {"event": "operation_begin", "call": SLEEP, "time": 1000.0})
    traced.sink(common | {"event": "transition", "trigger": "drain", "time": 1000.25})
    traced.sink(common | {"event": end, "time": 1000.5})
    assert traced.tree() == [("sleep", None), ("drain", "sleep")]
    for span in traced.spans():
        message = f"did not come to its end: the engine was {end}"
        assert (span.failed, span.message, span.ended) == (True, message, 1_000_500_000_000)


def test_what_is_open_ends_with_the_sink(traced):
    """`close()` exports what hangs, now, with a status that says so; twice is as good as once."""
    back = threading.Event()
    traced.engine.faults.add("sleep", hang=back)
    sleeper = threading.Thread(target=traced.lifecycle.sleep, args=(1,), daemon=True)
    sleeper.start()
    while not named(traced.lifecycle.events(), "operation_begin", call="sleep"):
        time.sleep(0.01)
    before = time.time_ns()
    traced.sink.close()
    traced.sink.close()
    for name in ("sleep", "release"):
        span = traced.one(name)
        assert (span.failed, span.message) == (True, "did not come to its end: the sink was closed")
        assert before <= span.ended <= time.time_ns()
    back.set()
    sleeper.join()
    assert len(traced.spans()) == 3
    assert traced.lifecycle._core.events.sink_failures == 0


def test_an_end_without_a_beginning_is_noted_only(traced):
    """A sink that comes late ends nothing that is open."""
    common = {"engine": "e", "rank": 0, "time": 1000.0}
    traced.sink(common | {"event": "operation_end", "call": "sleep"})
    traced.sink(common | {"event": "operation_begin", "call": "recover"})
    traced.sink(common | {"event": "operation_end", "call": "shutdown", "error": "OSError()"})
    traced.sink(common | {"event": "operation_end", "call": "recover", "time": 1001.0})
    recover = traced.one("recover")
    assert not recover.failed
    assert recover.told("operation_end") == [{"lifecycle.call": "shutdown", "lifecycle.error": "OSError()"}]
    assert recover.ended - recover.began == 1_000_000_000


def test_a_field_without_a_value_is_left_out(traced):
    """What the platform could not measure is no attribute; a field in a field has a name with two dots."""
    common = {"engine": "e", "rank": 0, "time": 1000.0, "call": "recover"}
    traced.sink(common | {"event": "operation_begin"})
    traced.sink(common | {"event": "memory", "bytes": {"device_before": None, "device_after": 5}})
    traced.sink(common | {"event": "operation_end"})
    assert traced.one("recover").told("memory") == [
        {"lifecycle.call": "recover", "lifecycle.bytes.device_after": 5}
    ]


def test_lifecycles_on_threads_keep_their_spans_apart(traced):
    """Lifecycles share a sink from threads of their own: every phase is below its own lifecycle's sleep."""

    def cycle(rank):
        lifecycle = Lifecycle(SimulatedEngine(), rank=rank, sinks=[traced.sink])
        for _ in range(25):
            lifecycle.sleep(1)
            lifecycle.wake_up()

    on_threads(cycle, 4)
    spans = traced.spans()
    by_id = {span.id: span for span in spans}
    assert Tally(span.name for span in spans) == {"sleep": 100, "drain": 100, "release": 100, "wake_up": 100}
    for span in spans:
        if span.name in ("drain", "release"):
            parent = by_id[span.parent_id]
            assert parent.name == "sleep"
            assert parent.attributes["lifecycle.rank"] == span.attributes["lifecycle.rank"]
            assert parent.began <= span.began <= span.ended <= parent.ended


async def test_the_engines_own_thread_tells_as_well(traced):
    """An `AsyncLifecycle` has both sinks: all streams are counted, and a sleep is a trace of its own."""
    registry = CollectorRegistry()
    sinks = [PrometheusSink(registry), traced.sink]
    async with AsyncLifecycle(SimulatedEngine, sinks=sinks) as lifecycle:

        async def stream(name):
            async for _ in lifecycle.generate("a prompt", params(), name):
                pass

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(str(number))) for number in range(20)]
            await asyncio.wait(streams, timeout=0.01)
            await lifecycle.sleep(level=1)
            await lifecycle.wake_up()
    found = samples(generate_latest(registry).decode())
    ours = {"engine": "engine", "rank": "0"}
    finished = found["lifecycle_requests_finished_total", frozenset((ours | {"outcome": "length"}).items())]
    assert finished == 20
    assert found["lifecycle_requests_in_flight", frozenset(ours.items())] == 0
    assert traced.tree() == [("sleep", None), ("drain", "sleep"), ("release", "sleep"), ("wake_up", None)]


# -- both ----------------------------------------------------------------------------------------------

SANE = {
    "attached": {"dest": "awake", "counts": {"in_flight": 0, "held": 0}},
    "transition": {"trigger": "slept", "source": "draining", "dest": "sleeping", "level": 1, "resident": []}
    | {"counts": {"in_flight": 0, "held": 1}, "call": SLEEP, "duration_s": 1.5, "drain_s": 1.0, "steps": 3},
    "operation_begin": {"call": SLEEP, "state": "awake", "counts": {"in_flight": 0, "held": 0}},
    "operation_end": {"call": SLEEP, "duration_s": 1.5, "error": "rolled back"},
    "drain_progress": {"call": SLEEP, "remaining": 1, "steps": 2, "tokens": 3},
    "memory": {"call": "sleep", "bytes": {"device_before": 3, "device_after": 1, "host_before": None}},
    "weights": {"weights": "valid", "epoch": 1, "version": "1"},
    "refused": {"call": "step", "state": "sleeping", "error": "IllegalCall: asleep", "count": 1},
    "repeated": {"of": 1, "repeats": "refused", "call": "step", "count": 3},
    "failed": {"call": "step", "error": "RuntimeError: lost"},
    "stalled": {"call": "step", "duration_s": 60.0, "stacks": "..."},
    "request_admitted": {"request": "r", "held": False},
    "request_finished": {"request": "r", "outcome": "stop", "tokens": 3},
    "closed": {"counts": {"unserved": 0}},
}
COMMON = {"seq": 1, "time": 1000.0, "engine": "e", "rank": 0}
ODD = (
    *(None, True, 0, -1, 2.5, 2**64, -(2**70), 10**400, math.nan, math.inf, -math.inf, "", "odd", b"odd"),
    *("slept", "drain", "sleep", [], [None, 1], {}, {"": {}}, object()),
)
PROVIDER = TracerProvider(shutdown_on_exit=False)


def odd_events(name):
    """The event as it is, and with each of its fields, and each field in a field, odd or missing."""
    sane = COMMON | {"event": name} | SANE[name]
    yield sane
    for field, value in sane.items():
        yield {key: kept for key, kept in sane.items() if key != field}
        yield from (sane | {field: odd} for odd in ODD)
        for part in value if isinstance(value, dict) else ():
            yield from (sane | {field: value | {part: odd}} for odd in ODD)


@pytest.mark.parametrize("name", SANE)
def test_no_event_is_too_odd(name):
    """Unknown names, missing fields, values of any kind: neither sink raises, and what they show is sound."""
    registry, exported = CollectorRegistry(), InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    metrics, spans = PrometheusSink(registry), OpenTelemetrySink(provider)
    for event in odd_events(name):
        operation = [COMMON | {"event": f"operation_{end}", "call": SLEEP} for end in ("begin", "end")]
        for told in (operation[0], event, operation[1]):
            metrics(told)
            spans(told)
        metrics(COMMON | {"event": "refused", "call": "step", "error": "IllegalCall: asleep"})
    spans.close()
    found = samples(generate_latest(registry).decode())
    assert all(math.isfinite(value) for value in found.values())
    encode_spans(exported.get_finished_spans()).SerializeToString()  # as the exporter does, in its own thread


def test_events_in_any_order():
    """Whatever follows what, neither sink raises; and at the end nothing is open."""
    shuffled = random.Random(7)
    metrics, spans = PrometheusSink(CollectorRegistry()), OpenTelemetrySink(PROVIDER)
    for _ in range(3000):
        name = shuffled.choice(list(SANE))
        call = shuffled.choice([SLEEP, "sleep", "wake_up", "drain"])
        event = (
            COMMON
            | {"event": name}
            | SANE[name]
            | {"call": call, "trigger": shuffled.choice(["drain", "wake"])}
        )
        metrics(event)
        spans(event)
    spans.close()
    assert spans._spans["e", "0"]._open == []


class Slow(dict):
    """An event that takes its time: whoever reads its `bytes` waits."""

    def __init__(self, fields):
        super().__init__(fields)
        self.is_read, self.goes_on = threading.Event(), threading.Event()

    def get(self, field, default=None):
        if field == "bytes":
            self.is_read.set()
            self.goes_on.wait(10)
        return super().get(field, default)


@pytest.mark.parametrize("make", [lambda: PrometheusSink(CollectorRegistry()), OpenTelemetrySink])
def test_one_event_at_a_time(make):
    """An event from another thread waits until the one before it was taken."""
    sink, slow, errors = make(), Slow(COMMON | {"event": "memory", "call": "sleep", "bytes": {}}), []

    def tell(event):
        try:
            sink(event)
        except Exception as error:
            errors.append(error)

    sink(COMMON | {"event": "operation_begin", "call": SLEEP})
    end = COMMON | {"event": "operation_end", "call": SLEEP}
    threads = [threading.Thread(target=tell, args=(event,), daemon=True) for event in (slow, end)]
    threads[0].start()
    assert slow.is_read.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    slow.goes_on.set()
    for thread in threads:
        thread.join(10)
    assert not threads[1].is_alive()
    assert errors == []


def test_a_sink_needs_only_its_own_package():
    """Each module imports its own package alone, and the library imports neither."""
    code = """if True:
    import sys
    import lifecycle, lifecycle.exporters
    assert not {"prometheus_client", "opentelemetry"} & set(sys.modules)
    import lifecycle.exporters.prometheus
    assert "opentelemetry" not in sys.modules
    del sys.modules["prometheus_client"]
    import lifecycle.exporters.opentelemetry
    assert not {"opentelemetry.sdk", "prometheus_client"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_without_an_sdk_nothing_happens():
    """With the API alone, and no provider given, the sink takes everything and keeps nothing."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[sink := OpenTelemetrySink()])
    lifecycle.sleep(2)
    lifecycle.wake_up(["weights"])
    lifecycle.reload_weights()
    lifecycle.close()
    assert lifecycle._core.events.sink_failures == 0
    assert sink._spans["engine", "0"]._open == []
