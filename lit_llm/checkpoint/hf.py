"""Hugging Face folders out of what a run left, or out of a Transformer in memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_llm.checkpoint.families import Family, family_of
from lit_llm.checkpoint.families.layout import Theirs, shapes_of
from lit_llm.checkpoint.hf_tokenizer import tokenizer_files
from lit_llm.checkpoint.model_weights import ModelWeights
from lit_llm.checkpoint.tensor_files import INDEX_FILE, Planned, write_shards
from lit_llm.data.conversation import turn_end_ids
from lit_llm.data.new_folder import new_folder
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.tokenizer_json import CARRIED_FILES, TEMPLATE_FILE
from lit_llm.data.tokenizer_json import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer

MAX_SHARD_SIZE = "5GB"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# The version whose configurations these are. transformers 5 warns of every Mistral tokenizer without one.
_TRANSFORMERS = "5.0.0"
# In config.json, with the number of this format: the folder is an export, which a later one may replace.
_MARK = "lit_llm_export"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Weights(Protocol):
    """Named tensors that are read one at a time; the names are those of a Transformer's parameters."""

    def names(self) -> list[str]:
        """All of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, without reading it."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        folder: there.
        architecture: the model class of transformers that loads it.
        parameters: their number, a tied head counted once.
        dtype: of the widest weights.
        files: of weights.
        bytes: of weights.
        tokenizer: whether its files are there, and
        chat_template: whether they have one.
    """

    folder: Path
    architecture: str
    parameters: int
    dtype: torch.dtype
    files: int
    bytes: int
    tokenizer: bool
    chat_template: bool


def export(
    weights: Weights,
    config: ModelConfig,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    generation: Mapping[str, Any] | None = None,
    chatml: bool = True,
    turn_ends: bool = True,
) -> Exported:
    """Writes a folder that transformers' ``from_pretrained`` loads: weights, configurations and tokenizer.

    One tensor is in memory at a time. The folder takes its name when it is complete; an earlier export of that name is
    replaced as a whole. A padded vocabulary keeps its rows, as most published models do; config.json says
    ``unpadded_vocab_size``, and generation_config.json tells transformers to generate none of the padding's ids.

    Args:
        weights: of a Transformer of this configuration.
        config: of the model.
        folder: is made; or empty, or an earlier export.
        tokenizer: whose files go with it, and whose ids the configuration takes where it has none.
        dtype: of the weights; None: as they are.
        max_shard_size: bytes of weights in a file, or text such as ``5GB`` (10^9 bytes) or ``500MiB``.
        generation: keys of the generation_config.json that the model came with, which are passed on.
        chatml: whether a tokenizer without a chat template gets the one that lit-llm renders chats by, ChatML, where it
            has the tokens; the model then ends where a turn does.
        turn_ends: whether transformers' generate is told to end where the template ends a turn, beside the model's EOS.
            False, as ``chatml``, for what was not trained here.

    Raises:
        UserError: no family has such a model, tensors that do not fit the configuration, values that ``dtype`` cannot
            hold, or a folder that can't be written.
    """
    max_bytes = shard_bytes(max_shard_size)
    family = family_of(config)
    _check(weights, config)
    theirs = family.tensors(config)
    planned = []
    for name, one in theirs.items():
        own = reduce(torch.promote_types, (weights.dtype(segment.ours) for segment in one.segments))
        planned.append(Planned(name, one.shape, dtype if dtype is not None and own.is_floating_point else own))
    assemble = _Assembly(weights)
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in planned))
    with new_folder(Path(folder), check_output, "lit-llm export") as fresh:
        texts = {} if tokenizer is None else tokenizer_files(tokenizer, chatml)
        for name, text in texts.items():
            (fresh / name).write_bytes(text.encode("utf-8"))
        speaker = tokenizer if turn_ends and tokenizer is not None and (chatml or tokenizer.chat_template) else None
        for name, content in _configurations(family, config, tokenizer, widest, generation, speaker).items():
            (fresh / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        files = write_shards(fresh, planned, max_bytes, lambda tensor: assemble(theirs[tensor.name], tensor.dtype))
    return Exported(
        Path(folder),
        family.architecture,
        sum(tensor.bytes // tensor.dtype.itemsize for tensor in planned),
        widest,
        files,
        sum(tensor.bytes for tensor in planned),
        tokenizer is not None,
        TEMPLATE_FILE in texts or "chat_template" in json.loads(texts.get(TOKENIZER_CONFIG_FILE, "{}")),
    )


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    generation: Mapping[str, Any] | None = None,
    chatml: bool | None = None,
) -> Exported:
    """:func:`export` of a Transformer in memory.

    Where its weights are spread over processes all of them call it; the first one writes, to which the others send
    tensor after tensor, and all return when the folder is there.

    Args:
        model: whose weights go out.
        folder, tokenizer, dtype, max_shard_size, generation: as there.
        chatml: as there; None: for a model that came from no other folder.

    Raises:
        UserError: as there, on all processes; and a model on the meta device.
    """
    chatml = model.config.model_type is None if chatml is None else chatml
    weights = ModelWeights(model)
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "generation": generation}
    options["chatml"] = chatml
    return weights.together(lambda: export(weights, model.config, folder, tokenizer, **options))


