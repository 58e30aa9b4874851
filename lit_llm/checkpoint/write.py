"""Writing checkpoints so that neither a full disk nor a killed process costs the ones before."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

PARTIAL = ".*.partial"
"""Pattern of the files that a save has not finished."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


class CheckpointWriteError(OSError):
    """A checkpoint that can't be written: one line with its path, the reason, the room there and the way out.

    It is the machine's state and no mistake in what the user typed, hence no UserError.
    """


def write_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """Writes a file that is either complete under its name or not there.

    It goes to ``.NAME.PROCESS.partial`` beside it, from there to the disk itself, and only then to its name. Whatever
    fails removes the partial file and leaves what was at `path`; a killed process leaves the partial file behind.

    Args:
        content: what torch.save takes; it is streamed, not copied.
        path: of the file; its folder is made if need be.

    Raises:
        CheckpointWriteError: the disk is full, the folder can't be written, and the like.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path.parent, path.name)
        _save(content, partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _explained(error, path) from error
        raise
    _sync_folder(path.parent)


class _Stream:
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


def _save(content: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        _lock(file)
        stream = _Stream(file)
        try:
            torch.save(content, stream)  # type: ignore[arg-type]  # write and flush are all that it calls
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _lock(file: IO[bytes]) -> bool | None:
    """Marks a file as being written, as long as it is open; False if another process does, None without locks."""
    try:
        import fcntl
    except ImportError:  # Windows, which does not remove open files either
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Removes what killed saves of ``name`` have left in a folder, and nothing that another process is writing."""
    for path in Path(folder).glob(f".{name}.*partial"):
        with suppress(OSError), path.open("r+b") as file:  # NFS locks only what may be written
            locked = _lock(file)
            if locked or (locked is None and _writer_is_gone(path.name)):
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes the new name itself last through a power cut. Not every file system can; the file is complete anyhow."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _explained(error: OSError, path: Path) -> CheckpointWriteError:
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


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's own way to save and load checkpoints, but local files are written by write_checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the whole content into one file.

        Raises:
            TypeError: storage_options are given; Lightning's class takes none either.
            CheckpointWriteError: see write_checkpoint.
        """
        system, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_checkpoint(checkpoint, local)


def write_safely(strategy: Any) -> None:
    """Gives a strategy SafeCheckpointIO, where it would use exactly Lightning's own."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = SafeCheckpointIO()


def snapshot(content: Any) -> Any:
    """A copy of a checkpoint's content that later training can't change.

    Tensors are copied to CPU memory. Those that share memory, such as tied weights and views, share it in the copy as
    well, and a container that appears twice is one there too, so the copy makes the same file. Objects of other kinds
    go through copy.deepcopy.
    """
    return _copied(content, {}, {})


def _copied(value: Any, memo: dict[int, Any], storages: dict[int, Any]) -> Any:
    if isinstance(value, _IMMUTABLE):
        return value
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if isinstance(value, torch.Tensor):
        new = _copied_tensor(value, memo, storages)
    elif isinstance(value, dict):
        new = memo[id(value)] = copy.copy(value)  # its kind, order and default
        for key in value:
            new[key] = _copied(value[key], memo, storages)
        if hasattr(value, "__dict__"):  # a module's state_dict carries _metadata so
            vars(new).update({name: _copied(one, memo, storages) for name, one in vars(value).items()})
    elif type(value) is list:
        new = memo[id(value)] = []
        new.extend(_copied(one, memo, storages) for one in value)
    elif type(value) is tuple:
        new = tuple(_copied(one, memo, storages) for one in value)
    else:
        new = copy.deepcopy(value, memo)
    memo[id(value)] = new
    memo.setdefault(id(memo), []).append(value)  # kept alive, as copy.deepcopy does, so that no id is met again
    return new


def _copied_tensor(tensor: torch.Tensor, memo: dict[int, Any], storages: dict[int, Any]) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    if storage.device.type == "cpu":
        new = copy.deepcopy(storage, memo)  # the memo knows it: copy.deepcopy of other objects shares it too
    else:
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.cpu()
        new = storages[storage._cdata]
    copied = torch.empty(0, dtype=tensor.dtype).set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


class BackgroundWrite:
    """One write in a thread of its own, which the process waits for at its end.

    Args:
        write: does it; what it raises is kept.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=False)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._error = CheckpointWriteError(str(error))  # without the frames, which hold the content
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> BaseException | None:
        """Waits for the end; returns what went wrong."""
        self._thread.join()
        return self._error
