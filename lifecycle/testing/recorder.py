"""`EventRecorder`: a sink that keeps what the lifecycle told, and can be waited at.

Theory of operation
-------------------
It is given to `attach` or `Lifecycle` among the `sinks`, and called under the lifecycle's
lock: it keeps the event and wakes whoever waits. Reading takes no lock of the lifecycle's.

events = EventRecorder()
lifecycle = attach(llm, sinks=[events])
...
assert events.states == ["awake", "running", "draining", "sleeping"]
events.wait_for("transition", dest="sleeping")  # from another thread than the one that sleeps
"""

import threading
from collections.abc import Mapping
from typing import Any

from lifecycle.events import Event


class EventRecorder:
    """A callable for `sinks=`. events: everything so far, in order; see the page of events for fields."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Keep an event; the lifecycle calls this."""
        with self._changed:
            self.events.append(dict(event))
            self._changed.notify_all()

    def named(self, name: str, **fields: Any) -> list[Event]:
        """The events of this name that have these fields."""
        return [event for event in list(self.events) if _matches(event, name, fields)]

    @property
    def transitions(self) -> list[tuple[str, str]]:
        """(source, dest) of every transition, in order."""
        return [(event["source"], event["dest"]) for event in self.named("transition")]

    @property
    def states(self) -> list[str]:
        """The states visited: the one that the engine was found in, then every destination."""
        return [event["dest"] for event in list(self.events) if event["event"] in ("attached", "transition")]

    def wait_for(self, name: str, timeout: float = 5.0, **fields: Any) -> Event:
        """The first event of this name with these fields, now or within `timeout` seconds.

        Raises TimeoutError, with the names of what came instead.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self.named(name, **fields), timeout):
                return self.named(name, **fields)[0]
        came = ", ".join(event["event"] for event in self.events) or "nothing"
        raise TimeoutError(f"no {name} with {fields} within {timeout} s; what came: {came}")


def _matches(event: Event, name: str, fields: Mapping[str, Any]) -> bool:
    return event["event"] == name and all(event.get(key) == value for key, value in fields.items())