def shard_bytes(size: int | str) -> int:
    """Bytes out of a number or of a text such as ``5GB``, ``500MiB``.

    Raises:
        UserError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    number = 0 if found is None else int(float(found.group(1)) * _UNITS.get(found.group(2).upper(), 0))
    if number < 1 or isinstance(size, bool):
        raise UserError(f"max_shard_size {size!r} is no size of a file; give one such as 5GB or 500MB")
    return number


class _Assembly:
    """Makes their tensors out of ours.

    What one of theirs was made of is kept for the next one: experts are stacked in ours and single tensors in theirs.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._held: dict[str, Tensor] = {}

    def __call__(self, theirs: Theirs, dtype: torch.dtype) -> Tensor:
        needed = {segment.ours for segment in theirs.segments}
        self._held = {name: tensor for name, tensor in self._held.items() if name in needed}
        for name in needed - set(self._held):
            self._held[name] = self._weights.read(name)
        parts = []
        for segment in theirs.segments:
            source = self._held[segment.ours]
            source = source if segment.index is None else source[segment.index]
            parts.append(_converted(source[segment.start : segment.stop], dtype, segment.ours))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.T.contiguous() if theirs.transposed else rows


def _check(weights: Weights, config: ModelConfig) -> None:
    wanted = shapes_of(config)
    names = weights.names()
    for kind, differ in (("missing", set(wanted) - set(names)), ("unexpected", set(names) - set(wanted))):
        if differ:
            raise UserError(
                f"the weights do not fit their configuration: {len(differ)} {kind} tensors, such as {min(differ)}; are "
                "they of a subclass of LitLLM?"
            )
    for name, shape in wanted.items():
        if weights.shape(name) != shape:
            raise UserError(f"the weights do not fit their configuration: {name} is {weights.shape(name)}, not {shape}")


def _converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    new = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not new.isfinite().all():
        large = tensor[tensor.isfinite() & ~new.isfinite()]
        if large.numel():
            raise UserError(
                f"{name} holds {large.abs().max().item():.4g}, more than --dtype {str(dtype).removeprefix('torch.')} "
                f"can ({torch.finfo(dtype).max:.4g}); give bfloat16 or leave it out"
            )
    return new


def _configurations(
    family: Family,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    carried: Mapping[str, Any] | None,
    speaker: Tokenizer | None,
) -> dict[str, dict[str, Any]]:
    ids: dict[str, Any] = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    ids["pad_token_id"] = None  # said even so: some families have one by default, beyond a small vocabulary
    for name in ids if tokenizer is not None else ():
        ids[name] = getattr(tokenizer, name) if ids[name] is None else ids[name]
    if isinstance(ids["eos_token_id"], tuple):
        ids["eos_token_id"] = list(ids["eos_token_id"])
    word = str(dtype).removeprefix("torch.")
    keys = {**family.config_json(config), **ids, "dtype": word, "torch_dtype": word, "use_cache": True}
    keys |= {"transformers_version": _TRANSFORMERS, _MARK: 1}
    own = {**ids, "eos_token_id": _ends(ids["eos_token_id"], speaker), "transformers_version": _TRANSFORMERS}
    generation = dict(carried or {})
    generation.pop("_from_model_config", None)  # else transformers takes config.json's word for it
    generation |= {name: value for name, value in own.items() if value is not None or name not in generation}
    padding = list(range(config.generated_vocab_size, config.vocab_size))
    if padding:
        keys["unpadded_vocab_size"] = config.unpadded_vocab_size
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or ()), *padding})
    return {CONFIG_FILE: keys, GENERATION_FILE: generation}


def _ends(eos: int | list[int] | None, speaker: Tokenizer | None) -> int | list[int] | None:
    """Where transformers' generate ends: the model's EOS, and what ends a turn, as `lit-llm predict` with chats."""
    own = [eos] if isinstance(eos, int) else eos or []
    with suppress(UserError):  # a template that renders no chat
        own = [*own, *(i for i in (turn_end_ids(speaker) if speaker is not None else []) if i not in own)]
    return own[0] if len(own) == 1 else own or None


def check_output(target: Path) -> None:
    """Refuses a place that an export must not take.

    Raises:
        UserError: a file, a mount point, or a folder with anything in it but an earlier export.
    """
    try:
        if os.path.ismount(target):
            raise UserError(f"{target} is a mount point, which cannot be replaced; choose a folder in it")
        if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
            return
        if not target.is_dir():
            raise UserError(f"{target} is a file; choose another folder (--output)")
        names = sorted(path.name for path in target.iterdir())
        text = (target / CONFIG_FILE).read_text(encoding="utf-8") if CONFIG_FILE in names else "{}"
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot write {target}: {error}; choose another folder (--output)") from error
    if _MARK not in text:
        raise UserError(f"{target} is not empty and no earlier export, so left alone; choose another folder (--output)")
    ours = {CONFIG_FILE, GENERATION_FILE, INDEX_FILE, *CARRIED_FILES}
    foreign = [name for name in names if name not in ours and not re.fullmatch(r"model[-\w]*\.safetensors", name)]
    if foreign:
        raise UserError(
            f"{target} is an export that holds {foreign[0]!r} too; move it away or choose another folder (--output)"
        )
