"""The contract of an `Engine`, for one that drives itself: vLLM's `AsyncLLM` behind its adapter.

`Stepped` shows it as an engine that its caller steps. Its steps are the engine's own, slowed down, so that
a rule can look between two of them. Where an engine that drives itself does otherwise by its nature, the
rule is here in its own form.
"""

import asyncio
import threading
import time

import pytest

from lifecycle.testing.contract import CUMULATIVE, DELTA, FINAL_ONLY, PROMPTS, Bench, EngineContract
from tests.engines import DEFAULTS, model_dir
from tests.test_contract import vllm_params

pytestmark = pytest.mark.vllm

STEP_S = 0.06
PATIENCE_S = 2.0


class Stepped:
    """What readers in the loop get, a step of the engine at a time. Everything else is the adapter's."""

    def __init__(self, engine, loop):
        self.adapter, self.loop = engine, loop
        self.changed = threading.Condition()
        self.outputs, self.errors, self.processed, self.reading = [], [], 0, 0
        process = engine.raw.output_processor.process_outputs

        def process_outputs(outputs, *args, **kwargs):
            result = process(outputs, *args, **kwargs)
            if outputs:
                self._note("processed")
            return result

        engine.raw.output_processor.process_outputs = process_outputs
        engine.listen(lambda error: self._note("processed"))

    def __getattr__(self, name):
        return getattr(self.adapter, name)

    def _note(self, what, by=1):
        with self.changed:
            setattr(self, what, getattr(self, what) + by)
            self.changed.notify_all()

    async def _read(self, outputs):
        try:
            async for output in outputs():
                self.outputs.append(self.copy_output(output))
        except Exception as error:
            self.errors.append(error)
        self._note("reading", -1)

    def step(self):
        before = self.processed
        for news in self.adapter.step():
            if news.outputs is not None:
                self._note("reading")
                asyncio.run_coroutine_threadsafe(self._read(news.outputs), self.loop)
            if news.final is not None:
                self.outputs.append(news.final)
        with self.changed:
            if self.reading and not self.outputs:
                self.changed.wait_for(lambda: self.processed > before or not self.reading, PATIENCE_S / 4)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), self.loop).result()  # readers take what came
        taken, self.outputs = self.outputs, []
        return taken

    def has_work(self):
        return bool(self.outputs) or self.adapter.has_work()

    def count_tokens(self, output):
        return super(type(self.adapter), self.adapter).count_tokens(output)

    def copy_output(self, output):
        return super(type(self.adapter), self.adapter).copy_output(output)

    def merge_outputs(self, earlier, later, *, delta):
        return super(type(self.adapter), self.adapter).merge_outputs(earlier, later, delta=delta)


@pytest.fixture(scope="module")
def stepped():
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_adapter.vllm_async import VllmAsync

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model_dir()), **DEFAULTS))
    engine = VllmAsync(llm, loop, owned=True)
    engine.call("collective_rpc", "take_time", args=(STEP_S,))
    yield Stepped(engine, loop)
    engine.shutdown()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


