"""Files and folders on their way to their names: partial ones, locks, and why a write failed. Needs no Lightning."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import torch

from lit_llm.checkpoint.marker import is_complete

PARTIAL = ".*.partial"
"""Pattern of the files that a save has not finished."""

LOCK = ".lock"
"""In a partial folder: locked by the process that writes it; holds the name that it is to get."""

_REPLACES = ContextVar("replaces", default=True)
_OLD = ".old.partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriteError(OSError):
    """A checkpoint that can't be written: one line with its path, the reason, the room there and the way out.

    It is the machine's state and no mistake in what the user typed, hence no UserError.
    """


def partial_name(path: Path) -> Path:
    """Under which name this thread writes what will come to `path`."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.partial")


class Stream:
    """A file for torch.save. What its zip writer makes of an error in the middle hides the error, so it is kept."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                return self.file.write(data)
            except BaseException as error:  # Ctrl-C, too, arrives here
                self.error = error
        raise self.error

    def flush(self) -> None:
        self.file.flush()


def save_file(content: dict[str, Any], path: Path) -> None:
    """torch.save onto the disk itself; the file is locked meanwhile.

    Raises:
        OSError: as the disk gave it.
    """
    with open(path, "wb") as file:
        lock_file(file)
        stream = Stream(file)
        try:
            torch.save(content, stream)  # type: ignore[arg-type]  # write and flush are all that it calls
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise
        file.flush()
        os.fsync(file.fileno())


def lock_file(file: IO[bytes], *, shared: bool = False) -> bool | None:
    """Marks a file as being written, as long as it is open; False if another process does, None without locks.

    Shared: only asks; others may ask at the same time.
    """
    try:
        import fcntl
    except ImportError:  # Windows, which does not remove open files either
        return None
    try:
        fcntl.flock(file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _writer_is_gone(partial: str) -> bool:
    """Whether the process in a partial file's name was one of this machine and has ended."""
    host, _, rest = partial.rpartition(f".{socket.gethostname()}-")
    pid = rest.split("-")[0]
    if not host or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def remove_partials(folder: str | Path, name: str = "*") -> None:
    """Removes what killed saves of ``name`` have left in a folder, and nothing that another process is writing.

    A partial folder is one being written if its file ``.lock`` is locked. One that is complete gets its name instead.
    """
    adopt_complete(folder, name)
    for path in Path(folder).glob(f".{name}.*partial"):
        with suppress(OSError):
            if path.is_dir():
                _remove_partial_folder(path)
                continue
            with path.open("r+b") as file:  # NFS locks only what may be written
                if _is_left_behind(lock_file(file), path):
                    path.unlink()


def _remove_partial_folder(path: Path) -> None:
    try:
        with (path / LOCK).open("r+b") as file:
            left = _is_left_behind(lock_file(file), path)
    except FileNotFoundError:  # not begun, or all but at its name
        left = _writer_is_gone(path.name)
    if left:
        shutil.rmtree(path, ignore_errors=True)


def _is_left_behind(locked: bool | None, path: Path) -> bool:
    return bool(locked) or (locked is None and _writer_is_gone(path.name))


def adopt_complete(folder: str | Path, name: str = "*") -> None:
    """Gives complete folders their names, if nothing is there, where a save was killed just before it did.

    Safe in any number of processes at once, which all find the same afterwards.
    """
    for path in Path(folder).glob(f".{name}.*.partial"):
        with suppress(OSError, ValueError):
            if path.name.endswith(_OLD) or not path.is_dir() or not is_complete(path):
                continue
            with (path / LOCK).open("r+b") as file:
                final = path.with_name(file.read().decode("utf-8"))
                meant = path.name.startswith(f".{final.name}.") and not os.path.lexists(final)
                if meant and _is_left_behind(lock_file(file, shared=True), path):
                    os.rename(path, final)
                    (final / LOCK).unlink(missing_ok=True)


@contextmanager
def new_names_only() -> Iterator[None]:
    """Checkpoints that this thread writes herein come to names that are free, and are refused where one is taken.

    So that runs in one folder, which have looked for free names at once, don't overwrite one another's.
    """
    token = _REPLACES.set(False)
    try:
        yield
    finally:
        _REPLACES.reset(token)


def replaces() -> bool:
    """Whether a checkpoint that this thread writes may replace what is at its name."""
    return _REPLACES.get()


def name_file(partial: Path, path: Path, *, replace: bool) -> None:
    """Gives a complete file its name.

    Raises:
        CheckpointWriteError: the name is taken, and not to be replaced.
        OSError: as the disk gave it.
    """
    if replace:
        os.replace(partial, path)
        return
    try:
        os.link(partial, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise _taken(path) from None
        os.replace(partial, path)
        return
    partial.unlink()


def name_folder(partial: Path, path: Path, *, replace: bool) -> None:
    """Gives a complete folder its name; a kill in between leaves the old one there or the new one to be adopted.

    Raises:
        CheckpointWriteError: the name is taken, and not to be replaced.
        OSError: as the disk gave it.
    """
    hidden = _hidden(path)
    if replace and path.is_dir() and not path.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
    elif replace and os.path.lexists(path):
        path.unlink()
    try:
        os.rename(partial, path)
    except BaseException as error:  # Ctrl-C, too
        taken = os.path.lexists(path)
        if hidden.is_dir() and not taken:
            os.rename(hidden, path)
        if taken and isinstance(error, OSError):
            raise _taken(path) from None
        raise
    shutil.rmtree(hidden, ignore_errors=True)


def _taken(path: Path) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"{path} is there by now and is not overwritten: another run writes into this folder; give each its own by "
        "checkpoint.dirpath"
    )


def _hidden(path: Path) -> Path:
    return partial_name(path).with_suffix(_OLD)


def remove_folder(path: Path) -> None:
    """Removes a checkpoint's folder; a kill in between leaves nothing under its name.

    Raises:
        OSError: it can't be renamed.
    """
    hidden = _hidden(path)
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes the new name itself last through a power cut. Not every file system can; the file is complete anyhow."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def explained(error: OSError, path: Path) -> CheckpointWriteError:
    """The one line for what the disk gave."""
    if isinstance(error, CheckpointWriteError):
        return error
    place = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    if error.errno in _FULL:
        way_out = "free some space, keep fewer by checkpoint.keep_last, or give another folder by checkpoint.dirpath"
    else:
        way_out = "see that the folder can be written, or give another by checkpoint.dirpath"
    line = f"{path} can't be written: {error.strerror or error} ({free:,} bytes are free there); {way_out}"
    explained = CheckpointWriteError(line)
    explained.errno = error.errno
    return explained
