"""`AuditLog`: a sink that puts every event on disk, and never lets the disk stop the engine.

Theory of operation
-------------------
Whoever emits an event seals it: a line of JSON, its sum, into a bounded backlog. A thread
of the log's own writes the backlog and syncs it. An event that must be on disk before
anybody goes on (`operation_begin`, a transition, a failure) waits for that thread, for
`WAIT_S` at most; one of the step path (a request, and the engine becoming busy or idle)
never waits, so that `step()` is not blocked by a disk.

*An outage* is a disk that raises, or does not answer in time. Nobody waits while it lasts.
The backlog keeps what is not written; once it holds `MOST_BACKLOG` bytes, new records are
lost, and counted. The outage is said once, as an exception of the sink, which becomes a
`sink_failed` event; when the disk is back, the backlog is written and a `log_outage` line
behind it, which names the records that were answered before they were on disk, and those
that are lost.

A `strict` log makes the lifecycle refuse to sleep or to load weights during an outage: it
asks `unaudited()` after the `operation_begin` of each.

Events of several threads may come out of order; what is too early is kept until its turn.
"""

import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lifecycle import table
from lifecycle.audit import format as form
from lifecycle.audit.file import LogFile
from lifecycle.errors import InvalidArgument

# The longest that an event waits for the disk, in seconds.
WAIT_S: Final = 2.0
# How often a disk that failed is tried again, and what was only written is synced, in seconds.
AGAIN_S: Final = 1.0
# How long the thread lets records gather that nobody waits for, in seconds.
GATHER_S: Final = 0.005
# The backlog holds so many bytes at most.
MOST_BACKLOG: Final = 64 << 20
# So many bytes are written at once, at most.
_CHUNK: Final = 256 << 10
# What must be on disk before anybody goes on, but for the triggers of the step path.
_SYNCED: Final = frozenset({"attached", "operation_begin", "transition", "failed", "closed", "detached"})
_UNSYNCED: Final = frozenset({"admit", "settle"})
# In the place of a record's number: lines without one.
_FRAME: Final = 0
_HEADER: Final = -1
_LAST_OF_PART: Final = -2


class AuditLog:
    """The durable log of one lifecycle at a time, as a sink.

    path: the file, which is appended to; {host}, {rank} and {pid} in it are filled in.
    rank: by default the environment's RANK, else 0. strict: sleeps and weight loads are refused
    while the disk takes nothing. requests: with records of each request's admission and end.
    texts: with its prompt and its output, too. max_bytes: a file of about this size is set aside
    as `path.1`, `path.2` and so on, and the log goes on at the path.

    lost counts the records that no file will ever have.

    Raises InvalidArgument for anything else in braces, BlockingIOError if another log is written to
    that path, and OSError if the file can't be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int | None = None,
        strict: bool = False,
        requests: bool = False,
        texts: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgument(f"max_bytes must be None or an integer >= 1, not {max_bytes!r}")
        self.path = _filled_in(path, rank)
        self.strict = strict
        self.requests = requests or texts
        self.texts = texts
        self.lost = 0
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # a signal handler may come in between
        self._session: _Session | None = None
        probe = LogFile(self.path)  # now, and not after minutes of building an engine
        probe.open()
        probe.close()

    def begin(self, engine: str, rank: int) -> None:
        """A session begins; its next event is number 1. Called by the lifecycle.

        Raises InvalidArgument while another engine's goes on, and what the constructor does.
        """
        with self._lock:
            if self._session is not None:
                why = f"{self.path} is the log of another engine; each needs an AuditLog of its own"
                raise InvalidArgument(why)
            self._session = _Session(LogFile(self.path), _header(engine, rank), self._max_bytes)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Keep one event. Once in an outage it raises OSError, when the event was kept or counted."""
        session = self._session
        if session is None:  # it ended: whatever is refused after that is in memory only
            return
        self.lost += session.take(event)
        waits = event["event"] in _SYNCED and event.get("trigger") not in _UNSYNCED
        if waits and not session.wait_for(event["seq"], WAIT_S):
            session.note_late(event["seq"])
        if session.untold is not None:
            session.complain()

    def unaudited(self) -> str | None:
        """Why an operation may not begin: this log is strict, and the disk takes nothing. Else None."""
        outage = self._session.outage if self.strict and self._session is not None else None
        return None if outage is None else f"the audit log {self.path} is strict, and behind: {outage}"

    @property
    def given(self) -> int:
        """The number of the last record that it was given, with all before it."""
        return self._session.next - 1 if self._session is not None else 0

    @property
    def on_disk(self) -> int:
        """The number of the last record that was synced; 0 while no session is open."""
        return self._session.on_disk if self._session is not None else 0

    def flush(self, timeout: float = WAIT_S) -> bool:
        """Wait until all that was given is on disk, for `timeout` seconds at most. Whether it is."""
        session = self._session
        return session is None or session.wait_for(session.next - 1, timeout)

    def end(self, *, clean: bool) -> None:
        """The session is over. clean: with a line that says so. Called by the lifecycle."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            self.lost += session.end(clean=clean)

    def forget_parent(self) -> None:
        """In a forked child: the log is the parent's, and so is the lock on its file."""
        self._lock = threading.RLock()
        session, self._session = self._session, None
        if session is not None:
            session.file.close()


