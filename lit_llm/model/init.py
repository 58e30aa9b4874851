"""Initial weights, as a function of (seed, parameter name) alone."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lit_llm.model.transformer import Transformer

# Matrices that write into the residual stream; scaled down so that its variance does not grow with depth
# (Radford et al. 2019, GPT-2, section 2.3).
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Fills every parameter: normal with `initializer_range`, biases 0, gains 1.

    Each parameter is drawn whole, on the CPU, in float32, by a generator seeded with (seed, its name): the result does
    not depend on device, dtype, order, or on how the model is split later.
    """
    std = model.config.initializer_range
    residual_std = std / math.sqrt(2 * model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            full = _normal(name, tuple(parameter.shape), seed, residual_std if name.endswith(RESIDUAL_OUTPUTS) else std)
        else:
            full = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
        _assign(parameter, full)


def _normal(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    # Compiled or wrapped blocks may carry prefixes of their own; they must not change the draw.
    plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    generator = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B1 + zlib.crc32(plain.encode())) % 2**63)
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator)


def _assign(parameter: nn.Parameter, full: Tensor) -> None:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        parameter.copy_(full)
    else:  # a DTensor: each rank takes its part of the same full tensor
        from torch.distributed.tensor import distribute_tensor

        parameter.copy_(distribute_tensor(full.to(parameter.device), mesh, getattr(parameter, "placements", None)))
