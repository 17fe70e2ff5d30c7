"""What `Lifecycle` does to requests, on the simulated engine: modes, deadlines, failures."""

import threading
import time
from contextlib import suppress

import pytest

from engine_adapter.simulated import (
    OutputKind,
    SamplingParams,
    SimulatedEngine,
    expected_tokens,
    make_weights,
)
from lifecycle import (
    AdmissionClosed,
    CacheNotReset,
    Closed,
    DrainCancelled,
    DrainStalled,
    DrainTimeout,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    Lifecycle,
    ReleaseFailed,
    State,
    WakeFailed,
    WeightsNotValid,
)
from lifecycle.engine import OutOfDeviceMemory


class Run:
    """An engine with a lifecycle, what was asked of it, and what came out."""

    def __init__(self, *, engine=None, **options):
        self.engine = engine or SimulatedEngine(max_num_seqs=2)
        self.lifecycle = Lifecycle(self.engine, sinks=(), **options)
        self.asked = {}
        self.outputs = {}

    def add(self, name, tokens=8, prompt=None, **params):
        prompt = prompt or f"prompt of {name}"
        params = SamplingParams(max_tokens=tokens, seed=hash(name) % 1000, **params)
        self.asked[name] = (prompt, params)
        return self.lifecycle.add_request(name, prompt, params)

    def step(self, times=1):
        for _ in range(times):
            for output in self.lifecycle.step():
                copy = self.engine.copy_output(output)
                self.outputs.setdefault(output.request_id, []).append(copy)

    def finish(self):
        while self.lifecycle.has_unfinished_requests():
            self.step()

    def last(self, name):
        return [output for output in self.outputs.get(name, []) if output.finished]

    def tokens(self, name):
        """A request's tokens, joined if they came as deltas."""
        _, params = self.asked[name]
        if params.output_kind is OutputKind.DELTA:
            return [token for output in self.outputs[name] for token in output.outputs[0].token_ids]
        return self.last(name)[0].outputs[0].token_ids

    def right(self, name):
        """Ended once, with exactly the tokens of an uninterrupted run."""
        assert len(self.last(name)) == 1, name
        prompt, params = self.asked[name]
        assert self.tokens(name) == expected_tokens(prompt, params), name

    def sound(self):
        assert self.lifecycle.check() == []
        assert self.engine.misuse == []


@pytest.fixture
def run():
    """Four requests on two slots, three steps in: two have started, two have not."""
    made = Run()
    for index in range(4):
        made.add(f"r{index}")
    made.step(3)
    yield made
    made.sound()


def everything_right(run):
    run.finish()
    for name in run.asked:
        run.right(name)


# -- modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("kind", list(OutputKind))
def test_wait_finishes_what_started_and_holds_the_rest(level, kind):
    """Mode wait: started requests end, the others wait outside the engine; all come out right."""
    run = Run()
    for index in range(4):
        run.add(f"r{index}", output_kind=kind)
    run.step(3)
    report = run.lifecycle.sleep(level, "wait")
    assert (sorted(report.drained), report.held, report.kept) == (["r0", "r1"], ("r2", "r3"), ())
    assert not run.engine.parents
    run.lifecycle.wake_up()
    if level == 2:
        run.lifecycle.reload_weights()
    everything_right(run)
    run.sound()


def test_wait_all_finishes_everything(run):
    """Mode wait_all: everything admitted before the call is finished first."""
    report = run.lifecycle.sleep(1, "wait_all")
    assert sorted(report.drained) == ["r0", "r1", "r2", "r3"]
    run.finish()
    for name in run.asked:
        run.right(name)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_abort_ends_everything_with_the_tokens_it_has(kind):
    """Mode abort: each request gets one last output, reason abort, with its tokens so far."""
    run = Run()
    for index in range(4):
        run.add(f"r{index}", output_kind=kind)
    run.step(3)
    report = run.lifecycle.sleep(1, "abort")
    assert report.aborted == ("r0", "r1", "r2", "r3")
    run.finish()
    for name, (prompt, params) in run.asked.items():
        assert [output.outputs[0].finish_reason for output in run.last(name)] == ["abort"]
        got = run.tokens(name)
        assert got == expected_tokens(prompt, params)[: len(got)]
    assert len(run.tokens("r0")) == 3
    assert run.tokens("r3") == []
    run.sound()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_keep_freezes_what_is_in_flight(run, level):
    """Mode keep: nothing ends, the report names the kept and their epoch, and they go on after the wake."""
    report = run.lifecycle.sleep(level, "keep")
    assert report.kept == ("r0", "r1", "r2", "r3")
    assert (report.epoch, report.drained) == (0, ())
    run.lifecycle.wake_up()
    if level == 2:
        run.lifecycle.reload_weights()
    everything_right(run)


def test_keep_steps_out_what_was_launched():
    """Launched batches are finished and delivered before the engine sleeps, in every mode."""
    for mode in ("wait", "wait_all", "keep", "abort"):
        run = Run(engine=SimulatedEngine(max_num_seqs=2, batch_queue_size=2))
        run.add("r")
        run.step(3)
        assert run.engine.has_launched()
        run.lifecycle.sleep(1, mode)
        assert not run.engine.has_launched()
        run.lifecycle.wake_up()
        run.finish()
        if mode != "abort":
            run.right("r")
        run.sound()


def test_requests_are_held_while_asleep_and_admitted_oldest_first(run):
    """What is asked for while asleep waits outside the engine, behind what was recalled."""
    run.lifecycle.sleep(1)
    for index in range(4, 7):
        run.add(f"r{index}")
    assert run.lifecycle.snapshot().held == 5
    report = run.lifecycle.wake_up()
    assert report.readmitted == ("r2", "r3", "r4", "r5", "r6")
    everything_right(run)


def test_recalled_requests_keep_their_arrival_time(run):
    """A recalled request is readmitted with the time of its call, not of the wake."""
    asked = {name: record.call.arrival_time for name, record in run.lifecycle._core.ledger.in_flight.items()}
    run.lifecycle.sleep(1)
    seen = {}
    real = run.engine.add
    run.engine.add = lambda call: (seen.__setitem__(call.request_id, call.arrival_time), real(call))[1]
    run.lifecycle.wake_up()
    assert seen == {name: asked[name] for name in ("r2", "r3")}
    everything_right(run)


def test_a_started_parent_is_never_split():
    """n=4 on two slots: once a sample has started the whole request is drained."""
    run = Run()
    run.add("four", n=4)
    run.add("late")
    run.step(2)
    report = run.lifecycle.sleep(1)
    assert (report.drained, report.held) == (("four",), ("late",))
    run.lifecycle.wake_up()
    run.finish()
    samples = {output.outputs[0].index: output.outputs[0] for output in run.outputs["four"]}
    prompt, params = run.asked["four"]
    for index in range(4):
        assert samples[index].token_ids == expected_tokens(prompt, params, index)
    run.right("late")
    run.sound()


