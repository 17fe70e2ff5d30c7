"""`attach_async` on a real `AsyncLLM` in a process of its own: the object is guarded wherever it is held."""

import asyncio
import inspect

import pytest
import pytest_asyncio

from engine_adapter import attach_async
from lifecycle import (
    AsyncLifecycle,
    EngineFailed,
    IllegalCall,
    InvalidArgument,
    State,
)
from tests.engines import DEFAULTS, model_dir
from tests.test_vllm_self_driven import LONG, NAMES, collect, ends, start

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def build():
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir()), **DEFAULTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain():
    llm = build()
    yield llm
    llm.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right(plain):
    """What each request comes to on the plain engine."""
    return {name: await collect(plain, name) for name in NAMES}


@pytest_asyncio.fixture(loop_scope="module")
async def llm(plain, right):
    """The engine under guard, and plain, awake and empty after the test."""
    life = await attach_async(plain, sinks=())
    yield plain
    if life.state is not State.CLOSED:
        await life.resume_generation()
        await life.wake_up()
        await life.close()
    assert await asyncio.wait_for(collect(plain, "1"), 30) == right["1"]
    assert plain.get_num_unfinished_requests() == 0


async def test_the_object_stays_what_it_is(plain, llm):
    """Same object, same kind, its parts at hand; attaching again gives the same lifecycle."""
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM

    assert llm is plain
    assert isinstance(llm, AsyncLLM)
    assert isinstance(llm, EngineClient)
    assert llm.vllm_config.model_config is llm.model_config
    assert llm.output_processor.request_states == {}
    assert llm.engine_core is not None
    assert llm.get_tokenizer() is not None
    assert isinstance(llm.lifecycle, AsyncLifecycle)
    assert await attach_async(llm) is llm.lifecycle
    with pytest.raises(InvalidArgument, match="attached already"):
        await attach_async(llm, max_held=3)
    with pytest.raises(InvalidArgument, match="guarded already"):
        AsyncLifecycle.from_async_llm(llm)
    assert (llm.errored, llm.is_running, llm.is_stopped) == (False, True, False)
    await llm.check_health()


async def test_every_argument_of_the_plain_calls_is_taken(llm):
    """Each guarded call binds what the plain one's signature has."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_adapter.standin_async import GuardedAsyncLLM

    for name, guarded in vars(GuardedAsyncLLM).items():
        original = getattr(AsyncLLM, name, None)
        if name.startswith("_") or not inspect.isfunction(original):
            continue
        parameters = list(inspect.signature(original).parameters.values())[1:]
        by_name = {p.name: None for p in parameters}
        inspect.signature(guarded).bind(llm, **by_name)
        in_order = [None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        inspect.signature(guarded).bind(llm, *in_order)


async def test_the_calls_of_the_object_are_guarded(llm, right):
    """A sleep waits, a request is held until the wake, and nothing is lost."""
    tasks = await start(llm, names=NAMES[:2])
    report = await llm.sleep()
    assert (report.level, report.mode, llm.lifecycle.state) == (1, "wait", State.SLEEPING)
    assert await llm.is_sleeping()
    tasks["2"] = asyncio.create_task(collect(llm, "2"))
    await asyncio.sleep(0.2)
    assert llm.get_num_unfinished_requests() == len(report.held) + 1
    with pytest.raises(IllegalCall, match="reload_weights"):
        await llm.collective_rpc("reload_weights")
    with pytest.raises(IllegalCall, match="generate"):
        await llm.add_request("x", "y", None)
    assert not await llm.wake_up(["weights"])
    assert await llm.wake_up(["kv_cache"])
    assert await ends(tasks) == {name: right[name] for name in NAMES[:3]}


async def test_what_comes_down_to_collective_rpc_is_seen(llm):
    """A weight update of the engine's own surface is a load: refused under requests, else legal."""
    tasks = await start(llm, max_tokens=LONG, names=NAMES[:1])
    with pytest.raises(IllegalCall, match="in flight: 0"):
        await llm.start_weight_update()
    await llm.abort("0")
    assert (await ends(tasks))["0"][2] == "abort"


