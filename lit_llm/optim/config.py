"""What a run says about its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lit_llm.errors import UserError
from lit_llm.optim.checks import as_float, as_int

NAMED = ("adamw", "muon")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings. Numbers may be given as text ("3e-4").

    Attributes:
        name: "adamw" (Loshchilov and Hutter 2019); "muon" (Liu et al. 2025) for the hidden matrices with AdamW for all
            else; or the path of an optimizer class, such as torch.optim.SGD.
        lr: the peak learning rate; the schedule multiplies it.
        weight_decay: of the matrices; norm gains, biases and embeddings have none. What it means is the class's affair
            (decoupled in AdamW and Muon, added to the gradient in SGD). A class that takes none gets none: the
            default is dropped, any other value but 0 refused.
        betas: AdamW's decay rates of the running means of the gradient and of its square, in [0, 1).
        eps: AdamW's, added to the root of the mean square.
        fused: one kernel for the whole update; None takes it for torch's AdamW, Adam and SGD where the parameters'
            device has it. Muon has none: with it this is about its AdamW part.
        options: further arguments: of the class given by path, of AdamW (amsgrad), or of torch.optim.Muon (ns_steps).
        embedding_lr_ratio: rate of the embeddings, a tied head among them, relative to lr.
        width_base: the width at which lr was tuned; None: no scaling. The rate of the hidden matrices and of an untied
            head is lr x width_base / width (Yang et al. 2022, Tensor Programs V, table 3, Adam), the width that of the
            token embedding. Initial weights and the scale of attention stay as the model has them. The rule is Adam's:
            a class given by path should have updates whose size does not follow the gradient's. Not with muon, whose
            updates have their own size already.
        muon_momentum: decay rate of Muon's running mean of the gradient, in [0, 1).

    Raises:
        UserError: a value that is not as described, or one that the optimizer has no use for.
    """

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fused: bool | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    embedding_lr_ratio: float = 1.0
    width_base: int | None = None
    muon_momentum: float = 0.95

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or (self.name not in NAMED and not _is_path(self.name)):
            raise UserError(
                f"model.optimizer.name must be one of {', '.join(NAMED)} or a class path such as torch.optim.SGD, "
                f"not {self.name!r}"
            )
        for name in ("lr", "weight_decay", "eps", "embedding_lr_ratio"):
            object.__setattr__(self, name, as_float(f"model.optimizer.{name}", getattr(self, name), 0.0))
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise UserError(f"model.optimizer.betas must be two numbers, not {self.betas!r}")
        betas = tuple(
            as_float(f"model.optimizer.betas[{i}]", beta, 0.0, 1.0, below=True) for i, beta in enumerate(self.betas)
        )
        object.__setattr__(self, "betas", betas)
        momentum = as_float("model.optimizer.muon_momentum", self.muon_momentum, 0.0, 1.0, below=True)
        object.__setattr__(self, "muon_momentum", momentum)
        if self.fused is not None and not isinstance(self.fused, bool):
            raise UserError(f"model.optimizer.fused must be true, false or null, not {self.fused!r}")
        if self.width_base is not None:
            object.__setattr__(self, "width_base", as_int("model.optimizer.width_base", self.width_base, 1))
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise UserError(f"model.optimizer.options must be a mapping of names to values, not {self.options!r}")
        object.__setattr__(self, "options", dict(self.options))
        self._refuse_the_unused()

    def _refuse_the_unused(self) -> None:
        if self.width_base is not None and self.name == "muon":
            raise UserError(
                f"model.optimizer.width_base {self.width_base} scales Adam's rates; muon sizes its updates by "
                "itself: set it to null"
            )
        if self.name not in NAMED:
            for name in ("betas", "eps"):
                if getattr(self, name) != DEFAULTS[name]:
                    raise UserError(
                        f"model.optimizer.{name} {getattr(self, name)} belongs to adamw and muon; give it to "
                        f"{self.name} as model.optimizer.options.{name}"
                    )
        if self.name != "muon" and self.muon_momentum != DEFAULTS["muon_momentum"]:
            raise UserError(
                f"model.optimizer.muon_momentum {self.muon_momentum} belongs to muon, not to {self.name}; drop it"
            )


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(OptimizerConfig)}


def _is_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))