def test_params_are_a_snapshot():
    """A caller that reuses its parameters object for the next request does not change a held one."""
    run = Run()
    run.lifecycle.sleep(1)
    params = SamplingParams(max_tokens=5, seed=1)
    run.lifecycle.add_request("a", "prompt", params)
    params.max_tokens = 2
    run.lifecycle.add_request("b", "prompt", params)
    run.lifecycle.wake_up()
    run.finish()
    assert [len(run.last(name)[0].outputs[0].token_ids) for name in "ab"] == [5, 2]


def test_equal_params_are_kept_once():
    """A hundred held requests with equal parameters share one snapshot of them."""
    run = Run()
    run.lifecycle.sleep(1)
    for index in range(100):
        run.lifecycle.add_request(f"r{index}", "prompt", SamplingParams(max_tokens=5, seed=1))
    snapshots = {id(record.call.params) for record in run.lifecycle._core.ledger.held.values()}
    assert len(snapshots) == 1


# -- the mailbox ---------------------------------------------------------------------------------------


def test_drained_outputs_are_delivered_once_then_step_refuses(run):
    """Outputs of the drain come first, each once; then `step` says why it can't go on."""
    run.lifecycle.sleep(1)
    run.step()
    assert len(run.last("r0")) == len(run.last("r1")) == 1
    with pytest.raises(IllegalCall, match=r"cannot step while sleeping \(level 1\).*legal now: .*wake_up"):
        run.lifecycle.step()
    assert run.lifecycle.has_unfinished_requests()  # r2 and r3 are held


def test_outputs_in_the_mailbox_are_snapshots():
    """A cumulative output that waits does not grow with the engine's live list."""
    run = Run()
    run.add("r", tokens=6)
    run.step(2)
    run.lifecycle.sleep(1, "wait")
    run.step()
    assert [len(output.outputs[0].token_ids) for output in run.outputs["r"]] == [1, 2, 3, 4, 5, 6]


def test_mailbox_outputs_come_before_new_ones():
    """After the wake the mailbox is handed out before the engine is stepped again."""
    run = Run()
    run.add("r", tokens=6)
    run.step(1)
    sleep = run.lifecycle._core.begin_sleep(0, "wait")
    sleep.advance()
    sleep.cancel()
    calls = len(run.engine.calls)
    run.step()
    assert len(run.engine.calls) == calls
    everything_right(run)


# -- deadlines -----------------------------------------------------------------------------------------


def test_timeout_zero_sleeps_only_if_quiet(run):
    """timeout=0 on a busy engine is rolled back; on a quiet one it sleeps."""
    with pytest.raises(DrainTimeout) as caught:
        run.lifecycle.sleep(1, "wait_all", timeout=0)
    assert caught.value.remaining == ("r0", "r1", "r2", "r3")
    assert run.lifecycle.state is State.RUNNING
    everything_right(run)
    assert run.engine.has_work()  # the last finished ids are still to be flushed: nobody waits for that
    assert run.lifecycle.sleep(1, timeout=0).level == 1
    run.lifecycle.wake_up()


def test_kv_memory_is_released_after_an_abort_at_the_pause(run):
    """The engine still has ids to flush then, and would refuse: they are flushed first."""
    run.lifecycle.pause("keep")
    run.lifecycle.abort_request(["r0", "r1", "r2", "r3"])
    run.lifecycle.release_kv_cache_memory()
    assert run.engine.resident == {"weights"}
    assert run.lifecycle.resume().noop


def test_weights_loaded_unseen_survive_a_sleep_at_level_1():
    """What was loaded and not looked at yet is put aside by level 1, and valid after the wake."""
    run = Run()
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up()
    run.engine.load_weights(make_weights(3).items())
    run.lifecycle.sleep(1)
    assert run.lifecycle.wake_up()
    assert run.engine.weights == make_weights(3)
    run.sound()


def test_a_reload_of_one_shard_loses_the_others_and_is_not_served():
    """A reload makes fused tensors anew: over valid weights too, what it did not bring is gone."""
    run = Run()
    report = run.lifecycle.reload_weights(weights_iterator=[("layers.0.q_proj", 7), ("lm_head", 7)])
    assert not report
    assert set(report.missing) == {"layers.0.k_proj", "layers.0.v_proj"}
    with pytest.raises(WeightsNotValid, match=r"never loaded: layers\.0\.[kv]_proj"):
        run.lifecycle.step()
    assert run.lifecycle.reload_weights()
    run.add("r")
    run.finish()
    run.right("r")
    run.sound()


def test_a_reload_without_a_hole_is_served():
    """A part that brings whole tensors is legitimate over valid weights."""
    run = Run()
    assert run.lifecycle.reload_weights(weights_iterator=[("lm_head", 7)])
    assert run.lifecycle.state is State.AWAKE
    run.sound()


def test_a_recovered_engine_may_give_a_held_request_the_id_it_had():
    """A handle outlives its engine; that the next engine counts from the beginning is no failure."""
    run = Run()
    run.engine = None
    run.lifecycle = Lifecycle(lambda: run.__dict__.update(engine=SimulatedEngine()) or run.engine, sinks=())
    run.add("r")
    run.lifecycle.sleep(1)
    run.engine.faults.add("wake_up", raises=RuntimeError("lost"))
    with pytest.raises(EngineFailed):
        run.lifecycle.wake_up()
    assert run.lifecycle.recover() == ("r",)
    run.finish()
    run.right("r")
    run.sound()


def test_a_deadline_never_rolls_back_an_abort(run):
    """mode="abort" has ended everything before a deadline could pass: the sleep goes on."""
    report = run.lifecycle.sleep(1, "abort", max_steps=0)
    assert report.aborted == ("r0", "r1", "r2", "r3")
    assert run.lifecycle.state is State.SLEEPING


def test_max_steps_rolls_back_and_admits_what_was_recalled_and_held(run):
    """At the deadline admission reopens, the recalled are back in the engine, nothing was lost."""
    with pytest.raises(DrainTimeout, match="after 2 steps"):
        run.lifecycle.sleep(1, max_steps=2)
    assert run.lifecycle.snapshot().held == 0
    assert run.lifecycle.snapshot().in_flight == 4
    everything_right(run)


@pytest.mark.parametrize("fallback", ["abort", "keep"])
def test_a_deadline_falls_through(run, fallback):
    """on_timeout="abort" or "keep" ends the drain that way, and the report says so."""
    report = run.lifecycle.sleep(1, max_steps=2, on_timeout=fallback)
    assert report.mode == fallback
    assert any("fell through" in warning for warning in report.warnings)
    assert report.aborted == (("r0", "r1") if fallback == "abort" else ())
    assert report.kept == (("r0", "r1") if fallback == "keep" else ())
    run.lifecycle.wake_up()
    run.finish()
    for name in ("r2", "r3"):
        run.right(name)


def test_wait_falls_through_to_keep_at_its_own_deadline_mode():
    """A drain in mode keep with on_timeout keep has no deadline to fall over again."""
    run = Run(engine=SimulatedEngine(batch_queue_size=2))
    run.add("r")
    run.step(3)
    assert run.lifecycle.sleep(1, "keep", max_steps=0, on_timeout="keep").kept == ("r",)
    run.lifecycle.wake_up()
    everything_right(run)


