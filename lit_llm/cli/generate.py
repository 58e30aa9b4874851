"""``lit-llm generate``: complete prompts with a trained model, on the screen or into a file."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_llm.cli.options import OptionParser
from lit_llm.errors import UserError

if TYPE_CHECKING:
    from lit_llm.data import Tokenizer
    from lit_llm.data.prompts import Prompt
    from lit_llm.generation import GenerationConfig
    from lit_llm.model import Transformer

_DTYPES = ("float32", "bfloat16", "float16")


def parser() -> OptionParser:
    """The options of the command."""
    options = OptionParser(
        "generate", "Completes prompts with the model of a run, a checkpoint or a Hugging Face folder."
    )
    add = options.add_argument
    add("source", metavar="SOURCE", help="a run's folder (its last checkpoint), a checkpoint or a Hugging Face folder")
    add("--prompt", action="append", metavar="TEXT", help="a text to complete; may be repeated")
    add(
        "--prompts_file",
        metavar="FILE",
        help='.txt, a prompt a line, or .jsonl of {"prompt": ...} or {"messages": [...]}',
    )
    add("--output", metavar="FILE", help="write JSON lines here instead of text to the screen")
    add("--max_new_tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token (default)")
    add("--top_k", type=int, metavar="K", help="draw among the K best tokens")
    add("--top_p", type=float, metavar="P", help="draw among the best tokens that make up probability P")
    add("--min_p", type=float, metavar="P", help="draw among tokens of at least P times the best one's probability")
    add("--repetition_penalty", type=float, default=1.0, metavar="X", help="1 is off (default)")
    add("--stop", action="append", metavar="TEXT", help="a text that ends a completion; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one")
    add("--dtype", choices=_DTYPES, help="of the weights (default: as saved)")
    add("--batch_size", type=int, default=8, metavar="N", help="prompts decoded together (default: %(default)s)")
    return options


def run(args: Namespace) -> int:
    """Completes the prompts.

    Raises:
        UserError: no prompts, a value out of its range, or a source that gives no model.
    """
    from lit_llm.data.prompts import read_prompts

    if args.prompt is None and args.prompts_file is None:
        raise UserError("generate needs a prompt: give --prompt TEXT or --prompts_file FILE")
    if args.prompt is not None and args.prompts_file is not None:
        raise UserError("give --prompt or --prompts_file, not both")
    if args.batch_size < 1:
        raise UserError(f"--batch_size must be at least 1, got {args.batch_size}")
    prompts = read_prompts(args.prompt, args.prompts_file)

    import torch

    from lit_llm.checkpoint import load_model
    from lit_llm.generation import GenerationConfig
    from lit_llm.generation.chat import until_turn_ends

    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
        seed=args.seed,
    )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if args.output is not None:
        _check_output(Path(args.output))
    device = None if args.device == "auto" else args.device
    model, tokenizer = load_model(args.source, device, None if args.dtype is None else getattr(torch, args.dtype))
    if not all(isinstance(prompt, str) for prompt in prompts):
        config = until_turn_ends(config, model.config, tokenizer)
    if args.output is not None:
        count = _write(Path(args.output), model, tokenizer, prompts, config, args.batch_size)
        print(f"{count} completion{'s' if count != 1 else ''} in {args.output}")
    elif len(prompts) == 1:
        _stream(model, tokenizer, prompts[0], config)
    else:
        for record in _records(model, tokenizer, prompts, config, args.batch_size):
            prompt = record["prompt"]
            print(f"--- {record['index']}\n{prompt if isinstance(prompt, str) else ''}{record['completion']}")
    return 0


def _stream(model: Transformer, tokenizer: Tokenizer, prompt: Prompt, config: GenerationConfig) -> None:
    from lit_llm.generation import stream

    pieces = stream(model, _encode(tokenizer, prompt), config, tokenizer)
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print()  # an error begins on a line of its own


def _records(
    model: Transformer, tokenizer: Tokenizer, prompts: list[Prompt], config: GenerationConfig, batch_size: int
) -> list[dict[str, Any]]:
    """One record per prompt, with the fields of predict's file."""
    from lit_llm.generation import generate

    ids = [_encode(tokenizer, prompt) for prompt in prompts]
    results = generate(model, ids, config, tokenizer=tokenizer, batch_size=batch_size)
    numbered = enumerate(zip(prompts, results, strict=True))
    return [result.record(index, prompt) for index, (prompt, result) in numbered]


def _write(
    output: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    config: GenerationConfig,
    batch_size: int,
) -> int:
    records = _records(model, tokenizer, prompts, config, batch_size)
    partial = output.with_name(f".{output.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(partial, output)
    return len(records)


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)


def _check_output(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path}: its folder can't be made: {error.strerror}; choose another") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--output {path} can't be written; choose another")
