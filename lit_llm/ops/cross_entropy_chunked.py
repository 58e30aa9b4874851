"""The chunked back end of :func:`lit_llm.ops.linear_cross_entropy`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_llm.errors import UserError

# Rows of logits held at a time: an eighth of the tokens, within bounds (measured with benchmarks/loss.py). Each chunk
# passes over the whole gradient of the weight, which few rows do not repay; small products leave threads waiting.
_CHUNKS = 8
_MIN_CHUNK_ROWS = 128
_MIN_CHUNK_BYTES = 16 * 2**20
_MAX_CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 1024 * 2**20}
# Rows of the weight's gradient whose half-precision product is held before it joins the float32 sum.
_VOCABULARY_BLOCK = 16384
# The soft cap's slope is held for this share of a chunk's rows at a time.
_SLOPE_PIECES = 8
# float16 products for the weight's gradient are taken at 1/64 (exact), so that sums over a chunk stay below 65504.
_FLOAT16_SCALE = 64.0


class LossTerms(NamedTuple):
    """What :func:`lit_llm.ops.linear_cross_entropy` adds to the plain cross entropy."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    chunk_size: int | None,
    terms: LossTerms,
) -> Tensor:
    """The loss sum.

    Args:
        hidden: (tokens, hidden_size).
        weight: (vocab_size, hidden_size).
        bias: (vocab_size,) or None.
        labels: (tokens,) int64, all inside the vocabulary.
        counted: (tokens,) bool, false where the label does not count.
        chunk_size: tokens whose logits are held at a time; None chooses by size.
        terms: what is added to the plain cross entropy.

    Raises:
        UserError: dtypes that do not fit; in backward, a second derivative.
    """
    rows = chunk_size or _default_chunk_size(hidden.shape[0], weight.shape[0], hidden.device.type)
    compute_dtype = _compute_dtype(hidden, weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, counted, rows, compute_dtype, terms)
    needs = (False, False, False)
    return _loss_and_gradients(hidden, weight, bias, labels, counted, rows, compute_dtype, terms, needs)[0]


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
        terms: LossTerms,
    ) -> Tensor:
        loss, gradients = _loss_and_gradients(
            hidden, weight, bias, labels, counted, rows, compute_dtype, terms, ctx.needs_input_grad[:3]
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
        return (*scaled, None, None, None, None, None)


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
    terms: LossTerms,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Loss sum over (tokens, hidden_size), and its gradients for hidden (in ``compute_dtype``), weight and bias."""
    need_hidden, need_weight, need_bias = needs
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    dtype = torch.promote_types(compute_dtype, torch.float32)
    device = hidden.device
    with torch.no_grad(), _autocast_disabled(device.type):
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        gain = torch.empty(tokens, 1, dtype=dtype, device=device)
        grad_hidden = hidden.new_empty(hidden.shape) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=device) if need_weight else None
        grad_bias = torch.zeros(vocab_size, dtype=dtype, device=device) if need_bias else None
        # One buffer for all chunks: fresh pages for each would cost as much as the softmax.
        buffer = torch.empty(min(rows, tokens), vocab_size, dtype=dtype, device=device)
        # A soft cap goes over a chunk in pieces, and only a piece's slope is held.
        pieces = 1 if terms.softcap is None else _SLOPE_PIECES
        slope = None
        if terms.softcap is not None and any(needs):
            slope = torch.empty(-(-buffer.shape[0] // pieces), vocab_size, dtype=dtype, device=device)

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
            step = -(-len(logits) // pieces)
            for rows_of in (slice(i, i + step) for i in range(0, len(logits), step)):
                _replace_by_gradient(logits[rows_of], label[rows_of], gain[chunk][rows_of], terms, slope, any(needs))
            if not any(needs):
                continue

            grad_logits = logits
            # Rows that do not count are zeroed in the factors and the results, which are smaller than the logits.
            if grad_bias is not None:
                grad_bias.addmv_(grad_logits.t(), kept.squeeze(-1).to(dtype))
            if half is not None:
                grad_logits = half.copy_(grad_logits)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk]).mul_(kept)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, hidden[chunk] * kept)
        loss = (-gain.squeeze(-1)).where(counted, 0).sum()
        return loss, (grad_hidden, grad_weight, grad_bias)


def _replace_by_gradient(
    logits: Tensor, label: Tensor, gain: Tensor, terms: LossTerms, slope: Tensor | None, need_gradient: bool
) -> None:
    """Writes minus the loss of each row to ``gain`` (rows, 1) and its gradient over ``logits`` (rows, vocab_size).

    With p = softmax(logits), y the one-hot label, e the label smoothing and k the coefficient of the z-loss, the
    gradient of a row's loss for its logits is p * (1 + 2 k logsumexp) - (1 - e) y - e / vocab_size. That for the
    logits before the soft cap is this times 1 - tanh^2, which ``slope`` (rows or more, vocab_size) holds meanwhile.
    Without ``need_gradient`` the logits are left as anything.
    """
    z_loss, smoothing, cap = terms
    if cap is not None:
        logits.div_(cap).tanh_()
        if slope is not None:
            slope = slope[: len(logits)]
            torch.addcmul(logits.new_ones(()), logits, logits, value=-1, out=slope)
        logits.mul_(cap)
    # log_softmax overwrites the logits; the largest tells what was subtracted, and does so exactly.
    largest = logits.amax(-1, keepdim=True) if z_loss else None
    log_p = torch.log_softmax(logits, -1, out=logits)
    torch.gather(log_p, -1, label, out=gain)
    if smoothing:
        gain.mul_(1 - smoothing).add_(log_p.mean(-1, keepdim=True), alpha=smoothing)
    log_sum = None
    if largest is not None:
        log_sum = largest - log_p.amax(-1, keepdim=True)
        gain.sub_(log_sum.square(), alpha=z_loss)
    if not need_gradient:
        return

    gradient = log_p.exp_()
    if log_sum is not None:
        gradient.mul_(1 + 2 * z_loss * log_sum)
    if smoothing:
        gradient.sub_(smoothing / gradient.shape[-1])
    gradient.scatter_add_(-1, label, gradient.new_full(label.shape, smoothing - 1.0))
    if slope is not None:
        gradient.mul_(slope)


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
