"""The ledger: every request from admission to its one terminal, and the mailbox.

Theory of operation
-------------------
A live request is in exactly one of three dicts, keyed by the caller's id:

`held`
    outside the engine, kept as the call's arguments until the engine serves.
`in_flight`
    inside the engine.
`undelivered`
    ended, while its last output still waits in the mailbox.

The *mailbox* holds outputs that arrived while nobody could take them: those of a
drain, those that the lifecycle makes itself (the abort of a sleep, a failure), those
that belong to another thread's call. Outputs in it are snapshots, in order; a request
is forgotten when its last one is taken.

An *owner* is whoever may take a request's outputs, as a `Scope`: one blocking call, or
one of the ledger's own two: `anybody`, and `enqueued` for what `LLM.enqueue` left for
`wait_for_completion` (and for anybody who steps by hand).

Whoever sets `on_begin` and `on_end` is told of every request once when it becomes live and
once when its end is known, however it ends; nobody asks for that unless it is recorded.

Plain data: no engine, no lock, no clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lifecycle.engine import Call


class Scope:
    """Who may take a request's outputs. live: its live requests.

    keeps: a blocking call that must give back what it was handed if it is interrupted.
    error: why one of its requests came to an end for which it gets no output.
    """

    __slots__ = ("call", "error", "handed_out", "keeps", "live")

    def __init__(self, call: str, *, keeps: bool = False) -> None:
        self.call = call
        self.keeps = keeps
        self.live = 0
        self.error: Exception | None = None
        self.handed_out: list[tuple[Record, Any]] = []

    def lose(self, request_id: str, error: Exception | None) -> None:  # noqa: ARG002  (for who tells them apart)
        """One of its requests ended without an output, perhaps for a reason."""
        self.error = self.error or error


class Record:
    """One live request. handle is the id that `add_request` returned to the caller."""

    __slots__ = ("call", "engine_id", "epoch", "handle", "owner", "seq")

    def __init__(self, call: Call, seq: int, owner: Scope, epoch: int) -> None:
        self.call = call
        self.seq = seq
        self.owner = owner
        self.epoch = epoch
        self.engine_id = ""  # while it is inside the engine
        self.handle = ""

    @property
    def request_id(self) -> str:
        """The caller's id."""
        return self.call.request_id

    @property
    def recallable(self) -> bool:
        """Its arguments are known, so that it can be admitted again."""
        return self.call.params is not None


