"""Matrix products of groups of rows, each with a matrix of its own: one operator for torch, several ways to compute it.

As an operator of its own it is opaque to torch.compile, has a shape on the meta device, and can be named where
activation checkpointing chooses what to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED_BYTES = 16
"""What addresses and rows of a grouped product on a GPU must be multiples of."""

_MOST_GROUPS = 1024
"""So many are too many for it."""


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    """The rows of each group g times ``weight[g]``, transposed, as a linear layer has it.

    On the CPU that is a product for each group that has rows. On a GPU bfloat16 goes through torch's grouped product.
    Its kernel is for Hopper and Blackwell (compute capability 9 and 10); on others torch itself waits for the device
    and loops, which is still the faster way there. All else goes through products of ``most`` rows for every group,
    which wait for nothing and are right, but cost (groups * most / rows) times as much.

    Args:
        x: (rows, in), the rows of a group together.
        weight: (groups, out, in), of the same dtype.
        ends: (groups,) int32, the row behind each group's last; the last of them is the number of rows.
        most: rows that no group has more of.

    Returns:
        (rows, out), with gradients of any order.
    """
    return torch.ops.lit_llm.grouped_linear(x, weight, ends, most)


@torch.library.custom_op("lit_llm::grouped_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1])
    if x.device.type == "cpu":
        return linear_by_loop(x, weight, ends)
    x = x.contiguous()
    if len(weight) < _MOST_GROUPS and _has_grouped_mm(x, weight):
        return linear_by_kernel(x, weight, ends)
    return linear_by_window(x, weight, ends, most)


@torch.library.custom_op("lit_llm::grouped_outer", mutates_args=())
def _outer(left: Tensor, right: Tensor, ends: Tensor, most: int) -> Tensor:
    """(groups, out, in): of each group left.T @ right, 0 for one without rows; left (rows, out), right (rows, in)."""
    if not left.shape[0]:
        return left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    if left.device.type == "cpu":
        return outer_by_loop(left, right, ends)
    left, right = left.contiguous(), right.contiguous()
    if len(ends) < _MOST_GROUPS and _has_grouped_mm(left, right):
        return outer_by_kernel(left, right, ends)
    return outer_by_window(left, right, ends, most)


def linear_by_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One product a group; reads ``ends``."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for group, start, end in _bounds(ends):
        if end > start:
            torch.mm(x[start:end], weight[group].t(), out=out[start:end])
    return out


def outer_by_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """One product a group; reads ``ends``."""
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for group, start, end in _bounds(ends):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[group])
        else:
            out[group].zero_()
    return out


def _bounds(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of each group."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        yield group, start, end
        start = end


def linear_by_kernel(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product."""
    # Its rows may be padded; a shape of one's own is what torch.compile was told.
    return _grouped_mm(x, weight.transpose(1, 2), ends).contiguous()


def outer_by_kernel(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product."""
    out = _grouped_mm(left.t(), right, ends).contiguous()
    # Some GPUs leave a product over no rows as the memory was (pytorch/pytorch issue 172439).
    return out.masked_fill_((ends == _starts(ends))[:, None, None], 0)


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    product: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(left, right, offs=ends)


def _has_grouped_mm(*operands: Tensor) -> bool:
    """Whether torch's kernel takes them; dtypes, shapes and addresses tell."""
    if any(one.device.type != "cuda" or one.dtype != torch.bfloat16 for one in operands):
        return False
    if not (hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")):
        return False
    if torch.cuda.get_device_capability(operands[0].device) < (8, 0):
        return False
    return all(one.data_ptr() % _ALIGNED_BYTES == 0 and _has_aligned_rows(one) for one in operands)


def _has_aligned_rows(matrices: Tensor) -> bool:
    """Whether rows, or columns, lie without gaps between their elements, and begin at aligned addresses."""
    steps = [step * matrices.element_size() for step in matrices.stride() if step != 1]
    return 1 in matrices.stride()[-2:] and all(step % _ALIGNED_BYTES == 0 for step in steps)


def linear_by_window(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    """A product of ``most`` rows for each group, of which those of other groups go to a row that is cut off."""
    rows = x.shape[0]
    out = x.new_empty(rows + 1, weight.shape[1])
    for group, places, belongs in _windows(ends, most, rows):
        out.index_copy_(0, places.where(belongs, rows), x[places] @ weight[group].t())
    return out[:rows]


def outer_by_window(left: Tensor, right: Tensor, ends: Tensor, most: int) -> Tensor:
    """A product over ``most`` rows for each group, of which those of other groups are taken as 0."""
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for group, places, belongs in _windows(ends, most, left.shape[0]):
        mine = belongs.unsqueeze(1)
        torch.mm(left[places].where(mine, 0).t(), right[places].where(mine, 0), out=out[group])
    return out


def _windows(ends: Tensor, most: int, rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each group ``most`` rows from its first on, and which of them are its own: sizes that need no look."""
    offsets, starts = torch.arange(most, device=ends.device), _starts(ends)
    for group in range(ends.shape[0]):
        places = starts[group] + offsets
        yield group, places.clamp(max=rows - 1), places < ends[group]


def _starts(ends: Tensor) -> Tensor:
    return F.pad(ends[:-1], (1, 0))


@_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, most: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, most: int) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, ends, ctx.most = inputs
    ctx.save_for_backward(first, second, ends)


def _linear_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    by_x = torch.ops.lit_llm.grouped_linear(upstream, weight.transpose(1, 2), ends, ctx.most) if needs_x else None
    by_weight = torch.ops.lit_llm.grouped_outer(upstream, x, ends, ctx.most) if needs_weight else None
    return by_x, by_weight, None, None


def _outer_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    needs_left, needs_right = ctx.needs_input_grad[:2]
    by_left = torch.ops.lit_llm.grouped_linear(right, upstream, ends, ctx.most) if needs_left else None
    by_right = None
    if needs_right:
        by_right = torch.ops.lit_llm.grouped_linear(left, upstream.transpose(1, 2), ends, ctx.most)
    return by_left, by_right, None, None


_linear.register_autograd(_linear_backward, setup_context=_keep)
_outer.register_autograd(_outer_backward, setup_context=_keep)
