"""Files and folders of our own: written atomically, locked, and read only if nobody else could have put them there.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slidesparse.errors import EnvironmentFault, SlideSparseError

JSON_LIMIT = 256 * 2**20  # bytes of a JSON file that is read
GLANCE = 0.2  # seconds for which a process may hold a lock that only sees whether another has it
SHARED = stat.S_IWGRP | stat.S_IWOTH


class DamagedFile(SlideSparseError, ValueError):  # noqa: N818  names what was found
    """A file does not hold what was written there."""


def own_folder(folder: Path, instead: str = "name another place") -> Path:
    """Create a folder, with its parents, under any umask not writable by others, and return it.

    Args:
        instead: what to do where it cannot be used, for messages.

    Raises EnvironmentFault unless it is a folder of this user, not a link, that nobody else may write to.
    """
    try:
        for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
            missing.mkdir(mode=0o755, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be created: {error.strerror}", instead) from error
    if not stat.S_ISDIR(status.st_mode):
        problem, remedy = "is a link or a file", "remove it"
    elif status.st_uid != os.geteuid():
        problem, remedy = "belongs to another user", "remove it"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem, remedy = "cannot be written", "run chmod u+wx on it"
    elif status.st_mode & SHARED and not status.st_mode & stat.S_ISVTX:
        problem, remedy = "may be changed by other users", "run chmod go-w on it"
    else:
        return folder
    raise EnvironmentFault(f"{folder} {problem}", f"{remedy}, or {instead}")


@contextmanager
def locked(path: Path, busy: SlideSparseError | None = None) -> Iterator[bool]:
    """Hold the lock of a folder, or of a file X.lock, which is made; the kernel releases it when a process dies.

    Yields whether it is held: file systems may have no locks, and NFS none of folders.  Raises ``busy`` if another
    process has it; waits for that process if ``busy`` is None.
    """
    import fcntl  # POSIX only; imported late so that doctor runs everywhere

    flags = os.O_RDWR | os.O_CREAT if path.suffix == ".lock" else os.O_RDONLY | os.O_DIRECTORY
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    held = True
    try:
        how = fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0)
        try:
            try:
                fcntl.flock(descriptor, how)
            except BlockingIOError:
                time.sleep(GLANCE)
                fcntl.flock(descriptor, how)
                if not _is_open(path, descriptor):  # it was removed by the process that had it
                    raise
        except OSError as error:
            if busy and isinstance(error, BlockingIOError):
                raise busy from None
            held = False
        yield held
    finally:
        os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Return whether a path still leads to what was opened there."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power failure."""
    partial = path.parent / f".{path.name}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_own(path: Path) -> bytes:
    """Read a file that this user wrote.  Raises DamagedFile for a link, a pipe, another user's or a larger file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > JSON_LIMIT:
            raise DamagedFile(f"{path} is not a file of at most {JSON_LIMIT} bytes of this user")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically, with a checksum of its name and the value."""
    write_atomically(
        path, json.dumps({"sha256": _sum(path, value), "value": value}, indent=1).encode() + b"\n"
    )


def read_json(path: Path) -> Any:
    """Return the value that `write_json` wrote, or None if there is no file.  Raises DamagedFile for anything else."""
    if not path.is_symlink() and not path.exists():
        return None
    try:
        content = json.loads(read_own(path))
        if content.keys() == {"sha256", "value"} and content["sha256"] == _sum(path, content["value"]):
            return content["value"]
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFile):
            raise
    raise DamagedFile(f"{path} does not hold what was written there")


def _sum(path: Path, value: object) -> str:
    return hashlib.sha256(json.dumps([path.name, value]).encode()).hexdigest()