class _Session:
    """One engine's records on their way to the file.

    next: the number of the record to come. on_disk: of the last one that was synced. outage: why the
    disk takes nothing, while it does not. untold: the same, until somebody was told.
    """

    def __init__(self, file: LogFile, header: dict[str, Any], max_bytes: int | None) -> None:
        self.file = file
        self.file.open()
        self.next = 1
        self.on_disk = 0
        self.outage: str | None = None
        self.untold: str | None = None
        self._header = header
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        # Under the lock: what is sealed and not written.
        self._chain = uuid.uuid4().hex[:16]
        self._early: dict[int, Mapping[str, Any]] = {}
        self._backlog: deque[tuple[int, bytes]] = deque()
        self._backlog_bytes = 0
        self._waiting: list[tuple[int, threading.Lock]] = []
        self._work = threading.Event()  # there is something to write
        self._urgent = threading.Event()  # and somebody waits for it
        self._ending = self._ends_well = False
        # Under the lock: the outage.
        self._since = 0.0
        self._first_late = self._last_late = 0  # the records whose callers did not wait any longer
        self._dropped = 0
        # The writer's own.
        self._part = 1
        self._taken: deque[tuple[int, bytes]] = deque()
        self._offset = 0  # so much of the first of them is written
        self._written = 0
        self._written_chain = self._chain
        self._is_full = False  # the part has its last line
        self._dirty = False  # something was written and not synced
        self._put_opening()
        self._thread = threading.Thread(target=self._run, name=f"audit log {file.path.name}", daemon=True)
        self._thread.start()

    # -- whoever emits ---------------------------------------------------------------------------------

    def take(self, event: Mapping[str, Any]) -> int:
        """Seal an event, and those that waited for it. Returns how many were lost."""
        lost = 0
        with self._lock:
            if event["seq"] >= self.next:
                self._early[event["seq"]] = event
            while self.next in self._early:
                lost += not self._keep(self._early.pop(self.next))
                self.next += 1
        if not self._work.is_set():
            self._work.set()
        return lost

    def _keep(self, event: Mapping[str, Any]) -> bool:
        if self._backlog_bytes > MOST_BACKLOG:
            self._begin_outage("records come faster than it takes them")
        if self._dropped or self._backlog_bytes > MOST_BACKLOG:
            self._dropped += 1
            return False
        line, self._chain = form.seal(event, self._chain)
        self._put(self.next, line)
        return True

    def _put(self, number: int, line: bytes) -> None:
        self._backlog.append((number, line))
        self._backlog_bytes += len(line)

    def wait_for(self, number: int, timeout: float) -> bool:
        """Whether the record is on disk, within `timeout` seconds; nobody waits in an outage."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self.on_disk >= number or self.outage is not None:
                return self.on_disk >= number
            self._waiting.append((number, waiter))
        self._work.set()
        self._urgent.set()
        answered = waiter.acquire(timeout=timeout)
        with self._lock:
            if not answered and self.on_disk < number:
                self._begin_outage(f"it did not answer for {timeout:g} s")
            return self.on_disk >= number

    def note_late(self, number: int) -> None:
        """Its caller goes on, though this record is not on disk."""
        with self._lock:
            self._first_late = self._first_late or number
            self._last_late = number

    def complain(self) -> None:
        """Raise OSError for an outage that nobody was told of."""
        with self._lock:
            untold, self.untold = self.untold, None
        if untold is not None:
            raise OSError(f"the audit log {self.file.path} is behind: {untold}")

    def end(self, *, clean: bool) -> int:
        """Write what there is and a closing line, and let the file go. Returns how many records are lost."""
        with self._lock:
            self._ending, self._ends_well = True, clean
            self._work.set()
            self._urgent.set()
        self._thread.join(WAIT_S)  # a disk that is stuck must not keep anybody
        return self.next - 1 - self._dropped - self._written

    # -- the outage: under the lock --------------------------------------------------------------------

    def _begin_outage(self, why: str) -> None:
        if self.outage is None:
            self.outage = self.untold = why
            self._since = time.monotonic()
        self._release(self.next)

    def _end_outage(self) -> None:
        """Everything that was kept is on disk: say what happened, where it happened."""
        fields: dict[str, Any] = {"lost": self._dropped, "error": self.outage}
        if self._first_late:
            fields |= {"first": self._first_late, "last": self._last_late}
        fields["duration_s"] = time.monotonic() - self._since
        self._put(_FRAME, self._frame(form.OUTAGE, **fields))
        self.outage = None
        self._dropped = self._first_late = 0

    def _release(self, number: int) -> None:
        """Whoever waits for this record, or one before it, goes on."""
        waiting, self._waiting = self._waiting, []
        for wanted, waiter in waiting:
            if wanted <= number:
                waiter.release()
            else:
                self._waiting.append((wanted, waiter))

    def _frame(self, name: str, **fields: Any) -> bytes:
        return form.seal({"event": name, "time": time.time(), **fields}, self._chain)[0]

    # -- the writer ------------------------------------------------------------------------------------

    def _run(self) -> None:
        over = False
        while not over:
            try:
                over = self._round()
            except OSError as error:
                with self._lock:
                    self._begin_outage(error.strerror or str(error))
                over = self._ending
                if not over:
                    time.sleep(AGAIN_S)
        self.file.close()

    def _round(self) -> bool:
        """Write and sync what there is. Returns whether the session is over."""
        unfinished = self._dirty or self._taken or self.outage
        idle = not self._work.wait(AGAIN_S if unfinished else None)
        if not idle:
            self._urgent.wait(GATHER_S)
        self._work.clear()
        self._urgent.clear()
        ending = self._ending
        while self._write_some():
            pass
        if self._dirty and (idle or ending or self._waiting or self.outage):
            self.file.sync()
            self._dirty = False
        with self._lock:
            if not self._dirty:
                self.on_disk = self._written
                self._release(self.on_disk)
                if self.outage is not None and not self._backlog:
                    self._end_outage()
                if self._ends_well and not self._backlog:  # the last of all, also behind an outage
                    self._ends_well = False
                    self._put(_FRAME, self._frame(form.CLOSED, last=self.next - 1))
            if self._backlog:
                self._work.set()
            return ending and not self._backlog

    def _write_some(self) -> bool:
        """Append a chunk of what was taken, or of the backlog. False with nothing left to write."""
        if self.file.is_gone():
            with self._lock:
                self._begin_outage("the file was removed or replaced; the log goes on in a new one")
            self._open_part()
        elif self._is_full:
            self.file.sync()
            self.file.set_aside()
            self._open_part()
        if not self._taken:
            with self._lock:
                self._taken, self._backlog = self._backlog, self._taken
        if not self._taken:
            return False
        lines: list[bytes] = []
        size = -self._offset
        for number, line in self._taken:
            lines.append(line)
            size += len(line)
            if size >= _CHUNK or number == _LAST_OF_PART:
                break
        written = self.file.write(b"".join(lines)[self._offset :])
        self._dirty = True
        self._note_written(written)
        return True

    def _note_written(self, count: int) -> None:
        """So many bytes more of what was taken are in the file."""
        with self._lock:
            self._backlog_bytes -= count
        self._offset += count
        while self._taken and self._offset >= len(self._taken[0][1]):
            number, line = self._taken.popleft()
            self._offset -= len(line)
            if number > _FRAME:
                self._written, self._written_chain = number, form.sum_of(line)
            elif number == _LAST_OF_PART:
                self._is_full = True
                return
        if (
            self._max_bytes
            and self.file.size >= self._max_bytes
            and not self._offset
            and self._written >= self._first
        ):
            fields = {"event": form.ROTATED, "time": time.time(), "last": self._written}
            line = form.seal(fields, self._written_chain)[0]
            self._taken.appendleft((_LAST_OF_PART, line))

    def _open_part(self) -> None:
        """Go on in another file: it begins with a header, and no half of a line."""
        self.file.close()
        self._part += 1
        self._is_full, self._offset = False, 0
        if self._taken and self._taken[0][0] in (_HEADER, _LAST_OF_PART):
            self._taken.popleft()
        self._put_opening()

    def _put_opening(self) -> None:
        fields = {
            **self._header,
            "time": time.time(),
            "part": self._part,
            "first": self._written + 1,
            "chain": self._written_chain,
            "after": form.sum_of(self.file.last_line) if self._part == 1 else "",
        }
        self._first = self._written + 1
        self._taken.appendleft((_HEADER, form.seal(fields, self._written_chain)[0]))


# -- the path, and who writes ----------------------------------------------------------------------


def from_environment(rank: int) -> tuple[AuditLog, ...]:
    """The log that LIFECYCLE_LOG asks for, if it is set. Raises what `AuditLog` does."""
    path = os.environ.get("LIFECYCLE_LOG")
    return (AuditLog(path, rank=rank or None),) if path else ()


def _filled_in(path: str | os.PathLike[str], rank: int | None) -> Path:
    known = {
        "host": socket.gethostname(),
        "rank": os.environ.get("RANK", "0") if rank is None else rank,
        "pid": os.getpid(),
    }
    template = os.fspath(path)
    try:
        filled = template.format(**known)
    except (LookupError, ValueError, AttributeError) as error:
        why = f"{template!r}: in braces there may be host, rank or pid ({{{{ stands for a brace): {error!r}"
        raise InvalidArgument(why) from None
    return Path(filled).absolute()


def _header(engine: str, rank: int) -> dict[str, Any]:
    return {
        "event": form.OPENED,
        "format": form.FORMAT,
        "table": table.TABLE_VERSION,
        "rules": [[rule.trigger, rule.source, rule.dest] for rule in table.RULES],
        "engine": engine,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
