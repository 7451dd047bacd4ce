"""One run at a time in a folder of checkpoints."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bilevel.errors import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows; see _created
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The name of the file that the run in a folder holds."""

_held: set[int] = set()


def _leave_to_the_parent() -> None:
    """Close the locks in a forked child, which would hold them longer than the run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other run can lock the folder, in this process or another.

    The system frees the lock of a process that was killed. (Without ``flock`` the file of such a
    process stays, and the message says that it may be removed.) Nothing is locked where the folder
    is read-only.

    Raises:
        CheckpointError: another run has locked it.
    """
    file = folder / LOCK
    descriptor = None
    with suppress(OSError):  # it is read-only, or its file system knows no locks
        descriptor = _created(file) if fcntl is None else _flocked(file)
    if descriptor is None:
        yield
        return
    _held.add(descriptor)
    try:
        with suppress(OSError):  # the disk may be full; the name is only for the message
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.remove(descriptor)
            with suppress(OSError):  # the whole folder may have been removed
                file.unlink()
            os.close(descriptor)


def _flocked(file: Path) -> int:
    """The locked file, open."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(file, "wait until it ends, or name another folder") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_there(file: Path, descriptor: int) -> bool:
    """Whether the file is what was opened, and not a new one after the old one was removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _created(file: Path) -> int:
    """The file, open, which nobody else has created."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        advice = f"wait until it ends, or remove {LOCK} if it was killed, or name another folder"
        raise _in_use(file, advice) from None


def _in_use(file: Path, advice: str) -> CheckpointError:
    owner = ""
    with suppress(OSError):
        owner = file.read_text(errors="replace")[:100]
    return CheckpointError(
        file.parent, f"another run ({owner or 'it does not say which'}) saves into it; {advice}"
    )
