"""Attention: one meaning, several back ends.

`attention_reference.py` says what is computed; `sdpa.py`, `flash.py` and `flex.py` compute it, and every one of them
equals the reference. Here the call is checked, and a back end chosen.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.ops import flash, sdpa
from lit_llm.ops.attention_problem import Needs, Problem, decided_once, needs_of
from lit_llm.ops.attention_reference import reference_attention
from lit_llm.ops.documents import check_cu_seqlens, document_lengths

BACKENDS = ("auto", "sdpa", "flash", "flex", "reference")
_SHORT = ("auto", "sdpa")

_log = logging.getLogger(__name__)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_lengths: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with grouped heads (Ainslie et al. 2023).

    Where there are fewer queries than keys they are the last ones: query i stands at key i + k_len - q_len. A query
    that may see no key gives zeros, and zero gradients. Under autocast the inputs are cast to its dtype first, as
    torch's own attention does.

    Args:
        q: (batch, q_len, heads, head_dim).
        k: (batch, k_len, kv_heads, head_dim); each of its heads serves heads / kv_heads heads of q, without a copy.
        v: (batch, k_len, kv_heads, value_dim).
        causal: a query sees the keys up to its own position.
        window: the number of keys a query sees, its own included (sliding window); only with ``causal``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` after scaling (Gemma 2, section 2).
        scale: what the scores are multiplied by; ``head_dim ** -0.5`` when None.
        document_ids: (batch, seq) integers, q_len = k_len = seq: a query sees only keys of its own document, which is a
            maximal run of equal ids in a row. Costs one wait for a GPU: see `document_lengths`.
        cu_seqlens: int32 (documents + 1,), the same as cumulative lengths over the batch * seq tokens, on the device
            of q; with ``max_seqlen``, the tokens of the longest. Read, and so checked, on the CPU only.
        key_lengths: (batch,) integers, at most k_len (not checked: that would wait for the device): row b has only its
            first ``key_lengths[b]`` keys, and the queries are the last q_len of these. The ragged KV cache.
        dropout: the probability that an attention weight is dropped, drawn from torch's default generator. For
            training: pass 0 to evaluate.
        backend: "auto" chooses by device, dtype and what is installed, and logs which and why, once each. "reference"
            is the plain computation with quadratic memory, "sdpa" torch's fused kernels, "flash" the flash-attn
            packages, "flex" torch's flex_attention.

    Returns:
        (batch, q_len, heads, value_dim), contiguous, in q's dtype (under autocast: in autocast's).

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together.
        UserError: for an option that makes no sense, or a back end that is unknown or cannot run here.
    """
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k and v must be (batch, seq, heads, head_dim), got {_shapes(q, k, v)}")
    batch, q_len, heads, head_dim = q.shape
    k_batch, k_len, kv_heads, k_dim = k.shape
    if k_batch != batch or k_dim != head_dim or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q, k and v do not fit together: {_shapes(q, k, v)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the heads of q ({heads}) must be a multiple of the heads of k ({kv_heads})")
    if (q.dtype != k.dtype or q.dtype != v.dtype) and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if scale is None:
        scale = head_dim**-0.5
    if (
        window is None
        and softcap is None
        and document_ids is None
        and cu_seqlens is None
        and key_lengths is None
        and not dropout
        and not q.is_cuda
        and backend in _SHORT
        and (not causal or q_len in (1, k_len))
        and v.shape[3] == head_dim
    ):
        # The short way of most calls on a CPU, decoding a token above all, where each microsecond of Python counts.
        if backend == "auto":
            _announce("attention: sdpa, torch's fused kernels (not on CUDA)")
        return sdpa.plain_attention(q, k, v, scale, causal)

    if backend not in BACKENDS:
        raise UserError(f"unknown attention backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if not 0.0 <= dropout < 1.0:
        raise UserError(f"attention dropout must be at least 0 and below 1, got {dropout}")
    if softcap is not None and not softcap > 0.0:
        raise UserError(f"softcap must be above 0, got {softcap}: use None for no soft cap")
    if window is not None:
        if window < 1:
            raise UserError(f"window must be at least 1 (the query's own key), got {window}: use None for no window")
        if not causal:
            raise UserError("a window is defined for causal attention only: use causal=True, or window=None")
    if document_ids is not None or cu_seqlens is not None:
        if key_lengths is not None:
            raise ValueError(
                "documents and key_lengths do not go together: packed rows are for training, a cache is not"
            )
        if q_len != k_len:
            raise ValueError(f"documents need as many queries as keys, got {q_len} and {k_len}")
        cu_seqlens, max_seqlen = _cumulative(document_ids, cu_seqlens, max_seqlen, q)
    elif max_seqlen is not None:
        raise ValueError("max_seqlen is the longest document of cu_seqlens: give both or neither")
    if window is not None and window >= (k_len if max_seqlen is None else max_seqlen):
        window = None  # every key is inside it
    if key_lengths is not None and (
        key_lengths.shape != (batch,) or key_lengths.is_floating_point() or key_lengths.device != q.device
    ):
        raise ValueError(
            f"key_lengths must be {batch} integers, one per row, on {q.device}; "
            f"got {key_lengths.dtype} {tuple(key_lengths.shape)} on {key_lengths.device}"
        )
    if q.numel() == 0 or k_len == 0:
        nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()  # zero, with a way back to the inputs
        return nothing + q.new_zeros(batch, q_len, heads, v.shape[3])

    problem = Problem(scale, causal, window, softcap, cu_seqlens, max_seqlen or 0, key_lengths, dropout)
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _run(q.to(dtype), k.to(dtype), v.to(dtype), problem, backend)
    return _run(q, k, v, problem, backend)


def _run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str) -> Tensor:
    if backend == "reference":
        return reference_attention(q, k, v, problem)
    if backend == "auto":
        backend = _choose(*needs_of(q, k, v, problem))
    if backend == "flash":
        needs = needs_of(q, k, v, problem)
        generation, why_not = flash.pick(*needs)
        if generation is not None:
            return flash.flash_attention(q, k, v, problem, generation)
        # A choice of the user's for a whole model: what a cache needs beyond the package is not the user's mistake.
        if flash.pick(*needs._replace(key_lengths=False))[0] is None:
            raise UserError(f"attention backend 'flash' cannot run: {why_not}; use backend='auto' or 'sdpa'")
    if backend == "flex":
        from lit_llm.ops.flex import flex_back_end  # torch's compiler comes with it

        return flex_back_end(q, k, v, problem)
    return sdpa.sdpa_attention(q, k, v, problem)


@decided_once
def _choose(*fields: Any) -> str:
    """The back end for "auto" and these `Needs`, and a line in the log that says why."""
    needs = Needs(*fields)
    backend, why = "sdpa", "torch's fused kernels (not on CUDA)"
    if needs.device.type == "cuda":
        backend, why = _choose_on_cuda(needs)
    _announce(f"attention: {backend}, {why}")
    return backend


def _choose_on_cuda(needs: Needs) -> tuple[str, str]:
    generation, why_not = flash.pick(*needs)
    beyond = [name for name in ("window", "softcap", "documents", "key_lengths") if getattr(needs, name)]
    why = f"for {needs.dtype} with {', '.join(beyond)}" if beyond else f"for {needs.dtype}"
    if generation is not None:
        # cuDNN through SDPA is faster than FlashAttention-2 from Hopper on, where it can serve.
        if generation > 2 or beyond or flash.compute_capability(needs.device)[0] < 9:
            return "flash", f"FlashAttention-{generation} {why}"
        return "sdpa", f"cuDNN or flash {why}: faster here than FlashAttention-2"
    if needs.documents and sdpa.varlen_limit(needs) is None:
        return "sdpa", f"torch's varlen_attn {why}: {why_not}"
    # flex_attention has no dropout, wants heads of at least 16 numbers, and would compile anew as ragged keys grow.
    flex_can = not needs.dropout and not needs.key_lengths and min(needs.head_dim, needs.value_dim) >= 16
    if flex_can and (needs.window or needs.softcap or needs.documents):
        return "flex", f"torch's flex_attention {why}: {why_not}"
    return "sdpa", f"torch's fused kernels {why}: {why_not}"


@decided_once
def _announce(line: str) -> None:
    _log.info(line)


def _cumulative(
    document_ids: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None, q: Tensor
) -> tuple[Tensor, int]:
    batch, seq = q.shape[:2]
    if document_ids is not None:
        if cu_seqlens is not None:
            raise ValueError("give document_ids or cu_seqlens, not both")
        if document_ids.shape != (batch, seq) or document_ids.device != q.device:
            raise ValueError(
                f"document_ids must be ({batch}, {seq}) on {q.device}, "
                f"got {tuple(document_ids.shape)} on {document_ids.device}"
            )
        return document_lengths(document_ids)
    assert cu_seqlens is not None
    if max_seqlen is None:
        raise ValueError("cu_seqlens needs max_seqlen, the tokens of the longest document")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be int32 of shape (documents + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on {q.device}, got {cu_seqlens.device}")
    if cu_seqlens.device.type == "cpu":
        check_cu_seqlens(cu_seqlens, max_seqlen, batch, seq)
    return cu_seqlens, max_seqlen


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
