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
from lit_llm.model.flops import flops_per_token
from lit_llm.model.init import init_weights
from lit_llm.model.layers import GatedMLP, PlainMLP, make_norm
from lit_llm.model.moe import MoE, RouterLosses, inactive_parameters
from lit_llm.model.positions import token_lengths, token_positions
from lit_llm.model.rotary import Rotary
from lit_llm.ops.attention import document_lengths
from lit_llm.ops.cross_entropy import linear_cross_entropy


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream.

    Where the norms stand is the configuration's: before each (``pre``), after each (``post``, OLMo 2), both
    (``sandwich``, Gemma 2), or before both at once where they read the same (``use_parallel_residual``).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, placement, parallel = config.hidden_size, config.norm_placement, config.use_parallel_residual
        self.input_layernorm = make_norm(config, size) if placement != "post" else None
        self.self_attn = SelfAttention(config, layer)
        # Llama's name for what stands before its MLP, and Gemma's for what stands behind its attention.
        self.post_attention_layernorm = None if config.shared_norm else make_norm(config, size)
        self.pre_feedforward_layernorm = make_norm(config, size) if placement == "sandwich" else None
        self.post_feedforward_layernorm = make_norm(config, size) if placement != "pre" else None
        dense = GatedMLP if config.mlp_type == "gated" else PlainMLP
        self.mlp: nn.Module = MoE(config) if config.is_sparse(layer) else dense(config)
        self.is_sparse, self.is_parallel, self.is_pre = config.is_sparse(layer), parallel, placement == "pre"
        self.multiplier, self.dropout = config.residual_multiplier, config.hidden_dropout
        self.recompute: Callable[..., Any] | None = None
        """Given :meth:`compute` and its arguments, computes without keeping all activations; None keeps them."""

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor | tuple[Tensor, Tensor]:
        """(batch, seq, hidden_size) in, the same out; with ``inputs.router`` a sparse block adds its router's term."""
        if self.recompute is None or not torch.is_grad_enabled():
            return self.compute(x, inputs)
        return self.recompute(self.compute, x, inputs)

    def compute(self, x: Tensor, inputs: AttentionInputs) -> Tensor | tuple[Tensor, Tensor]:
        """What a block is; as :meth:`forward`."""
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        added = self.self_attn(read, inputs)
        if self.is_parallel:
            both = read if self.post_attention_layernorm is None else self.post_attention_layernorm(x)
            update, term = self._feed_forward(both, inputs)
            x = x + self._scaled(added) + self._scaled(update)
            return x if term is None else (x, term)
        assert self.post_attention_layernorm is not None
        if self.is_pre:
            x = x + self._scaled(added)
            read = self.post_attention_layernorm(x)
        else:
            x = x + self._scaled(self.post_attention_layernorm(added))
            read = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x)
        update, term = self._feed_forward(read, inputs)
        if self.post_feedforward_layernorm is not None:
            update = self.post_feedforward_layernorm(update)
        x = x + self._scaled(update)
        return x if term is None else (x, term)

    def _feed_forward(self, x: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        if not self.is_sparse:
            return self.mlp(x), None
        out = self.mlp(x, inputs.router)
        return (out, None) if inputs.router is None else out

    def _scaled(self, update: Tensor) -> Tensor:
        if self.dropout and self.training:
            update = nn.functional.dropout(update, self.dropout)
        return update if self.multiplier == 1 else update * self.multiplier


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
            learned, places = config.position_embedding == "learned", config.max_position_embeddings
            self.embed_positions = nn.Embedding(places, config.hidden_size) if learned else None
            self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
            self.norm = make_norm(config, config.hidden_size)
            # A tied head has no parameter of its own, so nothing can pull the two apart.
            tied = config.tie_word_embeddings
            self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self._rotary = None if learned else Rotary(config)
        # Rounded to the embedding's dtype first, as Gemma was trained; numbers, so that no device is waited for.
        self._multipliers = {
            dtype: torch.tensor(config.embedding_multiplier, dtype=dtype, device="cpu").item()
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
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
    def head_bias(self) -> Tensor | None:
        """(vocab_size,), added to the logits, if there is one."""
        return None if self.lm_head is None else self.lm_head.bias

    @property
    def device(self) -> torch.device:
        """Where it computes, and takes its inputs."""
        return self.compute_device or self.embed_tokens.weight.device

    def num_parameters(self, embeddings: bool = True, *, active: bool = False) -> int:
        """Number of parameters, a tied head counted once.

        Args:
            embeddings: whether the input embedding counts.
            active: without the experts that a token is not sent to.
        """
        total = sum(p.numel() for p in self.parameters())
        if active:
            total -= inactive_parameters(self.config)
        return total if embeddings else total - self.embed_tokens.weight.numel()

    def flops_per_token(self, seq_len: int, causal: bool = False) -> int:
        """Floating point operations of training for a token; see :func:`lit_llm.model.flops.flops_per_token`."""
        return flops_per_token(self, seq_len, causal)

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for this model, on its device; dtype: of the weights if None."""
        return KVCache(self.config, batch_size, capacity, self.device, dtype or self.embed_tokens.weight.dtype)

    @classmethod
    def from_pretrained(cls, source: str | Path, dtype: torch.dtype | str | None = None, **options: Any) -> Transformer:
        """A model out of a folder in Hugging Face's format; see :func:`lit_llm.checkpoint.hf_folder.from_pretrained`.

        Args:
            source: the folder, or a name on the hub (``org/model``). Its weights must be safetensors.
            dtype: of the weights; None: as they are in the files.
            options: of that function.

        Raises:
            UserError: see there.
        """
        return importlib.import_module("lit_llm.checkpoint.hf_folder").from_pretrained(source, dtype, **options)

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
        router_aux_loss: float = 0.0,
        router_z_loss: float = 0.0,
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
            router_aux_loss: weight of the loss that balances the experts' load, and
            router_z_loss: of the one on the size of the routers' logits; both of :class:`lit_llm.model.moe.MoE`, as
                means over the sparse layers, and of no effect without ``labels``.

        Returns:
            (batch, seq, vocab_size) logits in the compute dtype, or (batch, vocab_size) with ``logits_at``; with
            ``labels`` two scalars: the sum of the loss over the labels (float32), and their number.

        Raises:
            UserError: an id outside the vocabulary (on a CPU), a sequence longer than the context, or the weight of a
                loss out of its range.
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
        lengths = None
        if self._rotary is not None and self._rotary.original_length is not None:
            lengths = token_lengths(input_ids, position_ids, cu_seqlens, cache)
        if position_ids is None:
            position_ids = token_positions(input_ids, cu_seqlens, cache)
        rope, local_rope = (None, None) if self._rotary is None else self._rotary.tables(position_ids, lengths)
        losses = None
        if not (router_aux_loss >= 0 and router_z_loss >= 0):
            raise UserError(
                f"router_aux_loss is {router_aux_loss} and router_z_loss {router_z_loss}; they must be at least 0"
            )
        if labels is not None and (router_aux_loss or router_z_loss):
            losses = RouterLosses((labels != -100).float(), router_aux_loss, router_z_loss)
        inputs = AttentionInputs(rope, local_rope, cu_seqlens, max_seqlen, cache, self.attention_backend, losses)
        x = self._embed(input_ids, position_ids)
        terms = []
        for block in self.layers:
            x = block(x, inputs)
            if isinstance(x, tuple):
                x, term = x
                terms.append(term)
        if logits_at is not None:
            x = x[torch.arange(len(x), device=x.device), logits_at]
        x = self.norm(x)
        if self.config.logits_scaling != 1:
            x = x / self.config.logits_scaling
        cap = self.config.final_logit_softcapping
        if labels is not None:
            head, bias = self.head_weight, self.head_bias
            total, count = linear_cross_entropy(
                x, head, labels, bias=bias, z_loss=z_loss, label_smoothing=label_smoothing, softcap=cap
            )
            return (total + torch.stack(terms).mean() if terms else total), count
        logits = nn.functional.linear(x, self.head_weight, self.head_bias)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self._look_up(input_ids)
        if self.embed_positions is not None:
            x = x + self._look_up_positions(position_ids)
        if self.config.embedding_multiplier != 1:
            x = x * self._multipliers.get(x.dtype, self.config.embedding_multiplier)
        if self.config.embedding_dropout and self.training:
            x = nn.functional.dropout(x, self.config.embedding_dropout)
        return x

    def _look_up(self, input_ids: Tensor) -> Tensor:
        try:
            return self.embed_tokens(input_ids)
        except IndexError:
            low, high = int(input_ids.min()), int(input_ids.max())
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size} ids; the "
                "text was prepared with another tokenizer than the model's"
            ) from None

    def _look_up_positions(self, position_ids: Tensor) -> Tensor:
        assert self.embed_positions is not None
        try:
            return self.embed_positions(position_ids)
        except IndexError:
            low, high = int(position_ids.min()), int(position_ids.max())
            raise UserError(
                f"position {low if low < 0 else high} is outside the model's {self.config.max_position_embeddings} "
                "learned positions (max_position_embeddings); give shorter rows"
            ) from None
