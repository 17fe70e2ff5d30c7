"""`attach_async(async_llm)`: put the lifecycle in front of an `AsyncLLM` that somebody else built.

Theory of operation
-------------------
A trainer, and vLLM's own server, hold the `AsyncLLM` itself, often in many places. So the object
stays what it is and where it is, and only gets another class: a subclass of the one that it had,
with the methods of `GuardedAsyncLLM`: the calls that the machine must see. Everything else
(`output_processor`, `vllm_config`, the tokenizer) is the engine's own, and so are the calls that
come down to `collective_rpc`, as the weight updates do.

The adapter calls the class that the object had. When the lifecycle is closed it gets that back.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

from lifecycle import AsyncLifecycle
from lifecycle.engine import LoadReport, SleepReport, WakeReport
from lifecycle.errors import IllegalCall, InvalidArgument
from lifecycle.table import ALIVE

# Calls that are made as they are, once the table lets them through.
_BY_NAME: Final = (
    *("reset_mm_cache", "reset_encoder_cache", "start_profile", "stop_profile"),
    *("add_lora", "remove_lora", "list_loras", "pin_lora"),
)


class GuardedAsyncLLM:
    """What an `AsyncLLM` under guard has in place of its own. The names and arguments are vLLM's.

    lifecycle: the `AsyncLifecycle` behind it. `sleep` waits where the caller names no mode, and
    takes the limits of a drain as well; what it returns is the report.
    """

    lifecycle: AsyncLifecycle

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """See `AsyncLifecycle.generate`."""
        return self.lifecycle.generate(prompt, sampling_params, request_id, **options)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """See `AsyncLifecycle.encode`."""
        bound = inspect.signature(_plain(self).encode).bind(self, *args, **kwargs)
        del bound.arguments["self"]
        return self.lifecycle.encode(**bound.arguments)

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002  (vLLM's arguments)
        """Refused: what it returns is read behind the machine."""
        raise IllegalCall(
            "cannot add_request to a guarded AsyncLLM: use generate() or encode()",
            call="add_request",
            state=self.lifecycle.state.value,
            needs="generate() or encode()",
        )

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """See `AsyncLifecycle.abort`. vLLM itself uses its own ids, of what it is just adding."""
        if internal:
            await _plain(self).abort(self, request_id, internal=True)
        else:
            await self.lifecycle.abort(request_id)

    async def sleep(self, level: int = 1, mode: str = "wait", **limits: Any) -> SleepReport:
        """See `AsyncLifecycle.sleep`."""
        return await self.lifecycle.sleep(level, mode, **limits)

    async def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """See `AsyncLifecycle.wake_up`: true once it is awake as a whole."""
        return await self.lifecycle.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether memory is asleep, or the scheduler stands still."""
        return await self.lifecycle.is_sleeping()

    async def pause_generation(
        self, *, mode: str = "abort", clear_cache: bool = True, **limits: Any
    ) -> SleepReport:
        """See `AsyncLifecycle.pause_generation`."""
        return await self.lifecycle.pause_generation(mode=mode, clear_cache=clear_cache, **limits)

    async def resume_generation(self) -> WakeReport:
        """See `AsyncLifecycle.resume_generation`."""
        return await self.lifecycle.resume_generation()

    async def is_paused(self) -> bool:
        """Whether the caller paused and has not resumed."""
        return await self.lifecycle.is_paused()

    async def release_kv_cache_memory(self) -> None:
        """See `AsyncLifecycle.release_kv_cache_memory`."""
        await self.lifecycle.release_kv_cache_memory()

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109  (vLLM's signature)
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `AsyncLifecycle.collective_rpc`."""
        return await self.lifecycle.collective_rpc(method, timeout, args, kwargs)

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """See `AsyncLifecycle.reset_prefix_cache`."""
        return await self.lifecycle.reset_prefix_cache(*args, **kwargs)

    async def reload_weights(self, version: str | None = None, **kwargs: Any) -> LoadReport:
        """See `AsyncLifecycle.reload_weights`."""
        return await self.lifecycle.reload_weights(version, **kwargs)

    def get_num_unfinished_requests(self) -> int:
        """What is held, counted with what runs."""
        return self.lifecycle.get_num_unfinished_requests()

    @property
    def errored(self) -> bool:
        """Whether it failed or was closed; a server ends itself then."""
        return self.lifecycle.state not in ALIVE

    @property
    def is_running(self) -> bool:
        """Not `errored`."""
        return not self.errored

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's process. Whoever waits for it gets EngineFailed; plain vLLM lets them wait."""
        _plain(self).shutdown(self, timeout)
        self.output_processor.propagate_error(self.dead_error)  # type: ignore[attr-defined]  # the engine's


def _plain(guarded: Any) -> Any:
    """The class that a guarded object had."""
    return type(guarded).__base__


def _by_name(name: str) -> Callable[..., Any]:
    async def guarded(self: GuardedAsyncLLM, *args: Any, **kwargs: Any) -> Any:
        return await self.lifecycle.call(name, *args, **kwargs)

    guarded.__name__, guarded.__doc__ = name, "The engine's own, where the table lets it through."
    return guarded


for _name in _BY_NAME:
    setattr(GuardedAsyncLLM, _name, _by_name(_name))


def _guarded(plain: type) -> type:
    """A subclass of this class alone: an object that exists could not get one of two classes."""
    own = {name: member for name, member in vars(GuardedAsyncLLM).items() if not name.startswith("_")}
    return type(f"Guarded{plain.__name__}", (plain,), {"__doc__": GuardedAsyncLLM.__doc__, **own})


async def attach_async(
    async_llm: Any, *, build: Callable[[], Any] | None = None, **options: Any
) -> AsyncLifecycle:
    """Guard an `AsyncLLM` that exists: every call of it goes through the lifecycle from now on.

    To be awaited in the event loop in which it is used. Its real condition is read first; it may be
    busy, paused or asleep. What it was asked for before is drained like the rest. build and options
    are those of `AsyncLifecycle.from_async_llm`. Attaching twice returns the same lifecycle.

    `close()` of the lifecycle takes the guard away; the engine is left to go on, unless `build` was
    given. After a `recover` the new engine serves the calls of the object, but what is read through
    it (`output_processor`, `vllm_config`) is the old one's. Raises UnsupportedEngine where vLLM
    lacks what is needed, InvalidArgument for what is no `AsyncLLM`, and for options when it was
    attached before.
    """
    attached: AsyncLifecycle | None = getattr(async_llm, "lifecycle", None)
    if attached is not None:
        if options or build is not None:
            raise InvalidArgument(
                "attached already: close() its lifecycle first to attach with other options"
            )
        return attached
    lifecycle = AsyncLifecycle.from_async_llm(async_llm, build=build, **{"name": "async_llm", **options})
    async_llm.lifecycle = lifecycle  # from here on nobody else can attach to it
    try:
        await lifecycle.start()
    except BaseException:
        vars(async_llm).pop("lifecycle", None)
        raise
    plain = type(async_llm)
    async_llm.__class__ = _guarded(plain)
    lifecycle.at_end(functools.partial(_unguard, async_llm, plain))
    return lifecycle


def _unguard(async_llm: Any, plain: type) -> None:
    async_llm.__class__ = plain
    vars(async_llm).pop("lifecycle", None)
