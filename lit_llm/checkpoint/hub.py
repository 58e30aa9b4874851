"""Where the folder of a model is: on this disk, or fetched from the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lit_llm.errors import UserError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
# Configurations and tokenizers.
_SMALL = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.bpe"]
_FILES = [*_SMALL, "*.safetensors"]
# Folders within, and weights in other formats and precisions than those that config.json speaks of.
_OTHERS = ["*/*", "consolidated*", "*.fp16.safetensors", "*.fp32.safetensors"]
_ELSEWHERE = "a local folder works without the hub"


def is_hub_name(source: str | Path) -> bool:
    """Whether it can only mean ``org/model[@revision]``: nothing on this disk is there, nor could well have been."""
    text = os.fspath(source)
    if os.path.lexists(text) or not _NAME.fullmatch(text):
        return False
    return not os.path.isdir(text.partition("/")[0]) and not text.endswith((".json", ".ckpt", ".safetensors"))


def resolve(source: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model; a local one first, else it is fetched, or taken from the hub's cache.

    Args:
        source: a folder, the config.json in one, or ``org/model[@revision]`` of the hub.
        weights: fetch them too, and not the configuration and the tokenizer alone.

    Raises:
        UserError: no such folder, or the hub has none, or doesn't answer.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".json":
            return path.parent
        raise UserError(f"{source} is a file; give the Hugging Face folder that holds config.json and *.safetensors")
    if not is_hub_name(source):
        raise UserError(f"no Hugging Face folder at {source}; give a folder with config.json, or org/model of the hub")
    found = _NAME.fullmatch(os.fspath(source))
    assert found is not None
    return _fetched(found.group(1), found.group(2), _FILES if weights else _SMALL)


def _fetched(name: str, revision: str | None, files: list[str]) -> Path:
    shown = name if revision is None else f"{name}@{revision}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{shown} is no folder here, and names of the hub need huggingface_hub: pip install 'lit-llm[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=_OTHERS))
    except Exception as error:  # which take many forms over its releases
        raise UserError(f"{shown} {_why(error)}") from error


def _why(error: BaseException) -> str:
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        kinds |= {kind.__name__ for kind in type(cause).__mro__}
        cause = cause.__cause__
    if "GatedRepoError" in kinds:
        return "is gated: accept its terms on huggingface.co and log in (hf auth login), or give a local folder"
    if "RevisionNotFoundError" in kinds:
        return "is not on the Hugging Face hub: the model has no such revision"
    if "RepositoryNotFoundError" in kinds:
        return f"is no folder here and no model on the Hugging Face hub that you can see; check the name, {_ELSEWHERE}"
    offline = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException")
    if kinds.intersection((*offline, "Timeout", "TimeoutError", "gaierror")):
        return f"is no folder here, and the Hugging Face hub can't be reached; {_ELSEWHERE}"
    return f"could not be fetched from the Hugging Face hub: {' '.join(str(error).split())[:200]}; {_ELSEWHERE}"
