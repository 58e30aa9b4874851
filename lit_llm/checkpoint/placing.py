"""Saved tensors into the tensors and optimizers of a model that may be split: each process takes its part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.checkpoint.average import plain_name
from lit_llm.checkpoint.folder import Folder, state_key
from lit_llm.checkpoint.stored import Stored, StoredStates
from lit_llm.errors import UserError


def placeholders(weights: Stored) -> dict[str, Any]:
    """The tensors of a folder as tensors without memory, which :func:`place_weights` reads when it places them.

    They may be renamed, left out, or replaced by others in between.
    """
    return {name: weights.placeholder(name) for name in weights}


def place_weights(saved: Mapping[str, Any], state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
    """Fills a model's tensors in place, DTensors among them, without communication.

    Names are compared without what torch.compile and activation checkpointing put into them.

    Args:
        saved: ``state_dict`` of a checkpoint: tensors, placeholders, or a :class:`Stored`.
        state_dict: of the model.
        strict: refuse missing and unexpected tensors.

    Raises:
        UserError: a tensor that is missing, unexpected, of another shape, or not in the folder any more.
    """
    sources = placeholders(saved) if isinstance(saved, Stored) else saved
    theirs = {plain_name(name): value for name, value in sources.items() if isinstance(value, Tensor)}
    mine = {plain_name(name): value for name, value in state_dict.items() if isinstance(value, Tensor)}
    missing, unexpected = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if strict and (missing or unexpected):
        both = ((missing, "is not in it"), (unexpected, "is not here"))
        parts = [f"{_some(names)} {what}" for names, what in both if names]
        raise UserError(f"the checkpoint does not fit the model: {' and '.join(parts)}; give its model.config")
    pairs = [(theirs[name], target) for name, target in mine.items() if name in theirs]
    for name, target in mine.items():
        if name in theirs and theirs[name].shape != target.shape:
            raise UserError(
                f"the checkpoint does not fit the model: {name} is {tuple(theirs[name].shape)} there and "
                f"{tuple(target.shape)} here; give its model.config"
            )
        if name in theirs and theirs[name].is_meta and not hasattr(theirs[name], "stored"):
            raise UserError(
                f"{name}: on_load_checkpoint has computed with a tensor that is not read yet; of a sharded checkpoint "
                "it may rename, drop and replace tensors"
            )
    fill(pairs)


@torch.no_grad()
def fill(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies whole tensors and placeholders into tensors and DTensors of their shapes, without communication.

    Args:
        pairs: source and target; whole sources are taken one at a time, and a DTensor only where it is split like the
            target.

    Raises:
        UserError: a file that can't be read.
    """
    stored: dict[int, tuple[Folder, list[tuple[str, Tensor]]]] = {}
    through: list[tuple[Tensor, torch.dtype]] = []
    for source, target in pairs:
        if hasattr(source, "stored"):
            folder, key = source.stored
            stored.setdefault(id(folder), (folder, []))[1].append((key, target.detach()))
            if source.dtype not in (folder.dtype(key), target.dtype):
                through.append((target.detach(), source.dtype))
        else:
            fill_from_whole(target, source)
    for folder, targets in stored.values():
        folder.read_into(targets)
    for target, dtype in through:
        part: Any = target.to_local() if hasattr(target, "to_local") else target
        part.copy_(part.to(dtype))


@torch.no_grad()
def fill_from_whole(target: Any, whole: Tensor) -> None:
    """Copies a whole tensor, or of it this process' part; a DTensor that is split alike, part to part."""
    if hasattr(whole, "to_local"):
        target.detach().to_local().copy_(whole.to_local())
        return
    if not hasattr(target, "to_local"):
        target.detach().copy_(whole)
        return
    if target.device_mesh.get_coordinate() is None:
        return
    (chunk,) = target.__create_chunk_list__()
    for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    target.detach().to_local().copy_(whole)


