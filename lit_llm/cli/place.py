"""Where a run's checkpoints lie."""

from __future__ import annotations

from pathlib import Path

from lit_llm.checkpoint import find
from lit_llm.checkpoint.find import CHECKPOINTS, Found
from lit_llm.errors import UserError


class CheckpointPlace:
    """Where the checkpoints of a run lie: ``checkpoints/`` in its folder, or checkpoint.dirpath.

    Args:
        root: the run's folder.
        dirpath: as for RunCheckpoint.
    """

    def __init__(self, root: str | Path, dirpath: str | None) -> None:
        self._root = root
        self._elsewhere = bool(dirpath)
        self.folder = Path(dirpath).expanduser() if dirpath else Path(root) / CHECKPOINTS

    def newest(self) -> Path | None:
        """The one that was completed last."""
        return next(iter(find._listed(self.folder)), None)

    def find(self, which: str, *, weights_only: bool) -> Found | None:
        """As :func:`lit_llm.checkpoint.find_checkpoint`, for this folder."""
        if not self._elsewhere or which not in ("last", "best"):
            return find.find_checkpoint(self._root, which, weights_only=weights_only)
        skipped: list[str] = []
        for found in find._readable(find._listed(self.folder), skipped, weights_only):
            if which == "last":
                return found
            for state in found.content.get("callbacks", {}).values():
                name = find._best_name(state)
                if name is not None and (self.folder / name).exists():
                    content = find.read_checkpoint(self.folder / name, weights_only=weights_only)
                    return Found(self.folder / name, content, skipped)
        told = f": {skipped[0]}" if skipped else ""
        if which == "best":
            raise UserError(f"no checkpoint in {self.folder} knows of a best one{told}; use last, or give a path")
        if skipped:
            raise UserError(f"no checkpoint in {self.folder} can be read{told}")
        return None
