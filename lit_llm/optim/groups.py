"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters of ``module`` in two groups, as torch optimizers take them.

    "decay" holds the matrices (and stacks of matrices, as of experts). "no_decay" holds norm gains, biases and
    embeddings, the tied head among them: what an ``nn.Embedding`` owns counts as an embedding whoever else uses it. A
    parameter that requires a gradient is in exactly one group, once; order is that of ``module.named_parameters()``.

    Returns:
        Groups with "name" ("decay" or "no_decay"), "params", "param_names" (qualified names, in the order of "params")
        and "weight_decay". A group without parameters is left out.
    """
    embeddings = {
        id(parameter)
        for owner in module.modules()
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        for parameter in owner.parameters(recurse=False)
    }
    named: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        # The biases of stacked experts have two dimensions, hence the look at the name.
        plain = parameter.ndim < 2 or name.endswith("bias") or id(parameter) in embeddings
        named["no_decay" if plain else "decay"].append((name, parameter))
    return [
        {
            "name": group,
            "params": [parameter for _, parameter in members],
            "param_names": [name for name, _ in members],
            "weight_decay": weight_decay if group == "decay" else 0.0,
        }
        for group, members in named.items()
        if members
    ]
