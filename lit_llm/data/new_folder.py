"""A folder that takes its final name only when it is complete."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_llm.data.lock import HeldError, locked
from lit_llm.data.store import FORMAT, META_FILE
from lit_llm.data.tokenizer_json import CARRIED_FILES
from lit_llm.errors import UserError

PICTURE_FILE = "lengths.png"  # what `lit-llm inspect` puts beside the shards


@contextmanager
def new_folder(
    target: Path, check: Callable[[Path], None] | None = None, writer: str = "lit-llm prepare"
) -> Iterator[Path]:
    """A fresh folder beside ``target`` that is renamed onto it when the block ends well, and removed otherwise.

    What lies at ``target`` stays until then and is replaced as a whole. All files reach the disk before the
    rename. One process at a time makes a folder of that name, and clears away what a killed one left.

    Args:
        target: the folder.
        check: refuses what must not be replaced; None: anything but a store.
        writer: the command, for the message that another one is at it.

    Raises:
        UserError: ``target`` is a file, a folder that is no store or holds other files too, cannot be written, or is
            being written by another process.
    """
    target = Path(os.path.realpath(target))
    if os.path.ismount(target):
        raise UserError(
            f"{target} is a mount point, which cannot be replaced as a whole; choose a folder in it, such as "
            f"{target / 'store'}"
        )
    (check or _check_target)(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target):
            _clear(target, "tmp", *(["old"] if target.exists() else []))
            folder = _beside(target, "tmp")
            folder.mkdir()
            with _filled(folder, target):
                yield folder
    except HeldError as error:
        raise UserError(
            f"{target} is being written by another {writer}; wait until that has ended, or choose another --output"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {target}: {_reason(error)}; choose another --output") from error


@contextmanager
def _filled(folder: Path, target: Path) -> Iterator[None]:
    try:
        try:
            yield
            _sync(folder)
            _swap(folder, target)
        except OSError as error:
            way_out = "free some space or choose another --output"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
                way_out = "use fewer --workers, or raise the limit of open files and processes (ulimit -n, -u)"
            raise UserError(f"writing {target} failed: {_reason(error)}; {way_out}, nothing was changed") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_target(target: Path) -> None:
    try:
        if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
            return
        if not target.is_dir():
            raise UserError(f"{target} is a file; choose another --output")
    except OSError as error:
        raise UserError(f"cannot write {target}: {_reason(error)}; choose another --output") from error
    if not (target / META_FILE).exists():
        raise UserError(f"{target} is not empty and no token store; it is left alone, choose another --output")
    try:
        meta = json.loads((target / META_FILE).read_bytes())
        splits = sorted(meta["splits"]) if meta["format"] == FORMAT else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        splits = None
    if splits is None:
        raise UserError(f"{target}: {META_FILE} is not that of a store; remove it or choose another --output")
    ours = {META_FILE, PICTURE_FILE, *CARRIED_FILES}
    shard = re.compile(rf"({'|'.join(map(re.escape, splits))})(-\d{{5}})?\.(bin|idx|trained)")  # of any version
    foreign = sorted(p.name for p in target.iterdir() if p.name not in ours and not shard.fullmatch(p.name))
    if foreign:
        raise UserError(f"{target} is a store that holds {foreign[0]!r} too; move it away or choose another --output")


def _swap(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``, out of whose way an old store goes, to be removed afterwards."""
    old: Path | None = None
    if target.is_dir() and any(target.iterdir()):
        old = _beside(target, "old")
        os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    _sync_path(target.parent)
    _clear(target, "old")


def _clear(target: Path, *suffixes: str) -> None:
    """Remove folders that ``_beside`` named, a killed process's among them. To be called with the lock held."""
    for suffix in suffixes:
        for left in target.parent.glob(f".{glob.escape(target.name)}.????????.{suffix}"):
            shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(target: Path, suffix: str) -> Path:
    """A hidden name in the same folder, so that a rename stays inside one file system."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.{suffix}"


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
