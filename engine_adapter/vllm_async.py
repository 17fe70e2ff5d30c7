"""vLLM's `AsyncLLM`, an engine that drives itself in a process of its own, as a `SelfDriven` engine.

Theory of operation
-------------------
Two threads meet here. The *loop's* is the one that `AsyncLLM` lives in: its front end makes
the outputs there, and whoever asked for them reads them there. The *owner's* makes the calls
of the `Engine` protocol. What such a call needs of the front end is done in the loop while
the owner waits, so that the front end is never touched from two sides.

A request is a `_Passage`. `add` only makes one: the request reaches `AsyncLLM` when its
reader begins, in the reader's own task, as with `AsyncLLM.generate`; from then on every output
goes from vLLM's own collector to the reader and crosses no thread. By `step` the owner
learns which requests began and which came to an end.

A request is *taken back* in one turn of the loop: nothing of it was given out, and nothing
will be. So it can be admitted again later, and nobody sees a difference.

An `AsyncLLM` that is *found* may have requests of which somebody else reads the outputs. They
are drained and aborted like any other; a task in the loop looks for their end.

Waking all memory resumes vLLM's scheduler. The pause that takes it back is sent in the same
breath as the wake, but vLLM does not promise that its process serves both before its next step.
"""

import asyncio
import contextlib
import inspect
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
import vllm
import vllm.outputs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from engine_adapter.vllm_inprocess import BAD_ARGUMENT, VllmFrontEnd, refuse_without
from lifecycle.engine import Call, Capabilities, Condition, Found, Memory, PassThrough, Progress, outcome_of
from lifecycle.errors import InvalidArgument
from lifecycle.table import LEVELS, MEMORY_TAGS

# Everything private of `AsyncLLM` that is used here, and why.
PRIVATE_SURFACE: Final[Mapping[str, str]] = {
    "output_processor.request_states": "drains: what ended can't be seen",
    "output_processor.parent_requests": "partial outputs of n > 1",
    "output_processor.propagate_error": "failures: outputs that nobody had taken are lost",
    "engine_core.pause_scheduler_async": "keep: in-flight requests can't be frozen",
    "engine_core.call_utility_async": "wakes: the scheduler runs before the lifecycle says so",
}

# How long the owner waits for the loop before it looks whether there still is one, in seconds.
_LOOP_GONE_S: Final = 1.0
# How often a found request is looked for, in seconds: nobody tells of its end.
_FOUND_S: Final = 0.05
# What vLLM says after the last output of a prompt that was itself a stream; up to 0.25 there is none.
_STREAM_FINISHED: Final = getattr(vllm.outputs, "STREAM_FINISHED", None)

_Answer = TypeVar("_Answer")


class _Passage:
    """A request between `add` and its end.

    inner: vLLM's id, once it is there, and states: vLLM's of its samples.
    begun: its reader began to pass it on. over: the reader gets nothing more from vLLM.
    """

    __slots__ = ("begun", "call", "collector", "engine_id", "inner", "over", "states", "untaken")

    def __init__(self, call: Call, engine_id: str) -> None:
        self.call = call
        self.engine_id = engine_id
        self.collector: Any = None
        self.inner: str | None = None
        self.states: dict[str, Any] = {}
        self.begun = False
        self.over = False
        self.untaken: Any = None  # what vLLM would throw away when it fails

    def is_over(self) -> bool:
        """Asked again after each await: a call, so that no type checker believes the last answer."""
        return self.over


