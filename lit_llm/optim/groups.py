"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; norm gains, biases and embeddings do not.

    A head that is tied to the embedding counts as the embedding. Each parameter that requires a gradient is in exactly
    one group, in the order of ``named_parameters``; a group without parameters is left out.

    Returns:
        Groups for an optimizer, with ``params``, ``weight_decay``, ``name`` (``decay`` or ``no_decay``) and
        ``param_names``.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    groups: dict[str, dict[str, Any]] = {
        name: {"name": name, "params": [], "param_names": [], "weight_decay": decay}
        for name, decay in (("decay", weight_decay), ("no_decay", 0.0))
    }
    for name, parameter in module.named_parameters():  # a shared parameter comes once
        if parameter.requires_grad:
            group = groups["no_decay" if parameter.ndim < 2 or id(parameter) in embeddings else "decay"]
            group["params"].append(parameter)
            group["param_names"].append(name)
    return [group for group in groups.values() if group["params"]]
