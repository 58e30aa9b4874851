"""``lit-llm export``: a trained model as a Hugging Face folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_llm.cli.options import OptionParser

if TYPE_CHECKING:
    from lit_llm.checkpoint.hf import Exported

_DTYPES = ("float32", "bfloat16", "float16")


def parser() -> OptionParser:
    """The options of the command."""
    options = OptionParser(
        "export", "Writes the model of a run, a checkpoint or a Hugging Face folder as such a folder."
    )
    add = options.add_argument
    add("source", metavar="SOURCE", help="a run's folder (its last checkpoint), a checkpoint or a Hugging Face folder")
    add("--output", required=True, metavar="DIR", help="the folder to write; an earlier export there is replaced")
    add("--dtype", choices=_DTYPES, help="of the weights (default: as saved)")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="of a file of weights (default: %(default)s)")
    return options


def run(args: Namespace) -> int:
    """Writes the folder.

    Raises:
        UserError: a source that gives no model, a model that no class of transformers holds, a folder that can't be
            written.
    """
    import torch

    from lit_llm.checkpoint import open_weights
    from lit_llm.checkpoint.hf import check_output, export, shard_bytes
    from lit_llm.checkpoint.pretrained import Pretrained
    from lit_llm.data.tokenizer import Tokenizer
    from lit_llm.model import ModelConfig

    shard_bytes(args.max_shard_size)
    check_output(Path(args.output))
    opened = open_weights(args.source)
    config = ModelConfig.from_dict(opened.config)
    tokenizer = None if opened.tokenizer is None else Tokenizer.from_files(opened.tokenizer)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    came_so = isinstance(opened.weights, Pretrained)  # nothing was trained: it goes out as it is
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": args.max_shard_size, "generation": opened.generation}
    options |= {"chatml": not came_so, "turn_ends": not came_so}
    done = export(opened.weights, config, args.output, tokenizer, **options)
    print(f"{opened.path} is exported:")
    chatml = done.chat_template and tokenizer is not None and tokenizer.chat_template is None
    for line in _told(done, chatml):
        print(f"  {line}")
    return 0


def _told(done: Exported, chatml: bool) -> list[str]:
    files = "1 file" if done.files == 1 else f"{done.files} files"
    dtype = str(done.dtype).removeprefix("torch.")
    tokenizer = f"tokenizer {'with' if done.chat_template else 'without'} chat template"
    if chatml:
        tokenizer = "tokenizer with the chat template ChatML, by which lit-llm renders chats"
    if not done.tokenizer:
        tokenizer = "no tokenizer: the checkpoint has none"
    return [
        f"{done.folder}: {done.architecture}, {done.parameters:,} parameters in {dtype}, {done.bytes / 1e6:,.1f} MB in "
        f"{files}; {tokenizer}",
        f'load it by transformers.AutoModelForCausalLM.from_pretrained("{done.folder}")',
    ]
