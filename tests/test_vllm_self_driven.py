"""`AsyncLLM` behind the machine, on a real vLLM in a process of its own.

What `tests/test_vllm_async_facts.py` shows of the plain engine can't happen here.
"""

import asyncio
import os
import random
import signal

import pytest
import pytest_asyncio

from lifecycle import AsyncLifecycle, DrainTimeout, EngineFailed, IllegalCall, InvalidArgument, State
from tests.audit_runs import Replayed
from tests.engines import DEFAULTS, model_dir

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

LENGTH = 24
LONG = 200  # still running whenever a test looks
NAMES = [str(i) for i in range(6)]  # of which four run at once


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_adapter.vllm_async import VllmAsync

    loop = asyncio.get_running_loop()

    def build():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir()), **DEFAULTS))
        return VllmAsync(llm, loop, owned=True)

    async with AsyncLifecycle(build, sinks=(Replayed(),)) as life:
        yield life


@pytest_asyncio.fixture(loop_scope="module")
async def life(shared):
    """The guarded engine, awake and empty; what a test leaves behind is checked and undone."""
    assert shared.state is State.AWAKE
    yield shared
    if shared.state is State.FAILED:
        await shared.recover()
    await shared.resume_generation()
    if shared.state is not State.AWAKE:
        await shared.wake_up()
    await asyncio.wait_for(shared.wait_for("awake"), 30)
    assert await shared._ask("snapshot", lambda core: core.check()) == []
    assert await shared._ask("snapshot", shared._events.sinks[0].check) == []
    assert shared.get_num_unfinished_requests() == 0
    engine = shared._core("snapshot").engine
    assert not engine._passages
    assert engine.raw.get_num_unfinished_requests() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right(shared):
    """The tokens of each request, of every kind, when nobody interrupts."""
    return {name: await collect(shared, name) for name in NAMES}


def params(name, kind="CUMULATIVE", max_tokens=LENGTH, **more):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=int(name),
        temperature=1.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind[kind],
        **more,
    )


async def collect(life, name, kind="CUMULATIVE", max_tokens=LENGTH, *, came=None, **more):
    """Tokens, text and finish reason of one request's first sample. came: set with its first output."""
    tokens, text, reason = [], "", None
    asked = params(name, kind, max_tokens, **more)
    async for output in life.generate(f"prompt number {name}", asked, name):
        if came is not None:
            came.set()
        for sample in output.outputs:
            if sample.index == 0:
                joins = kind == "DELTA"
                tokens = tokens + list(sample.token_ids) if joins else list(sample.token_ids)
                text = text + sample.text if joins else sample.text
                reason = sample.finish_reason or reason
    return tokens, text, reason


async def start(life, kind="CUMULATIVE", max_tokens=LENGTH, names=NAMES, **more):
    """Tasks that read these requests, of which the first has put something out."""
    came = asyncio.Event()
    tasks = {
        name: asyncio.create_task(collect(life, name, kind, max_tokens, came=came, **more)) for name in names
    }
    await asyncio.wait_for(came.wait(), 30)
    return tasks


async def ends(tasks):
    """What each task comes to."""
    results = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 30)
    return dict(zip(tasks, results, strict=True))


async def test_the_reference_outputs_differ_from_each_other(right):
    """Outputs differ, or lost and swapped tokens would go unseen."""
    assert len({tuple(tokens) for tokens, _, _ in right.values()}) == len(NAMES)


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
@pytest.mark.parametrize(("level", "mode"), [(0, "wait"), (1, "wait"), (1, "wait_all"), (1, "keep")])
async def test_a_sleep_changes_nothing(life, right, level, mode, kind):
    """Tokens, text and reasons of every request equal those without the sleep."""
    tasks = await start(life, "CUMULATIVE" if kind == "FINAL_ONLY" else kind, names=NAMES[:5])
    last = asyncio.create_task(collect(life, NAMES[5], kind))
    report = await life.sleep(level, mode)
    assert life.state is State.SLEEPING
    assert report.drained or report.kept or report.held
    assert await life.wake_up()
    assert await ends({**tasks, NAMES[5]: last}) == right


async def test_no_drain_is_bound_by_steps(life):
    """The engine takes its steps by itself, so a number of them is a bad argument."""
    with pytest.raises(InvalidArgument, match="timeout"):
        await life.sleep(1, max_steps=5)
    assert life.state is State.AWAKE


