"""Lightning's saved counts of micro-batches, rewritten for another layout or other data."""

from __future__ import annotations

from typing import Any


def fit_progress(
    progress: dict[str, Any],
    saved: tuple[int, int],
    present: tuple[int, int],
    *,
    steps: int | None = None,
    total_steps: int | None = None,
) -> None:
    """Rewrites Lightning's saved count of micro-batches for another number of ranks, micro-batch size or other data.

    Lightning counts the micro-batches of one rank. The optimizer step is what both layouts share; a window that was not
    finished has left no trace in the weights and is done again. A finished epoch stays one.

    Args:
        progress: Lightning's saved ``epoch_loop.batch_progress``, changed in place.
        saved, present: (micro-batches per step, micro-batches of an epoch as Lightning runs it) of the two layouts.
        steps: into the epoch, where the new data goes on at another place than the old; None: as saved.
        total_steps: of all epochs, likewise.
    """
    current, total = progress["current"], progress["total"]
    # Not those that are "ready": one in which an error fell has been begun and trained nothing.
    trained = current["processed"]
    finished_epoch = trained >= saved[1]
    done, begun = divmod(trained, saved[0])
    if saved == present and steps is None and (begun == 0 or finished_epoch):
        return
    new_ready = present[1] if finished_epoch else min((done if steps is None else steps) * present[0], present[1])
    # Saved inside Lightning's own hooks, the last micro-batch is processed but not yet counted as completed.
    behind = trained - current["completed"] if finished_epoch or begun == 0 else 0
    new_total = (total["processed"] // saved[0] if total_steps is None else total_steps) * present[0]
    for name in ("ready", "started", "processed", "completed"):
        less = min(behind, new_ready) if name == "completed" else 0
        current[name], total[name] = new_ready - less, new_total - less
