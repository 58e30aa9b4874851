"""Cross entropy of a linear head, without the (tokens x vocabulary) logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.errors import UserError

LossBackend = Literal["auto", "reference", "chunked"]

# Rows of logits held at a time: an eighth of the tokens, within bounds (measured with benchmarks/loss.py). Each chunk
# passes over the whole gradient of the weight, which few rows do not repay; small products leave threads waiting.
_CHUNKS = 8
_MIN_CHUNK_ROWS = 128
_MIN_CHUNK_BYTES = 16 * 2**20
_MAX_CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 1024 * 2**20}
# Rows of the weight's gradient whose half-precision product is held before it joins the float32 sum.
_VOCABULARY_BLOCK = 16384
# float16 products for the weight's gradient are taken at 1/64 (exact), so that sums over a chunk stay below 65504.
_FLOAT16_SCALE = 64.0


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    backend: LossBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy of ``hidden @ weight.T + bias`` over the labels that count, and their number.

    The chunked back end (what ``auto`` picks) holds the logits of ``chunk_size`` tokens at a time and computes the
    gradient of a chunk while its logits are there, in the forward pass; under ``no_grad``, or when nothing requires a
    gradient, it computes the loss alone. It refuses second derivatives and runs eagerly inside a compiled region.

    Under autocast the matrix products take the autocast dtype. Logits after the product, softmax and the sum that
    makes the weight's gradient are float32 (float64 for float64 inputs); gradients have the dtype of their tensor.

    Args:
        hidden: (..., hidden_size), floating point.
        weight: (vocab_size, hidden_size), the head.
        labels: (...), integers in [0, vocab_size) or ``ignore_index``. Another value is refused on the CPU; on a GPU,
            where looking at it would stall the stream, it trips the device's index assertion.
        bias: (vocab_size,) or None.
        ignore_index: the label of a position that counts neither in the sum nor in the number.
        chunk_size: tokens whose logits are held at a time; None takes an eighth of them, or 16 MiB.
        backend: "reference" holds all logits, "chunked" does not, "auto" is "chunked".

    Returns:
        The loss sum in nats (float32 scalar, float64 for float64 inputs) and the number of labels that count (int64
        scalar), both on the device of ``hidden`` and without a host synchronisation there. When no label counts, the
        sum and the gradients are 0.

    Raises:
        UserError: shapes, dtypes or labels that do not fit, an unknown back end, a chunk size below 1.
    """
    _check(hidden, weight, labels, bias, chunk_size, backend)
    # Wrapped here and not by a decorator, which would import dynamo along with this module.
    run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    return run(hidden, weight, labels, bias, ignore_index, chunk_size, backend)


def _run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
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
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum"), count

    labels = labels.masked_fill(~counted, 0)
    rows = chunk_size or _default_chunk_size(hidden.shape[0], weight.shape[0], hidden.device.type)
    compute_dtype = _compute_dtype(hidden, weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, counted, rows, compute_dtype), count
    needs = (False, False, False)
    return _loss_and_gradients(hidden, weight, bias, labels, counted, rows, compute_dtype, needs)[0], count


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss sum; its gradients for an upstream gradient of 1 are ready after forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counted: Tensor,
        rows: int,
        compute_dtype: torch.dtype,
    ) -> Tensor:
        loss, gradients = _loss_and_gradients(
            hidden, weight, bias, labels, counted, rows, compute_dtype, ctx.needs_input_grad[:3]
        )
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Not once_differentiable: it lets a constant upstream pass, and gradients of gradients would lack a term.
            raise UserError("linear_cross_entropy has no second derivatives (create_graph); take backend='reference'")
        # The saved gradients may be scaled in place, sparing a second (vocab_size, hidden_size), when no other backward
        # through this graph can follow.
        in_place = not _graph_is_kept()
        scaled: list[Tensor | None] = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if gradient is None:
                scaled.append(None)
            elif in_place and gradient.dtype == upstream.dtype:
                scaled.append(gradient.mul_(upstream).to(dtype))
            else:
                # Scaled in the loss's dtype: a loss scale of 65536 does not exist in float16.
                scaled.append((gradient.to(upstream.dtype) * upstream).to(dtype))
        return (*scaled, None, None, None, None)