class Ledger:
    """All live requests of one engine. Not thread-safe: the core's caller holds the lock."""

    def __init__(self, anybody: Scope | None = None) -> None:
        self.held: dict[str, Record] = {}
        self.in_flight: dict[str, Record] = {}
        self.undelivered: dict[str, Record] = {}
        self.mailbox: deque[tuple[Record, Any]] = deque()
        self.anybody = anybody or Scope("anybody")
        self.enqueued = Scope("enqueue")
        self.scoped = 0  # live requests that belong to a blocking call
        self.on_begin: Callable[[Record], None] | None = None
        # With its last output, or why there is none.
        self.on_end: Callable[[Record, Any, Exception | None], None] | None = None
        self._handles: dict[str, Record] = {}
        self._seq = 0

    # -- reading ---------------------------------------------------------------------------------------

    def is_live(self, request_id: str) -> bool:
        """Whether this id has not come to its end yet."""
        return request_id in self.in_flight or request_id in self.held or request_id in self.undelivered

    def is_new_handle(self, name: str, request_id: str) -> bool:
        """Whether no other live request goes by this engine id, nor this one inside the engine.

        A handle that outlived the engine that gave it may come again from the next.
        """
        known = self._handles.get(name)
        return known is None or (known.request_id == request_id and not known.engine_id)

    def records(self) -> Iterator[Record]:
        """All live requests."""
        yield from self.in_flight.values()
        yield from self.held.values()
        yield from self.undelivered.values()

    def busy(self, owner: Scope | None = None) -> bool:
        """Whether anything that this caller may take is unfinished or undelivered."""
        if owner is None:
            return self.anybody.live > 0 or self.enqueued.live > 0
        return owner.live > 0

    def all_delivered(self, owner: Scope) -> bool:
        """Whether nothing of this owner's is unfinished; its outputs may still wait in the mailbox."""
        places = (self.in_flight, self.held)
        return not any(record.owner is owner for place in places for record in place.values())

    def samples(self, owner: Scope | None = None) -> int:
        """Unfinished requests as vLLM counts them: each sample of `n` is one."""
        return sum(record.call.samples for record in self.records() if self.takes(owner, record))

    def takes(self, owner: Scope | None, record: Record) -> bool:
        """A blocking call takes what it owns; anybody else what no blocking call owns."""
        if owner is None:
            return record.owner is self.anybody or record.owner is self.enqueued
        return record.owner is owner

    def _count(self, owner: Scope, by: int) -> None:
        owner.live += by
        if owner is not self.anybody and owner is not self.enqueued:
            self.scoped += by

    def find(self, ids: Iterable[str]) -> list[Record]:
        """Live records by the caller's ids, by the handles they were given, or by engine ids."""
        found = {}
        for name in ids:
            record = self._handles.get(name) or self._by_request_id(name)
            if record is not None:
                found[record.request_id] = record
        return list(found.values())

    def _by_request_id(self, name: str) -> Record | None:
        return self.in_flight.get(name) or self.held.get(name) or self.undelivered.get(name)

    # -- admission -------------------------------------------------------------------------------------

    def _enter(self, call: Call, owner: Scope | None, epoch: int) -> Record:
        self._seq += 1
        record = Record(call, self._seq, owner or self.anybody, epoch)
        self._count(record.owner, 1)
        return record

    def admit(self, call: Call, engine_id: str, owner: Scope | None, epoch: int) -> Record:
        """The engine took the request."""
        record = self._enter(call, owner, epoch)
        record.handle = engine_id
        self.into_engine(record, engine_id)
        if self.on_begin is not None:
            self.on_begin(record)
        return record

    def hold(self, call: Call, owner: Scope | None, epoch: int) -> Record:
        """The request waits outside the engine; its handle has the form of an engine id."""
        record = self._enter(call, owner, epoch)
        record.handle = f"{call.request_id}-held{record.seq}"
        self._handles[record.handle] = record
        self.held[call.request_id] = record
        if self.on_begin is not None:
            self.on_begin(record)
        return record

    def into_engine(self, record: Record, engine_id: str) -> None:
        """A held request, or a new one, is now inside the engine."""
        record.engine_id = engine_id
        self._handles[engine_id] = record
        self.held.pop(record.request_id, None)
        self.in_flight[record.request_id] = record

    def recall(self, record: Record) -> None:
        """A request that never started is outside the engine again. Its handle stays good."""
        del self.in_flight[record.request_id]
        if record.engine_id != record.handle:
            self._handles.pop(record.engine_id, None)
        record.engine_id = ""
        self.held[record.request_id] = record

    def oldest_first(self) -> list[Record]:
        """What is held, in order of admission."""
        return sorted(self.held.values(), key=lambda record: record.seq)

    # -- ends ------------------------------------------------------------------------------------------

    def finished(self, record: Record, output: Any) -> bool:
        """Its last output goes straight to its caller. False if it had ended before."""
        if self.in_flight.pop(record.request_id, None) is None:
            return False
        self._forget(record)
        if self.on_end is not None:
            self.on_end(record, output, None)
        return True

    def post(self, record: Record, output: Any) -> None:
        """An output waits in the mailbox; its last one ends the request. The output is a snapshot."""
        self.mailbox.append((record, output))
        if output.finished:
            was_live = self._leave(record)
            self.undelivered[record.request_id] = record
            if was_live and self.on_end is not None:
                self.on_end(record, output, None)

    def _leave(self, record: Record) -> bool:
        """It neither runs nor is held any more. Whether it did, or was."""
        ran, was_held = (place.pop(record.request_id, None) for place in (self.in_flight, self.held))
        return ran is not None or was_held is not None

    def take(self, owner: Scope | None) -> list[Any]:
        """Everything in the mailbox that this caller may have, in order, once."""
        taken: list[Any] = []
        left: deque[tuple[Record, Any]] = deque()
        for record, output in self.mailbox:
            if not self.takes(owner, record):
                left.append((record, output))
                continue
            taken.append(output)
            if output.finished:
                del self.undelivered[record.request_id]
                self.hand_out(record, output, owner)
                self._forget(record)
        self.mailbox = left
        return taken

    def hand_out(self, record: Record, output: Any, owner: Scope | None) -> None:
        """Remember a delivered last output for as long as its call may still be interrupted."""
        if owner is not None and owner.keeps:
            owner.handed_out.append((record, output))

    def drop(self, record: Record, error: Exception | None = None) -> None:
        """End a request without delivery: its own caller gave it up, or nothing can be delivered.

        error: what its caller must be told instead of an output.
        """
        record.owner.lose(record.request_id, error)
        was_live = self._leave(record)
        self.undelivered.pop(record.request_id, None)
        if any(entry is record for entry, _ in self.mailbox):
            self.mailbox = deque(item for item in self.mailbox if item[0] is not record)
        self._forget(record)
        if was_live and self.on_end is not None:
            self.on_end(record, None, error)

    def _forget(self, record: Record) -> None:
        self._count(record.owner, -1)
        self._handles.pop(record.handle, None)
        self._handles.pop(record.engine_id, None)

    # -- owners ----------------------------------------------------------------------------------------

    def own(self, records: Iterable[Record], owner: Scope) -> None:
        """Give these requests to another owner."""
        for record in records:
            self._count(record.owner, -1)
            record.owner = owner
            self._count(owner, 1)

    def owned_by(self, owner: Scope) -> list[Record]:
        """All live requests of one owner."""
        return [record for record in self.records() if record.owner is owner]

    def give_back(self, scope: Scope) -> None:
        """What an interrupted `wait_for_completion` had taken can be taken again."""
        for record, output in scope.handed_out:
            record.owner = self.enqueued
            self._count(record.owner, 1)
            self._handles[record.handle] = record
            self.post(record, output)
        scope.handed_out.clear()

    def mend(self) -> None:
        """Make one of it again after an interrupt in the middle of a change. The mailbox is believed."""
        self.undelivered = {r.request_id: r for r, output in self.mailbox if output.finished}
        for name in self.undelivered:
            self.in_flight.pop(name, None)
            self.held.pop(name, None)
        for name in self.in_flight.keys() & self.held.keys():
            del self.held[name]
        self.mailbox = deque(item for item in self.mailbox if self.is_live(item[0].request_id))
        self._handles.clear()
        self.scoped = self.anybody.live = self.enqueued.live = 0
        for record in self.records():
            record.owner.live = 0
        for record in self.records():
            self._count(record.owner, 1)
            self._handles.update((name, record) for name in (record.handle, record.engine_id) if name)

    # -- invariants ------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """The broken promises of this ledger: empty unless this library has a bug."""
        ids = [*self.in_flight, *self.held, *self.undelivered]
        owners = Counter(id(record.owner) for record in self.records())
        scoped = len(ids) - owners[id(self.anybody)] - owners[id(self.enqueued)]
        last = [record.request_id for record, output in self.mailbox if output.finished]
        promises = {
            "a request is in one place": len(ids) == len(set(ids)),
            "the undelivered are those with a last output in the mailbox": sorted(last)
            == sorted(self.undelivered),
            "the last output of a request is its last in the mailbox": self._last_comes_last(),
            "the mailbox has outputs of live requests only": all(
                self.is_live(record.request_id) for record, _ in self.mailbox
            ),
            "what is in flight has an engine id": all(r.engine_id for r in self.in_flight.values()),
            "what is held has none": not any(record.engine_id for record in self.held.values()),
            "an owner counts its live requests": all(
                record.owner.live == owners[id(record.owner)] for record in self.records()
            ),
            "requests of blocking calls are counted": self.scoped == scoped,
            "a handle leads to its request": all(
                self._handles.get(record.handle) is record for record in self.records()
            ),
            "no handle leads to a forgotten request": all(
                self.is_live(record.request_id) for record in self._handles.values()
            ),
        }
        return [promise for promise, kept in promises.items() if not kept]

    def _last_comes_last(self) -> bool:
        ended: set[str] = set()
        for record, output in self.mailbox:
            if record.request_id in ended:
                return False
            if output.finished:
                ended.add(record.request_id)
        return True
