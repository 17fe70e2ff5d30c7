"""`lifecycle.testing`: fixtures that fail a test for what it did to the engine, faults, and the recorder."""

import threading
import time

import pytest

from engine_adapter import attach
from engine_adapter.simulated import EFFECTS, SimulatedEngine
from lifecycle import EngineFailed, Lifecycle
from lifecycle.testing.faults import Fault, Faults
from lifecycle.testing.recorder import EventRecorder

# An orchestrator as a user writes it, with nothing about tests in it.
ORCHESTRATOR = """
from engine_adapter import attach

class Trainer:
    def __init__(self, llm):
        self.llm = llm
        self.lifecycle = attach(llm)

    def rollout(self, prompts):
        return self.llm.generate(prompts)

    def update(self, weights):
        self.llm.sleep(level=2)
        self.llm.wake_up(["weights"])
        self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(weights)
        assert self.llm.wake_up(["kv_cache"])
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test module of a user's beside the orchestrator, with the plugin and nothing else."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(orchestrator=ORCHESTRATOR)

    def run_module(code, *arguments):
        pytester.makepyfile(code)
        options = ("-p", "lifecycle.testing.plugin", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*options, *arguments)

    return run_module


def test_orchestrator_passes(run):
    """A loop that treats the engine well passes, attached or not, with any of the fixtures."""
    result = run(
        """
        from engine_adapter.simulated import make_weights
        from orchestrator import Trainer

        def test_my_trainer(simulated_llm):
            trainer = Trainer(simulated_llm)
            for step in range(3):
                assert len(trainer.rollout(["a", "b"])) == 2
                trainer.update(make_weights(step).items())

        def test_with_options(make_simulated_llm, event_recorder):
            from engine_adapter import attach
            llms = [make_simulated_llm(parameters=["w"]), make_simulated_llm(max_num_seqs=1)]
            for llm in llms:
                attach(llm, sinks=[event_recorder])
                llm.sleep(1)
                llm.wake_up()
                assert len(llm.generate(["a", "b"])) == 2
            assert event_recorder.states.count("sleeping") == 2

        def test_plain(simulated_llm):
            assert len(simulated_llm.generate("a")) == 1

        def test_engine(simulated_engine):
            from lifecycle import Lifecycle
            with Lifecycle(simulated_engine) as lifecycle:
                lifecycle.sleep(1)
        """
    )
    result.assert_outcomes(passed=4)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            """
            simulated_llm.enqueue(["a", "b"])
            simulated_llm.sleep(1)
            """,
            ["- sleep(1, mode='abort') with requests in flight: 2 requests lost"],
        ),
        (
            """
            simulated_llm.sleep(1)
            for _ in range(3):
                try:
                    simulated_llm.llm_engine.step()
                except Exception:
                    pass
            """,
            ["- step while paused or asleep: nothing happens (3 times)"],
        ),
        (
            """
            attach(simulated_llm)
            simulated_llm.enqueue(["a", "b"])
            """,
            ["- at the end (running), 2 requests are still in flight: step until they are finished*"],
        ),
        (
            """
            attach(simulated_llm)
            simulated_llm.enqueue("a")
            simulated_llm.llm_engine.step()
            simulated_llm.sleep(1)
            simulated_llm.enqueue("b")
            """,
            [
                "- at the end (sleeping), 1 requests are still held: wake_up() admits them, or abort them",
                "- at the end (sleeping), 1 requests are finished, but their last outputs were never taken*",
            ],
        ),
    ],
    ids=["lost", "spinning", "in flight", "held"],
)
def test_misuse_fails_the_test(run, body, said):
    """What was done wrong to the engine fails the test at its end, in words, whatever it caught itself."""
    result = run(f"from engine_adapter import attach\n\ndef test_mine(simulated_llm):{body}")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the engine was misused:", *said])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_misuse_of_an_engine_fails_the_test(run):
    """The same holds for `simulated_engine`, and for every one that `make_simulated_llm` made."""
    result = run(
        """
        def test_engine(simulated_engine):
            simulated_engine.sleep(7)

        def test_second(make_simulated_llm):
            make_simulated_llm()
            make_simulated_llm().llm_engine.sleep(level=-1)
        """
    )
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*sleep(7): there is no such level; accepted"])
    result.stdout.fnmatch_lines(["*sleep(-1): there is no such level; accepted"])


def test_misuse_on_purpose_can_be_taken_back(run):
    """A test of a mistake clears the list; a failed engine explains what it left."""
    result = run(
        """
        import pytest
        from engine_adapter import attach
        from lifecycle import EngineFailed

        def test_on_purpose(simulated_llm):
            simulated_llm.sleep(1)
            simulated_llm.llm_engine.step()
            simulated_llm.misuse.clear()

        def test_failure(simulated_llm):
            attach(simulated_llm)
            simulated_llm.faults.add("step", raises=RuntimeError("the device is gone"))
            simulated_llm.enqueue(["a"])
            with pytest.raises(EngineFailed):
                simulated_llm.llm_engine.step()
        """
    )
    result.assert_outcomes(passed=2)


def test_an_operation_under_way_is_named(run):
    """A call that never came back is named, and the fixture does not wait for it."""
    result = run(
        """
        import threading
        from engine_adapter import attach
        go = threading.Event()

        def test_mine(simulated_llm, event_recorder):
            attach(simulated_llm, sinks=[event_recorder])
            simulated_llm.faults.add("sleep", hang=go)
            threading.Thread(target=simulated_llm.sleep, daemon=True).start()
            event_recorder.wait_for("operation_begin", call="sleep")

        def test_last():
            go.set()
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*sleep*is still under way"])