def load_optimizer(states: Sequence[Any], index: int, optimizer: Optimizer, names: Sequence[str]) -> None:
    """Calls ``optimizer.load_state_dict`` with what was saved: DTensors like the parameter where its size was saved.

    Parameters find their state by name. Where the optimizer and the saved groups both have ``param_names`` and a hook
    of the optimizer's own sees to that (:mod:`lit_llm.optim.resume`), the saved groups are passed on as they are. Other
    optimizers take the settings of the saved group of the same parameters.

    Args:
        states: ``optimizer_states`` of a checkpoint, of one file or of a folder.
        index: of the optimizer among them.
        optimizer: to be loaded.
        names: of its parameters, by position.

    Raises:
        UserError: the state of other parameters, or of the same in other groups.
    """
    folder = states.folder if isinstance(states, StoredStates) else None
    saved = folder.content["optimizer_states"][index] if folder is not None else states[index]
    theirs = folder.optimizer_names[index] if folder is not None else _saved_names(saved, names)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mine = {plain_name(name): p for name, p in zip(names, parameters, strict=True)}
    positions = {plain_name(name): position for position, name in enumerate(theirs)}
    _refuse_other_parameters(positions, mine)
    groups = saved["param_groups"]
    if not _matches_by_name(optimizer, groups):
        groups = _in_order(groups, optimizer, [positions[plain_name(name)] for name in names])
    loaded: dict[int, dict[str, Any]] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, position in positions.items():
        if position not in saved["state"]:
            continue
        loaded[position] = {}
        for key, value in saved["state"][position].items():
            source = value
            if folder is not None and (stored := state_key(index, theirs[position], key)) in folder:
                source = folder.placeholder(stored)
            loaded[position][key] = source
            if isinstance(source, Tensor):
                loaded[position][key] = target = _room(source, mine[name])
                pairs.append((source, target))
    fill(pairs)
    optimizer.load_state_dict({**saved, "state": loaded, "param_groups": groups})


def _room(source: Tensor, parameter: Tensor) -> Tensor:
    """An empty tensor for a saved one, split like its parameter if it is as large."""
    if hasattr(parameter, "to_local") and source.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=source.dtype, requires_grad=False)
    return torch.empty(source.shape, dtype=source.dtype)


def _saved_names(saved: Mapping[str, Any], names: Sequence[str]) -> Sequence[str]:
    """Of a file's parameters by position; where it has none, the present ones in their order, as torch has it."""
    groups = saved["param_groups"]
    own = {one: name for g in groups for one, name in zip(g["params"], g.get("param_names", ()), strict=False)}
    ids = [one for group in groups for one in group["params"]]
    if len(own) == len(ids):
        return [own[position] for position in sorted(own)]
    if len(ids) != len(names):
        raise UserError(
            f"the checkpoint's optimizer has {len(ids)} parameters, this one {len(names)}; resume with its "
            "model.config and model.optimizer"
        )
    by_position = dict(zip(ids, names, strict=True))
    return [by_position[position] for position in sorted(by_position)]


def _refuse_other_parameters(theirs: Mapping[str, int], mine: Mapping[str, Tensor]) -> None:
    missing, foreign = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    parts = [f"{_some(names)} {where}" for names, where in ((missing, "not in it"), (foreign, "not here")) if names]
    if parts:
        raise UserError(
            f"the checkpoint's optimizer trained other parameters: {' and '.join(parts)}; resume with its model.config "
            "and with the same parameters frozen"
        )


def _matches_by_name(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    return _is_hooked(optimizer) and all("param_names" in group for group in groups)


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether it matches groups by names itself."""
    hooked = bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))
    return hooked and all("param_names" in group for group in optimizer.param_groups)


def _in_order(
    groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, positions: Sequence[int]
) -> list[Mapping[str, Any]]:
    """The saved groups in the order of the present parameters, which torch matches by their places.

    A group's settings are those of the saved group with the same parameters, and where the optimizer decides on them
    itself those of the one that its first parameter was in.

    Raises:
        UserError: the parameters were grouped otherwise.
    """
    origin = {one: group for group in groups for one in group["params"]}
    ordered: list[Mapping[str, Any]] = []
    start = 0
    for number, present in enumerate(optimizer.param_groups):
        own = list(positions[start : start + len(present["params"])])
        start += len(own)
        settings = origin[own[0]] if own else groups[min(number, len(groups) - 1)]
        alike = len(groups) == len(optimizer.param_groups) and set(settings["params"]) == set(own)
        if not alike and not _is_hooked(optimizer):
            raise UserError(
                f"the checkpoint's optimizer has its parameters in {len(groups)} groups (of {_sizes(groups)}), this "
                f"one in {len(optimizer.param_groups)} (of {_sizes(optimizer.param_groups)}), and not the same ones "
                "together; resume with its configure_optimizers"
            )
        names = {"param_names": present["param_names"]} if "param_names" in present else {}
        ordered.append({**settings, **names, "params": own})
    return ordered


def _sizes(groups: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(len(group["params"])) for group in groups)


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