async def test_a_drain_has_a_deadline(life, right):
    """Late, it is rolled back, and nobody notices; or it falls through to the mode that was asked for."""
    tasks = await start(life, max_tokens=LONG, names=NAMES[:2])
    with pytest.raises(DrainTimeout):
        await life.sleep(1, timeout=0.05)
    assert life.state is State.RUNNING
    report = await life.sleep(1, timeout=0.05, on_timeout="keep")
    assert report.kept
    await life.wake_up()
    assert [len(tokens) for tokens, _, _ in (await ends(tasks)).values()] == [LONG, LONG]


async def test_samples_stop_strings_and_deltas_come_through_a_sleep(life):
    """n=2 with a stop string, as deltas: each sample's tokens and reason are those without the sleep."""

    async def read(name):
        got = {}
        asked = params("3", "DELTA", 40, n=2, stop=["e"])
        async for output in life.generate("prompt number 3", asked, name):
            for sample in output.outputs:
                entry = got.setdefault(sample.index, [[], "", None])
                entry[0] += sample.token_ids
                entry[1] += sample.text
                entry[2] = sample.finish_reason or entry[2]
        return got

    right = await read("whole")
    assert len(right) == 2
    for mode in ("wait", "keep"):
        blockers = await start(life, max_tokens=60, names=NAMES[:2])
        task = asyncio.create_task(read(f"slept {mode}"))
        await asyncio.sleep(0.02)
        await life.sleep(1, mode)
        await life.wake_up()
        assert await asyncio.wait_for(task, 30) == right
        await ends(blockers)


async def test_the_report_counts_what_the_drain_computed(life):
    """Tokens of a drain are those that came during it."""
    tasks = await start(life, max_tokens=LONG, names=NAMES[:2])
    report = await life.sleep(0, "wait_all")
    assert sorted(report.drained) == NAMES[:2]
    assert 0 < report.tokens <= 2 * LONG
    await life.wake_up()
    assert [len(tokens) for tokens, _, _ in (await ends(tasks)).values()] == [LONG, LONG]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA"])
async def test_an_aborting_sleep_ends_each_with_the_tokens_it_has(life, right, kind):
    """Each stream ends once, as aborted, with a beginning of the right tokens."""
    tasks = await start(life, kind)
    report = await life.sleep(1, "abort")
    assert sorted([*report.aborted, *report.held]) == NAMES
    await life.wake_up()
    for name, (tokens, _, reason) in (await ends(tasks)).items():
        assert reason == "abort"
        assert tokens == right[name][0][: len(tokens)]


async def test_no_wake_meets_a_pending_sleep(life):
    """While it drains a wake is refused, naming the sleep; none is left over to strike later."""
    tasks = await start(life, max_tokens=LONG, names=NAMES[:1])
    sleeping = asyncio.create_task(life.sleep(1, "wait"))
    await life.wait_for("draining")
    with pytest.raises(IllegalCall, match="sleep"):
        await life.wake_up()
    assert (await ends(tasks))["0"][2] == "length"
    assert (await sleeping).drained == ("0",)


async def test_a_cancelled_sleep_is_rolled_back(life, right):
    """The engine serves on, and never falls asleep."""
    tasks = await start(life, max_tokens=LONG, names=NAMES[:1])
    sleeping = asyncio.create_task(life.sleep(1, "wait"))
    await life.wait_for("draining")
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert await asyncio.wait_for(collect(life, "1"), 30) == right["1"]
    assert (await ends(tasks))["0"][2] == "length"
    assert life.state is State.AWAKE


async def test_a_sleeping_engine_is_not_resumed(life, right):
    """`resume_generation` while memory is asleep starts nothing; a request is held until the wake."""
    await life.sleep(1)
    await life.resume_generation()
    assert life.state is State.SLEEPING
    early = asyncio.create_task(collect(life, "1"))
    await asyncio.sleep(0.3)
    assert not early.done()
    assert life.snapshot().held == 1
    assert (await life.wake_up()).readmitted == ("1",)
    assert await asyncio.wait_for(early, 30) == right["1"]


async def test_a_failed_sleep_is_a_failure(life, right):
    """A sleep that raises inside the engine leaves FAILED; what is held goes on after `recover`."""
    await life.collective_rpc("fail_next", args=("sleep",))
    with pytest.raises(EngineFailed, match="told to fail"):
        await life.sleep(1)
    assert life.state is State.FAILED
    await life.recover()
    assert await asyncio.wait_for(collect(life, "2"), 30) == right["2"]


