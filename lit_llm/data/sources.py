"""Where text comes from: files, folders, globs, stdin and the Python library, as a stream of documents.

Texts come out as they stand: line ends are kept, only a byte order mark at a file's start is taken off. Order is the
order of the inputs, inside a folder by name, so that it does not depend on the file system.
"""

from __future__ import annotations

import glob
import io
import json
import os
import sys
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lit_llm.errors import UserError

STDIN = "-"
PYTHON_STDLIB = "python-stdlib"
_BOM = b"\xef\xbb\xbf"
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

EMPTY = "empty or only whitespace"
HIDDEN = "hidden"
OTHER_SUFFIX = "of another kind"
TWICE = "named twice"
LINKED = "linked folders"
UNDECODABLE = "not decodable"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, where it stands (``file`` or ``file:line``, for messages) and how many bytes of input it took."""

    text: str
    source: str
    size: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read. ``name`` stands for it in messages; ``lenient``: an undecodable file is left out, counted."""

    path: Path
    name: str
    reader: Callable[[SourceFile, str, Counter[str]], Iterator[Document]]
    size: int = 0
    lenient: bool = False


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
        """Bytes of input; None with stdin, which does not say."""
        return None if self.reads_stdin else sum(file.size for file in self.files)


def iter_documents(
    inputs: Sequence[str | Path], text_key: str = "text", *, skipped: Counter[str] | None = None
) -> Iterator[Document]:
    """The documents of ``inputs``, in order.

    Args:
        inputs: files, folders (read with their subfolders; hidden entries and unknown suffixes are left out), globs,
            ``-`` for stdin (a document a line), ``python-stdlib``. A .txt, .md or .py file is a document; so is each
            line of a .jsonl file.
        text_key: the key that holds the text in a .jsonl line.
        skipped: counts what was left out, by reason (empty documents among others).

    Raises:
        UserError: an input that is not there, cannot be read or holds no text; a byte that is not UTF-8, a line that
            is not JSON or has no text under the key (with file and line).
    """
    listing = list_files(inputs)
    skipped = Counter() if skipped is None else skipped
    skipped.update(listing.skipped)
    yield from read_documents(listing.files, text_key, skipped)


