"""The averaged weights that a checkpoint carries, read from its plain content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_llm.checkpoint.stored import Stored

AVERAGE_KEY = "WeightAverage"
"""Of the callback's state under ``callbacks`` in a checkpoint."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def averaged_weights(content: Mapping[str, Any]) -> Average | None:
    """The averaged weights by which a checkpoint is to be evaluated; None where its raw ones are.

    That is what fit's own validation did at that step: the average, if WeightAverage had ``evaluate`` set and had made
    an update. A checkpoint without callbacks' states (``save_weights_only``) has none.

    Args:
        content: of a checkpoint.

    Returns:
        Name in ``state_dict`` to tensor, in the dtype of the raw one: those that differ from ``state_dict``, so neither
        buffers nor frozen parameters. Of a parameter with several names, all. A tensor is converted, and of a sharded
        checkpoint read, when it is asked for; where ``state_dict`` has placeholders, it is one too.
    """
    state = (content.get("callbacks") or {}).get(AVERAGE_KEY)
    if not isinstance(state, Mapping) or not state.get("evaluate") or not state.get("updates"):
        return None
    return Average(state["weights"], content.get("state_dict", {}))


class Average(Mapping[str, Tensor]):
    """See :func:`averaged_weights`.

    Args:
        weights: by plain names.
        raw: the ``state_dict``.
    """

    def __init__(self, weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> None:
        self._weights, self._raw = weights, raw
        names = {plain_name(name): name for name in raw}
        self._names = {names.get(name, name): name for name in weights}

    def __getitem__(self, name: str) -> Tensor:
        own, dtype = self._names[name], self.dtype(name)
        in_place = not isinstance(self._raw, Stored) and hasattr(self._raw.get(name), "stored")
        if in_place and isinstance(self._weights, Stored):
            return self._weights.placeholder(own, dtype)
        return self._weights[own].to(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, without reading it."""
        if name in self._raw:
            return _dtype(self._raw, name)
        return _dtype(self._weights, self._names[name])

    def shape(self, name: str) -> torch.Size:
        """Of a tensor, without reading it."""
        own = self._names[name]
        return self._weights.shape(own) if isinstance(self._weights, Stored) else self._weights[own].shape


def _dtype(weights: Mapping[str, Any], name: str) -> torch.dtype:
    return weights.dtype(name) if isinstance(weights, Stored) else weights[name].dtype
