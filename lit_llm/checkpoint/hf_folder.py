"""Hugging Face folders in: a model of any known architecture, out of config.json and safetensors."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lit_llm.checkpoint.families import Family, config_of, family_from
from lit_llm.checkpoint.hub import is_hub_name, resolve
from lit_llm.checkpoint.pretrained import Pretrained, load_into
from lit_llm.checkpoint.tensor_folder import TensorFolder
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.tokenizer_files import holds_tokenizer
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.model.config import preset_fields
from lit_llm.model.presets import PRESETS

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_OF_THE_TOKENIZER = ("unpadded_vocab_size", "bos_token_id", "eos_token_id")
logger = logging.getLogger(__name__)

__all__ = [
    "HFFolder",
    "config_from_hf",
    "config_like",
    "from_pretrained",
    "is_hf_folder",
    "is_hub_name",
    "load_into",
    "model_of",
    "open_folder",
    "resolve",
]


@dataclass(frozen=True)
class HFFolder:
    """A folder as transformers' ``save_pretrained`` writes it.

    Args:
        path: of it.
        keys: of config.json.
        generation: keys of generation_config.json; None without one.
    """

    path: Path
    keys: dict[str, Any]
    generation: dict[str, Any] | None

    @cached_property
    def family(self) -> Family:
        """Which its model is of. UserError for an unknown one."""
        return family_from(self.keys)

    @cached_property
    def config(self) -> ModelConfig:
        """What config.json says, without a look at the weights; ids of BOS and EOS as generation_config.json has them.

        Raises:
            UserError: an architecture or a value that our Transformer does not cover; it is named.
        """
        ids: dict[str, Any] = {"unpadded_vocab_size": self.keys.get("unpadded_vocab_size")}
        for name in ("bos_token_id", "eos_token_id"):
            said = (self.generation or {}).get(name)
            ids[name] = self.keys.get(name) if said is None else said
        try:
            return replace(config_of(self.keys), **ids)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from error

    @cached_property
    def tensors(self) -> TensorFolder:
        """All tensors, by their names."""
        return TensorFolder(self.path)

    @cached_property
    def weights(self) -> Pretrained:
        """The tensors by ours, checked against the configuration.

        Files may have a head of their own though config.json ties it. Where it differs from the embedding the model is
        taken as untied, as transformers 5 does.

        Raises:
            UserError: no safetensors files, or ones that do not fit.
        """
        weights = self._weights(self.config)
        if not weights.same_head():
            logger.warning(
                "%s: config.json ties the head to the embedding, but the files have another one, which is taken",
                self.path,
            )
            weights = self._weights(replace(self.config, tie_word_embeddings=False))
        return weights

    def _weights(self, config: ModelConfig) -> Pretrained:
        names = self.family.names_in(self.tensors, config)
        return Pretrained(self.tensors, self.family.tensors(config, names), config, f"{names.head}.weight")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None where no file of one is there. UserError for a broken one."""
        return Tokenizer(self.path) if holds_tokenizer(self.path) else None


def is_hf_folder(path: str | Path) -> bool:
    """Whether it is a folder with a config.json, or such a file."""
    path = Path(path)
    return (path / CONFIG_FILE).is_file() or (path.suffix == ".json" and path.is_file())


def open_folder(source: str | Path, *, weights: bool = True) -> HFFolder:
    """A Hugging Face folder, of which only the small files have been read.

    Args:
        source: as of :func:`lit_llm.checkpoint.hub.resolve`.
        weights: whether those will be asked for.

    Raises:
        UserError: no such folder, or no valid config.json in it.
    """
    path = resolve(source, weights=weights)
    if not (path / CONFIG_FILE).is_file() and (path / "adapter_config.json").is_file():
        TensorFolder(path)  # which refuses it
    config = path / CONFIG_FILE
    if Path(source).is_file() and Path(source).name != CONFIG_FILE:
        config = Path(source)
    if not config.is_file():
        ours = path.suffix == ".ckpt" or (path / "checkpoints").is_dir()
        way = f"; `lit-llm export {path} --output FOLDER` makes one of it" if ours else ""
        raise UserError(f"{path} is no Hugging Face folder: it has no {CONFIG_FILE}{way}")
    keys = _read(config)
    if not keys or "model_type" not in keys:
        raise UserError(f"{path} looks like a Hugging Face folder, but its config.json names no model_type")
    return HFFolder(path, keys, _read(path / GENERATION_FILE))


def config_from_hf(source: str | Path) -> ModelConfig:
    """The configuration of a folder, of a config.json or of a name of the hub.

    Raises:
        UserError: nothing there, or a model that our Transformer does not cover; it is named.
    """
    return open_folder(source, weights=False).config


def config_like(name: str) -> dict[str, Any]:
    """Fields of ModelConfig for a model like a preset's, or like a Hugging Face folder's, a config.json's or a hub's.

    What such a folder says of its tokenizer is left out: a new model gets the data's.

    Raises:
        UserError: nothing of the kind is called so.
    """
    if name in PRESETS or not (Path(name).exists() or is_hub_name(name)):
        return preset_fields(name)
    fields = config_from_hf(name).to_dict()
    return {name: value for name, value in fields.items() if name not in _OF_THE_TOKENIZER}


def from_pretrained(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    device: str | torch.device | None = None,
    attention_backend: str = "auto",
) -> Transformer:
    """The model of a folder, in evaluation mode (no dropout until ``train()``).

    Tensors are read one by one into the memory of the model's, so that no second copy of them is ever held.

    Args:
        source: a folder with config.json and safetensors, or ``org/model[@revision]`` of the hub.
        dtype: of the weights, also by its name (``bfloat16``); None: as in the files, the widest where they differ.
        device: where they go; None: torch's default device.
        attention_backend: of :func:`lit_llm.ops.attention`.

    Raises:
        UserError: no such folder, a model that our Transformer does not cover, or files that do not fit it.
    """
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise UserError(f"dtype {dtype!r} is none of weights; give float32, bfloat16, float16 or None")
    return model_of(open_folder(source).weights, named, device, attention_backend)


def model_of(
    weights: Pretrained,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention_backend: str = "auto",
) -> Transformer:
    """The model of opened weights; see :func:`from_pretrained`."""
    target = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        model = Transformer(weights.config, attention_backend=attention_backend)
    model.to(weights.widest if dtype is None else dtype).to_empty(device=target)
    if target.type != "meta":
        load_into(model, weights)
    return model.eval()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content
