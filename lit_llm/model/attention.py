"""Self-attention of one block: projections, rotary embedding, the cache, and `ops.attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lit_llm.model.cache import KVCache
from lit_llm.model.config import ModelConfig
from lit_llm.model.layers import HeadNorm, make_norm
from lit_llm.ops.attention import attention
from lit_llm.ops.rope import apply_rope

if TYPE_CHECKING:
    from lit_llm.model.moe import RouterLosses


@dataclass
class AttentionInputs:
    """What all layers of one forward share.

    Args:
        rope: (cos, sin), each (batch or 1, seq, 1, rotary_dim) float32, see `rope_tables`; None without rotation.
        local_rope: those of sliding layers, where they differ.
        cu_seqlens: (documents + 1,) int32, cumulative document lengths over the flattened batch, or None.
        max_seqlen: the longest document.
        cache: where keys and values go, or None.
        backend: of `ops.attention`.
        router: what routers are to be penalised for, or None.
    """

    rope: tuple[Tensor, Tensor] | None
    local_rope: tuple[Tensor, Tensor] | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cache: KVCache | None = None
    backend: str = "auto"
    router: RouterLosses | None = None


class SelfAttention(nn.Module):
    """Causal self-attention with grouped key-value heads (Ainslie et al. 2023) and rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.kv_heads, config.head_size
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bool(config.attention_output_bias))
        self.norm_scope = config.qk_norm_scope
        self.q_norm = self._qk_norm(config, self.num_heads)
        self.k_norm = self._qk_norm(config, self.kv_heads)
        self.clip = config.clip_qkv
        self.window = config.window_of(layer)
        self.is_rotated = config.is_rotated(layer)
        self.scale = config.score_scale(layer)
        self.softcap = config.attn_logit_softcapping
        self.dropout = config.attention_dropout

    def _qk_norm(self, config: ModelConfig, heads: int) -> nn.Module | None:
        if not config.use_qk_norm:
            return None
        if config.qk_norm_scope == "each_head":
            return HeadNorm(config, heads, self.head_dim)
        size = self.head_dim if config.qk_norm_scope == "head" else heads * self.head_dim
        return make_norm(config, size, config.qk_norm_bias)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """(batch, seq, hidden_size) in, the same out."""
        batch, seq, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None and self.norm_scope == "layer":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (tensor.clamp(-self.clip, self.clip) for tensor in (q, k, v))
        q = q.view(batch, seq, self.num_heads, self.head_dim)
        k = k.view(batch, seq, self.kv_heads, self.head_dim)
        v = v.view(batch, seq, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None and self.norm_scope != "layer":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.is_rotated:
            sliding = inputs.local_rope is not None and self.window is not None
            rope = inputs.local_rope if sliding else inputs.rope
            assert rope is not None
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        key_lengths = None
        if inputs.cache is not None:
            k, v, key_lengths = inputs.cache.update(self.layer, k, v)
        y = attention(
            q,
            k,
            v,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            cu_seqlens=inputs.cu_seqlens,
            max_seqlen=inputs.max_seqlen,
            key_lengths=key_lengths,
            dropout=self.dropout if self.training else 0.0,
            backend=inputs.backend,
        )
        return self.o_proj(y.reshape(batch, seq, self.num_heads * self.head_dim))
