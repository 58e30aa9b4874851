"""Self-attention of one block: projections, rotary embedding, the cache, and `ops.attention`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lit_llm.model.cache import KVCache
from lit_llm.model.config import ModelConfig
from lit_llm.model.layers import make_norm
from lit_llm.ops.attention import attention
from lit_llm.ops.rope import apply_rope


@dataclass
class AttentionInputs:
    """What all layers of one forward share.

    Args:
        cos, sin: (batch or 1, seq, 1, rotary_dim) float32, see `rope_tables`.
        cu_seqlens: (documents + 1,) int32, cumulative document lengths over the flattened batch, or None.
        max_seqlen: the longest document.
        cache: where keys and values go, or None.
        backend: of `ops.attention`.
    """

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cache: KVCache | None = None
    backend: str = "auto"


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
        self.q_norm = make_norm(config, self.head_dim) if config.use_qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.use_qk_norm else None
        self.window = config.window_of(layer)
        self.softcap = config.attn_logit_softcapping
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """(batch, seq, hidden_size) in, the same out."""
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, inputs.cos, inputs.sin), apply_rope(k, inputs.cos, inputs.sin)
        key_lengths = None
        if inputs.cache is not None:
            k, v, key_lengths = inputs.cache.update(self.layer, k, v)
        y = attention(
            q,
            k,
            v,
            window=self.window,
            softcap=self.softcap,
            cu_seqlens=inputs.cu_seqlens,
            max_seqlen=inputs.max_seqlen,
            key_lengths=key_lengths,
            dropout=self.dropout if self.training else 0.0,
            backend=inputs.backend,
        )
        return self.o_proj(y.reshape(batch, seq, self.num_heads * self.head_dim))
