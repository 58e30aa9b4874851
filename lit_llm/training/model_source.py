"""What a LitLLM's model is built from: a configuration, a Hugging Face folder, or the checkpoint that comes next."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_llm.checkpoint.compare import misfits
from lit_llm.checkpoint.find import read_checkpoint
from lit_llm.checkpoint.hf_folder import HFFolder, config_like, open_folder
from lit_llm.checkpoint.pretrained import first_not_finite, load_into
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.model.presets import PRESETS
from lit_llm.training.coming_checkpoint import foretell_checkpoint

if TYPE_CHECKING:
    _Base = L.LightningModule
else:
    _Base = object

DEFAULT_CONFIG = "3m"


class ModelSource(_Base):
    """The part of LitLLM that knows which model is to be built."""

    config_source: str | dict[str, Any] | ModelConfig | None
    pretrained: str | None
    vocab_size: int | None
    seq_len: int | None
    seed: int
    tokenizer: Tokenizer | None
    _no_tokenizer: str
    model: Transformer | nn.Module | None
    hf_generation: dict[str, Any] | None = None
    """Keys of the generation_config.json that the model came with."""
    _hf_folder: HFFolder | None = None
    _checkpoint_config: dict[str, Any] | None = None  # of the checkpoint that is loaded
    _were_filled = False  # whether the model has got its first values here
    _weights_come = False  # whether they are but drawn, since a checkpoint is to bring others

    @property
    def trainer(self) -> L.Trainer:
        """The Trainer that runs this module. RuntimeError without one."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        foretell_checkpoint(trainer)
        L.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    def resolve_config(self) -> ModelConfig:
        """The model's configuration, with what the data knows filled in.

        Raises:
            UserError: a vocabulary or context that contradicts the data, no vocabulary at all, or fields that do not
                fit the pretrained weights.
        """
        weights = None if self.pretrained is None else self._config_of_weights()
        filled: dict[str, Any] = {}
        if self.vocab_size is not None:
            filled["vocab_size"] = self.vocab_size
        if self.seq_len is not None:
            filled["max_position_embeddings"] = self.seq_len
        config = ModelConfig.from_dict(self._fields(weights), **filled)
        if weights is not None:
            self._refuse_other_shapes(weights, config)
        if self.vocab_size is not None and self.vocab_size > config.vocab_size:
            if weights is not None and self._loads_checkpoint:
                return config  # which the tokenizer is compared with when it is loaded
            if weights is not None:
                raise UserError(
                    f"data.store has {self.vocab_size} ids, the pretrained head of {self.pretrained} "
                    f"{config.vocab_size}; prepare the text with its tokenizer: --tokenizer {self.pretrained}"
                )
            raise UserError(
                f"model.config.vocab_size {config.vocab_size} is smaller than the data's {self.vocab_size} ids; raise "
                "it or leave it out, it is taken from data.store"
            )
        if self.vocab_size is not None and self.vocab_size < config.vocab_size and config.unpadded_vocab_size is None:
            config = dataclasses.replace(config, unpadded_vocab_size=self.vocab_size)
        if self.seq_len is not None and self.seq_len > config.max_position_embeddings:
            raise UserError(
                f"data.seq_len {self.seq_len} is longer than model.config.max_position_embeddings "
                f"{config.max_position_embeddings}; shorten the rows or raise the model's context"
            )
        if self.tokenizer is not None and config.eos_token_id is None:
            eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
            config = dataclasses.replace(config, eos_token_id=eos, bos_token_id=bos)
        return config

    def _fields(self, weights: dict[str, Any] | None) -> dict[str, Any]:
        """What is said of the model; on top of what its weights are, where it has some."""
        source = self.config_source
        if source is None:
            source = {} if weights is not None else DEFAULT_CONFIG
        source = {"preset": source} if isinstance(source, str) else source
        fields = source.to_dict() if isinstance(source, ModelConfig) else dict(source)
        if "preset" in fields:
            name = fields.pop("preset")
            like = config_like(name)
            if name in PRESETS:  # whose vocabulary and context are but examples
                if self.vocab_size is not None:
                    like["vocab_size"] = self.vocab_size
                like["max_position_embeddings"] = max(like["max_position_embeddings"], self.seq_len or 0)
            fields = {**like, **fields}
        return {**(weights or {}), **fields}

    def _refuse_other_shapes(self, weights: dict[str, Any], config: ModelConfig) -> None:
        changed, shapes = misfits(weights, config)
        if shapes:
            told = "; ".join(f"{name} {changed[name][1]} is {changed[name][0]} there" for name in sorted(shapes))
            raise UserError(f"model.config does not fit the weights of {self.pretrained}: {told}; leave it out")

    # The weights

    def _config_of_weights(self) -> dict[str, Any]:
        """Of the checkpoint that is loaded, whose folder may be gone by now, or else of the pretrained folder."""
        if self._loads_checkpoint and self._checkpoint_config is None:
            with suppress(UserError):  # which Lightning will tell
                saved = read_checkpoint(self._trainer.ckpt_path).get("lit_llm")  # type: ignore[union-attr, arg-type]
                self._checkpoint_config = saved.get("config") if isinstance(saved, dict) else None
        if self._checkpoint_config is not None:
            return self._checkpoint_config
        return self._folder.weights.config.to_dict()

    @property
    def _loads_checkpoint(self) -> bool:
        """Whether all weights are replaced before they are used; a checkpoint may hold a part of them otherwise."""
        coming = self._trainer is not None and getattr(self._trainer, "ckpt_path", None) is not None
        return self.strict_loading and (coming or self._checkpoint_config is not None)

    @property
    def _folder(self) -> HFFolder:
        """The pretrained folder, opened once."""
        assert self.pretrained is not None
        if self._hf_folder is None:
            self._hf_folder = open_folder(self.pretrained)
        return self._hf_folder

    def _reads_folder(self) -> bool:
        """Whether the model's weights come from the pretrained folder."""
        return self.pretrained is not None and self.model is None and not self._loads_checkpoint

    def fill_weights(self, model: Transformer) -> None:
        """Gives a model whose parameters are allocated its first values: the pretrained folder's, or drawn ones.

        For a ``configure_model`` of one's own, which makes the model by itself.

        Raises:
            UserError: weights that are NaN or infinite.
        """
        self._were_filled, self._weights_come = True, self.pretrained is not None and self._loads_checkpoint
        if self.pretrained is None or self._weights_come:
            model.init_weights(self.seed)
            return
        load_into(model, self._folder.weights)
        self._refuse_damaged(model)
        rank_zero_info(f"weights: {self.pretrained}")
        self.hf_generation = self._folder.generation
        self._hf_folder = None  # with its open files

    def _refuse_damaged(self, model: Transformer) -> None:
        """Weights that are no numbers would skip step after step; all processes learn of one that has some."""
        mine = first_not_finite(model)
        found = [mine]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            found = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(found, mine)
        if name := next(filter(None, found), None):
            raise UserError(
                f"{self.pretrained}: {name} holds NaN or infinity, so the weights are damaged; fetch them anew"
            )

    def _drop_unfilled(self) -> None:
        """Forgets a model whose weights were to come from a checkpoint that then could not be loaded."""
        if self._weights_come and self.model is not None:
            self.model, self._weights_come, self._were_filled = None, False, False

    def _refuse_unread(self) -> None:
        """A folder that a ``configure_model`` of one's own has passed over would be missed only in the losses."""
        if self.pretrained is not None and not self._were_filled:
            raise UserError(
                f"{type(self).__name__}.configure_model makes a model without the weights of pretrained "
                f"{self.pretrained}; call super().configure_model(), or self.fill_weights(model)"
            )

    # The tokenizer

    def _take_folder_tokenizer(self, data: Any = None, *, prompts: bool) -> None:
        """The pretrained folder's tokenizer comes before the store's, which must be the same where it is trained on.

        Args:
            data: a datamodule, if any.
            prompts: only prompts are read from it, no tokens.

        Raises:
            UserError: the store has another one.
        """
        if not self._reads_folder():
            return
        own = self._folder.tokenizer
        if own is None:
            self._no_tokenizer = (
                f"{self.pretrained} holds no tokenizer (tokenizer.json), so there is no text to make; put one into it"
            )
            if not prompts and getattr(data, "tokenizer", None) is not None:
                rank_zero_info(
                    f"{self.pretrained} holds no tokenizer, so that of data.store can't be compared with the model's"
                )
            return
        self.tokenizer = own
        # A tokenizer may have ids beyond the head, of tokens that this model was never to see (Gemma 3's for images).
        known = min(own.vocab_size, self._folder.config.vocab_size)
        if prompts:
            self.vocab_size = known
            return
        theirs = getattr(data, "tokenizer", None)
        if theirs is None:
            self.vocab_size = self.vocab_size or known
            return
        if theirs.fingerprint != own.fingerprint:
            raise UserError(
                f"data.store was prepared with another tokenizer ({theirs.vocab_size} ids) than that of "
                f"{self.pretrained} ({own.vocab_size} ids); prepare the text with it: --tokenizer {self.pretrained}"
            )
        self.vocab_size = known