def test_a_drain_without_progress_is_stalled_and_rolled_back():
    """An engine that says it has work but computes nothing for the stall limit: DrainStalled."""
    run = Run(stall_s=0.05)
    run.add("r")
    run.step(2)
    for _ in range(1000):
        run.engine.faults.add("step", returns=[])
    with pytest.raises(DrainStalled, match="computed nothing"):
        run.lifecycle.sleep(1)
    assert run.lifecycle.state is State.RUNNING
    run.engine.faults.clear()
    everything_right(run)


def test_final_only_requests_are_progress_though_they_return_nothing():
    """Progress is read from the engine: a healthy drain without outputs is not stalled."""
    run = Run(stall_s=0.02)
    run.add("r", tokens=40, output_kind=OutputKind.FINAL_ONLY)
    run.step(2)
    real = run.engine.step
    run.lifecycle._core._step = lambda: (time.sleep(0.002), real())[1]
    assert run.lifecycle.sleep(1).steps >= 38
    run.lifecycle.wake_up()
    everything_right(run)


def test_progress_is_reported_after_each_step_without_the_lock(run):
    """The callback sees counts and tokens grow, and may read from inside."""
    seen = []
    run.lifecycle.sleep(1, progress=lambda p: seen.append((p, run.lifecycle.get_num_unfinished_requests())))
    assert [view.steps for view, _ in seen] == list(range(1, len(seen) + 1))
    assert [view.tokens for view, _ in seen] == sorted(view.tokens for view, _ in seen)
    assert seen[0][0].held == 2


