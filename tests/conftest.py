"""Fixtures: a real vLLM where one is installed, and the invariants checked after every test."""

import importlib.util
import os
import signal

import pytest

from tests import report

HAS_VLLM = importlib.util.find_spec("vllm") is not None
# Where the project is installed its entry point has loaded this one before, under the same name.
pytest_plugins = ["lifecycle.testing.plugin", "pytester"]
pytest.register_assert_rewrite("tests.vllm_runs")
# The project's own CI must never pass because an engine was missing.
MUST_HAVE_VLLM = os.environ.get("CI") == "true"


def pytest_collection_modifyitems(items):
    if HAS_VLLM or MUST_HAVE_VLLM:
        return
    for item in items:
        if "vllm" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no vLLM here; `make test` installs one"))


def pytest_terminal_summary(terminalreporter):
    for title, lines in report.SECTIONS.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive():
    """A shell starts background jobs with Ctrl-C ignored; the tests of it need it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def house():
    from tests.engines import House

    with_engine = House()
    yield with_engine
    with_engine.close()


@pytest.fixture
def llm(house):
    """A plain `LLM` on the tiny model, four slots, real sleep levels; idle and awake."""
    return house.llm()


@pytest.fixture
def guarded(llm, house):
    """The same, with the lifecycle attached; whatever a test leaves behind is checked and undone."""
    from engine_adapter import attach
    from lifecycle import State
    from tests.audit_runs import Replayed

    replayed = Replayed()
    lifecycle = attach(llm, sinks=(replayed,))
    yield lifecycle
    assert lifecycle.check() == []
    assert replayed.check(lifecycle._core) == []
    if lifecycle.state is State.FAILED:
        house.condemn()
    elif lifecycle.state is not State.CLOSED:
        undo(llm, lifecycle)


@pytest.fixture(scope="session")
def run(house):
    """The runs of `tests.vllm_runs` that nobody interrupted."""
    from tests.vllm_runs import Uninterrupted

    return Uninterrupted(house.llm())


@pytest.fixture
def scheduled(llm, monkeypatch):
    """What each step schedules, as a list of sets of the engine core's request ids."""
    from tests.vllm_runs import spy_on_schedule

    return spy_on_schedule(llm, monkeypatch)


@pytest.fixture
def guard(request):
    """Attaches when it is called, after what the test did to the plain engine."""

    def now():
        return request.getfixturevalue("llm"), request.getfixturevalue("guarded")

    return now


@pytest.fixture(autouse=True)
def _a_failed_test_spoils_no_other(request):
    """An engine that a failed test left attached is not used again."""
    house = request.getfixturevalue("house") if "house" in request.fixturenames else None
    yield
    if house is not None and house.is_attached():
        house.condemn()


def undo(llm, lifecycle):
    """Leave the engine awake and empty for the next test, and take the lifecycle off."""
    lifecycle.abort_request([record.request_id for record in lifecycle._core.ledger.records()])
    lifecycle.resume()
    lifecycle.wake_up()
    if lifecycle.is_sleeping():
        lifecycle.reload_weights()
        lifecycle.mark_weights_loaded()
    while lifecycle._core.engine.has_work():
        lifecycle.step()
    lifecycle.detach()
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def told(lifecycle, event, **fields):
    """The events of this name, and with these fields."""
    return [
        told
        for told in lifecycle.events()
        if told["event"] == event and all(told.get(name) == value for name, value in fields.items())
    ]
