"""The averaged weights that a checkpoint carries, read from its plain content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

AVERAGE_KEY = "WeightAverage"
"""Of the callback's state under ``callbacks`` in a checkpoint."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def averaged_weights(content: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The averaged weights by which a checkpoint is to be evaluated; None where its raw ones are.

    That is what fit's own validation did at that step: the average, if WeightAverage had ``evaluate`` set and had made
    an update. A checkpoint without callbacks' states (``save_weights_only``) has none.

    Args:
        content: of a checkpoint.

    Returns:
        Name in ``state_dict`` to tensor, in the dtype of the raw one: those that differ from ``state_dict``, so neither
        buffers nor frozen parameters. Of a parameter with several names, all.
    """
    state = (content.get("callbacks") or {}).get(AVERAGE_KEY)
    if not isinstance(state, Mapping) or not state.get("evaluate") or not state.get("updates"):
        return None
    raw = content.get("state_dict", {})
    names = {plain_name(name): name for name in raw}
    weights = {}
    for name, tensor in state["weights"].items():
        saved_name = names.get(name, name)
        weights[saved_name] = tensor.to(_dtype(raw, saved_name)) if saved_name in raw else tensor
    return weights


def _dtype(weights: Mapping[str, Any], name: str) -> Any:
    """Of a tensor, which is not read for it where it lies in a sharded checkpoint."""
    return weights.dtype(name) if hasattr(weights, "dtype") else weights[name].dtype
