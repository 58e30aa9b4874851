"""Stand-ins for the three flash-attn packages and for `varlen_attn`, as strict as the real ones are particular.

Each has the real keyword names of its generation, takes nothing but q, k and v by position, refuses what the real
kernels refuse or, worse, silently get wrong, and computes by an own explicit formula from flash-attn's definitions.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm.ops import flash, sdpa

# The function hides its module: an attribute of the package goes by the same name.
_choosing = importlib.import_module("lit_llm.ops.attention")

# The keywords of each function after the tensors that may be given by position; a star marks one that must be given.
_DENSE = {
    2: "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    3: "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    4: "qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic "
    "score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse",
}
_LENGTHS = "*cu_seqlens_q *cu_seqlens_k *max_seqlen_q *max_seqlen_k"
_VARLEN = {
    2: f"{_LENGTHS} {_DENSE[2]} block_table",
    3: f"{_LENGTHS} seqused_q seqused_k {_DENSE[3]}",
    4: f"{_LENGTHS} min_seqlen_k seqused_q seqused_k page_table {_DENSE[4]}",
}
_CACHE = (
    "*k_cache *v_cache k v rotary_cos rotary_sin *cache_seqlens cache_batch_idx cache_leftpad softmax_scale causal "
)
_CACHE += "window_size softcap rotary_interleaved num_splits return_softmax_lse "
_KVCACHE = {
    2: f"{_CACHE} block_table alibi_slopes",
    3: f"{_CACHE} qv page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    "v_descale attention_chunk scheduler_metadata pack_gqa sm_margin",
}


class FakePackage:
    """One generation of flash-attn; `calls` lists the functions that were called, `options` the last keywords."""

    def __init__(self, generation: int, tuples: bool = False) -> None:
        self.generation = generation
        self.tuples = tuples or generation == 4
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}

    def module(self) -> types.ModuleType:
        module: Any = types.ModuleType(f"fake_flash_attn_{self.generation}")
        module.flash_attn_func = self._function("dense", 3, _DENSE[self.generation], self._dense)
        module.flash_attn_varlen_func = self._function("varlen", 3, _VARLEN[self.generation], self._varlen)
        if self.generation in _KVCACHE:
            keywords = _KVCACHE[self.generation]
            module.flash_attn_with_kvcache = self._function("kvcache", 1, keywords, self._kvcache)
        return module

    def _function(self, name: str, positional: int, keywords: str, body: Callable[..., Tensor]) -> Callable[..., Any]:
        known = {word.lstrip("*") for word in keywords.split()}
        required = {word[1:] for word in keywords.split() if word.startswith("*")}

        def call(*tensors: Tensor, **options: Any) -> Any:
            if len(tensors) != positional or not set(options) <= known or not required <= set(options):
                raise TypeError(f"{name}: {len(tensors)} positional arguments and {sorted(options)}")
            self.calls.append(name)
            self.options = options
            out = body(*tensors, **options)
            return (out, torch.zeros(())) if self.tuples else out

        return call

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert q.ndim == k.ndim == v.ndim == 4
        rule = self._rule(q, k, v, options)
        return torch.stack([attend(*qkv, *rule) for qkv in zip(q, k, v, strict=True)])

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert q.ndim == k.ndim == v.ndim == 3
        rule = self._rule(q, k, v, options)
        parts = []
        for side, tensors in (("q", (q,)), ("k", (k, v))):
            cu, longest = options[f"cu_seqlens_{side}"], options[f"max_seqlen_{side}"]
            assert cu.dtype == torch.int32
            assert cu.ndim == 1
            assert type(longest) is int
            assert cu[0] == 0
            assert cu[-1] == tensors[0].shape[0]
            assert cu.diff().max() <= longest
            parts += [x.split(cu.diff().tolist()) for x in tensors]
        return torch.cat([attend(*qkv, *rule) for qkv in zip(*parts, strict=True)])

    def _kvcache(self, q: Tensor, *, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: Any) -> Tensor:
        rule = self._rule(q, k_cache, v_cache, options)
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (q.shape[0],)
        assert not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache))), "no backward"
        rows = [attend(q[b], k_cache[b, :n], v_cache[b, :n], *rule) for b, n in enumerate(cache_seqlens.tolist())]
        return torch.stack(rows)

    def _rule(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[float, bool, int, int, float]:
        """What the real functions demand of any call; gives (scale, causal, left, right, softcap)."""
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        assert q.shape[-2] % k.shape[-2] == 0
        assert q.dtype == k.dtype == v.dtype
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        window = options["window_size"]
        assert type(window) is tuple
        assert len(window) == 2
        if self.generation == 4:
            # -1 beside a limit, and (-1, 0), are read wrongly there, without an error.
            if -1 in window:
                raise AssertionError(f"FlashAttention-4 takes None for unlimited, got {window}")
            window = tuple(-1 if side is None else side for side in window)
        assert all(type(side) is int and side >= -1 for side in window)
        assert type(options["softmax_scale"]) is float
        assert type(options["causal"]) is bool
        assert type(options["softcap"]) is float
        return options["softmax_scale"], options["causal"], window[0], window[1], options["softcap"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float = 0.0
) -> Tensor:
    """(q_len, heads, dim) against (k_len, kv_heads, dim) by flash-attn's rules: bottom-right, -1 is unlimited."""
    q_len, k_len = q.shape[0], k.shape[0]
    right = 0 if causal else right
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k_len)[None] - (torch.arange(q_len)[:, None] + k_len - q_len)
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    weights = torch.where(seen, scores, -1e30).softmax(-1) * seen
    return torch.einsum("hqk,khd->qhd", weights, v)


def fake_varlen_attn(newest_parameter: str) -> Callable[..., Tensor]:
    """torch's `varlen_attn` in three states: with `is_causal`, with `window_size`, and with `enable_gqa` too."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
        assert cu.dtype == torch.int32
        parts = zip(*(x.split(cu.diff().tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*part, scale or q.shape[-1] ** -0.5, False, *window) for part in parts])

    def with_is_causal(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        assert query.shape[1] == key.shape[1]
        return run(query, key, value, cu_seq_q, None, (-1, 0) if is_causal else (-1, -1))

    def with_window(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert query.shape[1] == key.shape[1]
        return run(query, key, value, cu_seq_q, scale, window_size)

    def with_gqa(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert enable_gqa or query.shape[1] == key.shape[1]
        return run(query, key, value, cu_seq_q, scale, window_size)

    return {"is_causal": with_is_causal, "window_size": with_window, "enable_gqa": with_gqa}[newest_parameter]


def use_flash(monkeypatch: pytest.MonkeyPatch, *packages: FakePackage, capability: tuple[int, int] = (9, 0)) -> None:
    """Install fake packages, the others absent, and let flash-attn run on the CPU in float32."""
    for generation, name in flash._MODULES.items():
        found = [package for package in packages if package.generation == generation]
        monkeypatch.setitem(sys.modules, name, found[0].module() if found else None)
    monkeypatch.setattr(flash, "device_problem", lambda needs: None)
    monkeypatch.setattr(flash, "compute_capability", lambda device: capability)
    clear_decisions()


def use_varlen(monkeypatch: pytest.MonkeyPatch, newest_parameter: str) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn(newest_parameter))
    monkeypatch.setattr(sdpa, "_varlen_device", lambda needs: True)
    clear_decisions()


def clear_decisions() -> None:
    flash._found.clear()
    for cached in (flash.pick, _choosing._choose, _choosing._announce, sdpa._varlen_parameters):
        cached.cache_clear()
