"""The Transformer: one class for every family; families differ by configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_llm.errors import UserError
from lit_llm.model.attention import AttentionInputs, SelfAttention
from lit_llm.model.cache import KVCache
from lit_llm.model.config import ModelConfig
from lit_llm.model.init import init_weights
from lit_llm.model.layers import GatedMLP, make_norm
from lit_llm.ops.attention import document_lengths
from lit_llm.ops.cross_entropy import linear_cross_entropy
from lit_llm.ops.rope import rope_inverse_frequencies, rope_tables


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = GatedMLP(config)
        self.recompute: Callable[..., Tensor] | None = None
        """Given :meth:`compute` and its arguments, computes without keeping all activations; None keeps them."""

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """(batch, seq, hidden_size) in, the same out."""
        if self.recompute is None or not torch.is_grad_enabled():
            return self.compute(x, inputs)
        return self.recompute(self.compute, x, inputs)

    def compute(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """What a block is; as :meth:`forward`."""
        x = x + self.self_attn(self.input_layernorm(x), inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A decoder-only language model.

    Under ``torch.device("meta")`` nothing is allocated and nothing drawn; materialise it with ``to_empty`` and then
    call :meth:`init_weights`. Elsewhere the weights are drawn at once.

    Args:
        config: the shape.
        seed: of the initial weights; they are a function of (seed, parameter name) alone.
        attention_backend: of :func:`lit_llm.ops.attention`.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, attention_backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention_backend = attention_backend
        self.parallelized = False
        """Whether :func:`lit_llm.parallel.parallelize` has been applied."""
        self.compute_device: torch.device | None = None
        """Where it computes, if the weights lie elsewhere."""
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initialisation would cost time and random numbers for nothing
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
            self.norm = make_norm(config, config.hidden_size)
            # A tied head has no parameter of its own, so nothing can pull the two apart.
            tied = config.tie_word_embeddings
            self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # No buffer: a cast of the module to 16 bits must not touch the frequencies.
        self._inv_freq = rope_inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling).float()
        self._inv_freq_on: dict[torch.device, Tensor] = {}
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    def init_weights(self, seed: int = 0) -> None:
        """Draws the initial weights; equal on every device and however the model is split."""
        init_weights(self, seed)

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size, hidden_size): the matrix that turns hidden states into logits."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        """Where it computes, and takes its inputs."""
        return self.compute_device or self.embed_tokens.weight.device

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of parameters, a tied head counted once; without the input embedding if asked for."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings else total - self.embed_tokens.weight.numel()

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for this model, on its device; dtype: of the weights if None."""
        return KVCache(self.config, batch_size, capacity, self.device, dtype or self.embed_tokens.weight.dtype)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes a folder that transformers' ``from_pretrained`` loads; see :func:`lit_llm.checkpoint.hf.export`.

        Args:
            folder: is made; or empty, or an earlier export.
            options: ``tokenizer`` (lit_llm.data.Tokenizer), ``dtype`` (None: as they are), ``max_shard_size`` ("5GB").

        Raises:
            UserError: see there.
        """
        # By name: the model lies below the checkpoints, and this method is but a door to them.
        importlib.import_module("lit_llm.checkpoint.hf").save_pretrained(self, folder, **options)

    def compile_blocks(self) -> None:
        """torch.compile of each block, in place: keys stay as they are."""
        for block in self.layers:
            block.compile()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
        logits_at: Tensor | None = None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with ``labels`` the summed loss.

        Args:
            input_ids: (batch, seq) ids.
            position_ids: (batch or 1, seq); None: from 0 on, anew in each document, or behind what the cache holds.
            document_ids: (batch, seq); attention stays inside runs of equal ids. None: one document a row.
            labels: (batch, seq), the token after each input id; -100 is ignored.
            cu_seqlens: (documents + 1,) int32, the documents as cumulative lengths over the flattened batch, and
            max_seqlen: the longest of them; made from ``document_ids`` when left out (on a GPU that waits for it).
            cache: keys and values of the tokens before; the new ones are written to it. The caller moves it on
                (:meth:`KVCache.advance`), since only it knows which tokens of a padded row are real.
            logits_at: (batch,) places; the logits of these alone are computed.
            z_loss: weight of the squared logsumexp in the loss, and
            label_smoothing: share of the target spread over the vocabulary; both of
                :func:`lit_llm.ops.linear_cross_entropy`, and of no effect without ``labels``.

        Returns:
            (batch, seq, vocab_size) logits in the compute dtype, or (batch, vocab_size) with ``logits_at``; with
            ``labels`` two scalars: the sum of the loss over the labels (float32), and their number.

        Raises:
            UserError: an id outside the vocabulary (on a CPU), a sequence longer than the context, z_loss or
                label_smoothing out of its range.
        """
        seq_len = input_ids.shape[1]
        if cache is not None:
            cache.check_room(seq_len)
        elif seq_len > self.config.max_position_embeddings:
            raise UserError(
                f"{seq_len} tokens are more than the model's context of {self.config.max_position_embeddings} "
                "(max_position_embeddings); give shorter rows or a larger context"
            )
        if document_ids is not None and cu_seqlens is None:
            cu_seqlens, max_seqlen = document_lengths(document_ids)
        if position_ids is None:
            position_ids = self._positions(input_ids, cu_seqlens, cache)
        cos, sin = rope_tables(position_ids, self._inverse_frequencies(input_ids.device))
        inputs = AttentionInputs(cos, sin, cu_seqlens, max_seqlen, cache, self.attention_backend)
        x = self._embed(input_ids)
        for block in self.layers:
            x = block(x, inputs)
        if logits_at is not None:
            x = x[torch.arange(len(x), device=x.device), logits_at]
        x = self.norm(x)
        cap = self.config.final_logit_softcapping
        if labels is not None:
            return linear_cross_entropy(
                x, self.head_weight, labels, z_loss=z_loss, label_smoothing=label_smoothing, softcap=cap
            )
        logits = nn.functional.linear(x, self.head_weight)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embed(self, input_ids: Tensor) -> Tensor:
        try:
            return self.embed_tokens(input_ids)
        except IndexError:
            low, high = int(input_ids.min()), int(input_ids.max())
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size} ids; the "
                "text was prepared with another tokenizer than the model's"
            ) from None

    def _positions(self, input_ids: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
        batch, seq_len = input_ids.shape
        if cache is not None:
            return cache.position_ids(seq_len)
        places = torch.arange(batch * seq_len if cu_seqlens is not None else seq_len, device=input_ids.device)
        if cu_seqlens is None:
            return places[None]
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, places.to(cu_seqlens.dtype), right=True) - 1]
        return (places - starts).view(batch, seq_len)

    def _inverse_frequencies(self, device: torch.device) -> Tensor:
        if device not in self._inv_freq_on:
            self._inv_freq_on[device] = self._inv_freq.to(device)
        return self._inv_freq_on[device]