def read_documents(files: Iterable[SourceFile], text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of ``files`` that hold text; UserError when none does."""
    found = False
    names = []
    for file in files:
        names.append(file.name)
        try:
            for document in file.reader(file, text_key, skipped):
                if not document.text or document.text.isspace():
                    skipped[EMPTY] += 1
                else:
                    found = True
                    yield document
        except OSError as error:
            raise UserError(f"cannot read {file.name}: {error.strerror or error}") from error
    if not found:
        what = names[0] if len(names) == 1 else f"the {len(names)} files from {names[0]} on"
        raise UserError(f"no text in {what}: every document is empty; name an input that holds text")


# ------------------------------------------------------------------- listing


def list_files(inputs: Sequence[str | Path]) -> Listing:
    """The files behind ``inputs``; each is read once. Errors as in ``iter_documents``."""
    if isinstance(inputs, (str, Path)):
        inputs = [inputs]
    if not inputs:
        raise UserError("no input: name files, folders, quoted globs, - for stdin, or python-stdlib")
    files: dict[str, SourceFile] = {}
    skipped: Counter[str] = Counter()
    for entry in map(str, inputs):
        for file in _expand(entry, skipped):
            key = os.path.realpath(file.path)  # a link and its target are one file
            if key in files:
                skipped[TWICE] += 1
            files.setdefault(key, file)
    return Listing(list(files.values()), skipped)


def _expand(entry: str, skipped: Counter[str]) -> list[SourceFile]:
    path = Path(entry)
    if entry == STDIN:
        return [SourceFile(path, "stdin", _read_lines)]
    if entry == PYTHON_STDLIB:
        root = sysconfig.get_paths()["stdlib"]
        paths = [p for p in _walk(root, Counter(), _STDLIB_LEFT_OUT) if p.suffix == ".py"]
        if not paths:
            raise UserError(f"{PYTHON_STDLIB}: this Python has no sources in {root}; name a folder of .py files")
        return [_source_file(p, lenient=True) for p in paths]
    if os.path.isdir(entry):
        paths, what = list(_walk(entry, skipped)), "folder"
    elif os.path.exists(entry):
        if path.suffix.lower() not in _READERS:
            raise UserError(f"{entry}: cannot read files of this kind; known are {_known()}")
        return [_source_file(path)]
    elif entry and glob.escape(entry) != entry:
        matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]
        if not matches:
            raise UserError(f"{entry}: no file matches this pattern")
        # '**' gives a folder and its files both: a folder counts only where it is itself all that was asked for
        folders = [] if "**" in entry else [m for m in matches if os.path.isdir(m)]
        paths = [m for m in matches if os.path.isfile(m)] + [p for m in folders for p in _walk(str(m), skipped)]
        what = "pattern"
    else:
        raise UserError(
            f"no such file or folder: {entry or repr(entry)}; inputs are files, folders, quoted globs, - for stdin and "
            f"{PYTHON_STDLIB}"
        )
    known = [p for p in paths if p.suffix.lower() in _READERS]
    skipped[OTHER_SUFFIX] += len(paths) - len(known)
    if not known:
        raise UserError(f"{entry}: no file to read behind this {what}; known are {_known()}")
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
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if os.path.isfile(path):
                yield path
            else:  # a dangling link, a pipe
                skipped[OTHER_SUFFIX] += 1


def _source_file(path: Path, lenient: bool = False) -> SourceFile:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return SourceFile(path, str(path), _READERS[path.suffix.lower()], size, lenient)


# ------------------------------------------------------------------- readers


def _read_text(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A file that is one document."""
    content = file.path.read_bytes()
    yield Document(_decode(content, file.name), file.name, len(content))


def _read_python(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A Python source, in the encoding it declares (PEP 263)."""
    content = file.path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        if encoding.startswith("utf-8"):
            text = _decode(content, file.name)
        else:
            text = content.decode(encoding)
    except (SyntaxError, LookupError, ValueError):  # no or another encoding than it says
        if file.lenient:
            skipped[UNDECODABLE] += 1
            return
        text = _decode(content, file.name)  # as UTF-8, or with the place of the bad byte
    yield Document(text, file.name, len(content))


def _read_lines(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A document a line."""
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            source = f"{file.name}:{number}"
            yield Document(_decode(line, file.name, number).rstrip("\r\n"), source, len(line))


def _read_jsonl(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A JSON object a line, the text under ``text_key``. Blank lines are no records."""
    with _open(file) as stream:
        for number, raw in enumerate(stream, 1):  # of bytes, so that only "\n" ends a line, never U+2028
            line = _decode(raw, file.name, number)
            if line.isspace() or not line:
                continue
            source = f"{file.name}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{source}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{source}: a line must be a JSON object, not {line.strip():.40}")
            if text_key not in record:
                keys = ", ".join(map(repr, list(record)[:8])) or "none"
                raise UserError(f"{source}: no key {text_key!r}, the keys are {keys}; name the right one by --text_key")
            text = record[text_key]
            if not isinstance(text, str):
                kind = "null" if text is None else f"of type {type(text).__name__}"
                raise UserError(f"{source}: {text_key!r} must be text, it is {kind}; drop the line or mend it")
            if "\\ud" in line or "\\uD" in line:  # only an escape can make half a character
                _check_surrogates(text, source)
            yield Document(text, source, len(raw))


def _open(file: SourceFile) -> AbstractContextManager[BinaryIO]:
    if str(file.path) != STDIN:
        return open(file.path, "rb")
    if sys.stdin is None:
        raise UserError("stdin is closed: pipe text into it, or name files")
    return nullcontext(sys.stdin.buffer)


def _decode(content: bytes, name: str, line: int = 1) -> str:
    """UTF-8 to text; ``line`` is the number of the first line of ``content`` in the file called ``name``."""
    if line == 1 and content.startswith(_BOM):
        content = content[len(_BOM) :]
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = line + content.count(b"\n", 0, error.start)
        raise UserError(
            f"{name}:{number}: byte 0x{content[error.start]:02X} is not UTF-8; convert the file by iconv, or mend it"
        ) from error


def _check_surrogates(text: str, source: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: half a surrogate pair (\\u{ord(text[error.start]):04x}) is no text") from error


_READERS: dict[str, Callable[[SourceFile, str, Counter[str]], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_python,
    ".jsonl": _read_jsonl,
}


def _known() -> str:
    *most, last = _READERS
    return f"{', '.join(most)} and {last}"
