"""Norms and the gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_llm.model.config import ModelConfig
from lit_llm.ops.norms import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm with a gain (Zhang and Sennrich 2019); statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) in, the same out."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with gain and bias (Ba et al. 2016); statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) in, the same out."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """The configuration's norm over the last ``size`` dimensions."""
    return (RMSNorm if config.norm_type == "rms_norm" else LayerNorm)(size, config.rms_norm_eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU with the silu activation (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) in, the same out."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
