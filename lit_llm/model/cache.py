"""The key-value cache: what a row has seen, with a length of its own per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.model.config import ModelConfig
from lit_llm.ops.rope import rope_switch_length


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
        # The keys of one head lie side by side in memory, as decoding reads them; seen as (batch, capacity, kv_heads,
        # head_dim), as attention takes them.
        shape = (batch_size, config.kv_heads, capacity, config.head_size)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype).transpose(1, 2) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype).transpose(1, 2) for _ in layers]
        self.capacity = capacity
        self.switch_length = rope_switch_length(config.rope_scaling, config.max_position_embeddings)
        """A row longer than this is rotated otherwise from its first token on (longrope), or None."""
        self.lengths: list[int] = []
        self.device_lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)[:, None]
        self._expected: Tensor | None = None
        self._set_lengths([0] * batch_size)

    def _set_lengths(self, lengths: list[int]) -> None:
        # What all layers of a forward ask for again and again is worked out once.
        self.lengths = lengths
        self.longest = max(lengths)
        self.uniform = min(lengths) == self.longest  # whether all rows have the same length
        self._positions: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.lengths)

    def position_ids(self, seq_len: int) -> Tensor:
        """Positions of the next ``seq_len`` tokens: (batch, seq_len), or (1, seq_len) when all rows have one length."""
        if self._positions is None or self._positions.shape[1] != seq_len:
            device = self.device_lengths.device
            if self.uniform:
                self._positions = torch.arange(self.longest, self.longest + seq_len, device=device)[None]
            else:
                self._positions = self.device_lengths[:, None] + torch.arange(seq_len, device=device)
        return self._positions

    def check_room(self, seq_len: int) -> None:
        """Raises UserError when the longest row has no room for ``seq_len`` more tokens."""
        if self.longest + seq_len > self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} tokens a row and {self.longest} + {seq_len} are asked for; "
                "make it with a larger capacity"
            )

    @contextmanager
    def expecting(self, new_lengths: Sequence[int]) -> Iterator[None]:
        """Inside, each row is about to get that many real tokens, in however many calls; see :meth:`lengths_after`."""
        if self.switch_length is not None:
            self._expected = self.device_lengths + torch.tensor(list(new_lengths), device=self.device_lengths.device)
        try:
            yield
        finally:
            self._expected = None

    def lengths_after(self, seq_len: int) -> Tensor:
        """Each row's length with ``seq_len`` more tokens, or with all that it is :meth:`expecting`: (batch,)."""
        return self.device_lengths + seq_len if self._expected is None else self._expected

    def stale_rows(self, new_lengths: Sequence[int] | int) -> list[int]:
        """Rows whose keys are of no use once they get that many more tokens: they pass :attr:`switch_length`."""
        if self.switch_length is None:
            return []
        steps = [new_lengths] * self.batch_size if isinstance(new_lengths, int) else new_lengths
        rows = enumerate(zip(self.lengths, steps, strict=True))
        return [row for row, (length, step) in rows if 0 < length <= self.switch_length < length + step]

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
        end = self.longest + seq_len
        if self.uniform:
            keys[:, self.longest : end] = k
            values[:, self.longest : end] = v
            return keys[:, :end], values[:, :end], None
        rows, places = self._rows[: self.batch_size], self.position_ids(seq_len)
        keys[rows, places] = k.to(keys.dtype)
        values[rows, places] = v.to(values.dtype)
        return keys[:, :end], values[:, :end], self.device_lengths + seq_len

    def advance(self, new_lengths: Sequence[int] | int) -> None:
        """Moves each row on by its number of real tokens; what lies behind is overwritten by the next update."""
        steps = [new_lengths] * self.batch_size if isinstance(new_lengths, int) else list(new_lengths)
        self._set_lengths([length + step for length, step in zip(self.lengths, steps, strict=True)])
        if isinstance(new_lengths, int):
            self.device_lengths += new_lengths
        else:
            self.device_lengths += torch.tensor(steps, device=self.device_lengths.device)

    def put(self, rows: Sequence[int], other: KVCache) -> None:
        """Replaces keys and values of these rows by those of another cache, whose rows have the same lengths."""
        assert [self.lengths[row] for row in rows] == other.lengths
        index = torch.tensor(rows, device=self.device_lengths.device)
        end = other.longest
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for to, source in zip(mine, theirs, strict=True):
                to[index, :end] = source[:, :end]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows of these numbers alone, in this order; copies what is kept."""
        index = torch.tensor(rows, device=self.device_lengths.device)
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor.transpose(1, 2)[index].transpose(1, 2)
        self.device_lengths = self.device_lengths[index]
        self._set_lengths([self.lengths[row] for row in rows])
