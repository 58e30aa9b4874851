"""Folders that Lightning's own ModelParallelStrategy writes, told in the terms of ours: their tensors' keys agree."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch


def describe_folder(path: Path, metadata: Any, meta: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
    """The content with None for each tensor of weights and optimizers, and the names of the optimizers' parameters.

    Args:
        path: of the folder.
        metadata: of torch.distributed.checkpoint.
        meta: what meta.pt holds.
    """
    keys = list(metadata.state_dict_metadata)
    content: dict[str, Any] = dict(meta)
    content["state_dict"] = {key.removeprefix("state_dict."): None for key in keys if key.startswith("state_dict.")}
    states: list[dict[str, Any]] = []
    names: list[list[str]] = []
    while own := [key for key in keys if key.startswith(f"optimizer_{len(states)}.")]:
        state, parameters = _optimizer(path, metadata, own, f"optimizer_{len(states)}.")
        states.append(state)
        names.append(parameters)
    if states:
        content["optimizer_states"] = states
    return content, names


def _optimizer(path: Path, metadata: Any, keys: list[str], prefix: str) -> tuple[dict[str, Any], list[str]]:
    groups: dict[int, dict[str, Any]] = {}
    for key in keys:
        if key.startswith(f"{prefix}param_groups."):
            number, _, setting = key.removeprefix(f"{prefix}param_groups.").partition(".")
            groups.setdefault(int(number), {})[setting] = _plain(path, metadata, key)
    names: list[str] = []
    for _, group in sorted(groups.items()):
        start = len(names)
        names += group["params"]
        group["params"] = list(range(start, len(names)))
    states: dict[int, dict[str, None]] = {}
    for position, name in enumerate(names):
        begin = f"{prefix}state.{name}."
        if values := {key.removeprefix(begin): None for key in keys if key.startswith(begin)}:
            states[position] = values
    return {"state": states, "param_groups": [group for _, group in sorted(groups.items())]}, names


def _plain(path: Path, metadata: Any, key: str) -> Any:
    """A setting, which is saved as bytes of its own; no code in it is run."""
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    with (path / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
