"""The bytes of a trace file, inflated where they are gzip, as far as they can be had."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lit_llm.errors import UserError

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_PIECE = 256 << 10


class Source:
    """A file as blocks of text; what was wrong with it is known once they have been read.

    The content decides whether it is gzip, not the name. Damaged gzip data gives what stands before the damage.

    Attributes:
        damaged: the gzip data is cut, or breaks off, or its checksum is wrong.
        problems: lines for the user.
    """

    def __init__(self, path: Path, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.damaged = False
        self.problems: list[str] = []

    def blocks(self) -> Iterator[bytes]:
        """Blocks of at most about ``block_bytes`` bytes, none empty, without a byte order mark.

        Raises:
            UserError: the file can't be read or is empty.
        """
        try:
            with open(self.path, "rb") as file:
                start = file.read(2)
                file.seek(0)
                if not start:
                    raise UserError(f"{self.path} is no trace of the PyTorch profiler (the file is empty)")
                zipped = start == _GZIP
                if not zipped and self.path.suffix == ".gz":
                    self.problems.append("is named .gz but is not gzip; read as it is")
                inner = self._inflate(file) if zipped else iter(lambda: file.read(self.block_bytes), b"")
                first = True
                for block in inner:
                    if first and block.startswith(_BOM):
                        block = block[len(_BOM) :]
                    first = False
                    if block:
                        yield block
        except OSError as error:
            raise UserError(f"{self.path} can't be read ({error.strerror or error})") from None

    def _inflate(self, file: IO[bytes]) -> Iterator[bytes]:
        """All gzip members of the file, one after the other."""
        piece = file.read(_PIECE)
        while piece:
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                if not piece:
                    piece = file.read(_PIECE)
                if not piece:
                    # A member's start may be left over where the cut fell; what it held is given already.
                    yield from self._end(member.flush(), "its gzip data is cut off")
                    return
                before = member.copy()
                try:
                    block = member.decompress(piece, self.block_bytes)
                except zlib.error as error:
                    why = "has a wrong checksum" if "check" in str(error) else "is damaged"
                    yield from self._end(_until_error(before, piece), f"its gzip data {why}")
                    return
                piece = member.unconsumed_tail
                if block:
                    yield block
            rest = member.unused_data
            if len(rest) < 2:
                rest += file.read(_PIECE)
            piece = rest.lstrip(b"\0")
            while not piece and (more := file.read(_PIECE)):
                piece = more.lstrip(b"\0")  # padding
            if piece and not (piece + b"\x8b").startswith(_GZIP):
                self.problems.append("has bytes behind its gzip data; they were ignored")
                return

    def _end(self, block: bytes, problem: str) -> Iterator[bytes]:
        self.damaged = True
        self.problems.append(problem)
        if block:
            yield block


def _until_error(member: zlib._Decompress, piece: bytes) -> bytes:
    """What ``piece`` inflates to before zlib gives up: it drops the output of the call that fails."""
    out = []
    try:
        for at in range(len(piece)):
            out.append(member.decompress(piece[at : at + 1]))
    except zlib.error:
        pass
    return b"".join(out)
