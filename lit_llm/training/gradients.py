"""The gradients of a step, all together."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's step will use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """2-norm of all gradients together, a scalar of at least float32; of sharded ones over all shards."""
    if not gradients:
        return torch.zeros((), device=device)
    # Of half-precision gradients, norms in half precision would have 8 bits.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if any(hasattr(gradient, "full_tensor") for gradient in gradients):
        norm = nn.utils.get_total_norm(gradients)
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(dtype)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)))