async def test_requests_of_others_are_drained(plain, right):
    """An engine that is found busy: its requests end before it sleeps, and their readers get all."""
    tasks = await start(plain, max_tokens=LONG, names=NAMES[:3])
    tasks["3"] = asyncio.create_task(collect(plain, "3"))
    life = await attach_async(plain, sinks=())
    assert life.state is State.RUNNING
    report = await life.sleep(1)
    assert sorted(report.drained) == ["0", "1", "2"] or len(report.drained) == 4
    assert await life.wake_up()
    results = await ends(tasks)
    assert results["3"] == right["3"]
    assert {len(results[name][0]) for name in NAMES[:3]} == {LONG}
    await asyncio.wait_for(life.wait_for("awake"), 10)
    await life.close()
    assert type(plain).__name__ == "AsyncLLM"


async def test_the_end_of_found_requests_is_seen(plain):
    """Nobody tells of it, and yet the state becomes AWAKE."""
    tasks = await start(plain, names=NAMES[:2])
    life = await attach_async(plain, sinks=())
    await ends(tasks)
    await asyncio.wait_for(life.wait_for("awake"), 10)
    await life.close()


async def test_closing_takes_the_guard_away_and_leaves_the_engine(llm, right):
    """What is in flight ends first; then the object is plain again, and serves."""
    tasks = await start(llm, names=NAMES[:2])
    life = llm.lifecycle
    await life.close()
    assert await ends(tasks) == {name: right[name] for name in NAMES[:2]}
    assert type(llm).__name__ == "AsyncLLM"
    assert not hasattr(llm, "lifecycle")
    assert not await llm.is_paused()
    assert await asyncio.wait_for(collect(llm, "3"), 30) == right["3"]


async def test_it_is_found_asleep(plain, right):
    """A sleeping engine is attached to as one, and wakes."""
    await plain.sleep(1)
    life = await attach_async(plain, weights="unchecked", sinks=())
    assert life.state is State.SLEEPING
    task = asyncio.create_task(collect(plain, "2"))
    assert await plain.wake_up()
    assert await asyncio.wait_for(task, 30) == right["2"]
    await life.close()


async def test_the_servers_application_takes_it(llm, right):
    """The server that vLLM has, built around the guarded object, completes, sleeps and wakes through it."""
    import httpx
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(model_dir())])
    validate_parsed_serve_args(args)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks)
    await init_app_state(llm, app.state, args, tasks)
    ask = {"model": str(model_dir()), "prompt": "prompt number 0", "max_tokens": 5, "temperature": 0}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/v1/completions", json=ask)
        assert answer.status_code == 200, answer.text
        await llm.sleep(1)
        waits = asyncio.create_task(client.post("/v1/completions", json=ask))
        await asyncio.sleep(0.3)
        assert llm.lifecycle.snapshot().held == 1
        await llm.wake_up()
        assert (await waits).json()["choices"] == answer.json()["choices"]
        bad = await client.post("/v1/completions", json={**ask, "prompt": "x" * 9999})
        assert bad.status_code == 400
        assert (await client.get("/health")).status_code == 200


# -- what trainers do, in words of our own ----------------------------------------------------------------


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_openrlhf_loads_parameter_by_parameter_under_kept_requests(llm, right, clear_cache):
    """Between `pause_generation(mode="keep")` and `resume_generation`, one call of the workers each.

    Every load is seen. What is kept is computed again, or goes on with the KV it has, on record; the
    weights are the same in the end, so the tokens are.
    """
    tasks = await start(llm, names=NAMES[:5])
    report = await llm.pause_generation(mode="keep", clear_cache=clear_cache)
    assert report.kept
    epoch = llm.lifecycle.snapshot().epoch
    for factor in (2.0, 0.5):
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            await llm.collective_rpc("update_weight", args=(name, factor))
    assert llm.lifecycle.snapshot().epoch == epoch + 4
    tasks["5"] = asyncio.create_task(collect(llm, "5"))
    await llm.resume_generation()
    assert await ends(tasks) == right
    counts = [event["count"] for event in llm.lifecycle._events.tail(None) if event["event"] == "stale_kv"]
    assert counts == ([] if clear_cache else [4])


