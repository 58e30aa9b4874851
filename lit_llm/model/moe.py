"""A mixture of experts in place of a block's MLP: a router sends each token to a few of many gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_llm.model.config import ModelConfig
from lit_llm.model.layers import ACTIVATIONS, GatedMLP
from lit_llm.ops.experts import experts


@dataclass(frozen=True)
class RouterLosses:
    """What a router's training needs.

    Args:
        weights: (batch, seq) float32, 1 where a token carries a label and 0 elsewhere.
        aux: coefficient of the load balance, and
        z: of the size of the router's logits; see :class:`MoE`.
    """

    weights: Tensor
    aux: float
    z: float


class Experts(nn.Module):
    """The experts' weights, one stack each: gate and up (experts, 2 * width, hidden_size), gate's rows first, and
    down (experts, hidden_size, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        number, width = config.num_experts, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(number, config.hidden_size, width))
        self.activation = ACTIVATIONS[config.hidden_act]
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """(tokens, hidden_size) and twice (tokens, k) in, (tokens, hidden_size) out."""
        return experts(x, expert_ids, weights, self.gate_up_proj, self.down_proj, self.activation)


class MoE(nn.Module):
    """Each token through its ``num_experts_per_tok`` best experts, and the shared one if there is one.

    The router is a softmax over all experts, in float32; the k largest probabilities are the weights of their experts,
    divided by their sum where ``norm_topk_prob`` (Mixtral, Jiang et al. 2024, section 2.1, where it is written as a
    softmax over those k). A shared expert is weighted by a sigmoid of its own gate (Qwen2-MoE). No token is dropped.

    In training the router's losses hold each row of the batch (a sequence) for itself, so that they are a sum over rows
    and do not depend on how rows are spread over ranks and micro-batches (the sequence-wise balance of DeepSeek-V3, Liu
    et al. 2024, section 2.1.2). Of a row with n label tokens, f[e] slots a label token that went to expert e
    (their sum is k) and P[e] the mean over label tokens of e's probability, the term takes

        n * aux * experts * sum over e of f[e] * P[e]                (Switch Transformer, Fedus et al. 2022, eq. 4 to 6)
        + z * sum over label tokens of logsumexp(logits)^2           (ST-MoE, Zoph et al. 2022, eq. 5)

    Args:
        config: with ``num_experts``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert config.num_experts_per_tok is not None
        self.num_experts, self.chosen, self.normalised = (
            config.num_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
        )
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(config, shared) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if shared else None

    def forward(self, x: Tensor, losses: RouterLosses | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(batch, seq, hidden_size) in, the same out; with ``losses`` also the term, a float32 scalar."""
        logits = self.gate(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probabilities = logits.softmax(dim=-1)
        weights, expert_ids = probabilities.topk(self.chosen, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = (one.flatten(0, 1) for one in (x, expert_ids, weights.to(x.dtype)))
        out = self.experts(*flat).view(x.shape)
        if self.shared_expert is not None:
            assert self.shared_expert_gate is not None
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        if losses is None:
            return out
        return out, self._term(logits, probabilities, expert_ids, losses)

    def _term(self, logits: Tensor, probabilities: Tensor, expert_ids: Tensor, losses: RouterLosses) -> Tensor:
        term = logits.new_zeros(())
        if losses.aux:
            counts = losses.weights.unsqueeze(-1)
            slots = (torch.zeros_like(probabilities).scatter_(-1, expert_ids, 1.0) * counts).sum(dim=1)
            mass = (probabilities * counts).sum(dim=1)
            # n * f * P of a row is the product of its two sums over n.
            balance = (slots * mass).sum(dim=-1) / losses.weights.sum(dim=1).clamp(min=1)
            term = term + losses.aux * self.num_experts * balance.sum()
        if losses.z:
            term = term + losses.z * (losses.weights * logits.logsumexp(dim=-1).square()).sum()
        return term


def inactive_parameters(config: ModelConfig) -> int:
    """How many of a model's parameters a token does not meet: those of the experts that it is not sent to."""
    if config.num_experts is None or config.num_experts_per_tok is None:
        return 0
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    idle = config.num_experts - config.num_experts_per_tok
    return sparse * idle * 3 * config.hidden_size * config.expert_size
