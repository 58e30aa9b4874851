"""Open files: plain, packed by gzip or Zstandard, and stdin, as streams of bytes that know how far the file is read."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lit_llm.errors import UserError

STDIN = "-"
_UNPACKED_BYTES = 1 << 18
_ZSTD_BYTES = 1 << 13


class Opened:
    """The bytes of an open file, as they were before they were compressed, and how much of the file they took."""

    def __init__(self, stream: BinaryIO, raw: BinaryIO | None = None) -> None:
        self.stream = stream
        self._raw = raw  # the file itself, where it is an archive
        self._read = self._told = 0

    def read(self, count: int) -> bytes:
        content = self.stream.read(count)
        self._read += len(content)
        return content

    def lines(self) -> Iterator[bytes]:
        r"""Lines with their "\n", which alone ends one: never U+2028."""
        for line in self.stream:
            self._read += len(line)
            yield line

    def taken(self) -> int:
        """Bytes of the file read since this was asked last."""
        now = self._read if self._raw is None else self._raw.tell()
        size, self._told = now - self._told, now
        return size


@contextmanager
def open_file(path: Path, name: str, archive: str) -> Iterator[Opened]:
    """Open the file at ``path``, called ``name`` in messages and packed as ``archive`` says: ".gz", ".zst" or "".

    UserError where it turns out to be a broken archive.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise UserError("stdin is closed: pipe text into it, or name files")
        yield Opened(sys.stdin.buffer)
        return
    with open(path, "rb") as raw:
        if not archive:
            yield Opened(raw)
            return
        try:
            unpacked: Any = gzip.GzipFile(fileobj=raw) if archive == ".gz" else _Zstd(raw, name)
            yield Opened(io.BufferedReader(unpacked, _UNPACKED_BYTES), raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{name}: broken {archive} archive: {error}; make or fetch it again") from error


class _Zstd(io.RawIOBase):
    """The content of Zstandard frames, one after another. Unlike the library's own stream it sees a missing end."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{name}: .zst files need zstandard: pip install 'lit-llm[zstd]'") from error
        self._raw = raw
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` makes them
        self._frame = self._decompressor.decompressobj()
        self._inside = False
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            packed = self._packed or self._raw.read(_ZSTD_BYTES)
            if not packed:
                if self._inside:
                    raise EOFError("it ends in the middle")
                return 0
            try:
                self._content = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise EOFError(str(error)) from error
            self._inside, self._packed = not self._frame.eof, b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count