class TestVllmAsync(EngineContract):
    """Behind its adapter `AsyncLLM` keeps the contract, and is idle and awake after each rule."""

    @pytest.fixture
    def bench(self, stepped):
        bench = Bench(stepped, vllm_params)
        yield bench
        until = time.monotonic() + PATIENCE_S
        while bench.engine.has_work() and time.monotonic() < until:
            bench.engine.step()
        assert not bench.engine.has_work()
        assert bench.engine.condition().requests == ()
        assert bench.engine.raw.get_num_unfinished_requests() == 0

    def test_prepare_knows_samples_and_kind(self, bench):
        """`samples` is n; whatever a reader gets, what the owner sees are no deltas."""
        calls = [bench.call("a", n=3), bench.call("b", kind=DELTA), bench.call("c", kind=FINAL_ONLY)]
        assert [(call.samples, call.delta) for call in calls] == [(3, False), (1, False), (1, False)]

    def test_bad_arguments_leave_no_trace(self, bench):
        """`validate` raises ValueError; passed on all the same, its reader gets that, and it is gone."""
        engine = bench.engine
        for prompt in ("", "x" * 4000):
            with pytest.raises(ValueError):
                engine.validate(bench.call("bad", prompt))
            bench.add("bad", prompt)
            assert bench.steps() == []
            assert isinstance(engine.errors.pop(), ValueError)
        assert engine.condition().requests == ()

    def test_what_is_in_flight_is_found(self, bench):
        """`condition` lists requests in flight with their ids and samples."""
        ids = {bench.add("one"): ("one", 1), bench.add("two", n=2, kind=DELTA): ("two", 2)}
        found = {
            item.engine_id: (item.request_id, item.samples) for item in bench.engine.condition().requests
        }
        assert found == ids
        bench.steps()

    def test_unstarted_means_never_scheduled(self, bench):
        """Those without a token never started, and are taken back: their readers get nothing of them."""
        engine = bench.engine
        early = bench.add("early")
        assert engine.unstarted([early]) == [early]
        engine.abort([early])
        ids = [bench.add(f"r{index}", PROMPTS[index]) for index in range(4)]
        late = bench.add("late")
        while not all(engine.tokens(engine_id) for engine_id in ids):
            bench.steps(1)
        assert engine.unstarted([*ids, late]) == [late]
        engine.abort([late])
        while engine.condition().requests:
            bench.steps(1)
        bench.steps()

    def test_tokens_are_counted_while_in_flight(self, bench):
        """`tokens` rises from step to step, up to all of them; it is 0 for what the engine does not know."""
        engine = bench.engine
        engine_id = bench.add("r", tokens=6, n=2)
        counts = []
        while engine.condition().requests:
            bench.steps(1)
            counts.append(engine.tokens(engine_id))
        assert counts[:-1] == sorted(counts[:-1])
        assert len({count for count in counts if 0 < count <= 12}) >= 3
        bench.steps()
        assert engine.tokens(engine_id) == 0

    def test_an_aborted_request_is_gone(self, bench):
        """After `abort` a reader gets vLLM's last word, unknown ids are ignored, the engine is quiet."""
        gone = bench.add("gone", n=2)
        bench.add("stays")
        bench.steps(2)
        bench.engine.abort([gone, "unknown"])
        outputs = bench.steps()
        reasons = {
            sample.finish_reason
            for output in outputs
            if output.request_id == "gone" and output.finished
            for sample in output.outputs
        }
        assert reasons == {"abort"}
        assert len([output for output in outputs if output.request_id == "stays" and output.finished]) == 1

    def test_last_outputs_have_the_tokens_so_far(self, bench):
        """Ended as an error the final output has them; ended by an abort the reader gets them from vLLM."""
        engine = bench.engine
        for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
            bench.add(f"full{kind}", PROMPTS[kind], 9)
        reference = {
            output.request_id[-1]: list(output.outputs[0].token_ids)
            for output in bench.steps()
            if output.finished
        }
        for reason in ("abort", "error"):
            ids = {
                kind: bench.add(f"cut{kind}", PROMPTS[kind], 9, kind=kind)
                for kind in (CUMULATIVE, DELTA, FINAL_ONLY)
            }
            before = bench.steps(4)
            ends = engine.last_outputs(list(ids.values()), reason)
            assert [end.finished for end in ends] == [True] * 3
            engine.abort(list(ids.values()))
            outputs = [end.final for end in ends if end.final is not None]
            assert len(outputs) == (3 if reason == "error" else 0)
            outputs = outputs or bench.steps(3)
            for kind in ids:
                own = [output for output in [*before, *outputs] if output.request_id == f"cut{kind}"]
                assert own[-1].finished
                assert own[-1].outputs[0].finish_reason == reason
                lists = [output.outputs[0].token_ids for output in (own if kind == DELTA else own[-1:])]
                tokens = [token for some in lists for token in some]
                assert 0 < len(tokens) < 9
                assert tokens == reference[str(kind)][: len(tokens)]
            bench.steps(3)

    def test_last_outputs_of_many_samples_end_once(self, bench):
        """n=3 cut short by an error: every sample is told, in one output."""
        engine = bench.engine
        for kind in (CUMULATIVE, DELTA, FINAL_ONLY):
            engine_id = bench.add(f"wide{kind}", tokens=9, n=3, kind=kind)
            bench.steps(3)
            [end] = engine.last_outputs([engine_id], "error")
            assert end.finished
            assert sorted(sample.index for sample in end.final.outputs) == [0, 1, 2]
            engine.abort([engine_id])
            bench.steps(3)


def test_what_is_skipped_on_an_engine_in_another_process(stepped):
    """Its weights and its memory can't be looked at from here, and it launches nothing for others."""
    assert set(Bench(stepped, vllm_params).lacking()) == {
        "test_kv_memory_alone_is_released",
        "test_holes_in_the_weights_are_seen",
        "test_device_memory_is_released",
        "test_a_launched_batch_is_seen",
    }
