"""The micro-batches of a step that went wrong, in a file of plain types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_llm.checkpoint.write import write_checkpoint
from lit_llm.errors import UserError

FORMAT = 1
_KIND = "lit_llm.batches"


@dataclass(frozen=True)
class SavedBatches:
    """What :func:`save_batches` wrote.

    Attributes:
        step: the optimizer step that went wrong, counted from 1.
        rank: whose micro-batches these are, of world_size.
        world_size: ranks of the run.
        seed: of the run's random streams.
        reason: why they were saved, in words.
        loss: of the global batch, as it was seen then.
        grad_norm: likewise.
        batches: the step's micro-batches in their order, tensors on the CPU.
        checkpoint: that the run was started from, if any.
        left_out: what of a batch was no plain type and is not there.
    """

    step: int
    rank: int
    world_size: int
    seed: int
    reason: str
    loss: float
    grad_norm: float
    batches: list[dict[str, Any]]
    checkpoint: str | None = None
    left_out: list[str] = field(default_factory=list)


def save_batches(
    path: str | Path,
    *,
    step: int,
    rank: int,
    world_size: int,
    seed: int,
    reason: str,
    loss: float,
    grad_norm: float,
    batches: Sequence[Mapping[str, Any]],
    checkpoint: str | None = None,
) -> None:
    """Writes a rank's micro-batches of one step; arguments as in :class:`SavedBatches`.

    The file is complete under its name or not there, and its folder is made. Waits for the device.

    Raises:
        OSError: it can't be written.
    """
    left_out: set[str] = set()
    plain = [_plain_batch(batch, left_out) for batch in batches]
    content = {
        "kind": _KIND,
        "format": FORMAT,
        "step": int(step),
        "rank": int(rank),
        "world_size": int(world_size),
        "seed": int(seed),
        "reason": str(reason),
        "loss": float(loss),
        "grad_norm": float(grad_norm),
        "batches": plain,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "left_out": sorted(left_out),
    }
    write_checkpoint(content, path)


def load_batches(path: str | Path) -> SavedBatches:
    """Reads such a file; no code in it is run.

    Raises:
        UserError: no file there, or one that is truncated, of another kind or of a later format.
    """
    path = Path(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no saved batches at {path}; fit names the file when it meets a bad step") from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"saved batches {path} can't be read: {error.strerror}; give a file that fit named") from None
    except Exception as error:  # whatever the bytes lead to
        raise UserError(f"{path} is truncated or holds no saved batches; give a file that fit named") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise UserError(f"{path} holds no saved batches; give a file that fit named when it met a bad step")
    if content["format"] > FORMAT:
        raise UserError(f"{path} has format {content['format']}, this lit-llm reads up to {FORMAT}; update lit-llm")
    try:
        return SavedBatches(**{one.name: content[one.name] for one in fields(SavedBatches)})
    except KeyError as error:
        raise UserError(f"{path} lacks {error}; it is damaged or another lit-llm's: give another file") from None


def _plain_batch(batch: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        left_out.add(f"a batch ({type(batch).__name__})")
        return {}
    plain = {}
    for name, value in batch.items():
        try:
            plain[str(name)] = _plain(value)
        except (TypeError, RuntimeError):  # the latter of a sparse tensor, say
            left_out.add(f"{name} ({type(value).__name__})")
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()  # a view would be saved with all it is a view of
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError
