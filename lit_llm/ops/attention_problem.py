"""What one call of attention asks for, as the back ends get it: checked, and in one form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)

Result = TypeVar("Result")


def decided_once(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache a function of hashable arguments, and let torch.compile run it while it traces and keep what it gave.

    For what depends on the machine alone: imports, probes, a line in the log. Inside a traced function each would break
    the graph. The arguments must be constants to the tracer, one by one: ``*needs``, not a `Needs`.
    """
    cached = functools.cache(function)

    @torch.compiler.assume_constant_result
    def call(*arguments: object) -> Result:
        return cached(*arguments)

    call.cache_clear = cached.cache_clear
    return call


class Problem(NamedTuple):
    """The options of one call; see `lit_llm.ops.attention` for their meaning."""

    scale: float
    causal: bool = True
    window: int | None = None  # None also when every key is inside it
    softcap: float | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0  # only with cu_seqlens
    key_lengths: Tensor | None = None
    dropout: float = 0.0


class Needs(NamedTuple):
    """All that a choice of back end depends on. It is hashable and holds no tensor: a choice is made once per kind."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    grouped: bool = False
    own_scale: bool = False
    window: bool = False
    softcap: bool = False
    documents: bool = False
    key_lengths: bool = False
    dropout: bool = False
    training: bool = False


def needs_of(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Needs:
    """What this call needs."""
    # Branches, not expressions: torch.compile may hold a number as a symbol, and only a branch makes a constant of it.
    own_scale = dropout = False
    if problem.scale != q.shape[-1] ** -0.5:
        own_scale = True
    if problem.dropout:
        dropout = True
    return Needs(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        grouped=q.shape[-2] != k.shape[-2],
        own_scale=own_scale,
        window=problem.window is not None,
        softcap=problem.softcap is not None,
        documents=problem.cu_seqlens is not None,
        key_lengths=problem.key_lengths is not None,
        dropout=dropout,
        training=wants_gradients(q, k, v),
    )


def wants_gradients(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this call is part of a backward pass."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


@decided_once
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device: (9, 0) is Hopper."""
    return torch.cuda.get_device_capability(device)
