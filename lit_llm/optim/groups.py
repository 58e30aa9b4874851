"""Which parameters decay, which learn at another rate, and which are Muon's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_llm.errors import UserError

_Embedding = nn.Embedding | nn.EmbeddingBag


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    *,
    lr: float = 1.0,
    embedding_lr_ratio: float = 1.0,
    width_base: int | None = None,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """The trainable parameters of ``module`` in groups, as torch optimizers take them.

    - "decay": the matrices, and stacks of matrices, as of experts. With ``width_base`` at lr x width_base / width, the
      width that of the module's largest embedding.
    - "muon", with ``muon``: those of them that are hidden matrices, of exactly two dimensions and more than one row.
      The head is none, nor is a router.
    - "no_decay": norm gains, biases and embeddings, the tied head among them: what an ``nn.Embedding`` owns counts as
      an embedding whoever else uses it.
    - "embedding": those embeddings, in a group of their own where ``embedding_lr_ratio`` is not 1.

    A parameter that requires a gradient is in exactly one group, once; order is that of ``module.named_parameters()``.
    An untied head is what lies under the name ``lm_head``; in a module without such a name it is any ``nn.Linear`` that
    has the shape of an embedding, is not in an ``nn.ModuleList`` (as layers are) and not beside a tied head.

    Args:
        module: what is trained.
        weight_decay: of the matrices.
        lr: the rate that the ratios multiply.
        embedding_lr_ratio: rate of the embeddings, relative to ``lr``.
        width_base: the width at which the matrices learn at ``lr``; None: all widths.
        muon: whether hidden matrices are a group.

    Returns:
        Groups with "name", "params", "param_names" (qualified names, in the order of "params"), "weight_decay", and
        "lr" where it is not the common one. A group without parameters is left out.

    Raises:
        UserError: ``width_base`` for a module without an embedding.
    """
    owners = [owner for owner in module.modules() if isinstance(owner, (nn.Embedding, nn.EmbeddingBag))]
    embeddings = {id(parameter) for owner in owners for parameter in owner.parameters(recurse=False)}
    heads = _heads(module, owners) if muon else set()
    ratios = {"embedding": embedding_lr_ratio}
    if width_base is not None:
        ratios["decay"] = width_base / _width(owners, width_base)

    named: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "decay": [], "no_decay": [], "embedding": []}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            group = "embedding" if embedding_lr_ratio != 1 else "no_decay"
        # Biases of stacked experts and gains of single heads have two dimensions, hence the look at the name.
        elif parameter.ndim < 2 or name.endswith(("bias", "norm.weight")):
            group = "no_decay"
        else:
            # A router is a classifier, as the head is; without a z-loss its gradient has no part along all experts, and
            # Muon would make one of the rounding that is left.
            is_router = name.endswith(".gate.weight")
            hidden = parameter.ndim == 2 and parameter.shape[0] > 1 and id(parameter) not in heads and not is_router
            group = "muon" if muon and hidden else "decay"
        named[group].append((name, parameter))
    return [
        {
            "name": group,
            "params": [parameter for _, parameter in members],
            "param_names": [name.replace("_orig_mod.", "") for name, _ in members],
            "weight_decay": weight_decay if group in ("muon", "decay") else 0.0,
            **({"lr": lr * ratios[group]} if group in ratios else {}),
        }
        for group, members in named.items()
        if members
    ]


def describe_groups(optimizer: Optimizer) -> str:
    """A table with a line for each of the optimizer's groups, and a header.

    Its rates are the peaks, whatever the schedule makes of them at present.
    """
    rows = [("group", "tensors", "parameters", "peak lr", "weight decay", "optimizer")]
    for number, group in enumerate(optimizer.param_groups):
        decay = group.get("weight_decay")
        rows.append(
            (
                str(group.get("name", number)),
                f"{len(group['params']):,}",
                f"{sum(parameter.numel() for parameter in group['params']):,}",
                f"{float(group.get('initial_lr', group['lr'])):g}",
                "-" if decay is None else f"{decay:g}",
                str(group.get("optimizer", type(optimizer).__name__)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Text to the left, numbers to the right."""
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
    return "  ".join(cells).rstrip()


def _width(owners: Sequence[_Embedding], width_base: int) -> int:
    if not owners:
        raise UserError(
            f"model.optimizer.width_base {width_base} needs the model's width, and the model has no nn.Embedding to "
            "tell it; set it to null"
        )
    return max(owners, key=lambda owner: owner.num_embeddings).embedding_dim


def _heads(module: nn.Module, owners: Iterable[_Embedding]) -> set[int]:
    """The ids of the parameters of heads that are not tied."""
    named = {id(parameter) for name, parameter in module.named_parameters() if "lm_head" in name.split(".")}
    if named:
        return named
    linears = [one for one in module.modules() if isinstance(one, nn.Linear)]
    if {id(one.weight) for one in linears} & {id(owner.weight) for owner in owners}:
        return set()
    shapes = {(owner.num_embeddings, owner.embedding_dim) for owner in owners}
    layers = {id(one) for many in module.modules() if isinstance(many, nn.ModuleList) for one in many.modules()}
    return {
        id(one.weight) for one in linears if (one.out_features, one.in_features) in shapes and id(one) not in layers
    }