def test_the_lifecycle_is_taken_off(run):
    """After a clean test the lifecycle is detached, so that whoever kept it is told."""
    result = run(
        """
        import pytest
        from engine_adapter import attach
        from lifecycle import Closed
        kept = []

        def test_first(simulated_llm):
            kept.append(attach(simulated_llm))

        def test_second():
            with pytest.raises(Closed):
                kept[0].step()
        """
    )
    result.assert_outcomes(passed=2)


def test_contract_of_ones_own_engine(run):
    """A subclass of `EngineContract` runs the battery, says why it skips, and explains a failed assertion."""
    result = run(
        """
        import pytest
        from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine
        from lifecycle.testing.contract import Bench, EngineContract

        def params(tokens, kind=0, n=1):
            return SamplingParams(max_tokens=tokens, seed=7, n=n, output_kind=OutputKind(kind))

        class Doubled(SimulatedEngine):
            def count_tokens(self, output):
                return 2 * super().count_tokens(output)

        class TestGood(EngineContract):
            @pytest.fixture
            def bench(self):
                return Bench(SimulatedEngine(max_num_seqs=4), params)

        class TestDoubled(EngineContract):
            @pytest.fixture
            def bench(self):
                return Bench(Doubled(max_num_seqs=4), params)
        """,
        "-rs",
    )
    outcomes = result.parseoutcomes()
    assert outcomes["skipped"] == 2
    assert outcomes["failed"] == 3
    result.stdout.fnmatch_lines(["*assert [[]2, 4, 6, 8, 10, 12[]] == [[]1, 2, 3, 4, 5, 6[]]*"])
    result.stdout.fnmatch_lines(["*SKIPPED*this engine does not launch batches ahead"])


# -- faults --------------------------------------------------------------------------------------------


def test_faults_strike_once_at_their_call():
    """A fault strikes at the `at`-th matching call and is gone; "*" matches every call."""
    faults = Faults()
    third = faults.add("step", at=3)
    assert [faults.due(["step"]) for _ in range(2)] == [None, None]
    assert faults.due(["sleep"]) is None
    assert faults.due(["step"]) is third
    assert faults == []
    anything = faults.add("*", at=2, returns=None)
    assert [faults.due(["a"]), faults.due(["b"])] == [None, anything]
    assert anything.replaces_result
    assert not third.replaces_result


def test_faults_that_can_not_be():
    """A moment that does not exist, or an effect that the call has not, is refused where it is written."""
    for wrong in ({"at": 0}, {"when": "during"}):
        with pytest.raises(ValueError, match="no such moment"):
            Fault("step", **wrong)
    faults = Faults(EFFECTS)
    for call, effect in (("step", "frees_nothing"), ("sleep", "no_such_effect")):
        with pytest.raises(ValueError, match=f"{call} has no effect '{effect}'"):
            faults.add(call, effect=effect)
    assert faults == []
    assert SimulatedEngine().faults.add("sleep", effect="frees_nothing").call == "sleep"


def test_faults_reach_a_guarded_llm(simulated_llm):
    """What the script says reaches the caller of an attached `LLM`, as a failure of the engine would."""
    attach(simulated_llm)
    simulated_llm.faults.add("step", at=2, raises=RuntimeError("the device is gone"))
    with pytest.raises(EngineFailed, match="the device is gone"):
        simulated_llm.generate("a prompt")
    assert simulated_llm.faults == []


# -- recorder ------------------------------------------------------------------------------------------


def test_recorder_tells_the_story(event_recorder):
    """Events by name and field, transitions as pairs, and the states visited."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[event_recorder])
    lifecycle.sleep(1)
    lifecycle.sleep(1)
    lifecycle.wake_up()
    assert event_recorder.transitions == [
        ("awake", "draining"),
        ("draining", "sleeping"),
        ("sleeping", "awake"),
    ]
    assert event_recorder.states == ["awake", "draining", "sleeping", "awake"]
    assert [event["seq"] for event in event_recorder.events] == [e["seq"] for e in lifecycle.events()]
    assert len(event_recorder.named("transition", dest="sleeping")) == 1
    assert event_recorder.named("transition", dest="failed") == []


def test_recorder_is_waited_at(event_recorder):
    """`wait_for` returns what came already, wakes for what comes, and says what came instead."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=[event_recorder])
    assert event_recorder.wait_for("attached", timeout=0)["dest"] == "awake"
    timer = threading.Timer(0.05, lifecycle.sleep)
    timer.start()
    started = time.monotonic()
    assert event_recorder.wait_for("transition", dest="sleeping")["source"] == "draining"
    assert time.monotonic() - started < 4
    timer.join()
    with pytest.raises(TimeoutError, match=r"no failed with \{\} within 0.01 s; what came: attached, "):
        event_recorder.wait_for("failed", timeout=0.01)
    with pytest.raises(TimeoutError, match="what came: nothing"):
        EventRecorder().wait_for("failed", timeout=0)
