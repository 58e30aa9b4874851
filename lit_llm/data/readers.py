"""Readers: a file of each known kind as a stream of documents and conversations, memory flat whatever its size."""

from __future__ import annotations

import codecs
import csv
import io
import json
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_llm.data.archives import STDIN, Opened, open_file
from lit_llm.data.document import Document, Item
from lit_llm.data.json_stream import json_records
from lit_llm.data.records import columns, record_item
from lit_llm.errors import UserError

HUB = "hf:"
UNDECODABLE = "not decodable"
PART_BYTES = 1 << 20  # of a text file that are read and handed on together
_LONG_PYTHON = 64 << 20  # bytes from which on a Python source is no source but data, read in parts
_JSON_BYTES = 1 << 18
_CSV_FIELD = 1 << 28  # characters; a longer field is a quote that nobody closed
_TABLE_ROWS = 64
_BOM = b"\xef\xbb\xbf"

Reader = Callable[["SourceFile", str, "Counter[str]"], Iterator[Item]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read. ``name`` stands for it in messages; ``lenient``: an undecodable file is left out, counted.

    ``size`` is in bytes on disk, 0 where ``sized`` is false: stdin and data sets do not say. ``archive``: how it is
    compressed, ".gz", ".zst" or "".
    """

    path: Path
    name: str
    reader: Reader
    size: int = 0
    lenient: bool = False
    archive: str = ""

    @property
    def sized(self) -> bool:
        return str(self.path) != STDIN and not str(self.path).startswith(HUB)


def reader_of(path: Path) -> tuple[Reader, str] | None:
    """How to read a file of this name: its reader and kind of archive; None for an unknown kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    archive = suffixes.pop() if len(suffixes) == 2 and suffixes[-1] in (".gz", ".zst") else ""
    reader = _READERS.get(suffixes[-1]) if suffixes else None
    return None if reader is None or (archive and reader is read_parquet) else (reader, archive)


def known_suffixes() -> str:
    return f"{', '.join(s for s in _READERS if s != '.parquet')} (each also as .gz or .zst) and .parquet"


# ------------------------------------------------------------------- bytes


def _decode(content: bytes, name: str, line: int = 1) -> str:
    """UTF-8 to text; ``line`` is the number of the first line of ``content`` in the file called ``name``."""
    while line == 1 and content.startswith(_BOM):
        content = content[len(_BOM) :]
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_byte(error, name, line) from error


def _pieces(opened: Opened, name: str, count: int) -> Iterator[str]:
    """A UTF-8 file as texts of about ``count`` bytes, cut anywhere between two characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, start = 1, True
    while True:
        content = opened.read(count)
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:  # its object begins with what was left of the content before
            raise _bad_byte(error, name, line) from error
        line += content.count(b"\n")
        if start:
            text = text.lstrip("\ufeff")
            start = not text
        if text:
            yield text
        if not content:
            return


def _bad_byte(error: UnicodeDecodeError, name: str, line: int) -> UserError:
    number = line + error.object.count(b"\n", 0, error.start)
    byte = error.object[error.start]
    return UserError(f"{name}:{number}: byte 0x{byte:02X} is not UTF-8; convert the file by iconv, or mend it")


# ------------------------------------------------------------------- readers


def read_text(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A file that is one document, in parts where it is long."""
    with open_file(file.path, file.name, file.archive) as opened:
        last, size, begins = "", 0, True
        for text in _pieces(opened, file.name, PART_BYTES):
            if last:  # one part behind, to know the last one
                yield Document(last, file.name, size, begins, False)
                begins = False
            last, size = text, opened.taken()
        yield Document(last, file.name, size + opened.taken(), begins, True)


def read_python(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A Python source, in the encoding it declares (PEP 263)."""
    if file.size > _LONG_PYTHON:
        yield from read_text(file, text_key, skipped)
        return
    with open_file(file.path, file.name, file.archive) as opened:
        content = opened.read(-1)
        size = opened.taken()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        if encoding.startswith("utf-8"):
            text = _decode(content, file.name)
        else:
            text = content.decode(encoding)
            text.encode()  # some encodings can say half a surrogate pair
    except (SyntaxError, LookupError, ValueError):  # no or another encoding than it says
        if file.lenient:
            skipped[UNDECODABLE] += 1
            return
        text = _decode(content, file.name)  # as UTF-8, or with the place of the bad byte
    yield Document(text, file.name, size)


def read_lines(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Document]:
    """A document a line."""
    with open_file(file.path, file.name, file.archive) as opened:
        for number, line in enumerate(opened.lines(), 1):
            text = _decode(line, file.name, number).rstrip("\r\n")
            yield Document(text, f"{file.name}:{number}", opened.taken())


def read_jsonl(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """A JSON object a line, a record each. Blank lines are no records."""
    with open_file(file.path, file.name, file.archive) as opened:
        for number, raw in enumerate(opened.lines(), 1):
            line = _decode(raw, file.name, number)
            if line.isspace() or not line:
                continue
            source = f"{file.name}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                said = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise UserError(f"{source}: not JSON: {said}; mend the line or drop it") from error
            if not isinstance(record, dict):
                raise UserError(f"{source}: a line must be a JSON object, not {line.strip():.40}")
            half = "\\ud" in line or "\\uD" in line  # only an escape can make half a character
            item = record_item(record, source, opened.taken(), text_key, skipped, half_characters=half)
            if item is not None:
                yield item


def read_json(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """The records of a .json file, see ``json_records``; they are named by line and number, as a line holds many."""
    with open_file(file.path, file.name, file.archive) as opened:
        found = json_records(_pieces(opened, file.name, _JSON_BYTES), file.name, text_key)
        for number, each in enumerate(found, 1):
            source = f"{file.name}:{each.line}: record {number}"
            size = opened.taken()
            item = record_item(each.record, source, size, text_key, skipped, half_characters=each.half_characters)
            if item is not None:
                yield item


def read_csv(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """The rows of a comma-separated file (RFC 4180) whose first row names the columns. Blank lines are no rows."""
    csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD))
    with open_file(file.path, file.name, file.archive) as opened:
        rows = csv.reader((_decode(line, file.name, n) for n, line in enumerate(opened.lines(), 1)), strict=True)
        header: list[str] = []
        while True:
            source = f"{file.name}:{rows.line_num + 1}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                if "new-line character" in str(error):
                    raise UserError(
                        f"{source}: its lines end in a carriage return alone; convert the file by `tr '\\r' '\\n'`"
                    ) from error
                raise UserError(
                    f"{source}: not CSV: {error}; is a quote in the row that starts there wrong?"
                ) from error
            if row is None:
                return
            if not row:
                continue
            if not header:
                header = row
                if twice := [name for name, count in Counter(header).items() if count > 1]:
                    raise UserError(f"{source}: two columns are called {twice[0]!r}; the first row must name each once")
                continue
            if len(row) != len(header):
                raise UserError(
                    f"{source}: a row of {len(row)} fields, the first row names {len(header)}; quote fields with commas"
                )
            record = dict(zip(header, row, strict=True))
            item = record_item(record, source, opened.taken(), text_key, skipped)
            if item is not None:
                yield item


def read_parquet(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """The rows of a Parquet file; of its columns only those that texts or conversations stand in are read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file.name}: .parquet files need pyarrow: pip install 'lit-llm[parquet]'") from error
    with open(file.path, "rb") as raw:
        number = told = 0
        try:
            # A small buffer reads a column page by page; without one a whole row group would be in memory.
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=PART_BYTES, pre_buffer=False)
            wanted = columns(table.schema_arrow.names, text_key)
            total = max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(_TABLE_ROWS, columns=wanted, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    now = file.size * number // total
                    size, told = now - told, now
                    item = record_item(record, f"{file.name}:{number}", size, text_key, skipped)
                    if item is not None:
                        yield item
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.name}: a text in the {_TABLE_ROWS} rows from {number + 1} on is not UTF-8"
            ) from error
        except (pyarrow.ArrowException, OSError) as error:
            what = " ".join(str(error).split())
            raise UserError(f"{file.name}: not a Parquet file, or a broken one: {what:.200}") from error


_READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".py": read_python,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
