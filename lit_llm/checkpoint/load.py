"""A Transformer and its tokenizer out of what a run left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_llm.checkpoint.average import Average, averaged_weights, plain_name
from lit_llm.checkpoint.find import CHECKPOINTS, SUFFIX, Found, find_checkpoint, list_checkpoints
from lit_llm.checkpoint.hf_folder import HFFolder, is_hf_folder, is_hub_name, model_of, open_folder
from lit_llm.checkpoint.marker import is_folder_checkpoint
from lit_llm.checkpoint.pretrained import Pretrained
from lit_llm.checkpoint.stored import Stored
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer

PREFIX = "model."
logger = logging.getLogger(__name__)


def load_model(
    source: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    """The model of a run, of a checkpoint or of a Hugging Face folder, ready to generate, with its tokenizer.

    The weights are the averaged ones where the run validated with them (WeightAverage).

    Args:
        source: a run's folder, whose checkpoint completed last is taken; a checkpoint: a file, or the folder of a
            sharded one; or a Hugging Face folder, or ``org/model`` of the hub.
        device: where the weights go; None: the first GPU, else the CPU.
        dtype: of the weights; None: as they were saved.

    Raises:
        UserError: nothing there, a truncated or foreign checkpoint, no tokenizer in it, or other tensors than its
            configuration asks for.
    """
    opened = open_weights(source)
    path, weights = opened.path, opened.weights
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(weights, Pretrained):
        if opened.tokenizer is None:
            raise UserError(f"{path} holds no tokenizer (tokenizer.json), so there is no text to make; put one into it")
        model, tokenizer = model_of(weights, dtype, target), Tokenizer.from_files(opened.tokenizer)
        config = model.config
        if config.unpadded_vocab_size is None and tokenizer.vocab_size < config.vocab_size:
            model.config = replace(config, unpadded_vocab_size=tokenizer.vocab_size)  # no id without a text
        return model.requires_grad_(False), tokenizer
    if opened.tokenizer is None:
        raise UserError(f"{path} holds no tokenizer: it was trained on data without one, so there is no text to make")
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(opened.config))
    _check_names(path, weights, model)
    read = {name: _moved(weights.read(name), target, dtype) for name in weights.names()}
    model.load_state_dict(read, assign=True)
    return model.eval().requires_grad_(False), Tokenizer.from_files(opened.tokenizer)


class Weights:
    """The Transformer's tensors in a checkpoint, under its own names, each read when it is asked for.

    They are the averaged ones where the run validated with them (WeightAverage).

    Args:
        content: of a checkpoint, as :func:`lit_llm.checkpoint.find.read_checkpoint` gives it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._saved = content["state_dict"]
        self._averaged: Mapping[str, torch.Tensor] = averaged_weights(content) or {}
        names = [*self._saved, *(name for name in self._averaged if name not in self._saved)]
        self._names = {plain_name(name).removeprefix(PREFIX): name for name in names if name.startswith(PREFIX)}

    def names(self) -> list[str]:
        """Of all tensors, as in ``Transformer.state_dict()``."""
        return list(self._names)

    def shape(self, name: str) -> torch.Size:
        """Of a tensor, without reading it."""
        source, saved = self._found(name)
        return source.shape(saved) if isinstance(source, (Stored, Average)) else torch.Size(source[saved].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, without reading it."""
        source, saved = self._found(name)
        return source.dtype(saved) if isinstance(source, (Stored, Average)) else source[saved].dtype

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU; of a file it is mapped, and must not be changed."""
        source, saved = self._found(name)
        return source[saved]

    def _found(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Where a tensor is, and under which name."""
        saved = self._names[name]
        return (self._averaged if saved in self._averaged else self._saved), saved


class Opened(NamedTuple):
    """A checkpoint or a Hugging Face folder whose weights have not been read yet.

    Attributes:
        config: fields of the model's configuration.
        tokenizer: its files, name to text; None: it has none.
        weights: the tensors.
        path: of the file, or of the folder.
        generation: keys of the generation_config.json that the model came with; None: it came with none.
    """

    config: dict[str, Any]
    tokenizer: dict[str, str] | None
    weights: Weights | Pretrained
    path: Path
    generation: dict[str, Any] | None = None


def open_weights(source: str | Path) -> Opened:
    """The model of a checkpoint or a Hugging Face folder, to be read tensor by tensor, without any optimizer's state.

    Args:
        source: as of :func:`load_model`.

    Raises:
        UserError: nothing there, a truncated or foreign checkpoint, or one of another model.
    """
    opened = _open(source)
    if isinstance(opened, HFFolder):
        files = None if opened.tokenizer is None else opened.tokenizer.to_files()
        return Opened(opened.weights.config.to_dict(), files, opened.weights, opened.path, opened.generation)
    path, content = opened.path, opened.content
    config, files = describe(content, path)
    if config is None:
        raise UserError(f"{path} holds another model than lit_llm's Transformer; load it with its own LightningModule")
    return Opened(config, files, Weights(content), path, content["lit_llm"].get("generation_config"))


def describe(content: Mapping[str, Any], path: str | Path) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
    """The model's configuration and the tokenizer's files in a checkpoint; None for what it lacks.

    Raises:
        UserError: a checkpoint that LitLLM did not write.
    """
    saved = content.get("lit_llm")
    if not isinstance(saved, dict):
        raise UserError(
            f"{path} is a checkpoint of another program: it has no lit_llm section; give one that `lit-llm fit` wrote"
        )
    return saved.get("config"), saved.get("tokenizer")


def _open(given: str | Path) -> Found | HFFolder:
    source = Path(given)
    if is_hub_name(given):
        return open_folder(given)
    if not source.exists():
        raise UserError(
            f"there is nothing at {source}; give a run's folder, a checkpoint, or a Hugging Face folder (or a name on "
            "the hub, org/model)"
        )
    if source.is_file() and (source.suffix == ".safetensors" or is_hf_folder(source)):
        raise UserError(f"{source} is a part of a Hugging Face folder; give the folder, {source.parent}")
    is_run = source.is_dir() and ((source / CHECKPOINTS).is_dir() or source.suffix != SUFFIX)
    if is_run and is_hf_folder(source) and not list_checkpoints(source):
        return open_folder(source)
    if not is_run or is_folder_checkpoint(source):
        found = find_checkpoint(".", str(source))
    else:
        run = source.parent if source.name == CHECKPOINTS and not list_checkpoints(source) else source
        found = find_checkpoint(run, "last")
        if found is None and (any(source.glob("*.safetensors")) or (source / "adapter_config.json").is_file()):
            return open_folder(source)  # which says what is missing
        if found is None:
            raise UserError(
                f"no checkpoint in {run / CHECKPOINTS}; train one by `lit-llm fit`, or give a checkpoint or a Hugging "
                "Face folder (with config.json)"
            )
    assert found is not None
    for line in found.skipped:
        logger.warning("passed over: %s", line)
    return found


def _check_names(path: Path, weights: Weights, model: Transformer) -> None:
    wanted, there = model.state_dict(), weights.names()
    missing, unexpected = sorted(set(wanted) - set(there)), sorted(set(there) - set(wanted))
    if missing or unexpected:
        what = [
            f"{len(names)} {kind} tensors, such as {PREFIX}{names[0]}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UserError(f"{path} does not fit its own configuration: {'; '.join(what)}; is it of a subclass of LitLLM?")
    for name in there:
        if weights.shape(name) != wanted[name].shape:
            raise UserError(
                f"{path} does not fit its own configuration: {PREFIX}{name} is {tuple(weights.shape(name))}, not "
                f"{tuple(wanted[name].shape)}"
            )


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
