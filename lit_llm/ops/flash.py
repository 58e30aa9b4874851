"""The `flash` back end: the flash-attn packages, found by their functions and called as each generation wants it.

Three packages share a name and little else. FlashAttention-2 (`flash_attn`), -3 (`flash_attn_interface`, Hopper) and
-4 (`flash_attn.cute`) order their arguments differently, so every call is by keyword. All take (batch, seq, heads,
head_dim), align a causal mask bottom-right, and give zeros for a query without a key.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_llm.ops.attention_problem import HALF, Needs, Problem, compute_capability, decided_once

# Found by the function: with FlashAttention-4 alone `import flash_attn` succeeds as an empty namespace.
_MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
# Fastest first, by the major compute capability.
_ORDER = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2), 12: (4, 2)}


class Flash(NamedTuple):
    """The functions of one generation."""

    dense: Callable[..., Any]
    varlen: Callable[..., Any]
    kvcache: Callable[..., Any] | None  # FlashAttention-4 has none


# What was found, by generation; a plain dictionary, which torch.compile can look into.
_found: dict[int, Flash | str] = {}


def probe(generation: int) -> Flash | str:
    """The functions of one generation, or why it is absent. Imports the package at the first call, never before."""
    if generation not in _found:
        name = _MODULES[generation]
        try:
            module = importlib.import_module(name)
            kvcache = None if generation == 4 else module.flash_attn_with_kvcache
            _found[generation] = Flash(module.flash_attn_func, module.flash_attn_varlen_func, kvcache)
        except Exception as error:  # a wheel for another torch fails in any way: undefined symbol, missing library
            reason = str(error).strip().splitlines()
            _found[generation] = f"{name}: {type(error).__name__}: {reason[0] if reason else 'no message'}"
    return _found[generation]


@decided_once
def pick(*fields: Any) -> tuple[int | None, str]:
    """The fastest generation that can serve these `Needs`, or None; and why no faster one, a reason for each."""
    needs = Needs(*fields)
    if (problem := device_problem(needs)) is not None:
        return None, problem
    reasons = []
    for generation in _ORDER.get(compute_capability(needs.device)[0], ()):
        found = probe(generation)
        if isinstance(found, str):
            reasons.append(f"FlashAttention-{generation} is absent ({found})")
        elif (limit := _limit(generation, needs)) is not None:
            reasons.append(f"FlashAttention-{generation} {limit}")
        else:
            return generation, "; ".join(reasons)
    return None, "; ".join(reasons) or "no FlashAttention for this GPU"


def device_problem(needs: Needs) -> str | None:
    """Why no flash-attn can run on this device and dtype (the tests put a fake package on the CPU)."""
    if needs.device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {needs.device.type}"
    if needs.dtype not in HALF:
        return f"flash-attn needs float16 or bfloat16, not {needs.dtype}"
    return None


def _limit(generation: int, needs: Needs) -> str | None:
    most = 128 if generation == 4 and compute_capability(needs.device)[0] != 9 else 256
    if needs.head_dim > most or needs.head_dim % 8:
        return f"takes head sizes of up to {most} in eights, not {needs.head_dim}"
    if needs.head_dim != needs.value_dim:
        return "is used with one head size for keys and values"
    if needs.dropout and generation != 2:
        return "has no dropout"
    if needs.key_lengths and needs.training:
        return "has no gradient for ragged keys"
    if needs.key_lengths and generation == 4:
        return "has no function for a KV cache"
    return None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, generation: int) -> Tensor:
    """Attention by a generation that `pick` gave; shapes as in `lit_llm.ops.attention`."""
    flash = _found[generation]
    assert isinstance(flash, Flash)
    unlimited = None if generation == 4 else -1
    options: dict[str, Any] = {
        "softmax_scale": problem.scale,
        "causal": problem.causal,
        # (left, right) beside the query's own key; both sides given: one-sided windows are wrong in FlashAttention-4.
        "window_size": (unlimited, unlimited) if problem.window is None else (problem.window - 1, 0),
        "softcap": problem.softcap or 0.0,
    }
    if problem.key_lengths is not None:
        assert flash.kvcache is not None
        lengths = problem.key_lengths.to(torch.int32)
        return _output(flash.kvcache(q, k_cache=k, v_cache=v, cache_seqlens=lengths, **options))
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if generation == 2:
        options["dropout_p"] = problem.dropout
    if problem.cu_seqlens is None:
        return _output(flash.dense(q, k, v, **options))
    cu, longest = problem.cu_seqlens, problem.max_seqlen
    out = flash.varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options,
    )
    return _output(out).view(*q.shape[:3], v.shape[-1])


def _output(out: Any) -> Tensor:
    # FlashAttention-4 and older builds of -3 return (out, log-sum-exp).
    return (out[0] if isinstance(out, tuple) else out).contiguous()
