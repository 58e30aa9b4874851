"""A look into the model at a step that went wrong: its saved micro-batches, computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_llm.errors import UserError
from lit_llm.training.saved_batches import SavedBatches, load_batches, save_batches

__all__ = ["Report", "SavedBatches", "describe", "load_batches", "replay", "save_batches"]

_TEXT_IDS = 48
_SHOWN = 3


@dataclass(frozen=True)
class Report:
    """What one micro-batch does to the present weights.

    Attributes:
        micro_batch: its place in the step, from 0.
        loss_sum: summed loss over the label tokens.
        tokens: label tokens.
        loss: mean loss, 0 without label tokens.
        grad_norm: of the gradient of that mean, before clipping.
        row_losses: mean loss of each row alone, in the batch's order.
        worst_row: the first row that is not finite, else the one with the greatest loss.
        text: the beginning of the worst row; None without a tokenizer.
        first_module: where the first non-finite output came from, the innermost module; None if there is none.
        bad_gradients: parameter to number of non-finite entries in its gradient.
        bad_weights: parameter to number of non-finite entries in itself.
        parameters: number of trainable parameter tensors.
    """

    micro_batch: int
    loss_sum: float
    tokens: int
    loss: float
    grad_norm: float
    row_losses: list[float]
    worst_row: int
    text: str | None
    first_module: str | None
    bad_gradients: dict[str, int]
    bad_weights: dict[str, int]
    parameters: int

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are."""
        return _finite(self.loss_sum) and _finite(self.grad_norm)

    @property
    def bad_rows(self) -> list[int]:
        """Rows whose loss alone is not finite."""
        return [row for row, loss in enumerate(self.row_losses) if not _finite(loss)]


def replay(
    module: Any,
    saved: SavedBatches,
    *,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed_microbatch: Callable[[int], None] | None = None,
) -> list[Report]:
    """Computes saved micro-batches again with the module's present weights, in one process.

    Neither weights nor gradients of the module change; whether its parts are in training mode is the caller's to set.
    Where loss or gradient is not finite, the forward is run again to watch what each module returns; that and the rows
    alone run uncompiled. A row alone draws other dropout than within its batch.

    Args:
        module: with ``loss(batch)``, ``model`` and ``tokenizer``, as LitLLM.
        saved: what to compute.
        forward_context: makes the context of each forward, such as the precision plugin's.
        seed_microbatch: called with the micro-batch's place before each forward.

    Returns:
        A report for each micro-batch.

    Raises:
        UserError: micro-batches that can't be computed.
    """
    known = isinstance(saved.batches, list) and all(isinstance(b, dict) and "input_ids" in b for b in saved.batches)
    if not (known and saved.batches):
        left = f" ({_list(saved.left_out)} could not be saved)" if saved.left_out else ""
        raise UserError(f"the file holds no micro-batches with input_ids, which a replay computes{left}; give another")
    model: nn.Module = module.model
    device = next(model.parameters()).device

    def loss_of(index: int, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if seed_microbatch is not None:
            seed_microbatch(index)
        with forward_context():
            return module.loss(batch)

    weights = dict(model.named_parameters(prefix="model"))
    bad_weights = _not_finite(weights.items())
    reports = []
    for index, cpu_batch in enumerate(saved.batches):
        batch = {name: _to(value, device) for name, value in cpu_batch.items()}
        with torch.enable_grad():
            loss_sum, count = loss_of(index, batch)
            mean = loss_sum / count.clamp(min=1)
            gradients = _gradients(mean, weights)
        loss_sum, mean = loss_sum.detach(), mean.detach()
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
        grad_norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        first_module = None
        if not (_finite(float(loss_sum)) and _finite(grad_norm)):
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), _watched(model) as found:
                loss_of(index, batch)
            first_module = found[0] if found else None
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            alone = [loss_of(index, row) for row in _rows(batch)]
        row_losses = [float(row_sum / row_count.clamp(min=1)) for row_sum, row_count in alone]
        worst = _worst(row_losses)
        reports.append(
            Report(
                micro_batch=index,
                loss_sum=float(loss_sum),
                tokens=int(count),
                loss=float(mean),
                grad_norm=grad_norm,
                row_losses=row_losses,
                worst_row=worst,
                text=_text(module.tokenizer, cpu_batch["input_ids"][worst]),
                first_module=first_module,
                bad_gradients=_not_finite(gradients.items()),
                bad_weights=bad_weights,
                parameters=sum(p.requires_grad for p in weights.values()),
            )
        )
    return reports


