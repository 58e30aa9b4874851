"""``lit-llm inspect``: what a store holds, and what rows of it look like to a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lit_llm.data.files import is_remote
from lit_llm.data.histogram import LengthHistogram
from lit_llm.data.new_folder import PICTURE_FILE
from lit_llm.data.order import permute, round_keys
from lit_llm.data.packing import best_fit
from lit_llm.data.rows import PackedRows, TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.summary import megabytes
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

_BLOCK = 1 << 22
_TRAINED, _UNTRAINED = "green", "dim"


def counts(folder: str) -> dict[str, dict[str, int]]:
    """split -> documents, tokens, trained (label tokens, documents isolated) and bytes of text."""
    found = {}
    for split in TokenStore.splits(folder):
        store = TokenStore(folder, split)
        if store.has_trained:
            blocks = range(0, store.num_tokens, _BLOCK)
            trained = sum(int(store.trained(b, min(b + _BLOCK, store.num_tokens)).sum()) for b in blocks)
        else:
            trained = store.num_tokens - len(store)
        found[split] = {
            "documents": len(store),
            "tokens": store.num_tokens,
            "trained": trained,
            "bytes": store.num_bytes,
        }
    return found


def sample_rows(
    store: TokenStore, rows: TokenRows | PackedRows, samples: int, seed: int, marks: tuple[str, str] = ("", "")
) -> Iterator[tuple[int, Text]]:
    """Some rows of a store, chosen by ``seed``, as text: a rule where a document begins, labels in colour and between
    ``marks``."""
    tokenizer = store.tokenizer
    order = permute(np.arange(min(samples, len(rows))), len(rows), round_keys("inspect", seed))
    for row in order.tolist():
        batch = {name: values[0] for name, values in rows[np.array([row])].items() if name in _SHOWN}
        real = None if isinstance(rows, PackedRows) else min(store.num_tokens - row * rows.seq_len, rows.seq_len)
        yield row, _render(batch, tokenizer, real, marks)


_SHOWN = ("input_ids", "labels", "document_ids")


def _render(row: dict[str, Any], tokenizer: Tokenizer, real: int | None, marks: tuple[str, str]) -> Text:
    """A row as text. ``real``: how many of its tokens are not padding; None: what stands behind the last document."""
    ids, labels, documents = row["input_ids"], row["labels"], row["document_ids"]
    trained = np.append(False, labels[:-1] >= 0)  # the token at t is the label at t - 1
    text = Text()
    changes = (trained[1:] != trained[:-1]) | (documents[1:] != documents[:-1])
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]
    last = int(documents[-1])
    if real is None:
        # behind the last document of a packed row stands nothing but EOS without labels
        filled = bool((ids[documents == last] == tokenizer.eos_token_id).all()) and not trained[-1]
        real = int(np.flatnonzero(documents == last)[0]) if filled else len(ids)
    borders = sorted({*borders, real})
    for start, stop in zip(borders, borders[1:], strict=False):
        begins = start == 0 or documents[start] != documents[start - 1]
        if start >= real:
            text.append(f"\n── {stop - start} tokens of padding", style="dim")
            break
        if begins:
            length = int((documents[:real] == documents[start]).sum())
            text.append(f"{'' if start == 0 else chr(10)}── document, {length} tokens of it ──\n", style="dim cyan")
        piece = tokenizer.decode(ids[start:stop], skip_special_tokens=False)
        if trained[start]:
            text.append(f"{marks[0]}{piece}{marks[1]}", style=_TRAINED)
        else:
            text.append(piece, style=_UNTRAINED)
    return text


# ------------------------------------------------------------------- command line


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``lit-llm inspect``."""
    parser.add_argument("store", metavar="DIR", help="what `lit-llm prepare` wrote, or an address such as s3://...")
    parser.add_argument("--split", default="train", metavar="NAME", help="whose rows to show (default: %(default)s)")
    parser.add_argument("--seq_len", type=int, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    parser.add_argument(
        "--packing",
        default="auto",
        metavar="KIND",
        help="contiguous, best_fit, or auto: best_fit for chats (default: %(default)s)",
    )
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="rows to show (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which rows (default: %(default)s)")
    parser.add_argument(
        "--picture", metavar="FILE", help=f"the histogram of lengths, .png or .svg (default: DIR/{PICTURE_FILE})"
    )


def run(args: Namespace) -> int:
    """Print what the options ask for and write the picture. UserError for a store or an option that will not do."""
    if args.seq_len < 1 or args.samples < 0:
        raise UserError(f"seq_len must be at least 1 and samples 0 or more, not {args.seq_len} and {args.samples}")
    if args.packing not in ("auto", "contiguous", "best_fit"):
        raise UserError(f"packing must be auto, contiguous or best_fit, not {args.packing!r}")
    store = TokenStore(args.store, args.split)
    console = Console(markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    for name in ("documents", "tokens", "trained tokens", "text"):
        table.add_column(name, justify="right")
    for split, n in counts(args.store).items():
        cells = (f"{n[name]:,}" for name in ("documents", "tokens", "trained"))
        table.add_row(split, *cells, megabytes(n["bytes"]))
    console.print(table)
    console.print(
        f"tokenizer: {store.vocab_size:,} ids, EOS {store.tokenizer.eos_token!r}; ids as {store.dtype.name}\n"
    )
    lengths = np.diff(store.offsets)
    histogram = LengthHistogram(lengths)
    console.print(histogram)
    packing = best_fit(lengths, args.seq_len, long="cut" if store.has_trained else "split")
    console.print(
        f"\nrows of {args.seq_len}: contiguous {store.num_tokens // args.seq_len:,}, best_fit "
        f"{packing.num_rows:,} ({packing.fill_rate:.1%} full"
        + (f"; {packing.cut_documents:,} chats are longer, cut there)" if packing.cut_documents else ")")
    )
    packed = args.packing == "best_fit" or (args.packing == "auto" and store.has_trained)
    short = store.num_tokens < args.seq_len
    rows = PackedRows(store, args.seq_len) if packed else TokenRows(store, args.seq_len, pad_last=short)
    marks = ("", "") if console.color_system else ("⟦", "⟧")  # no colour in a file or a pipe
    for row, text in sample_rows(store, rows, args.samples, args.seed, marks):
        console.print(Rule(f"row {row:,} of {len(rows):,}", align="left"))
        console.print(text, soft_wrap=True)
    if args.samples:
        console.print(Rule())
        trained = Text(f"{marks[0]}labels of the row{marks[1]}", style=_TRAINED)
        console.print(Text.assemble(trained, ", ", ("tokens without a loss", _UNTRAINED)))
    picture = _picture_path(args)
    title = f"{args.store}, {args.split}: {len(store):,} documents, {store.num_tokens:,} tokens"
    try:
        histogram.save(picture, title)
    except UserError as error:
        if args.picture is not None:
            raise
        console.print(f"no picture: {error}", soft_wrap=True)  # the folder may be for reading only
    else:
        console.print(f"picture: {picture}", soft_wrap=True)
    return 0


def _picture_path(args: Namespace) -> Path:
    if args.picture is not None:
        return Path(args.picture)
    if is_remote(args.store):
        return Path(f"{PurePosixPath(args.store).name or 'store'}-{PICTURE_FILE}")
    return Path(args.store.removeprefix("file://"), PICTURE_FILE)
