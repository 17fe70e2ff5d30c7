"""`attach(llm)`: put the lifecycle in front of an engine that somebody else built.

Theory of operation
-------------------
A trainer holds an `LLM` and reaches through it: `llm.generate`, `llm.sleep`,
`llm.llm_engine.step`, `llm.llm_engine.model_executor...`. Two things are put in place:

`_StandIn`
    takes the place of `llm.llm_engine`. The calls that the machine must see are its
    own methods; every other attribute is the engine's, for get, set and delete.
blocking methods of the `LLM`
    are shadowed on the instance. Each runs the class's own code inside a scope, so
    that two callers never take each other's outputs, and an interrupted one leaves
    nothing behind. They hold the `LLM` weakly: `del llm` still frees the engine.

The lifecycle marks the engine with a weak reference to itself and with the options that it
was made with; attaching twice finds it.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine_adapter.simulated_llm import SimulatedLLMEngine
from lifecycle import Engine, Lifecycle
from lifecycle.errors import InvalidArgument
from lifecycle.table import MODES, NEEDS, Need

_MARK: Final = "_engine_lifecycle"
_UNKNOWN: Final = object()

# Blocking methods of an `LLM`: how each one's scope treats what it admits.
_BLOCKING: Final[Mapping[str, Mapping[str, bool]]] = {
    "generate": {},
    "chat": {},
    "beam_search": {},
    "encode": {},
    "embed": {},
    "classify": {},
    "score": {},
    "enqueue": {"enqueues": True},
    "enqueue_chat": {"enqueues": True},
    "wait_for_completion": {"claims_enqueued": True},
}

# Calls of the engine that are the lifecycle's own methods.
_GUARDED: Final = (
    "add_request",
    "abort_request",
    "step",
    "has_unfinished_requests",
    "get_num_unfinished_requests",
    "is_sleeping",
    "wake_up",
    "release_kv_cache_memory",
    "collective_rpc",
    "apply_model",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "reset_mm_cache",
)
# What the table lets through in any state goes to the engine as it is.
_FREE: Final = frozenset(name for name, need in NEEDS.items() if need is Need.NOTHING)
# The only public names that the stand-in has and an `LLMEngine` has not.
ADDED_NAMES: Final = ("lifecycle",)


class _Default(str):
    """A default that can be told from the same word said by the caller."""

    __slots__ = ()


DEFAULT_MODE: Final = _Default("wait")


class _StandIn:
    """What `llm.llm_engine` becomes. Its own state lives in attributes that no `LLMEngine` has."""

    def __init__(self, lifecycle: Lifecycle, engine: Any, default_mode: str) -> None:
        own = object.__setattr__
        own(self, "lifecycle", lifecycle)
        own(self, "_guarded_engine", engine)
        own(self, "_default_mode", default_mode)
        for name in _GUARDED:
            if hasattr(engine, name):
                own(self, name, _like(getattr(engine, name), getattr(lifecycle, name)))
        for name in _methods(type(engine)) - set(_GUARDED) - _FREE - {"sleep"}:
            own(self, name, _like(getattr(engine, name), functools.partial(lifecycle.call, name)))
        own(self, "sleep", _like(engine.sleep, lifecycle.sleep, mode=default_mode))

    @property  # type: ignore[misc]  # isinstance checks of trainers must hold
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_guarded_engine"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_guarded_engine"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_guarded_engine"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_guarded_engine"), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(object.__getattribute__(self, "_guarded_engine")), *ADDED_NAMES})

    def __repr__(self) -> str:
        return f"<guarded {object.__getattribute__(self, '_guarded_engine')!r}>"


def _methods(engine_class: type) -> set[str]:
    """Public methods: those that neither the lifecycle nor the table knows need a serving engine."""
    return {
        name
        for name in dir(engine_class)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(engine_class, name))
    }


def _like(
    original: Callable[..., Any], replacement: Callable[..., Any], **defaults: Any
) -> Callable[..., Any]:
    """The replacement under the original's name and signature, with some defaults changed.

    Extra keywords of the replacement (a drain's `timeout`, `progress`) stay usable.
    """
    signature = inspect.signature(original)
    positional = list(signature.parameters)
    if defaults:

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **_with_defaults(positional, args, kwargs, defaults))

    else:  # `step` comes this way

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

    parameters = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
    ]
    guarded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by inspect
    del guarded.__wrapped__  # it would show the original's default, and keep the engine alive
    return guarded


def _with_defaults(
    positional: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    given = set(positional[: len(args)]) | set(kwargs)
    return {**{name: value for name, value in defaults.items() if name not in given}, **kwargs}


def _shadow(llm: Any, lifecycle: Lifecycle, default_mode: str) -> tuple[str, ...]:
    """Put the guarded blocking methods on the instance; returns their names."""
    shadowed = []
    for name, scope in _BLOCKING.items():
        original = getattr(type(llm), name, None)
        if original is not None and name not in vars(llm):
            setattr(llm, name, _scoped(original, weakref.ref(llm), lifecycle, name, dict(scope)))
            shadowed.append(name)
    for name, target, defaults in (
        ("sleep", lifecycle.sleep, {"mode": default_mode}),
        ("wake_up", lifecycle.wake_up, {}),
    ):
        if hasattr(type(llm), name) and name not in vars(llm):
            setattr(llm, name, _like(getattr(llm, name), target, **defaults))
            shadowed.append(name)
    return tuple(shadowed)


def _scoped(
    original: Callable[..., Any], ref: Any, lifecycle: Lifecycle, name: str, scope: dict[str, bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with lifecycle.scope(name, **scope):
            return original(ref(), *args, **kwargs)

    signature = inspect.signature(original)
    guarded.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]  # read by inspect
    return guarded


def attach(
    holder: Any,
    *,
    attr: str = "llm_engine",
    weights: str | None = None,
    default_mode: str = DEFAULT_MODE,
    **options: Any,
) -> Lifecycle:
    """Guard the in-process vLLM engine that `holder` holds, an `LLM` or anything else.

    attr: where the holder has its `LLMEngine`. weights: "checked" (default where possible),
    "declared", "unchecked". default_mode: the mode of `sleep()` where the caller names none.
    options go to `Lifecycle` (`max_held`, `stall_s`, `strict_release`, `rpc_needs`, ...).

    The engine's real condition is read first; it may be asleep, or busy. Attaching twice
    returns the same object. `lifecycle.detach()` removes everything; the engine is not
    owned, so `close()` only detaches. Raises UnsupportedEngine for an engine that can't
    be guarded, InvalidArgument for a holder without one and for options other than those
    that it was attached with.
    """
    engine = getattr(holder, attr, None)
    if engine is None:
        msg = f"{type(holder).__name__} has no {attr!r}: give an LLM, or name the attribute with attr="
        raise InvalidArgument(msg)
    if default_mode not in MODES:
        msg = f"default_mode must be one of {', '.join(MODES)}, not {default_mode!r}"
        raise InvalidArgument(msg)
    raw = _raw(engine)
    if weights is not None:
        options["weights"] = weights
    lifecycle = attached(raw)
    if lifecycle is None:
        lifecycle = Lifecycle(_adapter(raw), **{"name": "llm", **options})
        setattr(raw, _MARK, (weakref.ref(lifecycle), options))
    else:
        _refuse_other_options(lifecycle, vars(raw)[_MARK][1], options)
    if type(engine) is _StandIn:
        standing = object.__getattribute__(engine, "_default_mode")
        if default_mode is not DEFAULT_MODE and default_mode != standing:
            raise _other_options("default_mode", standing, default_mode)
        return lifecycle
    default_mode = str(default_mode)
    undo_on = _weakly(holder)
    shadowed = _shadow(holder, lifecycle, default_mode) if attr == "llm_engine" else ()
    setattr(holder, attr, _StandIn(lifecycle, raw, default_mode))
    lifecycle.disown(functools.partial(_undo, undo_on, weakref.ref(raw), attr, shadowed))
    return lifecycle


def _raw(engine: Any) -> Any:
    return object.__getattribute__(engine, "_guarded_engine") if type(engine) is _StandIn else engine


def attached(engine: Any) -> Lifecycle | None:
    """The lifecycle that guards this engine, a raw one or its stand-in, if any does."""
    mark = vars(_raw(engine)).get(_MARK)
    lifecycle: Lifecycle | None = mark[0]() if mark else None
    return lifecycle


def _adapter(raw: Any) -> Engine:
    """What speaks to this engine for the lifecycle."""
    if isinstance(raw, SimulatedLLMEngine):
        return raw._simulated  # noqa: SLF001  (an `LLMEngine` has no public name for it)
    from engine_adapter.vllm_inprocess import VllmInprocess

    return VllmInprocess(raw)


def _refuse_other_options(lifecycle: Lifecycle, first: dict[str, Any], now: dict[str, Any]) -> None:
    """A second `attach` must not silently ignore what it asks for."""
    defaults = {name: p.default for name, p in inspect.signature(Lifecycle).parameters.items()}
    defaults["name"] = "llm"
    defaults["weights"] = "checked" if lifecycle.capabilities.check_weights else "declared"
    standing = {**defaults, **first}
    for name, value in now.items():
        if value != standing.get(name, _UNKNOWN):
            raise _other_options(name, standing.get(name), value)


def _other_options(name: str, standing: Any, asked: Any) -> InvalidArgument:
    msg = f"attached already, with {name}={standing!r}; to attach with {name}={asked!r}, detach() first"
    return InvalidArgument(msg)


def _weakly(holder: Any) -> Callable[[], Any]:
    """A reference that does not keep the holder alive, where its class allows one."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _undo(holder_ref: Any, raw_ref: Any, attr: str, shadowed: tuple[str, ...]) -> None:
    """Restore what `attach` replaced."""
    holder, raw = holder_ref(), raw_ref()
    if raw is not None:
        vars(raw).pop(_MARK, None)
    if holder is None:
        return
    for name in shadowed:
        vars(holder).pop(name, None)
    if raw is not None:
        setattr(holder, attr, raw)
