"""Activation checkpointing: what a block keeps for its backward, and what it computes again there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lit_llm.errors import UserError

Checkpointing = str | int
MODES = ("none", "full", "selective")
_KEPT = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"),
    "lit_llm::grouped_linear",
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
    *("torch_attn::_varlen_attn", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
)
"""Operators whose outputs ``selective`` keeps: matrix products and attention, which cost most to compute again."""


def check_checkpointing(value: Checkpointing) -> Checkpointing:
    """The option ``model.activation_checkpointing``, a number also out of text.

    Raises:
        UserError: neither a mode nor a positive number.
    """
    text = str(value)
    if text in MODES and not isinstance(value, bool):
        return text
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise UserError(
        f"model.activation_checkpointing must be none, full, selective, or a number n for every n-th block; got {value}"
    )


def checkpoint_activations(blocks: Sequence[nn.Module], mode: Checkpointing) -> None:
    """Makes blocks compute activations again in backward, in place: their parameters keep their names.

    Args:
        blocks: each with an attribute ``recompute``, see :class:`lit_llm.model.transformer.Block`.
        mode: ``none``; ``full``: a block keeps its input alone (Chen et al. 2016, section 4); a number n: every n-th
            block does so; ``selective``: all blocks, but the outputs of matrix products and attention are kept.
    """
    mode = check_checkpointing(mode)
    every = mode if isinstance(mode, int) else 1
    recompute = None if mode == "none" else _selective if mode == "selective" else _full
    for number, block in enumerate(blocks):
        chosen: Any = recompute if (number + 1) % every == 0 else None
        block.recompute = chosen


def _full(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _selective(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=_selective_contexts)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """Those of ``_KEPT`` that this torch, and what is installed beside it, has."""
    found: set[Any] = set()
    for name in _KEPT:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.update(getattr(packet, overload) for overload in packet.overloads())
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(found | ({flex} if flex is not None else set()))
