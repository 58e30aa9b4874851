"""Checkpoints of a model that is split over processes: each writes and reads its part (torch.distributed.checkpoint).

A checkpoint here is a folder, see :mod:`lit_llm.checkpoint.folder`. Names of parameters, not positions or ranks, say
what belongs where, so that it loads at any number of processes and on any mesh, and as what one file would hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lit_llm.checkpoint.folder import Folder
from lit_llm.checkpoint.placing import load_optimizer, place_weights
from lit_llm.checkpoint.sharded_write import Names, prepare_write
from lit_llm.checkpoint.stored import StoredStates, whole
from lit_llm.errors import UserError

__all__ = [
    "load_content",
    "load_sharded",
    "open_sharded",
    "prepare_write",
    "read_sharded",
    "shard_content",
]


def read_sharded(path: str | Path, *, weights_only: bool = True, optimizer: bool = True) -> dict[str, Any]:
    """A sharded checkpoint as one file would hold it: whole tensors on the CPU, optimizer states by position.

    No process group is needed. All of it is read.

    Args:
        path: of the folder.
        weights_only: as in torch.load; False runs code that the folder may hold.
        optimizer: with the optimizers' states; without, their tensors are not read.

    Raises:
        UserError: no such folder, or one that is incomplete or damaged.
    """
    content = open_sharded(path, weights_only=weights_only)
    content["state_dict"] = content["state_dict"].whole()
    if "callbacks" in content:
        content["callbacks"] = whole(content["callbacks"])
    if not optimizer:
        content.pop("optimizer_states", None)
    elif "optimizer_states" in content:
        content["optimizer_states"] = list(content["optimizer_states"])
    return content


def open_sharded(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """The same, but no tensor in the files of tensors is read before it is asked for, nor kept then.

    Returns:
        The content; ``state_dict`` is a :class:`lit_llm.checkpoint.stored.Stored`, and so are mappings in ``callbacks``
        that held DTensors; ``optimizer_states``, if any, is a StoredStates.

    Raises:
        UserError: as of :func:`read_sharded`.
    """
    folder = Folder(path, weights_only=weights_only)
    content = {**folder.content, "state_dict": folder.weights()}
    if "callbacks" in content:
        content["callbacks"] = folder.callbacks()
    if "optimizer_states" in content:
        content["optimizer_states"] = StoredStates(folder)
    return content


def load_sharded(
    path: str | Path,
    state_dict: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    optimizer_names: Names,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Fills tensors and DTensors in place; each process reads what its parts overlap with, without communication.

    Args:
        path: of the folder.
        state_dict: of the model.
        optimizers: those to load; none: only the weights are read.
        optimizer_names: of each optimizer, the parameters' names by their positions.
        weights_only: as in torch.load; False runs code that the folder may hold.

    Returns:
        The rest of the content.

    Raises:
        UserError: an incomplete or damaged folder; a tensor that is missing, unexpected or of another shape; the state
            of other parameters.
    """
    return shard_content(open_sharded(path, weights_only=weights_only), state_dict, optimizers, optimizer_names)


def shard_content(
    content: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    optimizer_names: Names,
) -> dict[str, Any]:
    """The same from the content of one file, whose tensors may be mapped: each process takes its slices."""
    rest = dict(content)
    place_weights(rest.pop("state_dict"), state_dict)
    states = rest.pop("optimizer_states", [])
    if optimizers:
        load_content(states, optimizers, optimizer_names)
    return rest


def load_content(states: Sequence[Any], optimizers: Sequence[Optimizer], optimizer_names: Names) -> None:
    """Gives each optimizer its saved state, see :func:`lit_llm.checkpoint.placing.load_optimizer`.

    Args:
        states: ``optimizer_states`` of a checkpoint, of one file or opened by :func:`open_sharded`.
        optimizers: as many.
        optimizer_names: of each optimizer, the parameters' names by their positions.

    Raises:
        UserError: another number of optimizers, or other parameters.
    """
    if len(states) != len(optimizers):
        raise UserError(
            f"the checkpoint holds the states of {len(states)} optimizers, and this run has {len(optimizers)}; resume "
            "with its model and model.optimizer"
        )
    for index, (optimizer, names) in enumerate(zip(optimizers, optimizer_names, strict=True)):
        load_optimizer(states, index, optimizer, names)
