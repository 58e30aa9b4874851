"""The `flex` back end: torch's flex_attention, one compiled kernel for masks and soft caps on a GPU.

The block mask is computed block by block (128 x 128 tokens), never from a (seq x seq) mask. On the CPU flex_attention
is forward only and not compiled here: there it serves to compare, not to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lit_llm.errors import UserError
from lit_llm.ops.attention_problem import Problem, wants_gradients
from lit_llm.ops.documents import document_index

_BLOCK = 128
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# Its own compilation inside: a surrounding torch.compile breaks its graph here.
@torch.compiler.disable
def flex_back_end(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Attention by flex_attention; shapes as in `lit_llm.ops.attention`.

    Raises:
        UserError: for dropout, and for gradients on the CPU.
    """
    if problem.dropout:
        raise UserError("attention backend 'flex' has no dropout: use backend='sdpa', or dropout=0")
    if q.device.type == "cpu":
        if wants_gradients(q, k, v):
            raise UserError("attention backend 'flex' on CPU is forward only: use backend='sdpa' to train there")
        # torch looks at requires_grad even where gradients are off.
        q, k, v = q.detach(), k.detach(), v.detach()
    score_mod = None
    if (cap := problem.softcap) is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

    run: Any = flex_attention if q.device.type == "cpu" else _run_compiled
    out = run(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=score_mod,
        block_mask=_block_mask(q, k, problem),
        scale=problem.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def _run_compiled(*tensors: Tensor, **options: Any) -> Any:
    # One compilation per kind of mask, with and without gradients. Past its limit of 8 torch would run flex uncompiled,
    # with all scores in memory: allow more, and fullgraph makes an error of the rest.
    with torch._dynamo.config.patch(recompile_limit=64):
        return _compiled()(*tensors, **options)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(q: Tensor, k: Tensor, problem: Problem) -> BlockMask | None:
    batch, q_len, k_len = q.shape[0], q.shape[1], k.shape[1]
    if problem.cu_seqlens is None and problem.key_lengths is None:
        return _shared_block_mask(q_len, k_len, problem.causal, problem.window, q.device) if problem.causal else None
    index = None
    if problem.cu_seqlens is not None:
        index = document_index(problem.cu_seqlens, batch, q_len)
    return _build(q_len, k_len, problem.causal, problem.window, q.device, index, problem.key_lengths)


@functools.lru_cache(maxsize=16)
def _shared_block_mask(q_len: int, k_len: int, causal: bool, window: int | None, device: torch.device) -> BlockMask:
    return _build(q_len, k_len, causal, window, device, None, None)


def _build(
    q_len: int,
    k_len: int,
    causal: bool,
    window: int | None,
    device: torch.device,
    index: Tensor | None,
    key_lengths: Tensor | None,
) -> BlockMask:
    """A block mask from what is known of whole blocks: any that may hold an allowed pair is computed, with its mask."""
    shift = k_len - q_len

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        position = q_index + shift if key_lengths is None else q_index + key_lengths[b] - q_len
        allowed = k_index <= position if causal else k_index >= 0
        if window is not None:
            allowed = allowed & (k_index > position - window)
        if index is not None:
            allowed = allowed & (index[b, q_index] == index[b, k_index])
        if key_lengths is not None:
            allowed = allowed & (k_index < key_lengths[b])
        return allowed

    q_first = torch.arange(0, q_len, _BLOCK, device=device)[:, None]
    k_first = torch.arange(0, k_len, _BLOCK, device=device)
    q_last, k_last = (q_first + _BLOCK - 1).clamp(max=q_len - 1), (k_first + _BLOCK - 1).clamp(max=k_len - 1)
    maybe = torch.ones(1, q_first.shape[0], k_first.shape[0], dtype=torch.bool, device=device)
    if causal:  # ragged keys only move a query's own key down
        maybe = maybe & (k_first <= q_last + shift)
    if window is not None and key_lengths is None:
        maybe = maybe & (k_last > q_first + shift - window)
    if index is not None:  # never falls along a row: the first and last tell all that is in a block
        low_q, high_q = index[:, q_first[:, 0], None], index[:, q_last[:, 0], None]
        maybe = maybe & (low_q <= index[:, None, k_last]) & (index[:, None, k_first] <= high_q)
    count = maybe.sum(dim=-1, dtype=torch.int32)[:, None]
    order = maybe.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(q_len, k_len))