def test_an_exception_of_the_progress_callback_cancels(run):
    """A callback that raises rolls the drain back: DrainCancelled, with the cause."""
    with pytest.raises(DrainCancelled) as caught:
        run.lifecycle.sleep(1, progress=lambda _: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert run.lifecycle.state is State.RUNNING
    everything_right(run)


def test_a_callback_that_calls_the_engine_is_refused(run):
    """Inside a transition everything but reading, admission and abort is refused, naming it."""
    with pytest.raises(DrainCancelled) as caught:
        run.lifecycle.sleep(1, progress=lambda _: run.lifecycle.wake_up())
    assert "sleep(level=1, mode=wait) is under way" in str(caught.value.__cause__)
    everything_right(run)


def test_tokens_of_the_drain_are_counted():
    """The report's tokens are those generated during the drain, for every output kind."""
    for kind in OutputKind:
        run = Run()
        run.add("r", tokens=20, output_kind=kind)
        run.step(5)
        assert run.lifecycle.sleep(1).tokens == 15, kind


# -- wake ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_partial_wake_does_not_resume(run, order):
    """With one tag back nothing steps and new requests are held; with both, all goes on."""
    run.lifecycle.sleep(1)
    run.step()  # the mailbox
    report = run.lifecycle.wake_up(order[:1])
    assert not report
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    run.add("late")
    with pytest.raises(IllegalCall, match="partially awake"):
        run.lifecycle.step()
    assert run.lifecycle.wake_up(order[1:])
    everything_right(run)


def test_what_already_holds_is_a_recorded_noop(run):
    """Wake when awake, sleep at the same level, a tag that is back: said, not done."""
    assert run.lifecycle.wake_up().noop
    run.lifecycle.sleep(1)
    assert run.lifecycle.sleep(1).noop
    run.lifecycle.wake_up(["weights"])
    assert run.lifecycle.wake_up(["weights"]).noop
    assert run.lifecycle.wake_up(["scheduling"]).noop
    calls = [call for call in run.engine.calls if call.startswith(("sleep", "wake_up"))]
    assert calls == ["sleep(1)", "wake_up(weights)"]
    assert sum(event["count"] for event in run.lifecycle.events() if event["event"] == "noop") == 4
    run.lifecycle.wake_up()
    everything_right(run)


def test_no_memory_to_wake_leaves_the_state(run):
    """A wake that finds too little memory changes nothing and can be tried again."""
    run.lifecycle.sleep(1)
    run.engine.faults.add("wake_up", raises=OutOfDeviceMemory("short", 4096))
    with pytest.raises(WakeFailed) as caught:
        run.lifecycle.wake_up()
    assert caught.value.missing_bytes == 4096
    assert run.lifecycle.state is State.SLEEPING
    assert run.lifecycle.wake_up()
    everything_right(run)


def test_a_tag_that_does_not_come_back_is_seen(run):
    """A wake that returns while a tag stays asleep is WakeFailed, and the state says what is true."""
    run.lifecycle.sleep(1)
    run.engine.faults.add("wake_up", effect="tag_stays_asleep")
    with pytest.raises(WakeFailed, match="did not come back"):
        run.lifecycle.wake_up()
    assert not run.lifecycle.snapshot().resident >= {"weights", "kv_cache"}
    assert run.lifecycle.is_sleeping()
    assert run.lifecycle.wake_up()
    everything_right(run)


def test_deepen_and_back_to_sleep(run):
    """Level 0 deepens to 1; partly awake goes back to sleep; other changes are refused with a way out."""
    run.lifecycle.sleep(0)
    run.lifecycle.sleep(1)
    with pytest.raises(IllegalCall, match="vLLM ignores a change from level 1"):
        run.lifecycle.sleep(2)
    run.lifecycle.wake_up(["kv_cache"])
    with pytest.raises(IllegalCall, match="ignores it while the weights sleep"):
        run.lifecycle.sleep(1)
    run.lifecycle.wake_up(["weights"])
    run.lifecycle.sleep(1)
    run.lifecycle.wake_up(["weights"])
    assert run.lifecycle.sleep(1).level == 1
    run.lifecycle.wake_up()
    everything_right(run)


def test_kept_requests_cannot_be_waited_for_while_asleep(run):
    """Deepening with kept requests takes mode keep or abort, not wait."""
    run.lifecycle.sleep(0, "keep")
    with pytest.raises(IllegalCall, match="use mode='keep' or mode='abort'"):
        run.lifecycle.sleep(1)
    assert run.lifecycle.sleep(1, "keep").kept == ("r0", "r1", "r2", "r3")
    run.lifecycle.wake_up()
    everything_right(run)


def test_kept_requests_can_be_aborted_on_the_way_down(run):
    """Deepening in mode abort ends the kept ones with the tokens they have."""
    run.lifecycle.sleep(0, "keep")
    assert run.lifecycle.sleep(1, "abort").aborted == ("r0", "r1", "r2", "r3")
    run.finish()
    assert len(run.tokens("r0")) == 3
    run.lifecycle.wake_up()


def test_kv_cache_alone_can_be_released(run):
    """release_kv_cache_memory: from a pause with nothing in flight, and back by its tag."""
    with pytest.raises(IllegalCall, match=r"a pause \(level 0\) with nothing in flight"):
        run.lifecycle.release_kv_cache_memory()
    run.lifecycle.sleep(0)
    run.lifecycle.release_kv_cache_memory()
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    assert run.lifecycle.wake_up(["kv_cache"])
    everything_right(run)


# -- pause ---------------------------------------------------------------------------------------------


def test_a_pause_survives_sleep_and_wake(run):
    """pause, sleep(1), wake: back at the pause; only resume serves."""
    run.lifecycle.pause()
    run.lifecycle.sleep(1, "keep")
    assert not run.lifecycle.wake_up()
    assert (run.lifecycle.state, run.lifecycle.snapshot().level) == (State.SLEEPING, 0)
    assert run.lifecycle.wake_up().noop
    assert run.lifecycle.resume()
    everything_right(run)


def test_resume_while_deeper_asleep_lets_the_wake_serve(run):
    """Resume at level 1 wakes no memory, but the wake then serves."""
    run.lifecycle.pause("wait")
    run.lifecycle.sleep(1)
    assert not run.lifecycle.resume()
    assert run.lifecycle.snapshot().level == 1
    assert run.lifecycle.wake_up()
    everything_right(run)


def test_pause_while_asleep_holds_the_wake(run):
    """A pause said while asleep is kept in mind: the wake stops at it."""
    run.lifecycle.sleep(1)
    assert run.lifecycle.pause().noop
    run.lifecycle.wake_up()
    assert run.lifecycle.is_sleeping()
    run.lifecycle.resume()
    everything_right(run)


def test_a_plain_level_0_sleep_is_undone_by_any_wake(run):
    """sleep(0) is vLLM's own: wake_up undoes it."""
    run.lifecycle.sleep(0)
    assert run.lifecycle.wake_up()
    everything_right(run)


# -- weights -------------------------------------------------------------------------------------------


def test_level_2_serves_only_after_a_load(run):
    """After level 2 nothing is served until the weights were loaded; the error names what is missing."""
    run.lifecycle.sleep(2)
    run.step()
    report = run.lifecycle.wake_up()
    assert not report
    assert report.missing
    with pytest.raises(WeightsNotValid, match=f"never loaded: {report.missing[0]}"):
        run.lifecycle.step()
    assert run.lifecycle.reload_weights(version="v2").valid
    assert run.lifecycle.snapshot().weights_version == "v2"
    everything_right(run)


def test_a_load_that_nothing_could_watch_is_recognised(run):
    """Loaded straight into the engine between the two wakes: the last tag finds no hole."""
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up(["weights"])
    run.engine.load_weights(make_weights().items())
    assert run.lifecycle.wake_up(["kv_cache"])
    everything_right(run)


def test_an_unseen_load_after_the_whole_wake_is_recognised_at_the_next_step(run):
    """Loaded straight into the engine after everything is awake: the next call looks again."""
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up()
    run.engine.load_weights(make_weights().items())
    run.finish()
    everything_right(run)


def test_one_forgotten_parameter_is_named(run):
    """A load with one hole is not enough, and the hole is named."""
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up(["weights"])
    weights = make_weights()
    forgotten, value = weights.popitem()
    run.engine.load_weights(weights.items())
    assert run.lifecycle.wake_up(["kv_cache"]).missing == (forgotten,)
    with pytest.raises(WeightsNotValid, match=forgotten):
        run.lifecycle.mark_weights_loaded()
    run.engine.load_weights([(forgotten, value)])
    assert run.lifecycle.wake_up()
    everything_right(run)


def test_declared_weights_need_the_callers_word():
    """weights="declared": neither the wake nor an unseen load is enough."""
    run = Run(weights="declared")
    run.add("r")
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up(["weights"])
    run.engine.load_weights(make_weights().items())
    assert not run.lifecycle.wake_up()
    assert run.lifecycle.mark_weights_loaded("v3").version == "v3"
    everything_right(run)
    run.sound()


def test_unchecked_weights_are_valid_at_the_wake():
    """weights="unchecked": waking is enough, and it is in the log that nobody looked."""
    for tags in ([None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]):
        run = Run(weights="unchecked")
        run.lifecycle.sleep(2)
        for some_tags in tags:
            run.lifecycle.wake_up(some_tags)
        assert run.lifecycle.state is State.AWAKE
        assert [event["call"] for event in run.lifecycle.events() if event["event"] == "weights"] == [
            "unchecked"
        ]


def test_a_failed_load_taints(run):
    """A load that raises leaves weights nobody may serve; a whole load cures that."""
    run.finish()
    run.engine.faults.add("reload_weights", raises=OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        run.lifecycle.reload_weights()
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    assert run.lifecycle.snapshot().weights == "tainted"
    with pytest.raises(WeightsNotValid):
        run.lifecycle.step()
    assert run.lifecycle.reload_weights()
    assert run.lifecycle.state is State.AWAKE


def test_an_update_taints_until_it_is_finished(run):
    """Between start and finish of an update nothing is served; requests are held meanwhile."""
    run.finish()
    for call in ("start_weight_update", "update_weights"):
        run.lifecycle.collective_rpc(call)
    assert run.lifecycle.snapshot().weights == "tainted"
    run.add("during")
    assert run.lifecycle.snapshot().held == 1
    run.lifecycle.collective_rpc("finish_weight_update")
    everything_right(run)


def test_loads_drop_the_caches(run):
    """A load in any state drops what was computed with the old weights."""
    run.finish()
    run.lifecycle.reload_weights()
    assert "reset_caches" in run.engine.calls


def test_caches_that_stay_are_an_error(run):
    """If the engine keeps its caches over a load, the weights are not served."""
    run.finish()
    run.engine.faults.add("reset_caches", returns=False)
    with pytest.raises(CacheNotReset):
        run.lifecycle.reload_weights()
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    run.lifecycle.reload_weights()


def test_a_load_under_requests_is_refused(run):
    """In flight or kept over valid weights: a load would mix the old model with the new."""
    with pytest.raises(IllegalCall, match="nothing in flight that pause_generation does not keep"):
        run.lifecycle.reload_weights()
    run.lifecycle.sleep(0, "keep")
    with pytest.raises(IllegalCall, match="nothing in flight that pause_generation does not keep"):
        run.lifecycle.collective_rpc("update_weight")
    run.lifecycle.wake_up()
    everything_right(run)


def test_epochs_count_loads_and_versions_are_labels(run):
    """Each load is a new epoch; going back to an earlier version is legitimate."""
    run.finish()
    epochs = [run.lifecycle.reload_weights(version=version).epoch for version in ("a", "b", "a")]
    assert epochs == [1, 2, 3]
    assert run.lifecycle.snapshot().weights_version == "a"


def test_a_dummy_load_is_not_served():
    """An engine built without weights serves nothing until they are loaded."""
    run = Run(engine=SimulatedEngine(dummy_weights=True))
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    run.add("r")
    with pytest.raises(WeightsNotValid):
        run.lifecycle.step()
    run.engine.load_weights(make_weights().items())
    everything_right(run)
    run.sound()


# -- admission -----------------------------------------------------------------------------------------


def test_max_held_bounds_what_is_held():
    """max_held=2 holds two and refuses the third; 0 holds none."""
    for limit in (0, 2):
        run = Run(max_held=limit)
        run.lifecycle.sleep(1)
        for index in range(limit):
            run.add(f"r{index}")
        with pytest.raises(AdmissionClosed, match=f"max_held={limit}"):
            run.lifecycle.add_request("more", "prompt", SamplingParams())
        run.lifecycle.wake_up()
        everything_right(run)
        run.sound()


def test_a_live_id_is_refused_wherever_the_request_is(run):
    """In flight, held or not yet delivered: the id can't be used again; afterwards it can."""
    for name in ("r0", "r3"):
        with pytest.raises(InvalidArgument, match="is live"):
            run.lifecycle.add_request(name, "prompt", SamplingParams())
    run.lifecycle.sleep(1)
    for name in ("r0", "r3"):  # undelivered, held
        with pytest.raises(InvalidArgument, match="is live"):
            run.lifecycle.add_request(name, "prompt", SamplingParams())
    run.lifecycle.wake_up()
    everything_right(run)
    run.outputs.clear()
    run.add("r0")
    everything_right_for = run.finish()
    assert everything_right_for is None
    run.right("r0")


def test_abort_by_either_id(run):
    """Abort takes the caller's id, the engine's id, and the id given for a held request."""
    handle = run.lifecycle._core.ledger.in_flight["r0"].handle
    run.lifecycle.abort_request([handle])
    run.lifecycle.abort_request(["r1"])
    run.lifecycle.sleep(1)
    held = run.add("r4")
    run.lifecycle.abort_request([held, "unknown"], internal=True)
    run.lifecycle.wake_up()
    run.finish()
    assert set(run.outputs) - {"r0", "r1"} == {"r2", "r3"}
    assert not run.last("r0")
    assert not run.last("r1")


def test_a_handle_given_before_a_recall_stays_good(run):
    """The id returned by add_request aborts the request also after it was recalled and readmitted."""
    handle = run.lifecycle._core.ledger.in_flight["r3"].handle
    run.lifecycle.sleep(1)
    run.lifecycle.wake_up()
    assert run.lifecycle._core.ledger.in_flight["r3"].engine_id != handle
    run.lifecycle.abort_request([handle], internal=True)
    run.finish()
    assert not run.last("r3")


def test_abort_takes_a_list(run):
    """A bare string would be taken for a list of letters: refused."""
    with pytest.raises(InvalidArgument, match="must be a list"):
        run.lifecycle.abort_request("r0")


def test_counts_are_vllms():
    """The drop-in count is of samples; the snapshot counts requests."""
    run = Run()
    run.add("r", n=3)
    assert run.lifecycle.get_num_unfinished_requests() == 3
    assert run.lifecycle.snapshot().in_flight == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda life: life.sleep(-1),
        lambda life: life.sleep(3),
        lambda life: life.sleep("1"),
        lambda life: life.sleep(True),
        lambda life: life.sleep(1.0),
        lambda life: life.sleep(1, "hard"),
        lambda life: life.sleep(1, None),
        lambda life: life.sleep(1, timeout=-1),
        lambda life: life.sleep(1, timeout=float("nan")),
        lambda life: life.sleep(1, timeout=float("inf")),
        lambda life: life.sleep(1, timeout="1"),
        lambda life: life.sleep(1, timeout=True),
        lambda life: life.sleep(1, max_steps=-1),
        lambda life: life.sleep(1, max_steps=1.5),
        lambda life: life.sleep(1, on_timeout="wait"),
        lambda life: life.pause("hard"),
        lambda life: life.wake_up([]),
        lambda life: life.wake_up(["bogus"]),
        lambda life: life.wake_up(["weights", "weights"]),
        lambda life: life.wake_up("weights"),
        lambda life: life.wake_up({"weights": 1}),
        lambda life: life.add_request("new", "", SamplingParams()),
        lambda life: life.add_request("new", "x" * 1000, SamplingParams()),
        lambda life: life.add_request("r0", "prompt", SamplingParams()),
    ],
)
@pytest.mark.parametrize("asleep", [False, True])
def test_bad_input_changes_nothing(call, asleep):
    """A wrong argument is an InvalidArgument in every state, and nothing reaches the engine."""
    run = Run()
    run.add("r0")
    run.step()
    if asleep:
        run.lifecycle.sleep(1, "keep")
    before, calls = run.lifecycle.snapshot(), list(run.engine.calls)
    with pytest.raises(InvalidArgument):
        call(run.lifecycle)
    after = run.lifecycle.snapshot()
    assert {**before.to_dict(), "seq": 0} == {**after.to_dict(), "seq": 0}
    assert run.engine.calls == calls
    run.lifecycle.wake_up()
    everything_right(run)
    run.sound()