def _graph_is_kept() -> bool:
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return probe is None or probe()


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    rows: int,
    compute_dtype: torch.dtype,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Loss sum over (tokens, hidden_size), and its gradients for hidden (in ``compute_dtype``), weight and bias.

    With p = softmax(logits) and y the one-hot label, the gradient of a row's loss for its logits is p - y.
    """
    need_hidden, need_weight, need_bias = needs
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    dtype = torch.promote_types(compute_dtype, torch.float32)
    device = hidden.device
    with torch.no_grad(), _autocast_disabled(device.type):
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        log_likelihood = torch.empty(tokens, 1, dtype=dtype, device=device)
        grad_hidden = hidden.new_empty(hidden.shape) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=device) if need_weight else None
        grad_bias = torch.zeros(vocab_size, dtype=dtype, device=device) if need_bias else None
        # One buffer for all chunks: fresh pages for each would cost as much as the softmax.
        buffer = torch.empty(min(rows, tokens), vocab_size, dtype=dtype, device=device)

        for start in range(0, tokens, rows):
            chunk = slice(start, min(start + rows, tokens))
            label, kept = labels[chunk, None], counted[chunk, None]
            logits = buffer[: chunk.stop - start]
            half = None
            if compute_dtype == dtype:
                torch.mm(hidden[chunk], weight.t(), out=logits)
            else:
                half = hidden[chunk] @ weight.t()
                logits.copy_(half)
            if bias is not None:
                logits.add_(bias)
            log_p = torch.log_softmax(logits, -1, out=logits)
            torch.gather(log_p, -1, label, out=log_likelihood[chunk])
            if not any(needs):
                continue

            grad_logits = log_p.exp_().scatter_add_(-1, label, log_p.new_full(label.shape, -1.0))
            # Rows that do not count are zeroed in the factors and the results, which are smaller than the logits.
            if grad_bias is not None:
                grad_bias.addmv_(grad_logits.t(), kept.squeeze(-1).to(dtype))
            if half is not None:
                grad_logits = half.copy_(grad_logits)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk]).mul_(kept)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, hidden[chunk] * kept)
        loss = (-log_likelihood.squeeze(-1)).where(counted, 0).sum()
        return loss, (grad_hidden, grad_weight, grad_bias)


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """``total += grad_logits.T @ hidden``, in float32 also where the operands are of half precision."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
        return
    scale = _FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0
    hidden = hidden / scale
    for start in range(0, total.shape[0], _VOCABULARY_BLOCK):
        block = slice(start, start + _VOCABULARY_BLOCK)
        total[block].add_(grad_logits[:, block].t() @ hidden, alpha=scale)


def _autocast_disabled(device: str) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: the autocast dtype where autocast would act, else that of both operands."""
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise UserError(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}; cast one, or use autocast"
        )
    return hidden.dtype


def _default_chunk_size(tokens: int, vocab_size: int, device: str) -> int:
    row_bytes = 4 * max(vocab_size, 1)
    rows = max(-(-tokens // _CHUNKS), _MIN_CHUNK_ROWS, _MIN_CHUNK_BYTES // row_bytes)
    return max(min(rows, _MAX_CHUNK_BYTES.get(device, _MAX_CHUNK_BYTES["cpu"]) // row_bytes), 1)


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


def _check_range(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    if labels.numel() == 0:
        return
    low, high = (int(x) for x in labels.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"linear_cross_entropy: label {low if low < 0 else high} is outside the vocabulary of {vocab_size}; "
            f"mark positions that do not count with {ignore_index}"
        )
