"""Splitting a LightningModule that has been built already, and what can't be split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_llm.errors import UserError
from lit_llm.model import Transformer
from lit_llm.optim.chained import ChainedOptimizer
from lit_llm.parallel.parallelize import Sharding, parallelize, shard_module
from lit_llm.parallel.report import is_sharded, reshard

_WHOLE_ONLY = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
"""Torch's optimizers that can't step parts of parameters."""


def split_module(module: nn.Module, sharding: Sharding, root_device: torch.device) -> None:
    """Splits each child of a LightningModule that is not split yet: a Transformer block by block, others as one unit.

    Values are rank 0's on all processes, as under ddp: what a subclass has built may be drawn at random.

    Raises:
        UserError: what would get other gradients than in one process, or was split in another way before.
    """
    reshard(module)
    _refuse_shared(module)
    _refuse_hooks(module)
    for unit in _units(module):
        parameters = list(unit.parameters())
        if any(is_sharded(p) for p in parameters):
            _refuse_other_layout(unit, sharding)
            continue
        _refuse_shapes(module, unit)
        _broadcast(parameters, root_device)
        if isinstance(unit, Transformer):
            parallelize(
                unit,
                activation_checkpointing=getattr(module, "activation_checkpointing", "none"),
                compile=getattr(module, "compile_blocks", False),
                sharding=sharding,
            )
        else:
            shard_module(unit, sharding)
    _refuse_hooks(module)
    whole = {name: p for name, p in module.named_parameters() if not is_sharded(p)}
    trained = [name for name, p in whole.items() if p.requires_grad]
    if trained:
        raise UserError(
            f"{type(module).__name__}: parameter {trained[0]} came after the model was split, or lies in no module of "
            "its own, so its gradient would not be averaged; add it in a configure_model that builds the model itself "
            "and leaves splitting to MeshStrategy"
        )
    _broadcast([*whole.values(), *module.buffers()], root_device)


def _units(module: nn.Module) -> list[nn.Module]:
    """The children that have parameters, of containers theirs; not what is a part of another one, nor one twice."""
    found: dict[int, nn.Module] = {id(unit): unit for unit in _children(module)}
    inside = {id(part) for unit in found.values() for part in unit.modules() if part is not unit}
    return [unit for key, unit in found.items() if key not in inside]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _broadcast(tensors: Iterable[Tensor], root_device: torch.device) -> None:
    for tensor in tensors:
        if not tensor.is_meta and not is_sharded(tensor):
            values = tensor.detach().to(root_device, copy=True).contiguous()
            torch.distributed.broadcast(values, src=0)
            tensor.data.copy_(values)


def _refuse_shared(module: nn.Module) -> None:
    """Parameters of two units would come apart."""
    owner: dict[int, tuple[int, str]] = {}
    for number, unit in enumerate(_units(module)):
        for name, parameter in unit.named_parameters():
            first, known = owner.setdefault(id(parameter), (number, name))
            if first != number:
                raise UserError(
                    f"{type(module).__name__}: {name} of {type(unit).__name__} is also {known} of another child; "
                    "MeshStrategy would split the two apart: put both users of a shared parameter into one module"
                )


def _refuse_shapes(module: nn.Module, unit: nn.Module) -> None:
    """What one ``fully_shard`` does not take."""
    named = dict(unit.named_parameters())
    where = f"{type(module).__name__}: {type(unit).__name__}"
    for name, parameter in named.items():
        if parameter.ndim == 0:
            raise UserError(
                f"{where} has the parameter {name} of no dimension, which can't be split; give it shape (1,)"
            )
    if isinstance(unit, nn.ParameterList | nn.ParameterDict):
        raise UserError(f"{where} has no forward in which its parameters could be gathered; put them into a module")
    if not isinstance(unit, Transformer) and len({parameter.dtype for parameter in named.values()}) > 1:
        kinds = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in named.values()}))
        raise UserError(f"{where} mixes parameters of {kinds}, which can't be split as one; make a module of each kind")


def _refuse_hooks(module: nn.Module) -> None:
    hooked = [name for name, p in module.named_parameters() if getattr(p, "_backward_hooks", None)]
    if hooked:
        raise UserError(
            f"{type(module).__name__}: the hook on the gradient of {hooked[0]} would never run on a split parameter; "
            "use register_post_accumulate_grad_hook after super().configure_model(), or on_before_optimizer_step"
        )


def _refuse_other_layout(unit: nn.Module, sharding: Sharding) -> None:
    if not isinstance(unit, Transformer):  # split by its owner, who knows why
        return
    other = [p.device_mesh for p in unit.parameters() if is_sharded(p) and p.device_mesh != sharding.mesh]
    if other:
        shapes = [" x ".join(map(str, mesh.shape)) for mesh in (other[0], sharding.mesh)]
        raise UserError(
            f"the model is split {shapes[0]} by another strategy before, and can't be split {shapes[1]} now; build a "
            "new one and load its checkpoint"
        )


def check_optimizer(optimizer: Optimizer, module: nn.Module, shard: int) -> None:
    """Refuses an optimizer that would not, or could not, train the parts of split parameters.

    Raises:
        UserError: see above; the line names the class or the parameter.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for one in optimizer.parts if isinstance(optimizer, ChainedOptimizer) else (optimizer,):
        kind = type(one).__name__
        if kind in _WHOLE_ONLY:
            raise UserError(f"{kind} can't step the parts of split parameters; use adamw, or ddp")
        for group in one.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise UserError(
                        f"{kind} has a parameter of shape {tuple(parameter.shape)} that is none of the model's: it was "
                        "remembered before the model was split; take self.parameters() in configure_optimizers"
                    )
                if not is_sharded(parameter):
                    raise UserError(
                        f"{kind} has {name}, which lies in no module of its own, so its gradient would not be averaged "
                        "once it is trained; put it into a module, or leave it out of the optimizer"
                    )
                if kind == "Muon" and parameter.shape[0] < shard:
                    raise UserError(
                        f"Muon can't step {name} of {parameter.shape[0]} rows on {shard} shards; use fewer shards, or "
                        "adamw"
                    )
