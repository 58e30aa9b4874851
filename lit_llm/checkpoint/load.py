"""A Transformer and its tokenizer out of what a run left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_llm.checkpoint.average import averaged_weights, plain_name
from lit_llm.checkpoint.find import CHECKPOINTS, find_checkpoint, list_checkpoints
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer

PREFIX = "model."


def load_model(
    source: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    """The model of a run or of a checkpoint, ready to generate, with the tokenizer it was trained with.

    The weights are the averaged ones where the run validated with them (WeightAverage).

    Args:
        source: a run's folder, whose checkpoint completed last is taken, or a checkpoint file.
        device: where the weights go; None: the first GPU, else the CPU.
        dtype: of the weights; None: as they were saved.

    Raises:
        UserError: nothing there, a truncated or foreign checkpoint, no tokenizer in it, or other tensors than its
            configuration asks for.
    """
    path, content = _open(Path(source))
    config, files = describe(content, path)
    if config is None:
        raise UserError(f"{path} holds another model than lit_llm's Transformer; load it with its own LightningModule")
    if files is None:
        raise UserError(f"{path} holds no tokenizer: it was trained on data without one, so there is no text to make")
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(config))
    named = {**content["state_dict"], **(averaged_weights(content) or {})}
    weights = {plain_name(name).removeprefix(PREFIX): t for name, t in named.items() if name.startswith(PREFIX)}
    _check_names(path, weights, model)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.load_state_dict({name: _moved(t, target, dtype) for name, t in weights.items()}, assign=True)
    return model.eval().requires_grad_(False), Tokenizer.from_files(files)


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


def _open(source: Path) -> tuple[Path, dict[str, Any]]:
    if not source.is_dir():
        found = find_checkpoint(".", str(source))
    else:
        run = source.parent if source.name == CHECKPOINTS and not list_checkpoints(source) else source
        found = find_checkpoint(run, "last")
        if found is None and (source / "config.json").exists():
            raise UserError(f"{source} looks like a Hugging Face folder; reading those is not there yet")
        if found is None:
            raise UserError(f"no checkpoint in {run / CHECKPOINTS}; train one by `lit-llm fit`, or give a file")
    assert found is not None
    return found.path, found.content


def _check_names(path: Path, weights: Mapping[str, torch.Tensor], model: Transformer) -> None:
    wanted = model.state_dict()
    missing, unexpected = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or unexpected:
        what = [
            f"{len(names)} {kind} tensors, such as {PREFIX}{names[0]}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UserError(f"{path} does not fit its own configuration: {'; '.join(what)}; is it of a subclass of LitLLM?")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{path} does not fit its own configuration: {PREFIX}{name} is {tuple(tensor.shape)}, not "
                f"{tuple(wanted[name].shape)}"
            )


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
