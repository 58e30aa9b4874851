"""``lit-llm prepare``: text in, a token store out.

Documents are read in order, tokenized by worker processes in batches whose results are taken in order again, split by
a hash of (seed, document number) and written. So the bytes of a store depend on the inputs, the tokenizer and the
seed, not on the number of workers; memory holds a few batches.
"""

from __future__ import annotations

import gc
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from shutil import copyfileobj
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from lit_llm.data.document import Conversation, Item
from lit_llm.data.encode import EngineMismatch, default_workers, encode_all
from lit_llm.data.histogram import LengthHistogram
from lit_llm.data.new_folder import new_folder
from lit_llm.data.progress import ProgressBar
from lit_llm.data.sources import STDIN, Listing, SourceFile, list_files, read_items
from lit_llm.data.splits import draw, write_splits
from lit_llm.data.store import TokenStore, fingerprint, read_meta
from lit_llm.data.summary import Summary
from lit_llm.data.tokenizer import Tokenizer, check_vocab_size, train_tokenizer
from lit_llm.data.tokenizer_json import CONFIG_FILE
from lit_llm.data.writer import SHARD_BYTES, StoreWriter
from lit_llm.errors import UserError

if TYPE_CHECKING:
    pass

VOCAB_SIZE = 8192
VAL_FRACTION = 0.02
MAX_WORKERS = 256
TRAIN_BYTES = 100_000_000  # a tokenizer learns from a sample of at most about so much text
_PIECE = 1 << 18  # characters of a document that are taken into that sample, or not, together


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    vocab_size: int | None = None,
    text_key: str = "text",
    val_fraction: float = VAL_FRACTION,
    workers: int | None = None,
    seed: int = 0,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Summary:
    """Tokenize ``inputs`` into a token store at ``output``.

    Args:
        inputs: what to read, see ``lit_llm.data.sources.iter_documents``.
        output: the store's folder. It appears when it is complete; a store that lies there is replaced then.
        tokenizer: a Tokenizer or what one can be made of (see there); None trains a byte-level BPE on the inputs (on
            a sample of about 100 MB where they are larger).
        vocab_size: ids of the trained tokenizer, 8192 by default.
        text_key: key of the text in the records of .jsonl, .json, .csv and .parquet files and data sets; without it a
            record is a chat (``messages``, ``prompt`` and ``completion``, or ``instruction`` and ``output``).
        val_fraction: share of the documents that goes to the split ``val``, by a hash of (seed, document number); the
            first one is always trained on, and the last one validated on if no other is (unless it is so long that it
            is in the store before its end is seen). The default, 2%, suits large inputs; a few hundred documents want
            5% or more for a steady loss. 0 makes no ``val``.
        workers: processes that tokenize; default: a process per usable CPU, fewer for little text. The result does
            not depend on it.
        seed: of the split and of the tokenizer's sample.
        progress: show a progress bar on stderr where that is a terminal.
        shard_bytes: bound of a shard's size.

    Raises:
        UserError: a wrong option, an input that cannot be read (with file and line), a tokenizer without EOS, an
            output that cannot be written. Nothing is left at ``output`` then but what lay there before.
    """
    begin = perf_counter()
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction must be at least 0 and below 1, not {val_fraction}")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"workers must be at least 1 and at most {MAX_WORKERS}, not {workers}")
    if shard_bytes < 4:
        raise UserError(f"shard_bytes must be at least 4, the bytes of an id, not {shard_bytes}")
    given = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
    if given is not None:
        _check_given(given, vocab_size, tokenizer)
    elif vocab_size is not None:
        check_vocab_size(vocab_size)
    listing = list_files(inputs)
    notes = []
    with new_folder(Path(output)) as folder, ProgressBar(progress) as bar:
        files = listing.files
        if given is None:
            files = _spool_stdin(listing, folder)
            wanted = VOCAB_SIZE if vocab_size is None else vocab_size
            given = _train(files, text_key, seed, wanted, bar)
            if given.vocab_size < wanted:
                notes.append(f"the text gives a vocabulary of {given.vocab_size} ids only, not {wanted}")
        spooled = [file.path for file in files if file.path.parent == folder]
        size = Listing(files, Counter()).size
        workers = default_workers(size) if workers is None else workers
        options = {"seed": seed, "val_fraction": val_fraction, "text_key": text_key}

        def write(tokenizer: Tokenizer) -> tuple[dict[str, Any], Counter[str], LengthHistogram]:
            skipped = Counter(listing.skipped)
            writer = StoreWriter(folder, tokenizer, shard_bytes=shard_bytes)
            try:
                with closing(encode_all(read_items(files, text_key, skipped), tokenizer, workers)) as batches:
                    lengths = write_splits(bar.encoding(batches, size), writer, val_fraction, seed)
                for path in spooled:
                    path.unlink()
                return writer.finish({"options": options}), skipped, lengths
            finally:
                writer.close()

        try:
            meta, skipped, lengths = write(given)
        except EngineMismatch as error:
            if listing.reads_stdin and not spooled:
                raise UserError(
                    f"{error}: {given.engine} gives other ids than tokenizers; write the text into a file and prepare "
                    "that, so that it can be read again by the other engine"
                ) from error
            notes.append(f"{given.engine} gave other ids than tokenizers ({error}), which was slower but used instead")
            given.use_engine("tokenizers")
            for path in set(folder.iterdir()) - set(spooled):
                path.unlink()
            meta, skipped, lengths = write(given)
    if val_fraction > 0 and "val" not in meta["splits"]:
        notes.append(
            "no validation split: there is no document to spare for it; give more, or validate on another store"
        )
    chats = tuple(name for name, split in meta["splits"].items() if split["chats"])
    if chats:
        from lit_llm.data.conversation import turn_end_ids

        if not turn_end_ids(given):
            notes.append(
                "the tokenizer has no control token that ends a turn: ChatML's marks are written as plain text, which "
                "takes many tokens; give a tokenizer with a chat template, or train one (without --tokenizer)"
            )
    splits = {
        name: {key: split[key] for key in ("documents", "tokens", "bytes")} for name, split in meta["splits"].items()
    }
    assert given.eos_token is not None
    return Summary(
        output=Path(output),
        splits=splits,
        skipped={why: count for why, count in skipped.items() if count},
        vocab_size=given.vocab_size,
        eos_token=given.eos_token,
        trained=tokenizer is None,
        workers=workers,
        seconds=perf_counter() - begin,
        engine=given.engine,
        lengths=lengths,
        chats=chats,
        notes=tuple(notes),
    )