# -- failure -------------------------------------------------------------------------------------------


def test_a_failing_step_reaches_the_caller_and_ends_what_was_in_flight(run):
    """EngineFailed with the cause; partial tokens are handed out; nothing else reaches the engine."""
    run.engine.faults.add("step", raises=ValueError("kernel"))
    with pytest.raises(EngineFailed, match="kernel") as caught:
        run.lifecycle.step()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.in_flight == ("r0", "r1", "r2", "r3")
    calls = list(run.engine.calls)
    run.finish()
    assert [output.outputs[0].finish_reason for output in run.last("r0")] == ["error"]
    assert len(run.tokens("r0")) == 3
    with pytest.raises(EngineFailed):
        run.lifecycle.step()
    with pytest.raises(EngineFailed):
        run.lifecycle.add_request("new", "prompt", SamplingParams())
    with pytest.raises(EngineFailed):
        run.lifecycle.sleep(1)
    assert run.engine.calls == calls
    assert run.lifecycle.state is State.FAILED


def test_a_step_that_fails_in_mid_drain_means_no_sleep(run):
    """The engine never slept, the held stay listed, and the failure names itself."""
    run.engine.faults.add("step", at=2, raises=RuntimeError("kernel"))
    with pytest.raises(EngineFailed) as caught:
        run.lifecycle.sleep(1)
    assert (caught.value.in_flight, caught.value.held) == (("r0", "r1"), ("r2", "r3"))
    assert not [call for call in run.engine.calls if call.startswith("sleep")]
    run.step()
    assert [output.outputs[0].finish_reason for output in run.last("r0")] == ["error"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_memory_calls_that_raise_fail(run, call, when):
    """A sleep or a wake that raises half-way can't be trusted, and says so."""
    run.engine.faults.add(call, when=when, raises=RuntimeError("half"))
    if call == "wake_up":
        run.lifecycle.sleep(1, "keep")
    with pytest.raises(EngineFailed, match="half"):
        run.lifecycle.sleep(1, "keep") if call == "sleep" else run.lifecycle.wake_up()
    assert run.lifecycle.state is State.FAILED
    run.finish()
    assert all(len(run.last(name)) == 1 for name in run.asked)


def test_recover_builds_a_new_engine_and_admits_what_was_held():
    """The old engine is shut down before the new one is built; what never started is served."""
    engines = []

    def build():
        assert all(engine.closed for engine in engines)
        engines.append(SimulatedEngine(max_num_seqs=2))
        return engines[-1]

    lifecycle = Lifecycle(build, sinks=())
    for index in range(4):
        lifecycle.add_request(f"r{index}", f"prompt {index}", SamplingParams(max_tokens=5, seed=index))
    lifecycle.step()
    engines[0].faults.add("step", raises=RuntimeError("kernel"))
    with pytest.raises(EngineFailed):
        lifecycle.sleep(1)
    assert lifecycle.recover() == ("r2", "r3")
    done = {}
    while lifecycle.has_unfinished_requests():
        done.update({output.request_id: output for output in lifecycle.step() if output.finished})
    reasons = {name: output.outputs[0].finish_reason for name, output in done.items()}
    assert reasons == {"r0": "error", "r1": "error", "r2": "length", "r3": "length"}
    want = expected_tokens("prompt 3", SamplingParams(max_tokens=5, seed=3))
    assert done["r3"].outputs[0].token_ids == want
    assert lifecycle.check() == []
    assert [engine.misuse for engine in engines] == [[], []]


def test_recover_after_a_recover_that_failed():
    """A factory that raises leaves FAILED, and recover can be called again."""
    attempts = []

    def build():
        attempts.append(1)
        if len(attempts) == 2:
            raise OSError("no device")
        return SimulatedEngine()

    lifecycle = Lifecycle(build, sinks=())
    lifecycle._core.engine.faults.add("step", raises=RuntimeError("kernel"))
    with pytest.raises(EngineFailed):
        lifecycle.step()
    with pytest.raises(OSError, match="no device"):
        lifecycle.recover()
    assert lifecycle.state is State.FAILED
    lifecycle.recover()
    assert lifecycle.state is State.AWAKE


def test_a_lost_device_context_says_restart():
    """Where no new engine can live in the process, recover is refused and says so."""
    run = Run(engine=None)
    run.engine.faults.add("step", raises=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(EngineFailed, match="restart the process") as caught:
        run.lifecycle.step()
    assert caught.value.restart


def test_recover_needs_a_factory_and_a_failure():
    """An engine that was handed over can't be rebuilt; one that serves needs no recovery."""
    run = Run()
    with pytest.raises(IllegalCall, match="an engine that failed"):
        run.lifecycle.recover()
    run.engine.faults.add("step", raises=RuntimeError("kernel"))
    with pytest.raises(EngineFailed):
        run.lifecycle.step()
    with pytest.raises(IllegalCall, match="handed over"):
        run.lifecycle.recover()


def test_freeing_far_too_little_is_a_warning_or_an_error():
    """A sleep that frees nothing is in the report; with strict_release it raises, and the engine sleeps."""
    for strict in (False, True):
        run = Run(strict_release=strict)
        run.engine.faults.add("sleep", effect="frees_nothing")
        if strict:
            with pytest.raises(ReleaseFailed):
                run.lifecycle.sleep(1)
        else:
            assert any("released" in warning for warning in run.lifecycle.sleep(1).warnings)
        assert run.lifecycle.state is State.SLEEPING


def test_an_output_twice_reaches_nobody_twice(run):
    """If the engine hands out a last output twice, the second is recorded and dropped."""
    run.engine.faults.add("step", at=5, effect="output_duplicated")
    everything_right(run)


def test_an_abort_that_the_engine_ignores(run):
    """Outputs of a request that was aborted reach nobody, even if the engine goes on with it."""
    run.engine.faults.add("abort", effect="ignored")
    run.lifecycle.abort_request(["r0"])
    run.outputs.clear()
    run.finish()
    assert "r0" not in run.outputs
    assert any(event["event"] == "unexpected_output" for event in run.lifecycle.events())


def test_bad_arguments_of_a_passed_call_are_the_callers(run):
    """An exception of apply_model or an RPC is the caller's to see and fails nothing."""
    run.engine.faults.add("apply_model", raises=KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        run.lifecycle.apply_model(lambda model: model)
    everything_right(run)


@pytest.mark.parametrize("method", ["sleep", "wake_up", "discard"])
def test_rpcs_do_not_go_behind_the_machine(run, method):
    """Worker methods that change residency are refused with the way to do it."""
    with pytest.raises(IllegalCall, match=f"use the lifecycle's own {method}"):
        run.lifecycle.collective_rpc(method)
    everything_right(run)


def test_unknown_calls_need_a_serving_engine(run):
    """A call that the table does not know is refused while asleep."""
    run.lifecycle.sleep(1)
    with pytest.raises(IllegalCall, match="cannot frobnicate"):
        run.lifecycle.call("frobnicate")
    run.lifecycle.wake_up()
    everything_right(run)


# -- the end -------------------------------------------------------------------------------------------


def test_close_ends_what_is_in_flight_and_can_be_said_twice():
    """Partial tokens can still be taken after close; then everything is refused."""
    run = Run()
    run.add("r")
    run.step(3)
    with run.lifecycle:
        pass
    run.lifecycle.close()
    run.finish()
    assert len(run.tokens("r")) == 3
    with pytest.raises(Closed):
        run.lifecycle.step()
    with pytest.raises(Closed):
        run.lifecycle.wake_up()
    assert run.engine.closed
    assert run.lifecycle.check() == []


def test_detach_is_refused_while_something_is_held_or_undelivered(run):
    """Letting go of the engine must not lose what waits outside it."""
    run.lifecycle.sleep(1)
    with pytest.raises(IllegalCall, match="2 requests are held and 2 not delivered"):
        run.lifecycle.detach()
    run.lifecycle.wake_up()
    everything_right(run)
    run.lifecycle.detach()
    assert not run.engine.closed


# -- attach: what the engine is found in ---------------------------------------------------------------


def found(prepare):
    engine = SimulatedEngine(max_num_seqs=2)
    prepare(engine)
    return Run(engine=engine)


def test_found_asleep():
    """An engine that already sleeps is SLEEPING, and wakes as any other."""

    def prepare(engine):
        engine.pause_scheduling()
        engine.sleep(1)

    run = found(prepare)
    assert run.lifecycle.state is State.SLEEPING
    run.add("r")
    run.lifecycle.wake_up()
    everything_right(run)
    run.sound()


def test_found_with_requests_in_flight():
    """Requests that were in flight are adopted: drained, delivered, counted; never recalled."""

    def prepare(engine):
        for index in range(4):
            params = SamplingParams(max_tokens=6, seed=index)
            engine.add(engine.prepare(f"r{index}", f"prompt {index}", params, {}))
        engine.step()

    run = found(prepare)
    assert run.lifecycle.state is State.RUNNING
    assert run.lifecycle.sleep(1).held == ()
    run.finish()
    for index in range(4):
        run.asked[f"r{index}"] = (f"prompt {index}", SamplingParams(max_tokens=6, seed=index))
        run.right(f"r{index}")
    run.sound()


def test_found_paused():
    """A paused engine is SLEEPING at level 0; a wake undoes it."""
    run = found(lambda engine: engine.pause_scheduling())
    assert (run.lifecycle.state, run.lifecycle.snapshot().level) == (State.SLEEPING, 0)
    assert run.lifecycle.wake_up()


# -- threads -------------------------------------------------------------------------------------------


def test_admission_and_abort_are_served_between_the_steps_of_a_drain():
    """While one thread drains, another's requests are held at once and its aborts take effect."""
    run = Run()
    run.add("long", tokens=200)
    run.add("gone", tokens=200)
    run.step(2)
    real = run.engine.step

    def slow():
        time.sleep(0.001)
        return real()

    run.lifecycle._core._step = slow
    started = threading.Event()
    reports = []
    drain = threading.Thread(
        target=lambda: reports.append(run.lifecycle.sleep(1, progress=lambda _: started.set()))
    )
    drain.start()
    started.wait(5)
    begun = time.monotonic()
    for index in range(20):
        run.add(f"held{index}")
    run.lifecycle.abort_request(["gone"])
    assert time.monotonic() - begun < 1.0  # the lock is fair: each waits for about one step
    assert run.lifecycle.state is State.DRAINING
    with pytest.raises(IllegalCall, match=r"sleep.level=1, mode=wait. is under way"):
        run.lifecycle.wake_up()
    drain.join(10)
    assert reports[0].drained == ("long",)
    assert len(reports[0].held) == 20
    run.lifecycle.wake_up()
    run.finish()
    run.right("held19")
    run.sound()


def test_a_hang_is_seen_from_another_thread():
    """`snapshot` answers while an engine call hangs, and names the call and its age."""
    run = Run()
    hang = threading.Event()
    for call, act in (("step", run.lifecycle.step), ("sleep", lambda: run.lifecycle.sleep(1))):
        hang.clear()
        run.engine.faults.add(call, hang=hang)
        thread = threading.Thread(target=act)
        thread.start()
        deadline = time.monotonic() + 5
        while run.lifecycle.snapshot().operation is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        snapshot = run.lifecycle.snapshot()
        hang.set()
        thread.join(5)
        assert snapshot.operation == call
        assert 0.04 < snapshot.operation_age_s < 5


def test_a_call_from_inside_an_engine_call_is_refused():
    """An apply_model function that calls back is refused instead of deadlocking."""
    run = Run()
    real = run.engine.call
    run.engine.call = lambda name, *args: run.lifecycle.step() if name == "apply_model" else real(name, *args)
    with pytest.raises(IllegalCall, match="from inside one of its own calls"):
        run.lifecycle.apply_model(None)


# -- an engine that fails while it is only being read --------------------------------------------------


@pytest.mark.parametrize(
    ("way", "read"),
    [
        *(
            ("drain", read)
            for read in ("memory", "condition", "has_work", "tokens", "progress", "unstarted", "copy_output")
        ),
        *(("deepen", read) for read in ("memory", "condition")),
    ],
)
def test_a_read_that_raises_is_a_failure(run, way, read):
    """Wherever in a sleep the engine raises, even when only read: FAILED, never half a transition."""
    if way == "deepen":
        run.lifecycle.sleep(0, "keep")

    def broken(*_):
        raise RuntimeError("driver gone")

    setattr(run.engine, read, broken)
    with pytest.raises(EngineFailed, match="driver gone"):
        run.lifecycle.sleep(1, "keep" if way == "deepen" else "wait")
    assert run.lifecycle.state is State.FAILED
    assert run.lifecycle.check() == []
    assert run.lifecycle.snapshot().operation is None


@pytest.mark.parametrize("read", ["memory", "condition"])
def test_a_read_that_raises_in_a_wake_is_a_failure(run, read):
    """The same for a wake: what is mapped can't be told any more."""
    run.lifecycle.sleep(1, "keep")

    def broken():
        raise RuntimeError("driver gone")

    setattr(run.engine, read, broken)
    with pytest.raises(EngineFailed, match="driver gone"):
        run.lifecycle.wake_up()
    assert run.lifecycle.state is State.FAILED


# -- weights, once more: what does not cure ------------------------------------------------------------


def test_the_end_of_an_update_that_failed_cures_nothing(run):
    """start, a failing part, finish: the failed part is not forgotten."""
    run.finish()
    run.lifecycle.collective_rpc("start_weight_update")
    run.engine.faults.add("update_weights", raises=OSError("lost a shard"))
    with pytest.raises(OSError, match="shard"):
        run.lifecycle.collective_rpc("update_weights")
    run.lifecycle.collective_rpc("finish_weight_update")
    assert run.lifecycle.snapshot().weights == "tainted"
    run.lifecycle.reload_weights()
    assert run.lifecycle.state is State.AWAKE


def test_an_update_at_a_pause_comes_back_to_the_pause(run):
    """A load is no wake: made at level 0, it ends at level 0."""
    run.finish()
    run.lifecycle.sleep(0)
    for call in ("start_weight_update", "finish_weight_update"):
        run.lifecycle.collective_rpc(call)
    assert (run.lifecycle.state, run.lifecycle.snapshot().level) == (State.SLEEPING, 0)
    assert run.lifecycle.wake_up()


@pytest.mark.parametrize(
    ("asleep", "awake"),
    [
        (lambda life: life.sleep(0), lambda life: life.wake_up()),
        (lambda life: life.sleep(0), lambda life: life.resume()),
        (lambda life: life.pause(), lambda life: life.resume()),
    ],
    ids=["sleep, wake_up", "sleep, resume", "pause, resume"],
)
def test_a_wake_during_an_update_ends_the_pause(run, asleep, awake):
    """A pause that was ended while the weights were torn is over: their load serves without another wake."""
    run.finish()
    asleep(run.lifecycle)
    run.lifecycle.collective_rpc("start_weight_update")
    assert not awake(run.lifecycle)
    assert run.lifecycle.state is State.PARTIALLY_AWAKE
    run.add("during")
    run.lifecycle.collective_rpc("finish_weight_update")
    assert run.lifecycle.state is State.RUNNING
    everything_right(run)


def test_the_way_out_says_what_happened(run):
    """An error about weights says why they are not valid: which update failed, or is not over."""
    run.finish()
    words = []
    for call, error in (("start_weight_update", None), ("update_weights", OSError("the network"))):
        if error:
            run.engine.faults.add(call, raises=error)
        with suppress(OSError):
            run.lifecycle.collective_rpc(call)
        with pytest.raises(WeightsNotValid) as refusal:
            run.lifecycle.step()
        words.append(str(refusal.value))
    assert "start_weight_update began an update that has not finished, so they are neither" in words[0]
    assert "update_weights failed (OSError('the network')), so they are neither" in words[1]


def test_a_load_under_requests_names_them(run):
    """The refusal of a load says whose requests are in the way."""
    run.lifecycle.step()
    with pytest.raises(IllegalCall, match=r"pause_generation does not keep \(in flight: .*\); legal now"):
        run.lifecycle.reload_weights()


def test_the_callers_word_cures_a_failed_load_that_was_made_good(run):
    """Level 2, a load that failed, then a whole load nobody saw: mark_weights_loaded looks again."""
    run.finish()
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up()
    run.engine.faults.add("reload_weights", raises=OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        run.lifecycle.reload_weights()
    with pytest.raises(WeightsNotValid):
        run.lifecycle.mark_weights_loaded()
    run.engine.load_weights(make_weights().items())
    assert run.lifecycle.mark_weights_loaded()
    assert run.lifecycle.state is State.AWAKE


@pytest.mark.parametrize(
    "name", ["sleep", "wake_up", "step", "add_request", "collective_rpc", "reload_weights"]
)
def test_calls_by_name_do_not_go_behind_the_machine(run, name):
    """`call` passes on what the machine does not know of, not what it does itself."""
    with pytest.raises(IllegalCall, match=f"use the lifecycle's own {name}"):
        run.lifecycle.call(name)
    everything_right(run)


@pytest.mark.parametrize(
    "options", [{"max_held": -1}, {"stall_s": -1}, {"weights": "x"}, {"rpc_needs": {"x": "y"}}]
)
def test_bad_options_are_refused_at_once(options):
    """A wrong option is an InvalidArgument when the lifecycle is made."""
    with pytest.raises(InvalidArgument):
        Lifecycle(SimulatedEngine(), sinks=(), **options)


def test_a_class_is_a_factory():
    """An engine class can be given as the callable that builds engines."""
    assert Lifecycle(SimulatedEngine, sinks=()).state is State.AWAKE


def test_a_sleep_that_returns_without_sleeping_is_seen():
    """SLEEPING is entered only when the engine proves it: a sleep that did nothing is a failure."""
    for level in (0, 1):
        run = Run()
        run.engine.faults.add("sleep", returns=None)
        with pytest.raises(EngineFailed, match="returned, but the engine is"):
            run.lifecycle.sleep(level)
        assert run.lifecycle.state is State.FAILED


def test_the_core_refuses_to_be_entered_twice():
    """Even without the lock, a call from inside an engine call is refused by the funnel."""
    run = Run()
    core = run.lifecycle._core
    run.engine.call = lambda *_: core.reload_weights()
    with pytest.raises(IllegalCall, match="apply_model is under way inside the engine"):
        core.call("apply_model", None)


def test_the_way_out_fits_the_policy():
    """Where nothing can be seen, the error does not send the caller to look for what is missing."""
    run = Run(weights="declared")
    run.lifecycle.sleep(2)
    run.lifecycle.wake_up()
    with pytest.raises(WeightsNotValid, match=r"mark_weights_loaded\(\)"):
        run.lifecycle.step()
    run.lifecycle.mark_weights_loaded()


# -- scopes: blocking calls ----------------------------------------------------------------------------


def generate(run, names, call="generate", **scope):
    """What `LLM.generate` does, on a lifecycle."""
    done = {}
    with run.lifecycle.scope(call, **scope):
        for name in names:
            run.add(name)
        while run.lifecycle.has_unfinished_requests():
            for output in run.lifecycle.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0].token_ids
    return done


def right(run, done):
    for name, tokens in done.items():
        assert tokens == expected_tokens(*run.asked[name]), name


def test_a_scope_sees_only_its_own(run):
    """Inside a blocking call counts and outputs are of its own requests; the others' wait in the mailbox."""
    done = generate(run, ["a", "b"])
    assert sorted(done) == ["a", "b"]
    right(run, done)
    assert run.lifecycle.get_num_unfinished_requests() == 4
    everything_right_but(run, {"a", "b"})


def everything_right_but(run, names):
    run.finish()
    for name in set(run.asked) - names:
        run.right(name)


def test_two_blocking_calls_at_once(run):
    """Two threads generate on one engine: each gets exactly its own, right."""
    results = {}

    def work(mark):
        results[mark] = generate(run, [f"{mark}{index}" for index in range(5)])

    threads = [threading.Thread(target=work, args=(mark,)) for mark in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for mark in "xyz":
        assert sorted(results[mark]) == [f"{mark}{index}" for index in range(5)]
        right(run, results[mark])
    everything_right_but(run, {name for done in results.values() for name in done})


def test_a_blocking_call_waits_for_the_wake():
    """A call that began while serving goes on after another thread's sleep and wake."""
    run = Run()
    results = {}
    slow = run.engine.step
    run.lifecycle._core._step = lambda: (time.sleep(0.002), slow())[1]
    thread = threading.Thread(target=lambda: results.update(generate(run, ["a", "b", "c", "d"])))
    thread.start()
    while run.lifecycle.snapshot().in_flight < 4:
        time.sleep(0.001)
    assert run.lifecycle.sleep(1).held
    time.sleep(0.05)
    assert thread.is_alive()
    run.lifecycle.wake_up()
    thread.join(20)
    assert sorted(results) == ["a", "b", "c", "d"]
    right(run, results)
    run.sound()


def test_a_blocking_call_while_asleep_raises_at_once(run):
    """Nothing could serve it: it is refused instead of hanging, and admits nothing."""
    run.lifecycle.sleep(1)
    with pytest.raises(IllegalCall, match="cannot generate while sleeping"):
        generate(run, ["late"])
    run.lifecycle.wake_up()
    everything_right(run)


def test_a_scope_left_by_an_exception_aborts_what_it_owns(run):
    """An interrupted call leaves nothing of its own in the engine, and others untouched."""
    with pytest.raises(KeyError), run.lifecycle.scope("generate"):
        run.add("gone")
        run.lifecycle.step()
        raise KeyError
    del run.asked["gone"]
    everything_right(run)


def test_enqueue_and_wait(run):
    """What was enqueued belongs to the next wait_for_completion; interrupted, it gives back what it took."""
    with run.lifecycle.scope("enqueue", enqueues=True):
        for name in ("e0", "e1"):
            run.add(name, tokens=3 if name == "e0" else 30)
    taken = []
    with (
        pytest.raises(KeyboardInterrupt),
        run.lifecycle.scope("wait_for_completion", claims_enqueued=True),
    ):
        while True:
            taken += [output for output in run.lifecycle.step() if output.finished]
            if taken:
                raise KeyboardInterrupt
    assert [output.request_id for output in taken] == ["e0"]
    assert run.lifecycle.check() == []
    done = generate(run, [], "wait_for_completion", claims_enqueued=True)
    assert sorted(done) == ["e0"]  # e1 was unfinished, and aborted with the call that owned it
    right(run, done)
    everything_right_but(run, {"e0", "e1"})


def test_enqueued_requests_can_be_taken_while_asleep(run):
    """wait_for_completion hands out what a drain finished, without an engine that serves."""
    with run.lifecycle.scope("enqueue", enqueues=True):
        run.add("e", tokens=3)
    run.lifecycle.sleep(1, "wait_all")
    done = generate(run, [], "wait_for_completion", claims_enqueued=True)
    right(run, done)
    assert sorted(done) == ["e"]
    run.lifecycle.wake_up()
    everything_right_but(run, {"e"})
