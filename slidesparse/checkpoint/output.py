"""Write a checkpoint folder: a few threads fill a hidden sibling folder, and one rename publishes it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from slidesparse.checkpoint.storage import SUFFIX, CheckpointError
from slidesparse.errors import EnvironmentFault
from slidesparse.files import locked, sync

MAX_WORKERS = 8
MAX_NAME = 255 - len("..partial-01234567")  # bytes of the name of an output folder


def require_free_name(source: Path, out: Path) -> None:
    """Raise CheckpointError unless ``out`` can be created: absent or empty, and not inside ``source``.

    Raises EnvironmentFault if its parent cannot be written to.
    """
    try:
        place = out.resolve()
    except RuntimeError:
        raise CheckpointError(f"output folder {out} is a link to itself; name another one") from None
    length, parent, problem = len(os.fsencode(place.name)), _existing_parent(out), ""
    if length > MAX_NAME:
        problem = f"cannot be created: its name has {length} bytes; choose one of at most {MAX_NAME}"
    elif place.is_dir() and any(place.iterdir()):  # "new/.." is a folder, too
        problem = "is not empty; name a new one, or empty it first"
    elif place.exists() and not place.is_dir():
        problem = "is a file; name a new folder"
    elif not parent.is_dir():
        problem = f"lies below {parent}, which is a file; name another folder"
    elif place.is_relative_to(os.path.realpath(source)):  # which may be a link to itself
        problem = f"lies inside the source {source}; name one elsewhere"
    elif place.is_dir() and place.samefile("."):  # the shell would stay in a folder that is deleted
        problem = "is the current folder, which would be replaced; run the command in another one"
    elif place.is_mount():  # a folder cannot be renamed to it
        problem = "is where a disk or volume is mounted; name a folder in it"
    if problem:
        raise CheckpointError(f"output folder {out} {problem}")
    if not os.access(parent, os.W_OK | os.X_OK):  # false on a disk that is mounted read-only, too
        raise EnvironmentFault(
            f"output folder {out} cannot be created: {parent} is not writable here; name a folder elsewhere"
        )


def _existing_parent(out: Path) -> Path:
    """Return the nearest existing parent of ``out``, or the root itself."""
    place = out.resolve()
    return next((path for path in place.parents if path.exists()), place)


def require_space(out: Path, needed: int) -> None:
    """Raise EnvironmentFault unless ``needed`` bytes are free on the disk of ``out``."""
    folder = _existing_parent(out)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFault(
            f"no space left for {out}: it needs {needed / 1e6:.1f} MB, {folder} has {free / 1e6:.1f} MB "
            "free; free some space or choose another output folder"
        )


@contextmanager
def full_disk_explained(out: Path, nbytes: int, advice: str) -> Iterator[None]:
    """Convert errors of a full disk, while ``nbytes`` are written to ``out``, to EnvironmentFault.

    A quota, and a limit on the size of a file, count as a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise EnvironmentFault(
            f"no space left in {out.resolve().parent} while writing {nbytes / 1e6:.0f} MB ({error.strerror}); {advice}"
        ) from error


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool with one thread per processor, in which torch itself uses a single thread."""
    count = max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        count, thread_name_prefix="slidesparse", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        with pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _partial_name(out: Path) -> str:
    return f".{out.resolve().name}.partial-"


def remove_stale(out: Path) -> None:
    """Remove the folders of interrupted conversions to ``out``.

    Raises CheckpointError if one is still running, EnvironmentFault for a link or a file by such a name.
    """
    parent = out.resolve().parent
    for stale in list(parent.iterdir()) if parent.exists() else ():
        if stale.name.startswith(_partial_name(out)):
            if stale.is_symlink() or not stale.is_dir():
                raise EnvironmentFault(
                    f"{stale} is a link or a file, not an interrupted conversion; remove it"
                )
            with locked(stale, _busy(stale, out)) as held:
                if held:  # else it may be written at this moment
                    shutil.rmtree(stale)


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """Create a hidden sibling of ``out``, which is removed afterwards unless it was published.

    A lock on it distinguishes a running process from a killed one.
    """
    partial = out.resolve().parent / f"{_partial_name(out)}{secrets.token_hex(4)}"
    partial.mkdir(parents=True)
    try:
        with locked(partial, _busy(partial, out)):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _busy(partial: Path, out: Path) -> CheckpointError:
    return CheckpointError(f"another conversion is writing {out} (in {partial}); wait for it or stop it")


def publish(partial: Path, out: Path) -> None:
    """Sync all files to disk, then rename the folder to its final name."""
    for path in sorted(partial.rglob("*")):
        if not path.name.endswith(SUFFIX) or path.parent != partial:  # shards are synced as they are closed
            sync(path)
    sync(partial)
    try:
        os.rename(partial, out.resolve())
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise CheckpointError(
                f"output folder {out} was filled by another process in the meantime; name a new one"
            ) from error
        raise
    sync(out.resolve().parent)
