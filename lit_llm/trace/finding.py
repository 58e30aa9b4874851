"""From what the user names to the trace files of one window."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_llm.errors import UserError
from lit_llm.trace.file_set import FileFacts, FileSet, check_set, natural

__all__ = ["FileFacts", "FileSet", "Found", "check_set", "find", "looks_like_trace"]

RECORD = "record some with --trainer.callbacks+=lit_llm.callbacks.TraceCapture"
_WINDOW = re.compile(r"step-(\d+)(?:-(\d+))?")
_RANK_FOLDER = re.compile(r"(?:global_?|local_?)?rank[-_]?\d+", re.IGNORECASE)
_LEFTOVERS = (".tmp", ".partial")
_KEYS = re.compile(rb'(?<!\\)"(?:traceEvents|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:')
_LIST = re.compile(rb'\s*\[\s*\{[^{}]*"(?:ph|ts|cat)"\s*:')
_LOOK = 64 << 10
_DEEPEST = 6
_PRUNED = {"checkpoints", "node_modules", "__pycache__"}


@dataclass
class Found:
    """The traces of one window."""

    files: list[Path]
    source: str
    """What they are, for a title."""
    window: str | None = None
    """Name of the window's folder, such as ``step-000100``."""
    others: list[str] = field(default_factory=list)
    """Windows, or folders of traces, that lie beside it and are not read."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user."""
    leftovers: list[Path] = field(default_factory=list)
    """Unfinished files beside the traces: a rank died while it wrote, or writes still."""


def find(paths: Sequence[str | Path]) -> Found:
    """The files to read.

    Args:
        paths: traces, a folder of traces, a folder of windows (``step-000100/``, ...; the last is taken), a run's
            folder (with ``traces/`` in it), or any folder with one of these somewhere below.

    Raises:
        UserError: a path is not there, or holds no trace.
    """
    if not paths:
        raise UserError("no trace is given; name a trace, a folder of traces or a run's folder")
    found = [_find(Path(path)) for path in paths]
    if len(found) == 1:
        return found[0]
    files = list({file.resolve(): file for one in found for file in one.files}.values())
    windows = {one.window for one in found}
    return Found(
        files=files,
        source=", ".join(map(str, paths)) if len(paths) <= 3 else f"{paths[0]} and {len(paths) - 1} others",
        window=windows.pop() if len(windows) == 1 else None,
        others=[name for one in found for name in one.others],
        notes=[note for one in found for note in one.notes],
        leftovers=[file for one in found for file in one.leftovers],
    )


def _find(path: Path) -> Found:
    try:
        if path.is_file():
            return Found([path], str(path), _window_name(path.parent))
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is no regular file; write what it gives into one first")
        if not path.is_dir():
            raise UserError(f"{path} is not there; name a trace, a folder of traces or a run's folder")
        return _in_folder(path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error})") from None


def _in_folder(root: Path) -> Found:
    """Searches level by level; on the first with traces, chooses between its folders."""
    level = [root]
    leftovers: list[Path] = []
    notes: list[str] = []
    for depth in range(_DEEPEST):
        held = {folder: _traces(folder, notes) for folder in level}
        unfinished = {folder: _leftovers(folder) for folder in level}
        leftovers += [file for files in unfinished.values() for file in files]
        folders = [folder for folder in level if held[folder]]
        if folders:
            chosen = _choose(root, folders)
            read = chosen[1]
            found = Found([file for folder in read for file in held[folder]], str(root if len(read) > 1 else read[0]))
            found.leftovers = [file for folder in read for file in unfinished[folder]]
            found.window = _window_name(read[0]) if len(read) == 1 else None
            found.others = [str(folder.relative_to(root)) for folder in folders if folder not in read]
            found.notes = [*chosen[0], *_later(read, unfinished), *notes, *_about(found.leftovers)]
            return found
        if depth == 0 and (root / "traces").is_dir():
            level = [root / "traces"]
            continue
        level = [folder for parent in level for folder in _folders(parent)]
    if leftovers:
        raise UserError(
            f"{root} holds only unfinished traces, of ranks that died while they wrote; name one to read what is in "
            f"it, such as {leftovers[0]}"
        )
    raise UserError(f"{root} holds no traces; {RECORD}")


