"""What plain vLLM's `AsyncLLM` does at sleep, wake and pause: one test for each known hazard.

The engine runs in a process of its own. Nothing here is guarded: these tests say what a guard must make
impossible, and turn red when a release mends it.
"""

import asyncio

import pytest
import pytest_asyncio

from tests.engines import DEFAULTS, model_dir

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

LENGTH = 24
LONG = 200  # still running whenever a test looks
# Longer than anything that comes at all takes to come here, a first step included.
NEVER_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir()), **DEFAULTS))
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared):
    """An engine that is awake and empty, and so again after the test."""
    yield shared
    await shared.wake_up()
    await shared.resume_generation()
    assert await asyncio.wait_for(collect(shared, "afterwards", 1), 30)
    assert shared.get_num_unfinished_requests() == 0


def params(max_tokens, kind="CUMULATIVE"):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=7, output_kind=RequestOutputKind[kind]
    )


async def collect(engine, name, max_tokens=LENGTH, came=None):
    """How many tokens one request gets, and why it ends. came: set with the first."""
    last = None
    async for output in engine.generate("a prompt", params(max_tokens), name):
        last = output
        if came is not None:
            came.set()
    return len(last.outputs[0].token_ids), last.outputs[0].finish_reason


async def start(engine, name):
    """A task that reads a long request, of which the first token has come."""
    came = asyncio.Event()
    task = asyncio.create_task(collect(engine, name, LONG, came))
    await asyncio.wait_for(came.wait(), 30)
    return task


async def comes(awaitable):
    """Whether it ends within a time in which everything that ends does."""
    done, _ = await asyncio.wait([awaitable], timeout=NEVER_S)
    return bool(done)


async def test_a_sleep_that_waits_strikes_after_the_wake(engine):
    """`wake_up` while `sleep(mode="wait")` is pending says True; then the memory goes, and it runs on."""
    reading = await start(engine, "long")
    sleeping = asyncio.create_task(engine.sleep(1, mode="wait"))
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    assert await engine.wake_up() is True
    assert await engine.is_paused() is False
    assert await reading == (LONG, "length")
    await asyncio.wait_for(sleeping, 30)
    assert await engine.is_sleeping() is True
    assert await engine.is_paused() is False
    assert await collect(engine, "asleep") == (LENGTH, "length")  # computed with what is not there


async def test_a_cancelled_sleep_goes_on(engine):
    """Cancelling the task that awaits `sleep` cancels the wait alone: the engine falls asleep."""
    reading = await start(engine, "long")
    sleeping = asyncio.create_task(engine.sleep(1, mode="wait"))
    await asyncio.sleep(0.05)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert await reading == (LONG, "length")
    await asyncio.sleep(0.2)
    assert await engine.is_sleeping() is True


async def test_a_sleeping_engine_can_be_resumed(engine):
    """`resume_generation` while memory is asleep is accepted, and the next request is computed without it."""
    await engine.sleep(1)
    await engine.resume_generation()
    assert await engine.is_sleeping() is True
    assert await collect(engine, "asleep") == (LENGTH, "length")


async def test_a_failed_sleep_is_a_pause_that_nobody_asked_for(engine):
    """After a sleep that raised it says that it sleeps, schedules nothing, and `wake_up` says True."""
    await engine.collective_rpc("fail_next", args=("sleep",))
    with pytest.raises(Exception, match="told to fail"):
        await engine.sleep(1)
    assert await engine.is_sleeping() is True
    assert await engine.is_paused() is True
    assert await engine.wake_up() is True


async def test_a_request_that_arrives_asleep_hangs(engine):
    """A request made during a sleep is accepted, and nothing comes of it until somebody wakes the engine."""
    await engine.sleep(1)
    reading = asyncio.create_task(collect(engine, "early"))
    assert not await comes(reading)
    await engine.wake_up()
    assert await asyncio.wait_for(reading, 30) == (LENGTH, "length")


async def test_a_pause_does_not_survive_a_sleep(engine):
    """A caller's pause ends with the next full wake, though nobody resumed."""
    await engine.pause_generation()
    await engine.sleep(1)
    await engine.wake_up()
    assert await engine.is_paused() is False


async def test_an_untaken_output_is_lost_when_the_engine_fails(engine):
    """What a reader of deltas had not taken when the engine died is replaced by the error."""
    from vllm.v1.engine.exceptions import EngineDeadError

    stream = engine.generate("a prompt", params(LONG, "DELTA"), "slow")
    first = await anext(stream)
    [state] = engine.output_processor.request_states.values()
    await asyncio.wait_for(state.queue.ready.wait(), 30)  # the second has come, and is not taken
    engine.output_processor.propagate_error(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await anext(stream)
    assert state.detokenizer.num_output_tokens() > len(first.outputs[0].token_ids)
    await engine.abort("slow")
