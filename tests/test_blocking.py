"""The blocking surface: what it passes on, and how it waits."""

import dataclasses
import threading
import time

import pytest

from engine_adapter.simulated import SamplingParams, SimulatedEngine, expected_tokens
from lifecycle import DrainProgress, Lifecycle, State
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


def test_a_blocking_call_waits_through_every_part_of_a_wake_and_costs_nothing():
    """Until the engine serves again, half awake too, the call waits without spinning; then it goes on."""
    lifecycle = Lifecycle(SimulatedEngine(), sinks=())
    started, tokens, spent = threading.Event(), [], []

    def generate():
        with lifecycle.scope("generate"):
            lifecycle.add_request("r", "a prompt", PARAMS)
            started.set()
            asleep.wait(5)
            before = time.thread_time()
            while lifecycle.has_unfinished_requests():
                for output in lifecycle.step():
                    tokens[:] = output.outputs[0].token_ids
            spent.append(time.thread_time() - before)

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
    assert spent[0] < 0.3
    assert lifecycle.check() == []


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