def _choose(root: Path, folders: list[Path]) -> tuple[list[str], list[Path]]:
    """Notes, and the folder to read, or the folders if each holds a rank's traces."""
    if len(folders) == 1:
        return [], folders
    if all(_RANK_FOLDER.fullmatch(folder.name) for folder in folders):
        return [], folders
    if all(_window_name(folder) for folder in folders):
        if len({folder.parent for folder in folders}) == 1:
            last = max(folders, key=_window_order)
            newest = max(folders, key=_written)
            note = f"{len(folders)} windows; {last.name}, the last, is read; give another folder to read that"
            if _written(newest) > _written(last):
                note += f" ({newest.name} was written later)"
            return [note], [last]
        parents = sorted({folder.parent for folder in folders}, key=_written)
        folders_of_last = [folder for folder in folders if folder.parent == parents[-1]]
        notes, read = _choose(root, folders_of_last)
        name = parents[-1].relative_to(root)
        return [
            f"{len(parents)} folders of windows; {name}, the newest, is read; give another to read that",
            *notes,
        ], read
    newest = max(folders, key=_written)
    name = newest.relative_to(root)
    return [f"{len(folders)} folders of traces; {name}, the newest, is read; give another to read that"], [newest]


def _later(read: list[Path], unfinished: dict[Path, list[Path]]) -> list[str]:
    """Of windows behind the one that is read, if they hold unfinished traces only."""
    if len(read) != 1 or not _window_name(read[0]):
        return []
    order = _window_order(read[0])
    later = [
        folder.name
        for folder, files in unfinished.items()
        if files and folder.parent == read[0].parent and _window_name(folder) and _window_order(folder) > order
    ]
    return [f"{name} holds unfinished traces only" for name in later]


def _about(leftovers: list[Path]) -> list[str]:
    if not leftovers:
        return []
    names = ", ".join(file.name for file in leftovers[:3]) + (", ..." if len(leftovers) > 3 else "")
    return [f"unfinished files lie beside the traces, of ranks that died while they wrote or still write: {names}"]


def _window_name(folder: Path) -> str | None:
    return folder.name if _WINDOW.fullmatch(folder.name) else None


def _window_order(folder: Path) -> tuple[int, int]:
    match = _WINDOW.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _written(folder: Path) -> tuple[float, str]:
    return max((file.stat().st_mtime for file in folder.iterdir()), default=0.0), str(folder)


def _folders(parent: Path) -> list[Path]:
    inside = (path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in inside if not path.name.startswith(".") and path.name not in _PRUNED)


def _traces(folder: Path, notes: list[str]) -> list[Path]:
    """In the order of the numbers in their names. A file that is named like a trace and is none gets a note."""
    files = []
    for path in folder.iterdir():
        if path.name.startswith(".") or not path.name.endswith((".json", ".json.gz")) or not path.is_file():
            continue
        if looks_like_trace(path):
            files.append(path)
        elif path.stat().st_size == 0 or path.name.startswith("rank") or ".trace." in path.name:
            empty = path.stat().st_size == 0
            notes.append(f"{path.name} is {'empty' if empty else 'no trace'} and is left out")
    return sorted(files, key=natural)


def _leftovers(folder: Path) -> list[Path]:
    """Unfinished files: kineto's, and those of :class:`lit_llm.callbacks.TraceCapture`, which are hidden."""
    files = (path for path in folder.iterdir() if ".json" in path.name and path.is_file())
    return sorted(path for path in files if path.name.endswith(_LEFTOVERS) or path.name.startswith("."))


def looks_like_trace(path: Path) -> bool:
    """By the first 64 KiB of its text."""
    try:
        with open(path, "rb") as file:
            start = file.read(_LOOK)
        if start.startswith(b"\x1f\x8b"):
            start = zlib.decompressobj(wbits=31).decompress(start, _LOOK)
    except (OSError, zlib.error):
        return False
    start = start.removeprefix(b"\xef\xbb\xbf")
    return _KEYS.search(start) is not None or _LIST.match(start) is not None
