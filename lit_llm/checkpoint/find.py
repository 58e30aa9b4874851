"""Which checkpoint `last` and `best` are, told from the files alone, so that it holds in any process."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_llm.checkpoint.disk import adopt_complete
from lit_llm.checkpoint.marker import MARKER, is_folder_checkpoint, refuse_part
from lit_llm.errors import UserError

CHECKPOINTS = "checkpoints"
SUFFIX = ".ckpt"


@dataclass(frozen=True)
class Found:
    """A checkpoint that could be read.

    Args:
        path: of the file, or of the folder of a sharded one.
        content: what it holds; tensors are mapped from the file, not read. Of a folder, ``state_dict`` and
            ``optimizer_states`` read each tensor when it is asked for, and keep none.
        skipped: one line for each newer one that could not be read.
    """

    path: Path
    content: dict[str, Any]
    skipped: list[str] = field(default_factory=list)


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The file of a folder that was completed last, of those that can be read; None if there is none."""
    for path in list_folder(Path(folder)):
        with suppress(UserError):
            read_checkpoint(path)
            return path
    return None


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """The checkpoints of a run's folder, the one completed last first.

    By modification time, then by the step in the name. Files that a save has not finished carry another ending.
    """
    return list_folder(Path(run_folder) / CHECKPOINTS)


def list_folder(folder: Path) -> list[Path]:
    """As :func:`list_checkpoints`, given the folder in which they lie."""
    adopt_complete(folder)
    files = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            files.append((_completed(path), _step(path), path.name, path))
        except OSError:  # removed in between, or a link to nothing
            continue
    return [path for *_, path in sorted(files, reverse=True)]


def _completed(path: Path) -> int:
    """When, in nanoseconds."""
    marker = path / MARKER
    return (marker if path.is_dir() and marker.exists() else path).stat().st_mtime_ns


def find_checkpoint(run_folder: str | Path, which: str, *, weights_only: bool = True) -> Found | None:
    """The checkpoint meant by ``last``, ``best`` or a path; None when there is no `last`.

    ``last`` is the newest file that can be read. ``best`` is what the newest checkpoint that knows of one calls so; its
    folder may have been moved since.

    Args:
        run_folder: of a run; its checkpoints lie in ``checkpoints/``.
        which: ``last``, ``best`` or the path of a checkpoint.
        weights_only: as in torch.load; False runs code that the file may hold.

    Raises:
        UserError: no such file, none that can be read, or no best one.
    """
    return find_in_folder(Path(run_folder) / CHECKPOINTS, which, weights_only=weights_only)


def find_in_folder(folder: Path, which: str, *, weights_only: bool = True) -> Found | None:
    """As :func:`find_checkpoint`, given the folder in which the checkpoints lie."""
    if which not in ("last", "best"):
        return Found(Path(which), read_checkpoint(which, weights_only=weights_only))
    files = list_folder(folder)
    if which == "best":
        return _best(files, folder, weights_only)
    skipped: list[str] = []
    for found in _readable(files, skipped, weights_only):
        return found
    if skipped:
        raise UserError(f"no checkpoint in {folder} can be read: {skipped[0]}")
    return None


def _best(files: list[Path], place: Path, weights_only: bool) -> Found:
    if not files:
        raise UserError(f"no checkpoint in {place}; train one by `lit-llm fit`, or give a path")
    skipped: list[str] = []
    for found in _readable(files, skipped, weights_only):
        for state in found.content.get("callbacks", {}).values():
            name = _best_name(state)
            if name is not None and (place / name).exists():
                return Found(place / name, read_checkpoint(place / name, weights_only=weights_only), skipped)
    raise UserError(
        f"no checkpoint in {place} knows of a best one: nothing was validated; use last, or give a path"
        + (f" ({skipped[0]})" if skipped else "")
    )


def _best_name(state: Any) -> str | None:
    """The file that a checkpoint callback's state calls the best by a measurement."""
    if not isinstance(state, dict) or state.get("best_model_score") is None:
        return None
    return Path(state.get("best_model_path") or "").name or None


def _readable(files: list[Path], skipped: list[str], weights_only: bool) -> Iterator[Found]:
    for path in files:
        try:
            yield Found(path, read_checkpoint(path, weights_only=weights_only), skipped)
        except UserError as error:
            skipped.append(str(error))


def read_checkpoint(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """What a Lightning checkpoint holds, its tensors mapped from the file and read only when used.

    Of a sharded checkpoint, see :func:`lit_llm.checkpoint.sharded.open_sharded`.

    Raises:
        UserError: nothing there, a truncated or incomplete one, one of another kind, or one that needs code to be read.
    """
    path = Path(path)
    if not path.exists():
        adopt_complete(path.parent, path.name)
    refuse_part(path)
    if path.is_dir():
        if path.suffix != SUFFIX and not is_folder_checkpoint(path):
            raise UserError(f"{path} is a folder; give a checkpoint, such as those in {CHECKPOINTS}/ of a run")
        from lit_llm.checkpoint.sharded import open_sharded

        return open_sharded(path, weights_only=weights_only)
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}; give last, best or the path of a file") from None
    except pickle.UnpicklingError as error:
        unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if unsafe:
            raise UserError(
                f"{path} holds objects of {unsafe.group(1)}, which would run code when read; if you trust the file, "
                "give --weights_only false"
            ) from None
        raise UserError(_unreadable(path)) from None
    except (PermissionError, NotADirectoryError) as error:
        raise UserError(f"checkpoint {path} can't be read: {error.strerror}") from None
    except Exception as error:  # whatever the bytes lead to
        raise UserError(_unreadable(path)) from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path} is no Lightning checkpoint: it has no state_dict; give one that `lit-llm fit` wrote")
    return content


def _unreadable(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"checkpoint {path} ({size:,} bytes) is truncated or no checkpoint at all; give another one, or delete it so "
        "that last means the one before"
    )


def _step(path: Path) -> int:
    found = re.search(r"step[-=](\d+)", path.stem)
    return int(found.group(1)) if found else -1
