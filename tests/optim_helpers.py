"""A small model and a few steps, for the tests of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lit_llm.model import ModelConfig, Transformer


def transformer(tied: bool = False, **changes: Any) -> Transformer:
    fields = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Transformer(
        ModelConfig(**{**fields, "intermediate_size": 24, "attention_bias": True, **changes}, tie_word_embeddings=tied)
    )  # type: ignore[arg-type]


def with_gradients(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def steps(module: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 3) -> list[torch.Tensor]:
    for seed in range(count):
        with_gradients(module, seed)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and all that the optimizer remembers of them."""
    kept = [value for p in model.parameters() for _, value in sorted(optimizer.state.get(p, {}).items())]
    return [value.detach().clone() for value in (*model.parameters(), *kept) if value is not None]
