"""The experts' part of a mixture of experts: each token through the few gated MLPs that were chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.ops.grouped import grouped_linear

ExpertsBackend = Literal["auto", "reference", "loop", "grouped"]


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    backend: ExpertsBackend = "auto",
) -> Tensor:
    """For each token the sum over its experts e of weight * down[e](activation(gate[e](x)) * up[e](x)).

    This is the sum of Shazeer et al. 2017 (equation 1) over the experts whose weight is not 0, whose MLPs are those of
    Shazeer 2020 (GLU variants). No token is dropped, whatever the load; an expert that gets none has the gradient 0.

    Both fast back ends sort the tokens by expert. "loop" then takes one busy expert after the other, which must look at
    their loads; "grouped" makes all experts' products at once. "auto" is "loop" on a CPU, and "grouped" on a GPU and
    within torch.compile. Both have second derivatives. Under autocast all products take the autocast
    dtype, and so does the result.

    Args:
        x: (tokens, hidden_size), floating point.
        expert_ids: (tokens, k) int64, different ones in a row. An id that is none of an expert is refused on the CPU.
        weights: (tokens, k), of the chosen experts.
        gate_up: (experts, 2 * width, hidden_size), the rows of the gate before those of up.
        down: (experts, hidden_size, width).
        activation: of each element.
        backend: "reference" is a loop over all experts and all tokens; the others as above.

    Returns:
        (tokens, hidden_size).

    Raises:
        UserError: shapes or ids that do not fit, an unknown back end.
    """
    _check(x, expert_ids, weights, gate_up, down, backend)
    kind = x.device.type
    # Autocast knows nothing of grouped products; the meta device knows nothing of autocast.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, gate_up, down = (one if one.dtype == torch.float64 else one.to(dtype) for one in (x, gate_up, down))
    weights = weights.to(x.dtype)
    if backend == "reference":
        return _reference(x, expert_ids, weights, gate_up, down, activation)
    plain = kind == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()
    loop = x.shape[0] > 0 and (backend == "loop" or (backend == "auto" and plain))
    return _sorted(x, expert_ids, weights, gate_up, down, activation, loop)


def _reference(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    total = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        weight = weights.where(expert_ids == expert, 0).sum(dim=1, keepdim=True)
        total = total + weight * F.linear(activation(gate) * up, down[expert])
    return total


def _sorted(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    loop: bool,
) -> Tensor:
    tokens, chosen = expert_ids.shape
    # A slot is one choice of one token. Slots sorted by expert, and at which slot each expert ends.
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(gate_up.shape[0], device=x.device), right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * chosen, device=x.device))
    slots = _Spread.apply(x, order, places, chosen)
    if loop:
        out = _one_by_one(slots, ends.tolist(), gate_up, down, activation)
    else:
        # No expert gets a token twice, so that the largest group is known without looking.
        gate, up = grouped_linear(slots, gate_up, ends, tokens).chunk(2, dim=-1)
        out = grouped_linear(activation(gate) * up, down, ends, tokens)
    out = _Permute.apply(out, places, order).unflatten(0, (tokens, chosen))
    if x.device.type == "cpu":
        return torch.bmm(weights.unsqueeze(1), out).squeeze(1)
    return (weights.unsqueeze(-1) * out).sum(dim=1)  # a GPU is slow at a batch of so many tiny products


def _one_by_one(
    slots: Tensor, ends: list[int], gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The MLP of each busy expert on its own rows. A CPU likes that: memory of this size is used again and again."""
    outs, start = [], 0
    for end, wide, narrow in zip(ends, gate_up.unbind(), down.unbind(), strict=True):
        if end > start:
            gate, up = F.linear(slots[start:end], wide).chunk(2, dim=-1)
            outs.append(F.linear(activation(gate) * up, narrow))
        start = end
    return torch.cat(outs)


class _Permute(torch.autograd.Function):
    """Rows in another order. Unlike index_select's own, its gradient adds nothing up, which on a GPU has no order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return _Permute.apply(upstream, inverse, order), None, None


class _Spread(torch.autograd.Function):
    """The token of each slot, the slots in ``order``; gradients of a token's slots are added up in the slots' order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.chosen = chosen
        return x.index_select(0, order // chosen)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        slots = _Permute.apply(upstream, inverse, order)
        return slots.unflatten(0, (-1, ctx.chosen)).sum(dim=1), None, None, None


def _check(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, backend: str) -> None:
    if backend not in get_args(ExpertsBackend):
        raise UserError(f"experts: unknown backend {backend!r}; choose one of {', '.join(get_args(ExpertsBackend))}")
    number, width = gate_up.shape[0], gate_up.shape[1] // 2
    fits = (
        x.ndim == 2 and gate_up.shape == (number, 2 * width, x.shape[1]) and down.shape == (number, x.shape[1], width)
    )
    if not fits:
        raise UserError(
            f"experts: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not fit; "
            "they must be (tokens, hidden_size), (experts, 2 * width, hidden_size) and (experts, hidden_size, width)"
        )
    if expert_ids.ndim != 2 or expert_ids.shape != weights.shape or expert_ids.shape[0] != x.shape[0]:
        raise UserError(
            f"experts: expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} must both be "
            f"({x.shape[0]}, k), a row for each row of x"
        )
    # Only plain CPU tensors may be looked at: a GPU's would stall it, a planner's fake ones hold nothing.
    plain = expert_ids.device.type == "cpu" and type(expert_ids) is Tensor and not torch.compiler.is_compiling()
    if plain and expert_ids.numel():
        low, high = (int(one) for one in expert_ids.aminmax())
        if low < 0 or high >= number:
            raise UserError(f"experts: id {low if low < 0 else high} is none of {number} experts")
