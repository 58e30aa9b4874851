"""Where text comes from: files, folders, globs, stdin, data sets and the Python library, as a stream of documents and
conversations.

Texts come out as they stand: line ends are kept, only a byte order mark at a file's start is taken off. Order is the
order of the inputs, inside a folder by name, so that it does not depend on the file system.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_llm.data.archives import STDIN
from lit_llm.data.document import Conversation, Document, Item
from lit_llm.data.hub import hub_file
from lit_llm.data.readers import HUB, UNDECODABLE, SourceFile, known_suffixes, read_lines, reader_of
from lit_llm.data.records import EMPTY_ANSWER
from lit_llm.data.store import FORMAT, META_FILE
from lit_llm.errors import UserError

__all__ = [
    "EMPTY",
    "EMPTY_ANSWER",
    "HIDDEN",
    "LINKED",
    "OTHER_SUFFIX",
    "PYTHON_STDLIB",
    "STDIN",
    "TWICE",
    "UNDECODABLE",
    "Conversation",
    "Document",
    "Item",
    "Listing",
    "SourceFile",
    "iter_documents",
    "list_files",
    "read_items",
]

PYTHON_STDLIB = "python-stdlib"
_BLANK_PARTS = 16  # a longer beginning of white space counts as text
_INPUTS = f"files, folders, quoted globs, {STDIN} for stdin, {HUB}NAME for a Hugging Face data set, or {PYTHON_STDLIB}"
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

EMPTY = "empty or only whitespace"
HIDDEN = "hidden"
OTHER_SUFFIX = "of another kind"
TWICE = "named twice"
LINKED = "linked folders"
STORES = "token stores"


@dataclass(frozen=True)
class Listing:
    """The files that inputs stand for, and how many were left out for which reason."""

    files: list[SourceFile]
    skipped: Counter[str]

    @property
    def reads_stdin(self) -> bool:
        return any(str(file.path) == STDIN for file in self.files)

    @property
    def size(self) -> int | None:
        """Bytes of input; None with stdin or a data set, which do not say."""
        return sum(file.size for file in self.files) if all(file.sized for file in self.files) else None


def iter_documents(
    inputs: Sequence[str | Path], text_key: str = "text", *, skipped: Counter[str] | None = None
) -> Iterator[Item]:
    """The documents and conversations of ``inputs``, in order.

    Args:
        inputs: files, folders (read with their subfolders; hidden entries, linked folders and unknown suffixes are
            left out), globs, ``-`` for stdin (a document a line), ``hf:NAME[:CONFIG][@SPLIT]`` for a Hugging Face data
            set, ``python-stdlib``. A .txt, .md or .py file is a document, in parts where it is long; .jsonl, .json,
            .csv and .parquet files hold records. All but .parquet also as .gz and .zst.
        text_key: the key that holds a record's text. A record without it may be a conversation, see
            ``lit_llm.data.records.record_item``.
        skipped: counts what was left out, by reason (empty documents among others).

    Raises:
        UserError: an input that is not there, cannot be read or holds no text; a byte that is not UTF-8, a record
            that is not as its format wants it or has neither text nor conversation (with file and line).
    """
    listing = list_files(inputs)
    skipped = Counter() if skipped is None else skipped
    skipped.update(listing.skipped)
    yield from read_items(listing.files, text_key, skipped)


def read_items(files: Iterable[SourceFile], text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """The documents of ``files`` that hold text, and their conversations; UserError when there is none."""
    found = False
    names = []
    for file in files:
        names.append(file.name)
        try:
            for item in _with_text(file.reader(file, text_key, skipped), skipped):
                found = True
                yield item
        except OSError as error:
            raise UserError(f"cannot read {file.name}: {error.strerror or error}") from error
    if not found:
        what = names[0] if len(names) == 1 else f"the {len(names)} files from {names[0]} on"
        raise UserError(f"no text in {what}: every document is empty; name an input that holds text")


def _with_text(items: Iterable[Item], skipped: Counter[str]) -> Iterator[Item]:
    """``items`` without the documents that are blank; blank parts wait until their document shows text."""
    waiting: list[Document] = []
    for item in items:
        blank = isinstance(item, Document) and (item.begins or waiting) and (not item.text or item.text.isspace())
        if isinstance(item, Document) and blank and len(waiting) < _BLANK_PARTS:
            waiting.append(item)
            if item.ends:
                skipped[EMPTY] += 1
                waiting = []
        else:
            yield from waiting
            waiting = []
            yield item


# ------------------------------------------------------------------- listing


def list_files(inputs: Sequence[str | Path]) -> Listing:
    """The files behind ``inputs``; each is read once. Errors as in ``iter_documents``."""
    if isinstance(inputs, (str, Path)):
        inputs = [inputs]
    if not inputs:
        raise UserError(f"no input: name {_INPUTS}")
    files: dict[str, SourceFile] = {}
    skipped: Counter[str] = Counter()
    for entry in map(str, inputs):
        for file in _expand(entry, skipped):
            # a link and its target are one file
            key = entry if entry.startswith(HUB) else os.path.realpath(file.path)
            if key in files:
                skipped[TWICE] += 1
            files.setdefault(key, file)
    return Listing(list(files.values()), skipped)


def _expand(entry: str, skipped: Counter[str]) -> list[SourceFile]:
    path = Path(entry)
    if entry == STDIN:
        return [SourceFile(path, "stdin", read_lines)]
    if entry.startswith(HUB):
        return [hub_file(entry)]
    if entry == PYTHON_STDLIB:
        root = sysconfig.get_paths()["stdlib"]
        paths = [p for p in _walk(root, Counter(), _STDLIB_LEFT_OUT) if p.suffix == ".py"]
        if not paths:
            raise UserError(f"{PYTHON_STDLIB}: this Python has no sources in {root}; name a folder of .py files")
        return [_source_file(p, lenient=True) for p in paths]
    if os.path.isdir(entry):
        paths, what = list(_walk(entry, skipped)), "folder"
    elif os.path.exists(entry):
        if reader_of(path) is None:
            raise UserError(f"{entry}: cannot read files of this kind; known are {known_suffixes()}")
        return [_source_file(path)]
    elif entry and glob.escape(entry) != entry:
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        if "**" in entry:
            links = {link for m in matches if (link := _link_above(m, _fixed_part(entry)))}
            skipped[LINKED] += len(links)
            matches = [m for m in matches if not _link_above(m, _fixed_part(entry))]
        stores = {m for m in matches if os.path.isdir(m) and _is_store(m)}
        stores |= {m.parent for m in matches if m.name == META_FILE and _is_store(m.parent)}
        skipped[STORES] += len(stores)
        matches = [m for m in matches if m not in stores and stores.isdisjoint(m.parents)]
        if not matches:
            raise UserError(f"{entry}: no file matches this pattern")
        # '**' gives a folder and its files both: a folder counts only where it is itself all that was asked for
        folders = [] if "**" in entry else [m for m in matches if os.path.isdir(m)]
        paths = [m for m in matches if os.path.isfile(m)] + [p for m in folders for p in _walk(str(m), skipped)]
        what = "pattern"
    else:
        raise UserError(f"no such file or folder: {entry or repr(entry)}; inputs are {_INPUTS}")
    known = [p for p in paths if reader_of(p) is not None]
    skipped[OTHER_SUFFIX] += len(paths) - len(known)
    if not known:
        raise UserError(f"{entry}: no file to read behind this {what}; known are {known_suffixes()}")
    return [_source_file(p) for p in known]


def _walk(root: str, skipped: Counter[str], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files below ``root``: a folder's own by name, then those of its subfolders by name."""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        visible = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        skipped[HIDDEN] += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = [name for name in visible if not os.path.islink(os.path.join(folder, name))]
        if linked := len(visible) - len(folders):  # following them could go round in circles
            skipped[LINKED] += linked
        if stores := [name for name in folders if _is_store(Path(folder, name))]:
            skipped[STORES] += len(stores)
            folders[:] = [name for name in folders if name not in stores]
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if os.path.isfile(path):
                yield path
            else:  # a dangling link, a pipe
                skipped[OTHER_SUFFIX] += 1


def _is_store(folder: Path) -> bool:
    """Whether this is what ``lit-llm prepare`` wrote: an output inside an input is no input."""
    try:
        with open(folder / META_FILE, "rb") as stream:
            return FORMAT.encode() in stream.read(200)
    except OSError:
        return False


def _fixed_part(pattern: str) -> Path:
    """The folder that a pattern begins with, before its first wildcard."""
    parts = Path(pattern).parts
    fixed = next((n for n, part in enumerate(parts) if glob.escape(part) != part), len(parts))
    return Path(*parts[:fixed])


def _link_above(match: Path, root: Path) -> Path | None:
    """The first linked folder between them: what ``**`` finds behind one, a folder's own listing does not."""
    between = [parent for parent in reversed(match.parents) if parent != root and root in (*parent.parents, Path())]
    return next((parent for parent in between if len(parent.parts) > len(root.parts) and parent.is_symlink()), None)


def _source_file(path: Path, lenient: bool = False) -> SourceFile:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    known = reader_of(path)
    assert known is not None
    reader, archive = known
    return SourceFile(path, str(path), reader, size, lenient, archive)
