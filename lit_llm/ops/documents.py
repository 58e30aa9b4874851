"""Where the documents of packed rows begin and end.

A row of a batch may hold several documents, one after the other. Two forms say which token belongs to which:

``document_ids`` (batch, seq)
    integers; a document is a maximal run of equal ids inside a row. An id that comes back later is a new document.
``cu_seqlens`` (documents + 1,), int32
    the same as cumulative lengths over the batch's tokens laid end to end, ``[0, ..., batch * seq]``: what the
    variable-length kernels take. No document crosses a row, so every multiple of ``seq`` is in it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


@torch.compiler.disable
def document_lengths(document_ids: Tensor) -> tuple[Tensor, int]:
    """Turn ``document_ids`` into cumulative lengths and the longest length.

    On a GPU this waits for the device once (the number of documents is data): call it once per forward pass, or on the
    CPU where the batch is made, never once per layer.

    Args:
        document_ids: (batch, seq), any integer dtype.

    Returns:
        ``cu_seqlens``, int32 (documents + 1,), on the device of ``document_ids``, and ``max_seqlen``, the number of
        tokens of the longest document. An empty batch has no document: ``[0]`` and 0.

    Raises:
        ValueError: if ``document_ids`` is not a matrix of integers.
    """
    if document_ids.ndim != 2 or document_ids.is_floating_point() or document_ids.is_complex():
        raise ValueError(
            f"document_ids must be integers of shape (batch, seq), got {document_ids.dtype} {tuple(document_ids.shape)}"
        )
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    # Moved as one byte per token before the documents are counted: the only wait.
    positions = starts.flatten().cpu().nonzero().flatten()
    cu_seqlens = torch.cat([positions, positions.new_tensor([document_ids.numel()])]).to(torch.int32)
    if document_ids.numel() == 0:
        return cu_seqlens[:1].to(document_ids.device), 0
    max_seqlen = int(cu_seqlens.diff().max())
    return cu_seqlens.to(document_ids.device, non_blocking=True), max_seqlen


def document_index(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """The number of each token's document, counted over the whole batch: (batch, seq), never falling.

    Runs on the device of ``cu_seqlens`` without a wait.
    """
    tokens = torch.arange(batch * seq, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(tokens, cu_seqlens[1:], right=True).view(batch, seq)


@torch.compiler.disable
def check_cu_seqlens(cu_seqlens: Tensor, max_seqlen: int, batch: int, seq: int) -> None:
    """Check what the shapes cannot tell. Reads ``cu_seqlens``, so it is for the CPU.

    Raises:
        ValueError: if a document crosses a row or is longer than ``max_seqlen``, or they do not fill the batch.
    """
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != batch * seq:
        raise ValueError(
            f"cu_seqlens must go from 0 to batch * seq = {batch * seq}, it goes from {borders[0]} to {borders[-1]}"
        )
    lengths = [stop - start for start, stop in itertools.pairwise(borders)]
    if lengths and min(lengths) < 0:
        raise ValueError(f"cu_seqlens must not fall, got {borders}")
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen} but cu_seqlens has a document of {max(lengths)} tokens")
    missing = set(range(0, batch * seq, seq or 1)) - set(borders)
    if missing:
        raise ValueError(
            f"a document of cu_seqlens crosses the row border at token {min(missing)}: "
            f"every multiple of seq = {seq} must be in it"
        )
