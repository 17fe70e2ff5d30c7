"""A thread that tells when an engine call does not return, and that reports on a signal.

Theory of operation
-------------------
Python can't end a call that hangs inside an engine: no exception reaches it, and a thread
can't be killed. What can be done is to say so. The watchdog looks at the core a few times a
second, without any lock. An engine call older than `limit_s`, or a drain that has not made
a step for so long, becomes one `stalled` event with the stacks of all threads, and another
one each time that the age has doubled. Getting out is up to the process: end it.

On a signal (SIGUSR1, `kill -USR1 <pid>`) it writes the snapshot, the last events and the
stacks. The main thread may be the one that hangs, and then no Python handler would run: so
`faulthandler` writes the stacks from its own handler in C, into a pipe, and the watchdog is
who reads the pipe. Neither works while a call hangs that holds the interpreter lock.
"""

import contextlib
import faulthandler
import json
import os
import select
import sys
import threading
import time
import traceback
import weakref
from types import TracebackType
from typing import Any, Final, Self, TextIO

from lifecycle.core import Core, is_duration
from lifecycle.errors import IllegalCall, InvalidArgument
from lifecycle.table import State

# How often it looks, in seconds.
LOOK_EVERY_S: Final = 0.25
_LAST_EVENTS: Final = 20
_MOST_CHARACTERS: Final = 100_000
_DUMP_S: Final = 0.05  # what `faulthandler` may take to write
_listened_to: set[int] = set()


class Watchdog:
    """Watches one lifecycle, from now until `stop()` or its end. Made by its `watch()`.

    limit_s: seconds after which an engine call has stalled. signum: the signal that makes it
    report, None for none; one watchdog of a process can have it. out: where the report goes,
    standard error by default. Use it as a context manager, or call `stop()`.
    """

    def __init__(
        self, core: Core, *, limit_s: float, signum: int | None = None, out: TextIO | None = None
    ) -> None:
        if not (is_duration(limit_s) and limit_s):
            raise InvalidArgument(f"watch: limit_s must be a number of seconds > 0, not {limit_s!r}")
        if signum in _listened_to:
            raise IllegalCall(
                f"another watchdog has signal {signum}", call="watch", state=None, needs="another"
            )
        self._core = weakref.ref(core)
        self._limit_s = limit_s
        self._signum = signum
        self._out = out
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)  # a handler must not wait for its reader
        self._stopping = False
        self._ending = threading.RLock()  # held to write into the pipe, and to close it
        if signum is not None:
            faulthandler.register(signum, self._writes, all_threads=True, chain=False)
            _listened_to.add(signum)
        self._thread = threading.Thread(
            target=self._run, name=f"watchdog of {core.events.engine}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Safe to call twice."""
        with self._ending:
            if self._stopping:
                return
            self._stopping = True
            with contextlib.suppress(BlockingIOError):  # full of stacks: that wakes it as well
                os.write(self._writes, b".")
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        seen: tuple[Any, ...] = ()  # what was under way when it last looked
        since = limit = 0.0
        try:
            while not self._stopping:
                readable = select.select([self._reads], [], [], LOOK_EVERY_S)[0]
                core = self._core()
                if core is None or core.state is State.CLOSED:
                    return
                if readable and not self._stopping:
                    self._report(core, self._read_dump())
                now, under_way = time.monotonic(), _under_way(core)
                if under_way != seen:
                    seen, since, limit = under_way, now, self._limit_s
                if under_way:
                    call, started = under_way[:2]
                    age = now - (started if started is not None else since)
                    if age >= limit:
                        limit = 2 * age
                        core.events.emit("stalled", call=call, duration_s=age, stacks=stacks())
                del core
        finally:
            with self._ending:
                self._stopping = True
                if self._signum is not None:
                    faulthandler.unregister(self._signum)
                    _listened_to.discard(self._signum)
                os.close(self._reads)
                os.close(self._writes)

    def _read_dump(self) -> str:
        time.sleep(_DUMP_S)
        return os.read(self._reads, _MOST_CHARACTERS).decode(errors="replace")

    def _report(self, core: Core, dump: str) -> None:
        lines = [
            f"--- {core.events.engine}: {core.describe()}",
            json.dumps(core.snapshot().to_dict(), default=repr),
            *(json.dumps(event, default=repr) for event in core.events.tail(_LAST_EVENTS)),
            dump,
        ]
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            print("\n".join(lines), file=self._out or sys.stderr, flush=True)


def _under_way(core: Core) -> tuple[Any, ...]:
    """The engine call under way and its beginning; or the drain that should be making steps; or nothing."""
    operation, transition = core.under_way(), core.transition
    if operation is not None:
        return operation.call, operation.started
    if transition is not None:
        return str(transition), None, transition.steps
    return ()


def stacks() -> str:
    """The stacks of all threads, the innermost call last."""
    by_ident = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {by_ident.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # noqa: SLF001  (the documented way)
    ]
    return "\n".join(parts)[:_MOST_CHARACTERS]
