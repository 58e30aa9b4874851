"""Writing checkpoints so that neither a full disk nor a killed process costs the ones before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_llm.checkpoint.copies import snapshot
from lit_llm.checkpoint.disk import (
    CheckpointWriteError,
    explained,
    name_file,
    new_names_only,
    partial_name,
    remove_folder,
    remove_partials,
    replaces,
    save_file,
    sync_folder,
)
from lit_llm.checkpoint.marker import refuse_part
from lit_llm.checkpoint.sharded import open_sharded

__all__ = [
    "BackgroundWrite",
    "CheckpointWriteError",
    "SafeCheckpointIO",
    "new_names_only",
    "remove_partials",
    "snapshot",
    "write_checkpoint",
    "write_safely",
]


def write_checkpoint(content: dict[str, Any], path: str | Path, *, replace: bool | None = None) -> None:
    """Writes a file that is either complete under its name or not there.

    It goes to ``.NAME.PROCESS.partial`` beside it, from there to the disk itself, and only then to its name. Whatever
    fails removes the partial file and leaves what was at `path`; a killed process leaves the partial file behind. What
    was there is replaced.

    Args:
        content: what torch.save takes; it is streamed, not copied.
        path: of the file; its folder is made if need be.
        replace: what is at `path`, or else refuse to write where something is; None: yes, but in
            :func:`lit_llm.checkpoint.disk.new_names_only`.

    Raises:
        CheckpointWriteError: the disk is full, the folder can't be written, and the like.
    """
    path = Path(path)
    partial = partial_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path.parent, path.name)
        save_file(content, partial)
        name_file(partial, path, replace=replaces() if replace is None else replace)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise explained(error, path) from error
        raise
    sync_folder(path.parent)


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

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content of a file, or of a sharded checkpoint as one file would hold it.

        The states of a sharded one's optimizers and its averaged weights are read when they are asked for, so not where
        weights are all that is wanted.

        Raises:
            UserError: an incomplete or damaged sharded checkpoint, or a file of one.
        """
        refuse_part(path)
        if not Path(path).is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        content = open_sharded(path, weights_only=weights_only is not False)
        return {**content, "state_dict": content["state_dict"].whole()}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a folder; a kill in between leaves no half checkpoint under its name."""
        if Path(path).is_dir():
            remove_folder(Path(path))
        else:
            super().remove_checkpoint(path)


def write_safely(strategy: Any) -> None:
    """Gives a strategy SafeCheckpointIO, where it would use exactly Lightning's own."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = SafeCheckpointIO()


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
