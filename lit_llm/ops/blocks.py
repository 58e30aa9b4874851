"""Attention block by block: what no fused kernel takes in one call, in bounded memory.

A window, a causal rectangle, a soft cap, dropout: the queries are cut into blocks, each block sees only the span of
keys that any of its queries may see, and the backward pass computes each block again instead of keeping its scores.
The largest thing alive is (block x span), never (seq x seq); keys and values are slices, never copies for a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_llm.ops.attention_problem import Problem, wants_gradients

# Queries in a block of the fused kernel: enough for its inner tiles, few enough that a window is not drowned in masked
# keys, and a mask of (rows x 16k keys) stays at a few MiB.
_FUSED_ROWS = 128
# Scores (numbers, over all heads) that an explicit block may hold; its softmax needs a handful of tensors of this size.
_EXPLICIT_SCORES = 2**20
_EXPLICIT_ROWS = (16, 256)  # fewest and most queries of an explicit block


class Segment(NamedTuple):
    """Queries that see one range of keys; query i stands at key i + shift."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    shift: int


class Block(NamedTuple):
    """A block of queries of some rows of the batch, and the span of keys that they may see."""

    rows: slice
    queries: slice
    keys: slice
    shift: int


class Plan(NamedTuple):
    """How to compute one call: its blocks, what is inside each (fused or explicit), and the seed of its dropout."""

    problem: Problem
    q_len: int
    blocks: list[Block]
    explicit: bool
    seed: int

    def compute(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of block ``number``; q, k and v are already cut to it."""
        block = self.blocks[number]
        mask = _block_mask(block, self.problem, self.q_len, q.device)
        if not self.explicit:
            return fused_attention(q, k, v, self.problem.scale, mask=mask)
        generator = None
        if self.problem.dropout:
            generator = torch.Generator(q.device).manual_seed(self.seed + number)
        return _explicit_attention(q, k, v, mask, self.problem, generator)


@torch.compiler.disable
def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, lengths: list[int] | None, explicit: bool
) -> Tensor:
    """Attention in blocks of queries; shapes as in `lit_llm.ops.attention`.

    Args:
        lengths: of the documents, when the batch's tokens are laid end to end: q, k and v then have one row.
        explicit: compute the scores (soft cap, dropout, values of another size) instead of calling the fused kernel.
    """
    segments = _segments(q.shape[1], k.shape[1], problem, lengths)
    # One row at a time where scores are explicit: a row's keys multiply without a copy, and the block stays in cache.
    rows = [slice(b, b + 1) for b in range(q.shape[0])] if explicit else [slice(0, q.shape[0])]
    blocks = [block for row in rows for block in _blocks(row, segments, problem, q.shape[2], explicit)]
    # From the CPU's generator whatever the device: reading a number that a GPU drew would wait for it.
    seed = int(torch.randint(2**62, (), device="cpu")) if problem.dropout else 0
    plan = Plan(problem, q.shape[1], blocks, explicit, seed)
    # One fused block is one kernel, whose backward keeps no scores already.
    if wants_gradients(q, k, v) and (explicit or len(blocks) > 1):
        return _Blockwise.apply(q, k, v, plan)
    return _run(q, k, v, plan)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """torch's fused attention, one call; a query without a key in the mask gives zeros.

    Args:
        mask: bool, (queries, keys) or (batch, 1, queries, keys), True where a query sees a key.
        causal: for as many queries as keys.
    """
    rows, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    grouped, empty = heads != kv_heads, None
    # A group's heads as more queries of its one head: reads a single query's keys once, not once per head (here up to 4
    # times as fast), and serves the GPU's kernels for masks and for float32, which know no groups.
    fold = grouped and not causal and (rows == 1 or q.is_cuda)
    if mask is not None:
        if q.is_cuda:
            # What these kernels give for a row without a key differs: it sees everything, and is set to zero after.
            # The CPU's gives zeros, and zero gradients.
            empty = ~mask.any(dim=-1, keepdim=True)
            mask = mask | empty
        if fold and rows > 1:  # the mask of a single query broadcasts
            mask = mask.repeat(*[1] * (mask.ndim - 2), heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(
        fold_heads(q, kv_heads) if fold else q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped and not fold,
    )
    out = unfold_heads(out, rows) if fold else out.transpose(1, 2)
    return out if empty is None else out.masked_fill(empty.reshape(-1, rows, 1, 1), 0.0)


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """(batch, rows, heads, dim) to (batch, kv_heads, group * rows, dim): a group's heads as queries of its one head."""
    batch, rows, heads, dim = q.shape
    if rows == 1:
        return q.reshape(batch, kv_heads, heads // kv_heads, dim)
    q = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return q.reshape(batch, kv_heads, heads // kv_heads * rows, dim)


def unfold_heads(out: Tensor, rows: int) -> Tensor:
    """What `fold_heads` did, undone: (batch, kv_heads, group * rows, dim) to (batch, rows, heads, dim)."""
    batch, kv_heads, folded, dim = out.shape
    if rows == 1:
        return out.reshape(batch, 1, kv_heads * folded, dim)
    out = out.reshape(batch, kv_heads, folded // rows, rows, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, kv_heads * (folded // rows), dim)


def _segments(q_len: int, k_len: int, problem: Problem, lengths: list[int] | None) -> list[Segment]:
    if lengths is None:
        shift = k_len - q_len
        return [Segment(max(0, -shift) if problem.causal else 0, q_len, 0, k_len, shift)]
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, start + length, start, start + length, 0))
        start += length
    return segments


def _blocks(rows: slice, segments: list[Segment], problem: Problem, heads: int, explicit: bool) -> Iterator[Block]:
    """Cut segments into blocks. A row of ragged keys is at most as long as k_len, so k_len bounds its span too."""
    most = _EXPLICIT_ROWS[1] if explicit else _FUSED_ROWS
    for segment in segments:
        start = segment.q_start
        while start < segment.q_stop:
            low = segment.k_start
            if problem.window is not None and problem.key_lengths is None:
                low = max(low, start + segment.shift - problem.window + 1)
            size = most
            if explicit:
                high = min(segment.k_stop, start + most + segment.shift) if problem.causal else segment.k_stop
                size = max(_EXPLICIT_ROWS[0], min(most, _EXPLICIT_SCORES // (heads * max(1, high - low))))
            stop = min(start + size, segment.q_stop)
            high = min(segment.k_stop, stop + segment.shift) if problem.causal else segment.k_stop
            yield Block(rows, slice(start, stop), slice(low, high), segment.shift)
            start = stop


def _block_mask(block: Block, problem: Problem, q_len: int, device: torch.device) -> Tensor | None:
    """Which key of its span each query of the block sees: bool, (queries, span), or (rows, 1, queries, span)."""
    key = torch.arange(block.keys.start, block.keys.stop, device=device)
    lengths = None
    if problem.key_lengths is not None:
        lengths = problem.key_lengths[block.rows].view(-1, 1, 1, 1)
    if not problem.causal:
        return None if lengths is None else key < lengths
    position = torch.arange(block.queries.start, block.queries.stop, device=device)[:, None]
    position = position + (block.shift if lengths is None else lengths - q_len)
    mask = key <= position
    if problem.window is not None:
        mask = mask & (key > position - problem.window)
    return mask


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: Problem, generator: torch.Generator | None
) -> Tensor:
    """Attention of one block with its scores in float32 (or float64), the heads of a group folded into rows."""
    rows, dtype = q.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = fold_heads(q.to(dtype) * problem.scale, k.shape[2]) @ k.to(dtype).permute(0, 2, 3, 1)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if mask is not None:
        by_row = scores.unflatten(2, (-1, rows))
        # The lowest finite number keeps a row without a key finite; its output is set to zero below.
        scores = by_row.masked_fill(~mask, torch.finfo(dtype).min).flatten(2, 3)
    weights = scores.softmax(dim=-1)
    if generator is not None:
        keep = torch.rand(weights.shape, device=q.device, generator=generator) >= problem.dropout
        weights = weights * keep / (1.0 - problem.dropout)
    out = unfold_heads((weights @ v.to(dtype).transpose(1, 2)), rows).to(q.dtype)
    if problem.key_lengths is not None and mask is not None:
        out = out.masked_fill(~mask.any(dim=-1).transpose(1, 2).unsqueeze(-1), 0.0)
    return out


def _cut(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[block.rows, block.queries], k[block.rows, block.keys], v[block.rows, block.keys]


def _run(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    batch, q_len, heads, _ = q.shape
    if len(plan.blocks) == 1 and plan.blocks[0].queries == slice(0, q_len) and plan.blocks[0].rows == slice(0, batch):
        return plan.compute(0, *_cut(plan.blocks[0], q, k, v)).contiguous()
    covered = plan.blocks and plan.blocks[0].queries.start == 0
    out = (torch.empty if covered else torch.zeros)(batch, q_len, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    for number, block in enumerate(plan.blocks):
        out[block.rows, block.queries] = plan.compute(number, *_cut(block, q, k, v))
    return out


class _Blockwise(torch.autograd.Function):
    """Blocks whose backward computes each block again, and adds the keys' gradients where the spans overlap."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plan = plan
        return _run(q, k, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        plan: Plan = ctx.plan
        # Sums over blocks are kept in float32, as a fused kernel would.
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for number, block in enumerate(plan.blocks):
            inputs = [x.detach().requires_grad_() for x in _cut(block, q, k, v)]
            # Autocast is not active in a custom backward unless backward() was called inside it: never here.
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                out = plan.compute(number, *inputs)
                block_q, block_k, block_v = torch.autograd.grad(out, inputs, grad[block.rows, block.queries])
            grad_q[block.rows, block.queries] = block_q
            grad_k[block.rows, block.keys] += block_k
            grad_v[block.rows, block.keys] += block_v
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None
