"""The fault script: what goes wrong, at which call, and how.

Theory of operation
-------------------
An engine for tests keeps a `Faults` list. Whoever writes the test adds to it; the engine
asks `due` at every call that reaches it, and does what the fault that strikes says: it
raises, hangs, returns something else, or misbehaves in a way of the engine's own (an
`effect`). A fault strikes once, at the `at`-th matching call from now, and is then gone
from the list: an empty list at the end of a test says that everything scripted happened.

    llm.faults.add("step", at=3, raises=RuntimeError("the device is gone"))
    llm.faults.add("sleep", when="after", hang=event)
    llm.faults.add("wake_up", raises=OutOfDeviceMemory("2 GiB are missing", 2 * 2**30))
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

UNSET: Final = object()


@dataclass(slots=True)
class Fault:
    """One scripted fault.

    call: the name of the method it strikes, a name passed to `call` or `collective_rpc`
    behind it, or "*" for every call. at: at which such call from now, counted from 1.
    when: "before" keeps the call from taking effect, "after" lets it take effect first.
    raises: what the call raises. returns: what it returns in place of its result.
    hang: an event that the call waits for. effect: a misbehaviour that the engine knows by
    name. Raises ValueError for a moment that does not exist.
    """

    call: str
    at: int = 1
    when: str = "before"
    raises: BaseException | None = None
    returns: Any = UNSET
    hang: threading.Event | None = None
    effect: str = ""

    def __post_init__(self) -> None:
        if self.at < 1 or self.when not in {"before", "after"}:
            raise ValueError(f"no such moment: at={self.at}, when={self.when!r}")

    @property
    def replaces_result(self) -> bool:
        """Whether the caller gets something else than the call's own result."""
        return self.raises is not None or self.returns is not UNSET


class Faults(list[Fault]):
    """The faults that have not struck yet.

    effects: the misbehaviours that the engine knows, each with the call it belongs to.
    """

    def __init__(self, effects: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._effects = effects or {}

    def add(self, call: str, **fields: Any) -> Fault:
        """Script a `Fault` with these fields. Raises ValueError for an effect that `call` has not."""
        fault = Fault(call, **fields)
        if fault.effect and self._effects.get(fault.effect) != call:
            raise ValueError(f"{call} has no effect {fault.effect!r}")
        self.append(fault)
        return fault

    def due(self, names: Sequence[str]) -> Fault | None:
        """Count a call under these names, and return the fault that strikes it. For engines."""
        struck = None
        for fault in list(self):
            if fault.call == "*" or fault.call in names:
                fault.at -= 1
                if fault.at <= 0 and struck is None:
                    self.remove(fault)
                    struck = fault
        return struck
