"""The random numbers of training, as a function of the step."""

from __future__ import annotations

import hashlib

import torch


def stream_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A seed for one micro-batch of one data-parallel rank, in [0, 2^63).

    Args:
        seed: of the run.
        step: optimizer steps before this one.
        micro_batch: place in the step's accumulation, from 0.
        rank: the data-parallel rank: tensor ranks, whose activations are replicated, share one.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def begin_stream(seed: int, step: int, micro_batch: int, rank: int) -> None:
    """Seeds torch's generators on every device, without waiting for one.

    Whatever a micro-batch draws (dropout, a subclass's own noise) then depends neither on what was drawn before nor on
    when the process started, so that a resumed run draws the same with no saved state.
    """
    torch.manual_seed(stream_seed(seed, step, micro_batch, rank))
