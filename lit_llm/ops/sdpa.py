"""The `sdpa` back end: torch's fused kernels, called so that no mask or copy grows with the square of the length."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_llm.ops.attention_problem import HALF, Needs, Problem, compute_capability, decided_once, needs_of
from lit_llm.ops.blocks import blockwise_attention, fused_attention

# cuDNN's kernel is about 1.6 times as fast as FlashAttention-2's on Hopper; torch tries it second there.
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, dropout: float = 0.0) -> Tensor:
    """One call of the fused kernel, for as many queries as keys, for one query, or without causal."""
    if causal and q.shape[1] == 1:
        causal = False  # the last query sees every key; a branch, so that torch.compile sees a plain bool
    if q.is_cuda and _prefer_cudnn(q):
        with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
            return fused_attention(q, k, v, scale, causal=causal, dropout=dropout).contiguous()
    return fused_attention(q, k, v, scale, causal=causal, dropout=dropout).contiguous()


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Attention by torch's fused kernels; shapes as in `lit_llm.ops.attention`.

    Documents: one call for all of them where `varlen_attn` runs, else one call per document, with the lengths read by
    the host (on a GPU: one wait). What no fused kernel takes runs in blocks, see `lit_llm.ops.blocks`.
    """
    q_len, k_len = q.shape[1], k.shape[1]
    documents = problem.cu_seqlens is not None
    # What one fused call can do. On a GPU no fused kernel takes float32 and grouped heads together.
    plain = problem.window is None and problem.key_lengths is None and problem.softcap is None
    plain = plain and (documents or not problem.causal or q_len in (1, k_len))
    if q.is_cuda and q.dtype not in HALF and q.shape[2] != k.shape[2]:
        plain = plain and not (problem.causal and q_len > 1)
    # On the CPU dropout and values of another size would fall to the unfused kernel, which holds all scores.
    explicit = problem.softcap is not None or (problem.dropout > 0 and not plain)
    explicit = explicit or (not q.is_cuda and (problem.dropout > 0 or v.shape[-1] != q.shape[-1]))
    if documents:
        return _documents(q, k, v, problem, plain and not explicit, explicit)
    if q_len == 1 and not explicit:  # a decoded token
        if problem.key_lengths is not None:
            return fused_attention(q, k, v, problem.scale, mask=_last_query_mask(k_len, problem)).contiguous()
        if problem.window is not None:
            return plain_attention(q, k[:, -problem.window :], v[:, -problem.window :], problem.scale, False)
    if plain and not explicit:
        return plain_attention(q, k, v, problem.scale, problem.causal, problem.dropout)
    return blockwise_attention(q, k, v, problem, None, explicit)


def _last_query_mask(k_len: int, problem: Problem) -> Tensor:
    """The keys that the one query of each row sees: bool, (batch, 1, 1, k_len)."""
    assert problem.key_lengths is not None
    lengths = problem.key_lengths[:, None]
    key = torch.arange(k_len, device=lengths.device)
    mask = key < lengths
    if problem.window is not None:
        mask = mask & (key >= lengths - problem.window)
    return mask[:, None, None]


def _prefer_cudnn(q: Tensor) -> bool:
    # Training only: cuDNN builds a plan for each new shape, and generation has a new shape at each step.
    training = torch.is_grad_enabled() and q.requires_grad and q.shape[1] > 1
    return training and q.dtype in HALF and compute_capability(q.device)[0] == 9


def _documents(q: Tensor, k: Tensor, v: Tensor, problem: Problem, plain: bool, explicit: bool) -> Tensor:
    if varlen_limit(needs_of(q, k, v, problem)) is None:
        return _varlen(q, k, v, problem)
    return _document_by_document(q, k, v, problem, plain, explicit)


@torch.compiler.disable
def _document_by_document(q: Tensor, k: Tensor, v: Tensor, problem: Problem, plain: bool, explicit: bool) -> Tensor:
    batch, seq, heads, _ = q.shape
    assert problem.cu_seqlens is not None
    lengths = [length for length in problem.cu_seqlens.diff().tolist() if length]
    if plain and lengths == [seq] * batch:  # a document a row
        return plain_attention(q, k, v, problem.scale, problem.causal, problem.dropout)
    q, k, v = (x.reshape(1, batch * seq, x.shape[2], x.shape[3]) for x in (q, k, v))  # laid end to end
    if not plain:
        out = blockwise_attention(q, k, v, problem, lengths, explicit)
    else:
        # split, not slices: its backward is one concatenation, a slice's is a full tensor of zeros per document.
        parts = zip(q.split(lengths, dim=1), k.split(lengths, dim=1), v.split(lengths, dim=1), strict=True)
        out = torch.cat([plain_attention(*qkv, problem.scale, problem.causal, problem.dropout) for qkv in parts], dim=1)
    return out.view(batch, seq, heads, v.shape[-1])


def varlen_limit(needs: Needs) -> str | None:
    """Why torch's `varlen_attn` cannot run packed documents here; None where it can."""
    parameters = _varlen_parameters()
    if not _varlen_device(needs):
        return "varlen_attn runs on CUDA, in half precision"
    if not parameters:
        return "this torch has no varlen_attn"
    if needs.softcap or needs.dropout or needs.head_dim != needs.value_dim:
        return "varlen_attn has no soft cap, no dropout, and one head size"
    if needs.window and "window_size" not in parameters:
        return "this torch's varlen_attn has no window"
    if needs.grouped and "enable_gqa" not in parameters:
        return "this torch's varlen_attn has no grouped heads"
    if needs.own_scale and "scale" not in parameters:
        return "this torch's varlen_attn has no scale"
    return None


def _varlen_device(needs: Needs) -> bool:
    """Where `varlen_attn` runs (the tests put a fake of it on the CPU)."""
    return needs.device.type == "cuda" and needs.dtype in HALF


@decided_once
def _varlen_parameters() -> frozenset[str]:
    """What `varlen_attn` takes: `is_causal` became `window_size`, `scale` and `enable_gqa` came later."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """`varlen_attn`, called by the parameters that this torch's has."""
    from torch.nn.attention import varlen

    parameters = _varlen_parameters()
    options: dict[str, Any] = {}
    if "scale" in parameters:
        options["scale"] = problem.scale
    if "enable_gqa" in parameters:
        options["enable_gqa"] = q.shape[2] != k.shape[2]
    if "window_size" in parameters:
        # The kernel's (left, right) do not count the query's own key.
        left = -1 if problem.window is None else problem.window - 1
        options["window_size"] = (left, 0 if problem.causal else -1)
    else:
        options["is_causal"] = problem.causal
    cu, longest = problem.cu_seqlens, problem.max_seqlen
    assert cu is not None
    out: Any = varlen.varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, longest, longest, **options
    )
    return out.view(*q.shape[:3], v.shape[-1])
