"""The blocking surface: what it passes on, and how it waits."""

import dataclasses
import signal
import threading
import time

import pytest

from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import Closed, DrainCancelled, DrainProgress, DrainTimeout, IllegalCall, Lifecycle, State
from lifecycle.requests import Scope

PARAMS = SamplingParams(max_tokens=6, seed=3)


def test_every_option_of_a_request_is_passed_on():
    """The engine gets what the caller gave, under vLLM's names, and vLLM's defaults for the rest."""
    engine = SimulatedEngine()
    lifecycle = Lifecycle(engine, sinks=())
    given = {
        "arrival_time": 5.0,
        "lora_request": "an adapter",
        "tokenization_kwargs": {"a": 1},
        "trace_headers": {"b": "2"},
        "priority": 7,
    }
    seen = []
    prepare = engine.prepare
    engine.prepare = lambda name, prompt, params, options: (
        seen.append(dict(options)) or prepare(name, prompt, params, {})
    )
    lifecycle.add_request("r0", "p", PARAMS, **given, extra="passed too")
    lifecycle.add_request("r1", "p", PARAMS)
    assert seen[0] == {**given, "extra": "passed too"}
    assert seen[1] == {**dict.fromkeys(given), "priority": 0}


def test_progress_cannot_be_changed():
    """What a callback is given is a record of that moment."""
    progress = DrainProgress(remaining=1, drained=2, held=3, steps=4, tokens=5, seconds=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        progress.remaining = 0


def test_progress_is_of_this_drain():
    """Seconds since the drain began; counts of what is in flight, ended and held; tokens since the call."""
    lifecycle = Lifecycle(SimulatedEngine(max_num_seqs=1), sinks=())
    lifecycle.add_request("r", "a prompt", PARAMS)
    lifecycle.step()
    lifecycle.add_request("later", "a prompt", PARAMS)
    began, seen = time.monotonic(), []
    lifecycle.sleep(1, progress=seen.append)
    took = time.monotonic() - began
    # Five more tokens, and a step in which the engine tells its workers of the end.
    assert [(one.remaining, one.drained, one.held) for one in seen] == [(1, 0, 1)] * 4 + [(0, 1, 1)] * 2
    assert [(one.steps, one.tokens) for one in seen] == [(step, min(step, 5)) for step in range(1, 7)]
    assert all(0 <= one.seconds <= took for one in seen)


def test_a_drain_that_its_callback_cancels_says_what_remained():
    """As a deadline does: what was in flight then, not what the rollback admitted again."""
    lifecycle = Lifecycle(SimulatedEngine(max_num_seqs=1), sinks=())
    lifecycle.add_request("r", "a prompt", PARAMS)
    lifecycle.step()
    lifecycle.add_request("later", "a prompt", PARAMS)
    with pytest.raises(DrainCancelled, match="progress callback raised ZeroDivisionError") as caught:
        lifecycle.sleep(1, progress=lambda _: 1 // 0)
    assert (caught.value.remaining, caught.value.steps) == (("r",), 1)
    assert lifecycle.snapshot().in_flight == 2


def running():
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.add_request("r", "a prompt", PARAMS)
    lifecycle.step()
    return lifecycle


@pytest.mark.parametrize("limit", [{"timeout": 0}, {"max_steps": 0}])
def test_a_pause_has_the_limits_of_a_sleep(limit):
    """A deadline in seconds or steps, and what then: rolled back, or another mode."""
    lifecycle = running()
    with pytest.raises(DrainTimeout):
        lifecycle.pause("wait", **limit)
    assert lifecycle.state is State.RUNNING
    assert lifecycle.pause("wait", on_timeout="keep", **limit).kept == ("r",)
    lifecycle.resume()
    assert lifecycle.pause("wait", on_timeout="abort", **limit).aborted == ("r",)


def test_a_sleep_is_of_level_1_and_waits_and_a_pause_keeps():
    """What is left out, as vLLM has it: level 1. Requests come to no harm."""
    lifecycle = running()
    report = lifecycle.sleep()
    assert (report.level, report.mode, report.drained) == (1, "wait", ("r",))
    lifecycle.wake_up()
    report = lifecycle.pause()
    assert (report.level, report.mode) == (0, "keep")


# -- scopes: whose a request is ------------------------------------------------------------------------


def test_what_a_blocking_call_left_behind_is_anybodys_and_was_not_enqueued():
    """`wait_for_completion` waits for what was enqueued alone; who steps by hand may take the rest."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with lifecycle.scope("generate"):
        lifecycle.add_request("r", "a prompt", PARAMS)
    with lifecycle.scope("wait_for_completion", claims_enqueued=True):
        assert not lifecycle.has_unfinished_requests()
    assert [output.request_id for output in lifecycle.step()] == ["r"]


def test_what_an_interrupted_wait_had_not_taken_yet_can_be_taken_by_the_next():
    """Ended requests wait in the mailbox, each for whoever asks for what was enqueued."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with lifecycle.scope("enqueue", enqueues=True):
        lifecycle.add_request("e0", "a prompt", PARAMS)
        lifecycle.add_request("e1", "a prompt", PARAMS)
    lifecycle.sleep(1, "wait_all")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lifecycle.scope("wait_for_completion", claims_enqueued=True):
            assert lifecycle.has_unfinished_requests()
            _ = 1 / 0
        assert lifecycle.snapshot().undelivered == 2
    with lifecycle.scope("wait_for_completion", claims_enqueued=True):
        ended = [output.request_id for output in lifecycle.step() if output.finished]
    assert sorted(ended) == ["e0", "e1"]
    assert lifecycle.check() == []


def test_outputs_that_an_interrupted_call_did_not_take_are_dropped():
    """Its requests had ended, and another thread's step had brought the outputs: nobody will take them."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with pytest.raises(ZeroDivisionError), lifecycle.scope("generate"):
        lifecycle.add_request("r", "a prompt", SamplingParams(max_tokens=1))
        other = threading.Thread(target=lifecycle.step)
        other.start()
        other.join(5)
        assert (lifecycle.state, lifecycle.snapshot().undelivered) == (State.AWAKE, 1)
        _ = 1 / 0
    assert lifecycle.snapshot().undelivered == 0


@pytest.mark.parametrize("ends", [Lifecycle.close, Lifecycle._forget_parent])
def test_a_blocking_call_may_outlive_its_engine(ends):
    """Closed meanwhile, or left in a forked child: what comes out is the call's own exception."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with pytest.raises(ZeroDivisionError), lifecycle.scope("generate"):
        lifecycle.add_request("r", "a prompt", PARAMS)
        ends(lifecycle)
        _ = 1 / 0


@pytest.fixture
def waits_for_nobody(monkeypatch):
    """A step of a blocking call that would wait fails."""
    monkeypatch.setattr(Lifecycle, "_wait_for_change", lambda *_: pytest.fail("it waits"))


@pytest.mark.usefixtures("waits_for_nobody")
def test_a_step_without_outputs_returns_where_the_engine_serves():
    """A request whose outputs come all at the end: its blocking call steps on, and does not wait."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    params = SamplingParams(max_tokens=2, output_kind=OutputKind.FINAL_ONLY)
    with lifecycle.scope("generate"):
        lifecycle.add_request("r", "a prompt", params)
        assert lifecycle.step() == []
        assert [output.finished for output in lifecycle.step()] == [True]


@pytest.mark.usefixtures("waits_for_nobody")
def test_a_blocking_call_in_a_forked_child_waits_for_no_wake():
    """Nobody there could wake the engine: it is refused like every other call."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with pytest.raises(Closed, match="belongs to the parent"), lifecycle.scope("generate"):
        lifecycle.add_request("r", "a prompt", PARAMS)
        lifecycle.sleep(1)
        lifecycle._forget_parent()
        lifecycle.step()


# -- the end -------------------------------------------------------------------------------------------


def test_detach_after_the_end_is_no_error_whatever_was_not_taken():
    """It lets go of nothing; outputs in the mailbox can still be taken."""
    lifecycle = running()
    lifecycle.close()
    assert lifecycle.snapshot().undelivered == 1
    lifecycle.detach()
    assert [output.finished for output in lifecycle.step()] == [True]


def test_detach_is_refused_while_an_output_waits_though_nothing_else_is_left_to_do():
    """The engine serves and is idle, but its last output is in the mailbox only."""
    lifecycle = running()
    lifecycle.sleep(1)
    lifecycle.wake_up()
    assert lifecycle.state is State.AWAKE
    with pytest.raises(IllegalCall, match="0 requests are held and 1 not delivered"):
        lifecycle.detach()
    lifecycle.step()
    lifecycle.detach()


def test_an_attached_engine_is_never_shut_down():
    """`close` of an engine that is somebody else's lets go of it, and undoes the attachment once."""
    lifecycle = running()
    engine, undone = lifecycle._core.engine, []
    lifecycle.disown(lambda: undone.append(lifecycle.state))
    lifecycle.close()
    lifecycle.close()
    assert (undone, engine.closed) == ([State.CLOSED], False)


# -- stepping and waiting -------------------------------------------------------------------------------


def test_a_step_that_nobody_waits_for_pays_for_no_handler():
    """The hot path leaves Ctrl-C to whoever it was set by; what comes in the engine fails it."""
    lifecycle, seen = running(), []
    step = lifecycle._core._step
    lifecycle._core._step = lambda: seen.append(signal.getsignal(signal.SIGINT)) or step()
    lifecycle.step()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_blocking_call_waits_through_every_part_of_a_wake_and_costs_nothing(monkeypatch):
    """Until the engine serves again, half awake too, the call waits without spinning; then it goes on.

    What waits in the mailbox for somebody else is no reason to look again.
    """
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    lifecycle.add_request("theirs", "p", SamplingParams(max_tokens=1))
    with lifecycle.scope("generate"):
        lifecycle.add_request("mine", "p", SamplingParams(max_tokens=1))
        lifecycle.step()
    assert lifecycle.snapshot().undelivered == 1
    started, tokens, looks = threading.Event(), [], []
    wait = Lifecycle._wait_for_change
    monkeypatch.setattr(Lifecycle, "_wait_for_change", lambda self, seen: looks.append(1) or wait(self, seen))

    def generate():
        with lifecycle.scope("generate"):
            lifecycle.add_request("r", "a prompt", PARAMS)
            started.set()
            asleep.wait(5)
            while lifecycle.has_unfinished_requests():
                for output in lifecycle.step():
                    tokens[:] = output.outputs[0].token_ids

    asleep = threading.Event()
    thread = threading.Thread(target=generate)
    thread.start()
    assert started.wait(5)
    lifecycle.sleep(1, "keep")
    asleep.set()
    time.sleep(0.3)
    lifecycle.wake_up(["weights"])
    assert lifecycle.state is State.PARTIALLY_AWAKE
    time.sleep(0.3)
    assert thread.is_alive()
    lifecycle.wake_up()
    thread.join(5)
    assert not thread.is_alive()
    assert tokens == expected_tokens("a prompt", PARAMS)
    assert 0 < len(looks) < 20  # once for each thing that it was told
    assert lifecycle.check() == []


def test_a_blocking_call_that_has_less_than_it_asked_for_says_why():
    """Somebody closed the engine that held its request: nothing is left to wait for, and that is told."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with pytest.raises(Closed, match="r did not come to its end"), lifecycle.scope("generate"):
        lifecycle.sleep(1)
        lifecycle.add_request("r", "a prompt", PARAMS)
        closer = threading.Thread(target=lifecycle.close)
        closer.start()
        closer.join()
        assert not lifecycle.has_unfinished_requests()


def test_a_wait_for_what_was_enqueued_in_an_engine_closed_since_says_why():
    """It gets no empty list, as if all had been taken."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with lifecycle.scope("enqueue", enqueues=True):
        lifecycle.sleep(1)
        lifecycle.add_request("r", "a prompt", PARAMS)
    lifecycle.close()
    with pytest.raises(Closed), lifecycle.scope("wait_for_completion", claims_enqueued=True):
        assert not lifecycle.has_unfinished_requests()


def test_outside_a_blocking_call_nobody_is_asked_for():
    """Counts outside of any scope are anybody's, also after a scope was used once."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    with lifecycle.scope("generate"):
        assert not lifecycle.has_unfinished_requests()
        lifecycle._core.ledger.admit(
            lifecycle._core.engine.prepare("theirs", "p", PARAMS, {}), "theirs-1", Scope("other"), 0
        )
        assert not lifecycle.has_unfinished_requests()
    assert not lifecycle.has_unfinished_requests()
    lifecycle.add_request("mine", "p", PARAMS)
    assert lifecycle.has_unfinished_requests()
    assert lifecycle.get_num_unfinished_requests() == 1