async def test_new_weights_show_in_what_is_computed_after_them(llm, right):
    """A load under kept requests changes the tokens that follow, and none that were there."""
    tasks = await start(llm, max_tokens=LONG, names=NAMES[:1])
    before = await collect(llm, "1", max_tokens=LONG)
    await llm.pause_generation(mode="keep")
    await llm.collective_rpc("update_weight", args=("model.norm.weight", -1.0))
    await llm.resume_generation()
    after = await collect(llm, "1", max_tokens=LONG)
    assert before != after
    assert len((await ends(tasks))["0"][0]) == LONG
    await llm.collective_rpc("update_weight", args=("model.norm.weight", -1.0))
    assert await collect(llm, "1", max_tokens=LONG) == before


@pytest.mark.parametrize("level", [1, 2])
async def test_verl_keeps_its_pause_over_sleep_and_wake(llm, right, level):
    """Pause, sleep, wake the weights, load, wake the cache, and only then resume: what waited is served."""
    tasks = await start(llm, max_tokens=LONG, names=NAMES[:2])
    await llm.pause_generation()
    assert {reason for _, _, reason in (await ends(tasks)).values()} == {"abort"}
    waits = asyncio.create_task(collect(llm, "2"))
    await llm.sleep(level=level)
    await llm.wake_up(tags=["weights"])
    await llm.collective_rpc("update_weights_from_path", kwargs={"path": None})
    await llm.lifecycle.mark_weights_loaded(version="step-1")
    await llm.reset_prefix_cache()
    await llm.wake_up(tags=["kv_cache"])
    assert await llm.is_paused()
    assert not waits.done()
    await llm.resume_generation()
    assert await asyncio.wait_for(waits, 30) == right["2"]


async def test_prime_rl_loads_from_a_path_while_requests_are_kept(llm, right):
    """Paused with what it has of KV, loaded as a whole by its own worker method, and resumed."""
    tasks = await start(llm, names=NAMES[:5])
    await llm.pause_generation(mode="keep", clear_cache=False)
    await llm.collective_rpc("update_weights_from_path", args=("a checkpoint",))
    await llm.resume_generation()
    assert await ends(tasks) == {name: right[name] for name in NAMES[:5]}


async def test_without_a_word_about_its_weights_a_level_2_wake_does_not_serve(llm, right):
    """Nobody can look into another process: the caller says that they were loaded, or `unchecked`."""
    await llm.sleep(2)
    assert not await llm.wake_up()
    held = asyncio.create_task(collect(llm, "2"))
    await asyncio.sleep(0.2)
    assert not held.done()
    await llm.reload_weights()
    assert await asyncio.wait_for(held, 30) == right["2"]


# -- the end ----------------------------------------------------------------------------------------------


async def test_a_handed_over_engine_is_not_rebuilt(llm):
    """Without `build` there is no recovery, and the error says so; `errored` tells of the failure."""
    await llm.collective_rpc("fail_next", args=("sleep",))
    with pytest.raises(EngineFailed):
        await llm.sleep(1)
    assert llm.errored
    with pytest.raises(IllegalCall, match="build="):
        await llm.lifecycle.recover()
    await llm.lifecycle.close()
    await llm.resume_generation()


async def test_a_shut_down_engine_tells_its_readers():
    """`shutdown` while streams are open ends them as failed; with `build` the next one serves."""
    llm = build()
    life = await attach_async(llm, build=build, sinks=())
    right = await collect(llm, "1")
    tasks = await start(llm, max_tokens=LONG, names=NAMES[:2])
    llm.shutdown()
    results = await ends(tasks)
    assert [type(result) for result in results.values()] == [EngineFailed] * 2
    await life.recover()
    assert await asyncio.wait_for(collect(llm, "1"), 30) == right
    await life.close()
