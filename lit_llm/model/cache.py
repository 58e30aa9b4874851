"""The key-value cache: what a row has seen, with a length of its own per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.model.config import ModelConfig


class KVCache:
    """Keys and values of every layer for a batch of rows of different lengths.

    Each row has its own length; new tokens of row b are written from place ``lengths[b]`` on, so that a short row never
    sees the padding of a long one. Lengths are kept twice: on the host (slicing needs no synchronisation) and on the
    device (positions and masks). A cache is not part of the module and lands in no checkpoint.

    Args:
        config: of the Transformer.
        batch_size: rows.
        capacity: most tokens a row can hold, prompt and new ones together.
        device, dtype: of the keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if capacity > config.max_position_embeddings:
            raise UserError(
                f"{capacity} tokens are more than the model's context of {config.max_position_embeddings} "
                "(max_position_embeddings); shorten the prompt or lower max_new_tokens"
            )
        # (batch, kv_heads, capacity, head_dim): the keys of one head lie side by side, as decoding reads them.
        shape = (batch_size, config.kv_heads, capacity, config.head_size)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.capacity = capacity
        self.lengths: list[int] = [0] * batch_size
        self.device_lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same length."""
        return min(self.lengths) == max(self.lengths)

    def position_ids(self, seq_len: int) -> Tensor:
        """Positions of the next ``seq_len`` tokens: (batch, seq_len), or (1, seq_len) when all rows have one length."""
        if self.uniform:
            start = self.lengths[0]
            return torch.arange(start, start + seq_len, device=self.device_lengths.device)[None]
        return self.device_lengths[:, None] + torch.arange(seq_len, device=self.device_lengths.device)

    def check_room(self, seq_len: int) -> None:
        """Raises UserError when the longest row has no room for ``seq_len`` more tokens."""
        if max(self.lengths) + seq_len > self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} tokens a row and {max(self.lengths)} + {seq_len} are asked for; "
                "make it with a larger capacity"
            )

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes new keys and values behind those of each row, without moving on (see :meth:`advance`).

        Args:
            layer: number of the block.
            k, v: (batch, seq, kv_heads, head_dim).

        Returns:
            keys and values (batch, keys, kv_heads, head_dim), views of the cache up to the longest row, and the key
            lengths (batch,) of the rows, None when they are equal.
        """
        seq_len = k.shape[1]
        keys, values = self.keys[layer], self.values[layer]
        end = max(self.lengths) + seq_len
        if self.uniform:
            keys[:, :, end - seq_len : end] = k.transpose(1, 2)
            values[:, :, end - seq_len : end] = v.transpose(1, 2)
            lengths = None
        else:
            places = self.device_lengths[:, None] + torch.arange(seq_len, device=keys.device)
            keys[self._rows[:, None], :, places] = k.to(keys.dtype)
            values[self._rows[:, None], :, places] = v.to(values.dtype)
            lengths = self.device_lengths + seq_len
        return keys[:, :, :end].transpose(1, 2), values[:, :, :end].transpose(1, 2), lengths

    def advance(self, new_lengths: Sequence[int] | int) -> None:
        """Moves each row on by its number of real tokens; what lies behind is overwritten by the next update."""
        steps = [new_lengths] * self.batch_size if isinstance(new_lengths, int) else list(new_lengths)
        self.lengths = [length + step for length, step in zip(self.lengths, steps, strict=True)]
        if isinstance(new_lengths, int):
            self.device_lengths += new_lengths
        else:
            self.device_lengths += torch.tensor(steps, device=self.device_lengths.device)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows of these numbers alone, in this order; copies what is kept."""
        index = torch.tensor(rows, device=self.device_lengths.device)
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor[index]
        self.lengths = [self.lengths[row] for row in rows]
        self.device_lengths = self.device_lengths[index]
        self._rows = self._rows[: len(rows)]
