"""Cross entropy of a linear head, without the (tokens x vocabulary) logits."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.ops.cross_entropy_chunked import LossTerms, chunked_loss

LossBackend = Literal["auto", "reference", "chunked"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: LossBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy of ``hidden @ weight.T + bias`` over the labels that count, and their number.

    With logits z = hidden @ weight.T + bias, first capped to c * tanh(z / c) where ``softcap`` is c, and
    log p = z - logsumexp(z), the sum takes for each label y that counts

        -(1 - label_smoothing) * log p[y] - label_smoothing * mean(log p) + z_loss * logsumexp(z)^2

    The chunked back end (what ``auto`` picks) holds the logits of ``chunk_size`` tokens at a time and computes the
    gradient of a chunk while its logits are there, in the forward pass; under ``no_grad``, or when nothing requires a
    gradient, it computes the loss alone. It refuses second derivatives and runs eagerly inside a compiled region. The
    slope of the soft cap takes an eighth of a chunk more; the other options take a few numbers a token.

    Under autocast the matrix products take the autocast dtype. Logits after the product, softmax and the sum that
    makes the weight's gradient are float32 (float64 for float64 inputs); gradients have the dtype of their tensor.

    Args:
        hidden: (..., hidden_size), floating point.
        weight: (vocab_size, hidden_size), the head.
        labels: (...), integers in [0, vocab_size) or ``ignore_index``. Another value is refused on the CPU; on a GPU,
            where looking at it would stall the stream, it trips the device's index assertion.
        bias: (vocab_size,) or None.
        ignore_index: the label of a position that counts neither in the sum nor in the number.
        z_loss: weight of the squared logsumexp, which holds the logits near a normalised scale (PaLM, section 5); at
            least 0.
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1) (Szegedy et al. 2016,
            section 7). A token whose logit is -inf makes the smoothed loss infinite.
        softcap: soft cap on the logits (Gemma 2, section 2), above 0; None: no cap.
        chunk_size: tokens whose logits are held at a time; None takes an eighth of them, or 16 MiB.
        backend: "reference" holds all logits, "chunked" does not, "auto" is "chunked".

    Returns:
        The loss sum in nats (float32 scalar, float64 for float64 inputs) and the number of labels that count (int64
        scalar), both on the device of ``hidden`` and without a host synchronisation there. When no label counts, the
        sum and the gradients are 0.

    Raises:
        UserError: shapes, dtypes or labels that do not fit, an unknown back end, a chunk size below 1, an option out
            of its range.
    """
    _check(hidden, weight, labels, bias, chunk_size, backend)
    _check_terms(z_loss, label_smoothing, softcap)
    # Wrapped here and not by a decorator, which would import dynamo along with this module.
    run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    terms = LossTerms(z_loss, label_smoothing, softcap)
    return run(hidden, weight, labels, bias, ignore_index, terms, chunk_size, backend)


def _run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    terms: LossTerms,
    chunk_size: int | None,
    backend: LossBackend,
) -> tuple[Tensor, Tensor]:
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels = labels.reshape(-1).long()
    counted = labels != ignore_index
    count = counted.sum()
    # Only plain CPU tensors may be looked at: a GPU's would stall it, a planner's fake ones hold nothing.
    if labels.device.type == "cpu" and type(labels) is Tensor:
        if int(count) != labels.numel():
            kept = counted.nonzero().squeeze(1)
            hidden, labels, counted = hidden.index_select(0, kept), labels[kept], counted[kept]
        _check_range(labels, weight.shape[0], ignore_index)

    if backend == "reference":
        return _reference(hidden, weight, labels, bias, counted, ignore_index, terms), count
    labels = labels.masked_fill(~counted, 0)
    return chunked_loss(hidden, weight, bias, labels, counted, chunk_size, terms), count


def _reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    counted: Tensor,
    ignore_index: int,
    terms: LossTerms,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    smoothing = terms.label_smoothing
    loss = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing)
    if terms.z_loss:
        loss = loss + terms.z_loss * logits.logsumexp(-1).square().where(counted, 0).sum()
    return loss


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk_size: int | None, backend: str
) -> None:
    name = "linear_cross_entropy"
    if backend not in get_args(LossBackend):
        raise UserError(f"{name}: unknown backend {backend!r}; choose one of {', '.join(get_args(LossBackend))}")
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"{name}: chunk_size is {chunk_size}; it must be at least 1, or None to choose by size")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise UserError(
            f"{name}: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; "
            "they must be (..., hidden_size) and (vocab_size, hidden_size)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise UserError(f"{name}: labels {tuple(labels.shape)} do not match hidden {tuple(hidden.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"{name}: labels are {labels.dtype}; they must be integers")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"{name}: bias {tuple(bias.shape)} must be ({weight.shape[0]},), one for each row of weight")


def _check_terms(z_loss: float, label_smoothing: float, softcap: float | None) -> None:
    for name, value, fits, bounds in (
        ("z_loss", z_loss, lambda x: x >= 0, "at least 0 (0 to leave it out)"),
        ("label_smoothing", label_smoothing, lambda x: 0 <= x < 1, "in [0, 1) (0 to leave it out)"),
        ("softcap", 1.0 if softcap is None else softcap, lambda x: x > 0, "above 0, or None for no cap"),
    ):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and fits(value)):
            raise UserError(f"linear_cross_entropy: {name} is {value!r}; it must be a finite number {bounds}")


def _check_range(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    if labels.numel() == 0:
        return
    low, high = (int(x) for x in labels.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"linear_cross_entropy: label {low if low < 0 else high} is outside the vocabulary of {vocab_size}; "
            f"mark positions that do not count with {ignore_index}"
        )