def describe(reports: Sequence[Report], saved: SavedBatches) -> str:
    """Some lines for the terminal: what was wrong then, what is wrong now and where, then each micro-batch."""
    lines = [
        f"step {saved.step}, rank {saved.rank} of {saved.world_size}: {saved.reason} "
        f"(loss {saved.loss:.6g}, gradient norm {saved.grad_norm:.6g})"
    ]
    if saved.checkpoint:
        lines.append(f"that run began from {saved.checkpoint}")
    bad = [report for report in reports if not report.finite]
    if reports and reports[0].bad_weights:
        lines.append(f"here: the weights are not finite already: {_counts(reports[0].bad_weights)}")
    elif bad:
        lines.append(f"here: {len(bad)} of {len(reports)} micro-batches are not finite: {_list(_places(bad))}")
    else:
        lines.append(
            "here: every micro-batch is finite; the weights are not those of that step, or it was the precision or a "
            "random draw"
        )
    if saved.left_out:
        lines.append(f"not saved, as no plain types: {_list(saved.left_out)}")
    for report in reports:
        lines += _lines(report)
    return "\n".join(lines)


def _places(reports: Iterable[Report]) -> list[str]:
    return [f"{one.micro_batch}" + (f" (row {_list(one.bad_rows)})" if one.bad_rows else "") for one in reports]


def _lines(report: Report) -> Iterator[str]:
    yield (
        f"micro-batch {report.micro_batch}: loss {report.loss:.6g} over {report.tokens:,} label tokens, "
        f"gradient norm {report.grad_norm:.6g}"
    )
    if report.first_module is not None:
        yield f"  first output that is not finite: {report.first_module}"
    elif not report.finite:
        yield "  every module's output is finite: it is the backward, or the compiled code"
    if report.bad_gradients:
        number = len(report.bad_gradients)
        yield f"  gradients not finite: {number} of {report.parameters}, {_counts(report.bad_gradients)}"
    if report.row_losses:
        bad, row = report.bad_rows, report.worst_row
        state = f"not finite alone ({len(bad)} such)" if bad else f"the greatest loss, {report.row_losses[row]:.6g}"
        yield f"  row {row} of {len(report.row_losses)}: {state}" + (f": {report.text!r}" if report.text else "")


def _counts(bad: Mapping[str, int]) -> str:
    return _list([f"{name} ({count:,} entries)" for name, count in bad.items()])


def _list(items: Sequence[Any]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(map(str, items[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _rows(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each row as a batch of its own."""
    number, length = batch["input_ids"].shape
    for row in range(number):
        one = {}
        for name, value in batch.items():
            if name == "cu_seqlens":  # over the flattened batch; every row begins a document
                one[name] = value[(value >= row * length) & (value <= (row + 1) * length)] - row * length
            elif isinstance(value, Tensor) and value.ndim and len(value) == number:
                one[name] = value[row : row + 1]
            else:
                one[name] = value
        yield one


def _gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the parameters that the loss depends on, beside their ``grad``."""
    wanted = {name: p for name, p in weights.items() if p.requires_grad}
    if not wanted or not loss.requires_grad:
        return {}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """The modules whose output is not finite, as they end: those within before those around them."""
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, inputs: Any, output: Any) -> None:
            if not all(bool(torch.isfinite(t).all()) for t in _floats(output)):
                found.append(name)

        return look

    handles = [part.register_forward_hook(hook(name)) for name, part in model.named_modules(prefix="model")]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for one in output.values():
            yield from _floats(one)
    elif isinstance(output, list | tuple):
        for one in output:
            yield from _floats(one)


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    counts = {name: int((~torch.isfinite(t)).sum()) for name, t in tensors}
    return {name: count for name, count in counts.items() if count}


def _worst(losses: Sequence[float]) -> int:
    bad = [row for row, loss in enumerate(losses) if not _finite(loss)]
    return bad[0] if bad else max(range(len(losses)), key=losses.__getitem__)


def _finite(value: float) -> bool:
    return value - value == 0


def _text(tokenizer: Any, ids: Tensor) -> str | None:
    if tokenizer is None:
        return None
    try:
        return tokenizer.decode(ids[:_TEXT_IDS].tolist(), skip_special_tokens=False)
    except UserError as error:  # an id that the tokenizer doesn't have may be what is wrong
        return f"({error})"