async def test_a_pause_survives_a_sleep_and_a_wake(life, right):
    """Only `resume_generation` ends it."""
    await life.pause_generation(mode="keep")
    await life.sleep(1, "keep")
    await life.wake_up()
    assert await life.is_paused()
    waits = asyncio.create_task(collect(life, "3"))
    await asyncio.sleep(0.3)
    assert not waits.done()
    await life.resume_generation()
    assert await asyncio.wait_for(waits, 30) == right["3"]


async def test_bad_arguments_are_their_callers_alone(life, right):
    """A prompt that is too long raises InvalidArgument; everybody else goes on."""
    from vllm import SamplingParams

    tasks = await start(life, names=NAMES[:2])
    with pytest.raises(InvalidArgument, match="add_request"):
        async for _ in life.generate({"prompt_token_ids": [5] * 999}, SamplingParams(), "bad"):
            pass
    assert await ends(tasks) == {name: right[name] for name in NAMES[:2]}


async def test_leaving_a_stream_aborts_its_request(life):
    """A reader that breaks off leaves nothing in the engine."""
    async for _ in life.generate("prompt", params("0", max_tokens=LONG), "left"):
        break
    await asyncio.wait_for(life.wait_for("awake"), 30)


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA"])
async def test_the_death_of_the_process_reaches_every_stream(life, right, kind):
    """Each gets the tokens there were and `EngineFailed` within a second; `recover` serves."""
    seen = {name: [] for name in NAMES}
    began = {name: asyncio.Event() for name in NAMES[:4]}

    async def read(name):
        async for output in life.generate(f"prompt number {name}", params(name, kind, LONG), name):
            new = list(output.outputs[0].token_ids)
            seen[name] = seen[name] + new if kind == "DELTA" else new
            if name in began:
                began[name].set()

    tasks = {name: asyncio.create_task(read(name)) for name in NAMES}
    for event in began.values():
        await asyncio.wait_for(event.wait(), 30)
    manager = life._core("snapshot").engine.raw.engine_core.resources.engine_manager
    for process in manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    done, _ = await asyncio.wait(tasks.values(), timeout=1.0)
    assert len(done) == len(NAMES)
    assert all(isinstance(error, EngineFailed) for error in (await ends(tasks)).values())
    assert life.state is State.FAILED
    for name in NAMES[:4]:
        length = min(len(seen[name]), LENGTH)
        assert seen[name][:length] == right[name][0][:length]
    await life.recover()
    assert await asyncio.wait_for(collect(life, "4"), 30) == right["4"]


async def test_death_at_random_moments(life):
    """Fifty streams each time: all end as failed within a second, with a beginning of their tokens.

    KILLS in the environment says how often; each takes a new engine.
    """
    names = [str(number) for number in range(50)]
    right = {name: await collect(life, name, max_tokens=2 * LENGTH) for name in names}
    dice = random.Random(int(os.environ.get("KILLS_SEED", "0")))
    for _ in range(int(os.environ.get("KILLS", "2"))):
        seen = {name: [] for name in names}

        async def read(name, seen=seen):
            kind = ("CUMULATIVE", "DELTA")[int(name) % 2]
            async for output in life.generate(f"prompt number {name}", params(name, kind, LONG), name):
                new = list(output.outputs[0].token_ids)
                seen[name] = seen[name] + new if kind == "DELTA" else new

        tasks = [asyncio.create_task(read(name)) for name in names]
        await asyncio.sleep(dice.uniform(0, 0.6))
        for process in life._core("snapshot").engine.raw.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        done, pending = await asyncio.wait(tasks, timeout=1.0)
        assert not pending
        assert {type(task.exception()) for task in done} == {EngineFailed}
        assert life.state is State.FAILED
        for name in names:
            length = min(len(seen[name]), 2 * LENGTH)
            assert seen[name][:length] == right[name][0][:length]
        await life.recover()
        assert life.snapshot().in_flight == 0
        assert await asyncio.wait_for(collect(life, "4", max_tokens=2 * LENGTH), 30) == right["4"]


async def test_what_comes_together_with_an_abort_begins(life, right):
    """A request that is admitted in the same turn as an aborted one's last output still begins."""
    tasks = await start(life, max_tokens=LONG, names=NAMES[:1])
    aborting = asyncio.create_task(life.abort("0"))
    tasks["1"] = asyncio.create_task(collect(life, "1"))
    await aborting
    done, _ = await asyncio.wait(tasks.values(), timeout=10)
    if len(done) < len(tasks):
        await life.abort("1")  # any command comes to its help
    assert len(done) == len(tasks)
    assert (await ends(tasks))["1"] == right["1"]
