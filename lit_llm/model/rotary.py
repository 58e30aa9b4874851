"""The rotary tables of a Transformer, from positions to what its layers take."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_llm.model.config import ModelConfig
from lit_llm.ops.rope import RopeFrequencies, rope_frequencies, rope_tables

Tables = tuple[Tensor, Tensor]


class Rotary:
    """Frequencies of a model's layers. Not in the module: a cast of it to 16 bits must not touch them.

    Args:
        config: of the model, with rotary positions.
    """

    def __init__(self, config: ModelConfig) -> None:
        dim, context = config.rotary_dim, config.max_position_embeddings
        self._all = _OnDevices(rope_frequencies(dim, config.rope_theta, config.rope_scaling, context))
        # Sliding layers see near keys alone, so nothing has to be scaled for them (Gemma 3, section 2).
        base = config.rope_local_base_freq
        self._local = None if base is None else _OnDevices(rope_frequencies(dim, base))
        self.original_length = self._all.frequencies.original_length
        """Sequences above it have frequencies of their own (longrope); None: all have the same."""

    def tables(self, position_ids: Tensor, lengths: Tensor | None) -> tuple[Tables, Tables | None]:
        """Tables of all layers, and those of sliding layers where they differ.

        Args:
            position_ids: (batch or 1, seq).
            lengths: (batch or 1, seq or 1), tokens of the sequence that each belongs to; needed with
                ``original_length``.
        """
        local = None if self._local is None else self._local.tables(position_ids, None)
        return self._all.tables(position_ids, lengths), local


class _OnDevices:
    """Frequencies, copied to each device that asks for them, once."""

    def __init__(self, frequencies: RopeFrequencies) -> None:
        self.frequencies = frequencies
        self._copies: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def tables(self, position_ids: Tensor, lengths: Tensor | None) -> Tables:
        device, source = position_ids.device, self.frequencies
        if device not in self._copies:
            long = source.long_inv_freq
            self._copies[device] = (
                source.inv_freq.to(device, torch.float32),
                None if long is None else long.to(device, torch.float32),
            )
        inv_freq, long_inv_freq = self._copies[device]
        if long_inv_freq is not None:
            assert lengths is not None
            assert source.original_length is not None
            inv_freq = torch.where(lengths[..., None] > source.original_length, long_inv_freq, inv_freq)
        return rope_tables(position_ids, inv_freq, source.attention_factor)
