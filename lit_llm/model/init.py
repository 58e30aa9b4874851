"""Initial weights, as a function of (seed, parameter name) alone."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lit_llm.model.transformer import Transformer

# Matrices that write into the residual stream; scaled down so that its variance does not grow with depth
# (Radford et al. 2019, GPT-2, section 2.3).
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


# Numbers that one generator draws of a matrix: a process that holds a part of it draws little more than that part.
_CHUNK = 2**20


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Fills every parameter: normal with `initializer_range`, biases 0, gains 1 (0 where the model adds 1 to them).

    Matrices, and each one of a stack, are drawn on the CPU, in float32, a few rows at a time, by generators seeded with
    (seed, the parameter's name, in a stack the matrix's number, the place of the rows): the result does not depend on
    device, dtype, order, or on how the model is split, and a process draws the rows that it holds alone.
    """
    std = model.config.initializer_range
    residual_std = std / math.sqrt(2 * model.config.num_hidden_layers)
    gain = 0.0 if model.config.norm_zero_centered else 1.0
    for name, parameter in model.named_parameters():
        # Compiled or wrapped blocks may carry prefixes of their own; they must not change the draw.
        plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if name.endswith("bias"):
            parameter.fill_(0.0)
        # Gains of single heads have two dimensions, hence the look at the name.
        elif parameter.ndim < 2 or name.endswith("norm.weight"):
            parameter.fill_(gain)
        else:
            _draw(parameter, plain, seed, residual_std if name.endswith(RESIDUAL_OUTPUTS) else std)


def _draw(parameter: nn.Parameter, name: str, seed: int, std: float) -> None:
    """Fills a parameter, or this process's part of it; a stack one matrix after the other."""
    part, offsets = part_and_offsets(parameter)
    if not part.numel():
        return
    if parameter.ndim == 2:
        _draw_matrix(part, offsets, tuple(parameter.shape), name, seed, std)
        return
    for number, matrix in enumerate(part, start=offsets[0]):
        _draw_matrix(matrix, offsets[1:], tuple(parameter.shape[1:]), f"{name}.{number}", seed, std)


def _draw_matrix(
    part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], name: str, seed: int, std: float
) -> None:
    """Fills the part of a matrix of ``shape`` that begins at ``offsets``."""
    rows_each = max(1, _CHUNK // max(1, math.prod(shape[1:])))
    first, last = offsets[0], offsets[0] + part.shape[0]
    columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:], strict=True))
    for number in range(first // rows_each, -(-last // rows_each)):
        start = number * rows_each
        rows = torch.empty((min(rows_each, shape[0] - start), *shape[1:]), device="cpu", dtype=torch.float32)
        generator = torch.Generator(device="cpu").manual_seed(
            (seed * 0x9E3779B1 + zlib.crc32(name.encode()) + number * 0x2545F4914F6CDD1D) % 2**63
        )
        rows.normal_(0.0, std, generator=generator)
        begin, end = max(first, start), min(last, start + len(rows))
        chosen = (slice(begin - start, end - start), *columns)
        part[begin - first : end - first].copy_(rows[chosen])


def part_and_offsets(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
    """This process's part of a parameter, the same memory, and where in the whole it begins."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return parameter.data, (0,) * parameter.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = parameter
    local = sharded.to_local()
    shape, offsets = compute_local_shape_and_global_offset(sharded.shape, mesh, sharded.placements)
    assert tuple(shape) == tuple(local.shape), "parts that do not lie together are not filled yet"
    return local, tuple(offsets)
