"""What marks the folder of a sharded checkpoint as complete: names and sizes of its files, written last."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lit_llm.errors import UserError

FORMAT = 1
META, MARKER, METADATA = "meta.pt", "complete.json", ".metadata"
WAY_OUT = "give another checkpoint, or delete the folder so that last means the one before"


def is_folder_checkpoint(path: str | Path) -> bool:
    """Whether a path is a folder that is, or was meant to be, a sharded checkpoint; complete or not."""
    path = Path(path)
    return path.is_dir() and any((path / name).is_file() for name in (MARKER, METADATA, META))


def refuse_part(path: str | Path) -> None:
    """Raises UserError if a path is a file of a sharded checkpoint, and not the checkpoint."""
    path = Path(path)
    known = path.name in (META, MARKER, METADATA) or path.suffix == ".distcp"
    if known and path.is_file() and is_folder_checkpoint(path.parent):
        raise UserError(f"{path} is one file of the sharded checkpoint {path.parent}; give the folder")


def write_marker(folder: Path, world_size: int, *, without: str) -> None:
    """Marks a folder as complete, with the files that are there now; onto the disk itself.

    Args:
        folder: whose other files are written.
        world_size: processes that wrote it.
        without: a file that is left out.
    """
    names = sorted(file.name for file in folder.iterdir() if file.name != without)
    files = {name: (folder / name).stat().st_size for name in names}
    with (folder / MARKER).open("w", encoding="utf-8") as marker:
        json.dump({"format": FORMAT, "world_size": world_size, "files": files}, marker)
        marker.flush()
        os.fsync(marker.fileno())


def is_complete(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    try:
        check_complete(folder)
    except UserError:
        return False
    return True


def check_complete(folder: Path) -> None:
    """Compares a folder with its marker.

    Raises:
        UserError: no folder, no marker or a damaged one, a later format, a file that is missing or of another size.
    """
    if not folder.is_dir():
        raise UserError(f"no checkpoint at {folder}; give last, best or the path of a checkpoint")
    saved_as, files = _read(folder)
    if saved_as > FORMAT:
        raise UserError(f"{folder} has format {saved_as}, this lit-llm reads up to {FORMAT}; update lit-llm")
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except (OSError, ValueError):  # ValueError: no name that a file can have
            raise UserError(f"{folder} is damaged: {name} is missing; {WAY_OUT}") from None
        if found != size:
            raise UserError(f"{folder} is damaged: {name} has {found:,} of {size:,} bytes; {WAY_OUT}")


def _read(folder: Path) -> tuple[int, dict[str, int]]:
    """Format and files, by a marker that has the keys and types of one; a later format may have other ones."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        saved_as, files = marker["format"], marker["files"]
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no complete checkpoint: its marker {MARKER} is missing, so its save was cut short; {WAY_OUT}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(folder) from None
    if type(saved_as) is not int or not isinstance(files, dict):
        raise _damaged(folder)
    if any(type(size) is not int for size in files.values()) or not {META, METADATA} <= files.keys():
        raise _damaged(folder)
    return saved_as, files


def _damaged(folder: Path) -> UserError:
    return UserError(f"{folder / MARKER} can't be read or is damaged; {WAY_OUT}")
