"""A lock file beside what is written, so that two processes never write it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: no lock there
    fcntl = None  # type: ignore[assignment]


class HeldError(OSError):
    """Another process holds the lock."""


def lock_path(target: Path) -> Path:
    """The lock's hidden file in the folder of ``target``."""
    return target.parent / f".{target.name}.lock"


@contextmanager
def locked(target: Path, wait: bool = False) -> Iterator[None]:
    """Holds the lock of ``target``, which the system lets go of when the process dies however it dies.

    Raises:
        HeldError: another process has it (unless ``wait``).
    """
    path = lock_path(target)
    if fcntl is None:
        yield
        return
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(path, descriptor):  # the one who held it may have removed the file meanwhile
                break
        except BlockingIOError as error:
            os.close(descriptor)
            raise HeldError(f"{target} is being written") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def being_written(target: Path) -> bool:
    """Whether another process holds the lock of ``target``."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(lock_path(Path(os.path.realpath(target))), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