def _check_given(tokenizer: Tokenizer, vocab_size: int | None, name: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: the tokenizer names no EOS token, which ends each document; put "
            f'{{"eos_token": "..."}} into a {CONFIG_FILE} beside it'
        )
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} contradicts the tokenizer's {tokenizer.vocab_size} ids; leave one of them out"
        )


def _spool_stdin(listing: Listing, folder: Path) -> list[SourceFile]:
    """The files, stdin copied into ``folder``: what a tokenizer is trained on is read twice."""
    files = []
    for file in listing.files:
        if str(file.path) == STDIN:
            if sys.stdin is None:
                raise UserError("stdin is closed: pipe text into it, or name files")
            path = folder / "stdin.spool"
            with open(path, "wb") as stream:
                copyfileobj(sys.stdin.buffer, stream)
            file = replace(file, path=path, size=path.stat().st_size)
        files.append(file)
    return files


def _train(files: list[SourceFile], text_key: str, seed: int, vocab_size: int, bar: ProgressBar) -> Tokenizer:
    """A tokenizer of the inputs; one with ChatML's control tokens where they begin with a chat."""
    items = read_items(files, text_key, Counter())
    first = next(items)
    size = sum(file.size for file in files)
    # what does not say its size beforehand gives its first TRAIN_BYTES
    share = TRAIN_BYTES / max(size, 1) if all(file.sized for file in files) else 1.0
    texts = _sample(chain([first], items), seed, share)
    return train_tokenizer(bar.reading(texts, size), vocab_size, chat=isinstance(first, Conversation))


def _sample(items: Iterable[Item], seed: int, share: float) -> Iterator[str]:
    """Pieces of the texts, about ``share`` of them, chosen by a hash of (seed, item, piece)."""
    taken = 0
    for number, item in enumerate(items):
        if share == 1.0 and taken > TRAIN_BYTES:
            return
        texts = [m["content"] for m in item.messages] if isinstance(item, Conversation) else [item.text]
        for text in texts:
            for start in range(0, len(text), _PIECE):
                if share >= 1 or draw("sample", seed, number, start) < share:
                    taken += min(_PIECE, len(text) - start)
                    yield text[start : start + _PIECE]


