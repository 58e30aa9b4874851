"""Norms and dense MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.model.config import ModelConfig
from lit_llm.ops.norms import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019); statistics in float32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        gain: whether there is a weight to multiply by.
        zero_centered: one multiplies by 1 + weight.
    """

    def __init__(self, size: int, eps: float, gain: bool = True, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) in, the same out."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016); statistics in float32.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        gain, bias: whether there are a weight to multiply by and a bias to add.
    """

    def __init__(self, size: int, eps: float, gain: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if gain else None
        self.bias = nn.Parameter(torch.zeros(size)) if gain and bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) in, the same out."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """A norm over each head with a gain of its own for each head (StableLM 2); statistics in float32.

    Args:
        config: which norm, and its epsilon.
        heads, head_dim: of the input.
    """

    def __init__(self, config: ModelConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.eps, self.is_rms = config.rms_norm_eps, config.norm_type == "rms_norm"
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        has_bias = not self.is_rms and bool(config.qk_norm_bias)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., heads, head_dim) in, the same out."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = rms_norm(wide, None, self.eps) if self.is_rms else layer_norm(wide, None, None, self.eps)
        normed = normed * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)


def make_norm(config: ModelConfig, size: int, bias: bool | None = None) -> nn.Module:
    """The configuration's norm over the last ``size`` dimensions; ``bias``: of a layer norm, None: as configured."""
    if config.norm_type == "rms_norm":
        return RMSNorm(size, config.rms_norm_eps, config.norm_weight, config.norm_zero_centered)
    return LayerNorm(size, config.rms_norm_eps, config.norm_weight, config.norm_bias if bias is None else bias)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
}


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU with the silu activation (Shazeer 2020).

    Args:
        config: widths, biases and activation.
        size: of the hidden layer; None: the configuration's.
    """

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        size = size or config.mlp_size
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) in, the same out."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(nn.Module):
    """down(act(up(x))), the MLP of the first Transformers (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) in, the same out."""
        return self.down_proj(self.activation(self.up_proj(x)))
