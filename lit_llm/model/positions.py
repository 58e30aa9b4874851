"""Where each token stands, and how long the sequence is that it stands in."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_llm.model.cache import KVCache
from lit_llm.ops.documents import document_index


def token_positions(input_ids: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
    """Positions of tokens whose caller gave none: from 0 on, anew in each document, or behind what the cache holds.

    Args:
        input_ids: (batch, seq).
        cu_seqlens: (documents + 1,) cumulative document lengths over the flattened batch, or None.
        cache: what the rows hold already, or None.

    Returns:
        (batch or 1, seq) integers.
    """
    batch, seq_len = input_ids.shape
    if cache is not None:
        return cache.position_ids(seq_len)
    places = torch.arange(batch * seq_len if cu_seqlens is not None else seq_len, device=input_ids.device)
    if cu_seqlens is None:
        return places[None]
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, places.to(cu_seqlens.dtype), right=True) - 1]
    return (places - starts).view(batch, seq_len)


def token_lengths(
    input_ids: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None, cache: KVCache | None
) -> Tensor:
    """Length of the sequence that each token belongs to, the tokens of this call included.

    What a row or a document gets by it does not depend on the others of its batch. With a cache it is the row's
    length after this call, or after the whole prompt that the call is a chunk of, without padding
    (:meth:`KVCache.expecting`); otherwise the highest position of the row, or of the document, plus one.

    Args:
        input_ids: (batch, seq).
        position_ids: (batch or 1, seq), as the caller gave them; None: from 0 on, anew in each document.
        cu_seqlens: (documents + 1,) cumulative document lengths over the flattened batch, or None.
        cache: what the rows hold already, or None.

    Returns:
        (batch or 1, seq or 1) integers, on the device of ``input_ids``; made without waiting for it.
    """
    batch, seq_len = input_ids.shape
    if cache is not None:
        return cache.lengths_after(seq_len)[:, None]
    if position_ids is None and cu_seqlens is None:
        return torch.full((1, 1), seq_len, device=input_ids.device)
    if position_ids is None:
        position_ids = token_positions(input_ids, cu_seqlens, None)
    if cu_seqlens is None:
        return position_ids.amax(dim=1, keepdim=True) + 1
    documents = document_index(cu_seqlens, batch, seq_len).flatten().long()
    positions = position_ids.expand(batch, seq_len).flatten()
    # One place more than documents: tokens behind the last of them, if the lengths leave any over.
    highest = positions.new_zeros(cu_seqlens.numel()).scatter_reduce(0, documents, positions, "amax")
    return (highest[documents] + 1).view(batch, seq_len)