# ------------------------------------------------------------------- checking


def check(folder: str | Path) -> list[str]:
    """Reads all of a store and says what is wrong with it, a line each; [] if nothing is.

    Raises:
        UserError: no store there.
    """
    meta = read_meta(folder)
    problems = []
    splits = meta.get("splits")
    if not isinstance(splits, dict) or not splits:
        return [f"{folder}: meta.json names no split; prepare the store anew"]
    for split in sorted(splits):
        try:
            store = TokenStore(folder, split)
            problems += store.problems()
            if not problems and (store.tokenizer.eos_token_id, store.tokenizer.bos_token_id) != (
                store.eos_token_id,
                store.bos_token_id,
            ):
                problems.append(f"{folder}: meta.json has other EOS and BOS than its tokenizer; prepare the store anew")
        except UserError as error:
            problems.append(str(error))
    if "tokenizer_fingerprint" not in meta:
        problems.append(f"{folder}: meta.json has no tokenizer_fingerprint; prepare the store anew")
    if not problems and meta.get("fingerprint") != fingerprint(meta):
        problems.append(f"{folder}: meta.json was changed, its fingerprint is another; prepare the store anew")
    return problems


# ------------------------------------------------------------------- command line


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``lit-llm prepare``."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="files, folders or quoted globs of .txt .md .py .jsonl .json .csv .parquet, also .gz and .zst of them; - "
        "for stdin (a document a line), hf:NAME for a Hugging Face data set (hf:NAME:CONFIG@SPLIT), or python-stdlib",
    )
    parser.add_argument("--output", metavar="DIR", help="the store's folder; a store there is replaced")
    parser.add_argument("--check", metavar="DIR", help="verify the store in DIR instead: lengths, checksums, ids")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, SentencePiece .model, tiktoken ranks, or a folder that holds one, also as org/model of "
        "the Hugging Face hub (default: train one)",
    )
    parser.add_argument(
        "--vocab_size", type=int, metavar="N", help=f"ids of the trained tokenizer (default: {VOCAB_SIZE})"
    )
    parser.add_argument(
        "--text_key", default="text", metavar="KEY", help="key of the text in a record (default: %(default)s)"
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=VAL_FRACTION,
        metavar="F",
        help="share of the documents kept for validation, 0 for none (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one per CPU)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the split (default: %(default)s)")
    parser.add_argument(
        "--shard_bytes",
        type=int,
        default=SHARD_BYTES,
        metavar="N",
        help="no shard of ids gets longer (default: %(default)s)",
    )


def run(args: Namespace) -> int:
    """Prepare what the options say and print a summary, or check a store.

    1: the checked store is damaged; 130: Ctrl-C. UserError as in ``prepare``.
    """
    from rich.console import Console

    if args.check is not None:
        if args.inputs or args.output:
            raise UserError("--check DIR verifies a store and takes neither inputs nor --output")
        problems = check(args.check)
        for problem in problems:
            print(f"lit-llm: error: {problem}", file=sys.stderr)
        if not problems:
            print(f"{args.check} is whole: lengths, checksums, ids and tokenizer are those of its meta.json")
        return 1 if problems else 0
    missing = [what for what, given in (("INPUT", args.inputs), ("--output DIR", args.output)) if not given]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing: name files, folders, quoted globs, - for stdin, hf:NAME or "
            "python-stdlib, and by --output the folder for the store"
        )

    def terminate(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # so that the half-made folder is removed on SIGTERM too

    # Vocabularies are a million objects that live to the end: looking through them for garbage takes a tenth of the
    # start. What comes later is arrays and strings.
    gc.set_threshold(100_000, 50, 100)
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        summary = prepare(
            args.inputs,
            args.output,
            tokenizer=args.tokenizer,
            vocab_size=args.vocab_size,
            text_key=args.text_key,
            val_fraction=args.val_fraction,
            workers=args.workers,
            seed=args.seed,
            shard_bytes=args.shard_bytes,
        )
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the bars of the histogram in a terminal that knows no such
    try:
        Console().print(summary, soft_wrap=True)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"wrote {summary.output}, but not this summary: {error.strerror}", file=sys.stderr)
    return 0