class VllmAsync(VllmFrontEnd):
    """An `AsyncLLM` behind the `SelfDriven` protocol. Made, and called, outside of its event loop's thread.

    llm: lives in `loop`, which runs. owned: `shutdown` ends it. Whatever stands before its class
    later (see `attach_async`), the calls made here are those of its own class.
    """

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, *, owned: bool) -> None:
        refuse_without(llm, PRIVATE_SURFACE)
        super().__init__(llm)
        self._llm: Any = llm
        self._class = type(llm)
        self._loop = loop
        self._owned = owned
        self._passages: dict[str, _Passage] = {}
        self._news: deque[PassThrough] = deque()
        self._numbers = itertools.count()
        self._notify: Callable[[BaseException | None], object] = lambda _: None
        self._failure: BaseException | None = None
        self._paused = False
        self._level: int | None = None
        self._resident = self._find_resident()
        self._tasks = self._wait(llm.get_supported_tasks())
        self._propagate = llm.output_processor.propagate_error
        llm.output_processor.propagate_error = self._propagate_error
        self._in_loop(self._adopt_found)
        self.capabilities = self._probe()

    def _probe(self) -> Capabilities:
        return Capabilities(
            name="vllm-async",
            versions={"vllm": vllm.__version__, "torch": str(torch.__version__)},
            check_weights=False,
            release_kv=False,
            levels=LEVELS,
            costs=(
                "weights can't be checked for holes in another process",
                "memory can't be measured in another process",
            ),
        )

    # -- between the owner's thread and the loop -------------------------------------------------------

    def _own(self, name: str) -> Any:
        """A method of the `AsyncLLM`'s own class, which no guard stands before."""
        return getattr(self._class, name).__get__(self._llm)

    def _wait(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Have the loop run it, and wait for what comes of it."""
        if not self._loop.is_running():
            work.close()
            raise RuntimeError("the event loop of the engine has ended")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            done, _ = wait((future,), _LOOP_GONE_S)
            if done:
                return future.result()
            if not self._loop.is_running():
                raise RuntimeError("the event loop of the engine ended while it was waited for")

    def _in_loop(self, work: Callable[[], _Answer]) -> _Answer:
        """Have it done in one turn of the loop."""

        async def turn() -> _Answer:
            return work()

        return self._wait(turn())

    def listen(self, notify: Callable[[BaseException | None], object]) -> None:
        """From now on `notify(None)` says that a `step` has something to tell, an error that it died."""
        self._notify = notify

    def _propagate_error(self, error: Exception) -> None:
        """In the loop: vLLM's front end died. What nobody had taken is kept, and the owner is told."""
        for passage in list(self._passages.values()):  # the owner may change them meanwhile
            if passage.collector is not None and not isinstance(passage.collector.output, Exception):
                passage.untaken = passage.collector.output
        self._failure = error
        self._propagate(error)
        self._notify(error)

    # -- condition -------------------------------------------------------------------------------------

    def condition(self) -> Condition:
        """Whether it is paused comes from the engine, and what is mapped from its answers to sleep and wake.

        vLLM's own `is_sleeping` says no more: it is true of every pause.
        """
        paused = self._wait(self._own("is_paused")())
        whole = self._resident >= MEMORY_TAGS
        if not paused and not whole and not self._wait(self._own("is_sleeping")()):
            self._resident, whole = MEMORY_TAGS, True
        return Condition(
            resident=self._resident,
            paused=paused or not whole,
            level=(0 if paused else None) if whole else self._level,
            requests=tuple(
                Found(passage.call.request_id, passage.engine_id, passage.call.samples)
                for passage in list(self._passages.values())
            ),
        )

    def _find_resident(self) -> frozenset[str]:
        """What is mapped of an engine that was found: all, or, as far as can be seen from here, nothing."""
        if not self._wait(self._own("is_sleeping")()):
            return MEMORY_TAGS
        return MEMORY_TAGS if self._map(("scheduling",)) else frozenset()

    def _adopt_found(self) -> None:
        """In the loop: requests whose outputs go to somebody else, and a task that tells of their end."""
        for found in self._find_requests():
            call = Call(found.request_id, None, None, 0.0, {}, found.samples)
            passage = self._passages[found.engine_id] = _Passage(call, found.engine_id)
            self._is_there(passage, found.engine_id)
        if self._passages:
            self._watch = asyncio.create_task(self._watch_found(frozenset(self._passages)))

    async def _watch_found(self, found: frozenset[str]) -> None:
        while found & self._passages.keys():
            await asyncio.sleep(_FOUND_S)
            self._sweep()
            if self._news:
                self._notify(None)

    def _is_there(self, passage: _Passage, inner: str) -> None:
        passage.inner = inner
        names = self._children(inner)
        passage.states = {name: self._states[name] for name in names if name in self._states}
        passage.collector = next((state.queue for state in passage.states.values()), passage.collector)

    def _map(self, tags: Sequence[str]) -> bool | None:
        """A wake, and the pause again that it ends. Whether all memory is mapped now; None up to 0.25."""

        async def wake() -> bool | None:
            ask = (
                self._llm.engine_core.call_utility_async
            )  # both this way, or the pause may overtake the wake
            whole, _ = await asyncio.gather(ask("wake_up", list(tags)), ask("pause_scheduler", "keep", False))
            if self._llm.logger_manager is not None and whole is not False:  # as `AsyncLLM.wake_up` does
                self._llm.logger_manager.record_sleep_state(0, 0)
            return None if whole is None else bool(whole)

        return self._wait(wake())

    # -- requests --------------------------------------------------------------------------------------

    def prepare(self, request_id: Any, prompt: Any, params: Any, options: Mapping[str, Any]) -> Call:
        """As of any front end; but what the owner sees of it are no deltas, whatever its reader gets."""
        return replace(super().prepare(request_id, prompt, params, options), delta=False)

    def validate(self, call: Call) -> None:
        """In the loop, for tokenizers are not safe from two threads. A stream of prompts is not read."""
        if not isinstance(call.prompt, AsyncGenerator):
            self._in_loop(lambda: super(VllmAsync, self).validate(call))

    def _supported_tasks(self) -> Any:
        return self._tasks

    def add(self, call: Call) -> str:
        """A passage, of which `step` tells; its reader passes the request on."""
        engine_id = f"{call.request_id}-{next(self._numbers)}"
        passage = self._passages[engine_id] = _Passage(call, engine_id)
        self._news.append(PassThrough(call.request_id, outputs=partial(self._read, passage)))
        return engine_id

    async def _read(self, passage: _Passage) -> AsyncGenerator[Any, None]:
        """In the loop, by the reader: pass the request on, and its outputs back.

        Ends after the last output, or without one where the owner has that, or took it back.
        """
        if not passage.is_over():
            await self._pass_on(passage)
        while not passage.is_over():
            try:
                output = passage.collector.get_nowait() or await passage.collector.get()
            except Exception as error:
                if self._failure is None:  # of this request alone: the stream that it reads from broke
                    raise getattr(error, "cause", None) or error from error
                passage.over, output = True, passage.untaken
                self._notify(error)
                if output is not None:
                    yield output
                return
            if passage.is_over():  # taken back: this is vLLM's word for an abort
                return
            if output.finished:
                self._end(passage, "" if output is _STREAM_FINISHED else outcome_of(output))
            if output is not _STREAM_FINISHED:
                yield output

    async def _pass_on(self, passage: _Passage) -> None:
        """In the loop, by the reader: give the request to vLLM, unless the engine is dead."""
        call, passage.begun = passage.call, True
        try:
            collector = await self._own("add_request")(
                call.request_id, call.prompt, call.params, arrival_time=call.arrival_time, **call.options
            )
        except Exception as error:
            if self._llm.engine_core.resources.engine_dead:  # told to everybody whom it concerns
                passage.over = True
                self._notify(error)
                return
            self._passages.pop(passage.engine_id, None)
            if isinstance(error, BAD_ARGUMENT):
                raise InvalidArgument(f"add_request: {error}", call="add_request") from error
            raise  # of this request alone: the queue is full, say
        if passage.is_over():
            await self._own("abort")(collector.request_id, internal=True)
            return
        passage.collector = collector
        self._is_there(passage, collector.request_id)

    def _end(self, passage: _Passage, outcome: str) -> None:
        """In the loop: its last output is with its reader."""
        passage.over = True
        if self._passages.pop(passage.engine_id, None) is not None:
            self._news.append(self._news_of_end(passage, outcome))
            self._notify(None)

    def _news_of_end(self, passage: _Passage, outcome: str, final: Any = None) -> PassThrough:
        return PassThrough(
            passage.call.request_id, finished=True, final=final, tokens=_tokens_of(passage), outcome=outcome
        )

    def step(self) -> list[Any]:
        """What began and what ended since; nothing is computed here."""
        if self._failure is not None:
            raise self._failure
        if not self._news:
            self._sweep()
        news = []
        with contextlib.suppress(IndexError):
            while True:
                news.append(self._news.popleft())
        return news

    def _sweep(self) -> None:
        """Find what vLLM finished while its reader did not come to take it."""
        for passage in list(self._passages.values()):
            unfinished = passage.inner is None or passage.states.keys() & self._states.keys()
            if not unfinished and self._passages.pop(passage.engine_id, None) is not None:
                untaken = passage.collector.output
                outcome = outcome_of(untaken) if isinstance(untaken, RequestOutput) else ""
                self._news.append(self._news_of_end(passage, outcome))

    def abort(self, engine_ids: Sequence[str]) -> None:
        """A reader gets what vLLM says to that, unless its request was not there yet, or taken back."""
        passages = [self._passages.pop(name) for name in engine_ids if name in self._passages]
        if passages:
            self._wait(self._abort(passages))

    async def _abort(self, passages: Sequence[_Passage]) -> None:
        for passage in passages:
            passage.over = passage.over or passage.inner is None
        inner = [passage.inner for passage in passages if passage.inner is not None]
        if inner:
            # Samples by name: a parent forgets those of which a last output was made.
            samples = [name for one in inner for name in self._children(one)]
            await self._own("abort")(list(dict.fromkeys([*samples, *inner])), internal=True)

    def last_outputs(self, engine_ids: Sequence[str], reason: str) -> list[Any]:
        """Where one is aborted that is there, vLLM itself says the last word to its reader."""
        passages = [self._passages[name] for name in engine_ids if name in self._passages]
        if not passages:
            return []
        return self._in_loop(
            lambda: [self._news_of_end(one, reason, self._final(one, reason)) for one in passages]
        )

    def _final(self, passage: _Passage, reason: str) -> Any:
        """In the loop: the last output, where its reader gets none from vLLM."""
        if passage.inner is None:
            passage.over = True
            return _empty_output(passage.call, reason)
        if reason == "abort":
            return None
        outputs = super().last_outputs([passage.inner], reason)
        if not outputs:
            return _empty_output(passage.call, reason)
        for output in outputs[1:]:
            outputs[0].add(output, aggregate=passage.call.params.output_kind == RequestOutputKind.DELTA)
        return outputs[0]

    def unstarted(self, engine_ids: Sequence[str]) -> list[str]:
        """Those of which no token came yet. They are taken back: readers get nothing of them any more."""
        return self._in_loop(
            lambda: [name for name in engine_ids if self._take_back(self._passages.get(name))]
        )

    def _take_back(self, passage: _Passage | None) -> bool:
        if passage is None:
            return False
        if passage.begun and isinstance(passage.call.prompt, AsyncGenerator):  # it was read from
            return False
        if passage.inner is not None:
            waits = passage.states.keys() <= self._states.keys() and passage.collector.output is None
            if not waits or _tokens_of(passage) or any(not s.detokenizer for s in passage.states.values()):
                return False
        passage.over = True
        return True

    def tokens(self, engine_id: str) -> int:
        """Read from the detokenizers."""
        passage = self._passages.get(engine_id)
        return 0 if passage is None else _tokens_of(passage)

    def count_tokens(self, output: Any) -> int:
        """All of the request's: its last output came another way."""
        tokens: int = output.tokens
        return tokens

    def copy_output(self, output: Any) -> Any:
        """News share nothing with the engine."""
        return output

    @staticmethod
    def merge_outputs(earlier: Any, later: Any, *, delta: bool) -> Any:  # noqa: ARG004
        """The way to a request's outputs, and its end."""
        return PassThrough(
            later.request_id,
            finished=later.finished,
            tokens=later.tokens,
            outputs=later.outputs or earlier.outputs,
            final=later.final,
            outcome=later.outcome,
        )

    # -- scheduling ------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Tokens that came, of what is in flight; a long prefill can't be seen from here."""
        tokens = {name: self.tokens(name) for name in list(self._passages)}
        return Progress(sum(tokens.values()), frozenset(name for name, count in tokens.items() if count))

    def has_work(self) -> bool:
        """Requests that did not come to their end, and news of those that did."""
        return bool(self._news) or (bool(self._passages) and not self._paused)

    def has_launched(self) -> bool:
        """False: a pause is over once what was launched came back."""
        return False

    def pause_scheduling(self) -> None:
        """The pause that keeps: nothing is scheduled, and what was launched has come back."""
        self._wait(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        self._paused = True

    def resume_scheduling(self) -> None:
        """Schedule again."""
        self._wait(self._own("resume_generation")())
        self._paused, self._level = False, None

    # -- memory ----------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """The engine's own, in the mode that neither drops nor waits for requests."""
        self._wait(self._own("sleep")(level, mode="keep"))
        self._paused, self._level = True, level
        self._resident = frozenset() if level else MEMORY_TAGS

    def wake_up(self, tags: Sequence[str]) -> None:
        """The engine's own. Its answer must fit what this adapter believes."""
        resident = self._resident | frozenset(tags)
        if self._map(tags) not in (None, resident >= MEMORY_TAGS):
            raise RuntimeError(
                f"wake_up({list(tags)}): the engine and this adapter disagree on what is mapped"
            )
        self._resident = resident

    def release_kv_cache_memory(self) -> None:
        """The engine's own."""
        self._wait(self._own("release_kv_cache_memory")())
        self._resident = frozenset({"weights"})

    def reset_caches(self, *, kept: bool = False) -> bool:
        """Prefix and encoder caches, and by a preemption the KV blocks of what is kept."""
        done = bool(self._wait(self._own("reset_prefix_cache")(reset_running_requests=kept)))
        if done:
            self._wait(self._own("reset_encoder_cache")())
        return done

    def forget_media(self) -> None:
        """Validating a held request may have told the front end that the workers know its media."""
        if getattr(self._llm.renderer, "mm_processor_cache", None) is not None:
            self._wait(self._own("reset_mm_cache")())

    def memory(self) -> Memory:
        """Unknown: it is another process's."""
        return Memory()

    def discard_weights(self) -> None:
        """Not possible in another process; `capabilities` says so."""

    def missing_weights(self) -> tuple[str, ...]:
        """Unknown."""
        return ()

    # -- the rest --------------------------------------------------------------------------------------

    @property
    def raw(self) -> AsyncLLM:
        """The `AsyncLLM` itself, unguarded."""
        llm: AsyncLLM = self._llm
        return llm

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of `AsyncLLM`, awaited."""

        async def called() -> Any:
            result = self._own(name)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return self._wait(called())

    def shutdown(self) -> None:
        """End the engine's process if it is ours, and let go of it."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.output_processor.propagate_error = self._propagate
        if self._owned:
            llm.shutdown()
        self._states, self._parents, self._input = {}, {}, None


def handed_over(llm: AsyncLLM, build: Callable[[], AsyncLLM] | None) -> Callable[[], VllmAsync]:
    """What makes the adapter of this engine, to be called in the thread that owns it, and then of new ones.

    Called itself in the event loop of the engine. Raises InvalidArgument for one that is guarded.
    """
    if not isinstance(llm, AsyncLLM):
        raise InvalidArgument(f"an AsyncLLM is needed, not {type(llm).__name__}")
    if "lifecycle" in vars(llm):
        raise InvalidArgument("this AsyncLLM is guarded already: its attribute `lifecycle` says by what")
    loop, found = asyncio.get_running_loop(), [llm]

    def make() -> VllmAsync:
        engine = found.pop() if found or build is None else build()
        return VllmAsync(engine, loop, owned=build is not None)

    return make


def _tokens_of(passage: _Passage) -> int:
    detokenizers = (state.detokenizer for state in passage.states.values())
    return sum(detokenizer.num_output_tokens() for detokenizer in detokenizers if detokenizer is not None)


def _empty_output(call: Call, reason: str) -> RequestOutput:
    """The last output of a request that never came to vLLM."""
    samples = [
        CompletionOutput(index, "", [], None, None, finish_reason=reason) for index in range(call.samples)
    ]
    return RequestOutput(call.request_id, None, None, None, samples, finished=True)
