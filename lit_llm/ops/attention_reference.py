"""What attention means: the explicit computation that every other back end is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_llm.ops.attention_problem import Problem
from lit_llm.ops.documents import document_index


def allowed_keys(batch: int, q_len: int, k_len: int, problem: Problem, device: torch.device) -> Tensor:
    """Which key each query may see: bool, (batch, q_len, k_len)."""
    key = torch.arange(k_len, device=device)
    lengths = problem.key_lengths
    if lengths is None:
        lengths = torch.full((batch,), k_len, device=device)
    # The queries are the last q_len of the row's keys: query i stands at key i + lengths - q_len.
    position = torch.arange(q_len, device=device) + (lengths[:, None] - q_len)
    key, position, lengths = key[None, None, :], position[:, :, None], lengths[:, None, None]
    allowed = (key < lengths).expand(batch, q_len, k_len)
    if problem.causal:
        allowed = allowed & (key <= position)
    if problem.window is not None:
        allowed = allowed & (key > position - problem.window)
    if problem.cu_seqlens is not None:
        index = document_index(problem.cu_seqlens, batch, q_len)
        allowed = allowed & (index[:, :, None] == index[:, None, :])
    return allowed


def reference_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Softmax attention (Vaswani et al. 2017, section 3.2.1) with a (q_len x k_len) mask, computed in float32.

    Shapes as in `lit_llm.ops.attention`; float64 input is computed in float64. Memory is quadratic in the length.
    """
    batch, q_len, heads, _ = q.shape
    k_len, kv_heads = k.shape[1], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    allowed = allowed_keys(batch, q_len, k_len, problem, q.device)[:, None]  # one for all heads
    keys = k.to(dtype).repeat_interleave(heads // kv_heads, dim=2)
    values = v.to(dtype).repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), keys) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    # The lowest finite number, not -inf: a query without a key then has finite weights, which are set to 0 next.
    weights = scores.masked_fill(~allowed, torch.finfo(dtype).min).softmax(dim=-1).masked_fill(~allowed, 0.0)
    weights = torch.nn.functional.dropout(weights, problem.dropout)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values).to(q.dtype).contiguous()
