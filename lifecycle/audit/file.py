"""The file that a log is written to: appended, synced, and opened again when it is gone.

Theory of operation
-------------------
One writer per file: it holds a lock (`flock`) for as long as the file is open, and a second
one gets `BlockingIOError`. The file is opened to append, its folder is synced once it was
created, and a line that an earlier process left unfinished is ended first.

A write that took part of what it was given is continued where it stopped, so that a full
disk leaves no torn line behind. Whether the file is still the one at its path is looked at
before every write: one that was removed, or moved away by somebody, is left, and the log
goes on in a new one at the path.

Every method raises OSError for what the disk says. No thread, no lock of its own.
"""

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Final

from lifecycle.audit.format import MOST_BYTES, TORN

_BLOCK: Final = 64 << 10
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class LogFile:
    """The file at a path, opened when it is first needed. size: in bytes, once it is open.

    last_line: of those that were in it when it was opened, the last whole one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self.size = 0
        self.last_line = b""

    def open(self) -> int:
        """Open it for this writer alone, unless it is. Raises BlockingIOError if somebody else writes to it.

        Returns the file descriptor.
        """
        if self._descriptor is not None:
            return self._descriptor
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o644)  # a pipe in its place must not block
        try:
            _lock(descriptor, self.path)
            self.size = os.fstat(descriptor).st_size
            self.last_line, ended = _last_line(descriptor, self.size)
            if not ended:
                self.size += os.write(descriptor, TORN)
            _sync_folder(self.path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def write(self, data: bytes) -> int:
        """Append the data, or its beginning. Returns how many bytes were taken."""
        written = os.write(self.open(), data)
        self.size += written
        return written

    def sync(self) -> None:
        """Return once everything that was written is on disk."""
        os.fdatasync(self.open())

    def is_gone(self) -> bool:
        """Whether it is open, and another file or none is at its path now."""
        if self._descriptor is None:
            return False
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def close(self) -> None:
        """Let it go, and with it the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def set_aside(self) -> None:
        """Give the full file the next number behind its name: the path is free for the next one."""
        self.path.rename(aside(self.path, max(numbers(self.path), default=0) + 1))
        self.close()


def numbers(path: Path) -> list[int]:
    """The numbers of what was set aside from this path, in order: `path.1` is the oldest."""
    pattern = re.compile(re.escape(path.name) + r"\.([1-9][0-9]{0,8})")
    if not path.name:  # a folder: nothing can be set aside from it
        return []
    with contextlib.suppress(OSError):
        found = (pattern.fullmatch(name) for name in os.listdir(path.parent))  # noqa: PTH208  (names are all it takes)
        return sorted(int(match[1]) for match in found if match)
    return []


def aside(path: Path, number: int) -> Path:
    """Where the part of this number is."""
    return path.with_name(f"{path.name}.{number}")


def _last_line(descriptor: int, size: int) -> tuple[bytes, bool]:
    """The last whole line, and whether what is behind it has an end."""
    tail, begin, lines = b"", size, [b""]
    while begin and len(tail) <= 2 * MOST_BYTES:
        begin = max(0, begin - _BLOCK)
        tail = os.pread(descriptor, size - begin, begin)
        lines = [line for line in tail.split(b"\n")[1 if begin else 0 : -1] if not line.endswith(b"\0")]
        if lines:
            break
    return (lines[-1] + b"\n" if lines and lines[-1] else b""), not tail or tail.endswith(b"\n")


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            "another log is written to it; give each writer a path of its own, as with {rank} or {pid} in it",
            str(path),
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a file system without locks is no reason to have no log
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems can't, and need not
            raise
    finally:
        os.close(descriptor)
