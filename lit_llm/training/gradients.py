"""The gradients of a step, all together."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's step will use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """2-norm of all gradients together, a float32 scalar; of sharded ones over all shards."""
    if not gradients:
        return torch.zeros((), device=device)
    if any(hasattr(gradient, "full_tensor") for gradient in gradients):
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor().float() if hasattr(norm, "full_tensor") else norm.float()
    # Half-precision gradients: the norms of the single tensors in float32, or their sum would have 8 bits.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
