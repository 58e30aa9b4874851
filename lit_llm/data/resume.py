"""Lightning's saved counts of micro-batches, rewritten for another layout or other data."""

from __future__ import annotations

from typing import Any


def fit_progress_to_layout(progress: dict[str, Any], saved: tuple[int, int], present: tuple[int, int]) -> None:
    """Rewrites Lightning's saved count of micro-batches for another number of ranks or micro-batch size.

    Lightning counts the micro-batches of one rank. The optimizer step is what both layouts share; a window that was not
    finished has left no trace in the weights and is done again.

    Args:
        progress: Lightning's saved ``epoch_loop.batch_progress``, changed in place.
        saved, present: (micro-batches per step, micro-batches per epoch) of the two layouts.
    """
    current, total = progress["current"], progress["total"]
    ready = current["ready"]
    finished_epoch = ready >= saved[1]
    steps, begun = divmod(ready, saved[0])
    if saved == present and (begun == 0 or finished_epoch):
        return
    new_ready = present[1] if finished_epoch else steps * present[0]
    # Saved inside Lightning's own hooks, the last micro-batch is processed but not yet counted as completed.
    behind = ready - current["completed"] if finished_epoch or begun == 0 else 0
    epochs_before = (total["ready"] - ready) // saved[1]
    for name in ("ready", "started", "processed", "completed"):
        current[name] = new_ready - (behind if name == "completed" else 0)
        total[name] = epochs_before * present[1] + current[name]


def fit_progress_to_step(progress: dict[str, Any], step: int, present: tuple[int, int]) -> None:
    """Rewrites Lightning's saved count of micro-batches for data that goes on at another place of its order.

    Args:
        progress: as in :func:`fit_progress_to_layout`.
        step: of the new data's order, which comes next.
        present: (micro-batches per step, micro-batches per epoch) of the new data.
    """
    done = step * present[0]
    for name in ("ready", "started", "processed", "completed"):
        progress["current"][name] = done % present[1]
        progress["total"][name] = done
    progress["is_last_batch"] = False
