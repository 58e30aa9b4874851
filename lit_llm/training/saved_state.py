"""What a LitLLM saves beside its weights, and how it takes a checkpoint."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lit_llm.checkpoint.average import AVERAGE_KEY, averaged_weights, plain_name
from lit_llm.checkpoint.compare import compare_configs
from lit_llm.checkpoint.sharded import read_sharded
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import RunStopped, UserError
from lit_llm.model import Transformer
from lit_llm.training.boundary import StepBoundary
from lit_llm.training.window import StepWindow

if TYPE_CHECKING:
    import lightning as L

    _Base = L.LightningModule
else:
    _Base = object

CHECKPOINT_FORMAT = 1


def agree_on_checkpoint(trainer: Any) -> None:
    """Sees that all ranks go on from one checkpoint.

    Each has looked for itself, and a file may not be visible everywhere yet, or be finished in between.

    Raises:
        RunStopped: on all ranks, where they differ.
    """
    if trainer.world_size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, mine)
    if any(one != found[0] for one in found):
        other = next(rank for rank, one in enumerate(found) if one != found[0])
        told = [f"rank {rank} from {found[rank] or 'none'}" for rank in (0, other)]
        raise RunStopped(
            f"the ranks would go on from different checkpoints, {' and '.join(told)}: one was written in between, or "
            "they do not see the same disk; start again, or name the checkpoint by --ckpt_path PATH"
        )


class SavedState(_Base):
    """The part of LitLLM that deals with checkpoints."""

    model: Transformer | nn.Module | None
    tokenizer: Tokenizer | None
    hf_generation: dict[str, Any] | None
    _checkpoint_config: dict[str, Any] | None
    _weights_come: bool
    _were_filled: bool
    _window: StepWindow
    _boundary: StepBoundary
    _sources: list[tuple[str, str]]
    _tokens_by_store: dict[str, int]

    if TYPE_CHECKING:

        def _all_tokens_by_store(self) -> dict[str, int]: ...

    @property
    def _plain_model(self) -> Transformer | None:
        model = getattr(self.model, "_orig_mod", self.model)
        return model if isinstance(model, Transformer) else None

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; here a folder that MeshStrategy wrote will do as well, its weights whole on the CPU."""
        if not (isinstance(checkpoint_path, str | os.PathLike) and os.path.isdir(checkpoint_path)):
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        names = ("map_location", "hparams_file", "strict", "weights_only")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        own = {name: given.pop(name, None) for name in names}
        if own["hparams_file"] is not None:
            raise UserError("a folder holds its hyperparameters itself; leave hparams_file out")
        folder, safe = os.fspath(checkpoint_path), own["weights_only"] is not False
        content = read_sharded(folder, weights_only=safe, optimizer=False)
        content.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(given)
        module: Any = _load_state(cls, content, strict=own["strict"], **given)
        device = own["map_location"]
        return module if device is None else module.to(device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what generation needs, as plain types, and takes what torch.compile wrote out of the names."""
        checkpoint["state_dict"] = {plain_name(name): t for name, t in checkpoint["state_dict"].items()}
        model = self._plain_model
        config = None if model is None else model.config.to_dict()
        checkpoint["lit_llm"] = {
            "format": CHECKPOINT_FORMAT,
            "config": config,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.to_files(),
            "generation_config": self.hf_generation,
            "trained_tokens": int(self._window.trained_tokens),
            "trained_tokens_by_store": self._all_tokens_by_store(),
            "guard": self._boundary.guard.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the checkpoint's tokenizer, builds the model if needed, and names what does not fit it.

        Outside of fit the averaged weights are taken where fit validated with them.
        """
        if self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            averaged = averaged_weights(checkpoint)
            if averaged is not None:
                rank_zero_info("weights: the average of WeightAverage, by which fit validated")
                checkpoint["state_dict"] = {**checkpoint["state_dict"], **averaged}
        elif AVERAGE_KEY in (checkpoint.get("callbacks") or {}) and not any(
            getattr(one, "state_key", "") == AVERAGE_KEY
            for one in self._trainer.callbacks  # type: ignore[attr-defined]
        ):
            rank_zero_warn(
                "the checkpoint has averaged weights, which this run does not go on with: it has no WeightAverage; add "
                "--trainer.callbacks+=lit_llm.callbacks.WeightAverage to keep them"
            )
        saved = checkpoint.get("lit_llm")
        if saved is None:
            self._fit_names(checkpoint)
            return
        if saved["format"] > CHECKPOINT_FORMAT:
            raise UserError(
                f"the checkpoint has format {saved['format']}, this lit-llm reads up to {CHECKPOINT_FORMAT}"
            )
        if saved["tokenizer"] is not None:
            self.tokenizer = Tokenizer.from_files(saved["tokenizer"])
            self._refuse_other_tokenizer()
        self._checkpoint_config, self._weights_come, self._were_filled = saved["config"], False, True
        self.hf_generation = saved.get("generation_config")
        if self.model is None:
            self.configure_model()
        self._fit_names(checkpoint)
        self._window.trained_tokens = torch.tensor(saved["trained_tokens"], dtype=torch.int64)
        self._tokens_by_store = dict(saved.get("trained_tokens_by_store", {}))
        if "guard" in saved:
            self._boundary.guard.load_state_dict(saved["guard"])
        self._sources, self._window.trained_tokens_by_source = [], None
        model = self._plain_model
        if saved["config"] is not None and model is not None:
            compare_configs(saved["config"], model.config)
            # The model may have been built before its tokenizer was known.
            names = [n for n in ("bos_token_id", "eos_token_id", "unpadded_vocab_size") if n in saved["config"]]
            unknown = {n: saved["config"][n] for n in names if getattr(model.config, n) is None}
            model.config = dataclasses.replace(model.config, **unknown)

    def _fit_names(self, checkpoint: dict[str, Any]) -> None:
        """Weights of a compiled model load into a plain one, and the other way round."""
        mine = {plain_name(name): name for name in self.state_dict()}
        weights = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {mine.get(plain_name(name), name): tensor for name, tensor in weights}

    def _refuse_other_tokenizer(self) -> None:
        """A loss over ids that mean other texts than those the model learned is no figure at all."""
        trainer = self._trainer
        if trainer is None or trainer.predicting:
            return
        theirs, mine = getattr(getattr(trainer, "datamodule", None), "tokenizer", None), self.tokenizer
        if theirs is not None and mine is not None and theirs.fingerprint != mine.fingerprint:
            raise UserError(
                f"the checkpoint was trained with another tokenizer ({mine.vocab_size} ids) than data.store's "
                f"({theirs.vocab_size} ids); give the store it was trained on, or prepare this text with its tokenizer "
                "(--tokenizer, the other store's folder)"
            )
