"""Normalisation over the last dimension: statistics in float32 (float64 for float64), result in the input's dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, section 4).

    As in Llama, the normalised value is rounded to ``x``'s dtype before the gain is applied; with ``zero_centered``,
    as in Gemma, after it.

    Args:
        x: (..., hidden_size).
        weight: (hidden_size,), the gain, in any floating dtype; None: no gain.
        eps: added to the mean square.
        zero_centered: the gain is 1 + weight.

    Returns:
        (..., hidden_size) in ``x``'s dtype.
    """
    if weight is None:
        return F.rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=eps).to(x.dtype)
    if zero_centered:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), 1 + weight.to(dtype), eps).to(x.dtype)
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        normalised = F.rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=eps)
        return (normalised.to(x.dtype) * weight).to(x.dtype)
    # Eager CPU autograd has no fused backward for F.rms_norm. Subclasses (DTensor, fake tensors) keep torch's own.
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if needs_grad and x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (Ba et al. 2016, section 3).

    Args:
        x: (..., hidden_size).
        weight: (hidden_size,), the gain, in any floating dtype, or None.
        bias: (hidden_size,) or None.
        eps: added to the variance, which divides by hidden_size.

    Returns:
        (..., hidden_size) in ``x``'s dtype, rounded to it once at the end.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    weight = None if weight is None else weight.to(dtype)
    return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """The formula with its gradient written out: half the passes of what autograd records for it."""

    # Autocast would take the products of vecdot in half precision; cast_inputs turns it off in both directions.
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (x * scale).mul_(weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a derivative of this one is wanted: let autograd record it
            wanted = [tensor for tensor, need in ((x, need_x), (weight, need_weight)) if need]
            out = F.rms_norm(x, x.shape[-1:], weight, ctx.eps)
            found = iter(torch.autograd.grad(out, wanted, upstream, create_graph=True))
            return next(found) if need_x else None, next(found) if need_weight else None, None
        normalised = x * scale
        grad_x = grad_weight = None
        if need_weight:
            grad_weight = (upstream * normalised).reshape(-1, x.shape[-1]).sum(0)
        if need_x:
            # d/dx: scale * (g - n * mean(g * n)) with n = x * scale and g = upstream * weight
            grad = upstream * weight
            mean = torch.linalg.vecdot(grad, normalised).div_(x.shape[-1]).unsqueeze(-1)
            grad_x = grad.sub_(normalised.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None
