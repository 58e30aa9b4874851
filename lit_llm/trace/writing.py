"""Writes a report so that a reader never finds half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lit_llm.errors import UserError


def write_text(path: str | Path, text: str) -> Path:
    """Writes ``text`` (UTF-8) under a temporary name beside ``path`` and renames it; makes missing folders.

    Raises:
        UserError: where nothing can be written there.
    """
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir, says no to a name that is too long
        raise UserError(f"can't write the report to {path}: it is a folder; give the name of a file in it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names in a trace can hold half a surrogate pair, which UTF-8 has no bytes for.
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"can't write the report to {path}: {error.strerror}; give another path") from error
    finally:
        with contextlib.suppress(OSError):  # such as a parent that is a file: nothing was written
            partial.unlink(missing_ok=True)
    return path
