"""The weights of a Hugging Face folder under the names and in the layout of our Transformer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from lit_llm.checkpoint.families.layout import Piece, Theirs, pieces, shapes_of
from lit_llm.checkpoint.tensor_folder import TensorFolder
from lit_llm.checkpoint.tensor_reader import DTYPES, PIECE
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.model.init import part_and_offsets

# What files hold beside weights: rotary frequencies, which are computed, and the masks of old GPT-2 and GPT-NeoX files.
_NO_WEIGHTS = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))")
_EMBEDDING = "embed_tokens.weight"


class Pretrained:
    """The tensors of a folder, each read when it is asked for; a :class:`lit_llm.checkpoint.hf.Weights`.

    Args:
        tensors: of the folder.
        theirs: what they should be for ``config``, see :mod:`lit_llm.checkpoint.families.layout`.
        config: of the model.
        head: their name of a head; files may have one even where the configuration ties it to the embedding.

    Raises:
        UserError: a tensor that is missing, unexpected or of another shape or kind than the configuration's; it is
            named.
    """

    def __init__(
        self, tensors: TensorFolder, theirs: Mapping[str, Theirs], config: ModelConfig, head: str = "lm_head.weight"
    ) -> None:
        self.tensors, self.config = tensors, config
        self._shapes = shapes_of(config)
        self._pieces = pieces(theirs.values())
        self._tied_head = head if config.tie_word_embeddings and head in tensors else None
        self._names = {name: self._found(name) for name in theirs}
        self._check(theirs)

    def names(self) -> list[str]:
        """Of all tensors, as in ``Transformer.state_dict()``."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor; of several pieces, the widest. Eight bits, which nothing computes in, are read as bfloat16."""
        found = (self.tensors.dtype(self._file_name(one)) for one in self._pieces[name])
        return reduce(torch.promote_types, (torch.bfloat16 if one.itemsize == 1 else one for one in found))

    @property
    def widest(self) -> torch.dtype:
        """The dtype that holds all of them."""
        return reduce(torch.promote_types, map(self.dtype, self._shapes))

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU."""
        target = torch.empty(self._shapes[name], dtype=self.dtype(name), device="cpu")
        self.read_into(name, target)
        return target

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, offsets: tuple[int, ...] | None = None) -> None:
        """Fills a tensor of any dtype and device, or a part of one; only the bytes of the part are read.

        Of a part along another dimension than the first, or of a matrix that the file holds transposed, the rows it
        shares are read a few MB at a time.

        Args:
            name: of ours.
            target: the whole, or the part of the whole
            offsets: that begins here, one number per dimension.
        """
        begin = offsets or (0,) * target.ndim
        for piece in self._pieces[name]:
            part, origin, index = target, begin, piece.segment.index
            if index is not None:
                if not begin[0] <= index < begin[0] + len(target):
                    continue
                part, origin = target[index - begin[0]], begin[1:]
            self._fill(piece, part, origin)

    def _fill(self, piece: Piece, part: Tensor, origin: tuple[int, ...]) -> None:
        """The rows of a piece that lie in a part of ours, or of one matrix of a stack of ours."""
        segment, theirs = piece.segment, self._file_name(piece)
        first, last = max(origin[0], segment.start), min(origin[0] + len(part), segment.stop)
        if first >= last or not part.numel():
            return
        place, shift = part[first - origin[0] : last - origin[0]], piece.their_start - segment.start
        rows, columns = (first + shift, last + shift), self._columns(origin[1:], place.shape[1:])
        if piece.theirs.transposed:
            rows, columns, place = (origin[1], origin[1] + place.shape[1]), (slice(*rows),), place.T
        whole = self.tensors.shape(theirs)
        if columns == self._columns((0,) * len(columns), whole[1:]):
            self.tensors.read_into(theirs, place, rows)
            return
        chosen = (slice(None), *columns)
        each = max(1, PIECE // max(1, math.prod(whole[1:]) * self.tensors.dtype(theirs).itemsize))
        for start in range(rows[0], rows[1], each):
            stop = min(start + each, rows[1])
            read = self.tensors.read_rows(theirs, start, stop)
            place[start - rows[0] : stop - rows[0]].copy_(read[chosen])

    @staticmethod
    def _columns(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + number) for begin, number in zip(start, size, strict=True))

    def _file_name(self, piece: Piece) -> str:
        return self._names[piece.theirs.name]

    def _found(self, name: str) -> str:
        """A tensor's name in the files, where those of a bare base model begin without ``model.`` or the like."""
        if name in self.tensors:
            return name
        _, dot, bare = name.partition(".")
        if dot and bare in self.tensors:
            return bare
        if self._tied_head is not None and name == self._pieces[_EMBEDDING][0].theirs.name:
            return self._tied_head  # some files have it in place of the embedding
        return name

    def _check(self, theirs: Mapping[str, Theirs]) -> None:
        """Refuses files that do not fit the configuration."""
        there, wanted, folder = set(self.tensors.names()), set(self._names.values()), self.tensors.folder
        if missing := sorted(wanted - there):
            raise UserError(f"{folder} does not fit its config.json: {_some(missing)} missing")
        over = there - wanted - {self._tied_head}
        if unexpected := sorted(name for name in over if not _NO_WEIGHTS.fullmatch(name)):
            raise UserError(f"{folder} does not fit its config.json: {_some(unexpected)} unexpected")
        for name, one in theirs.items():
            file_name = self._names[name]
            shape, dtype = self.tensors.shape(file_name), self.tensors.dtype(file_name)
            if shape != one.shape:
                raise UserError(
                    f"{folder} does not fit its config.json: {file_name} is {list(shape)}, not {list(one.shape)}"
                )
            if not dtype.is_floating_point:
                word = next(word for word, known in DTYPES.items() if known == dtype)
                raise UserError(
                    f"{folder}: {file_name} is {word}, so quantized; give the folder of the original weights"
                )

    def same_head(self) -> bool:
        """Whether a tied head that the files hold all the same equals the embedding; read a few MB at a time."""
        head, embedding = self._tied_head, self._file_name(self._pieces[_EMBEDDING][0])
        if head is None or head == embedding:
            return True
        shape = self.tensors.shape(embedding)
        if self.tensors.shape(head) != shape:
            return False
        each = max(1, PIECE // max(1, 8 * shape[1]))
        spans = ((start, min(start + each, shape[0])) for start in range(0, shape[0], each))
        return all(
            torch.equal(self.tensors.read_rows(head, *span).double(), self.tensors.read_rows(embedding, *span).double())
            for span in spans
        )


@torch.no_grad()
def load_into(model: Transformer, weights: Pretrained) -> None:
    """Fills a model whose parameters are allocated, tensor by tensor, in their own dtypes.

    Of a parameter that lies on several processes each reads its own part alone.
    """
    for name, parameter in model.named_parameters():
        plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        part, offsets = part_and_offsets(parameter)
        weights.read_into(plain, part, offsets)


def first_not_finite(model: Transformer) -> str | None:
    """The first parameter of which this process holds a NaN or an infinity, if any; reads each once."""
    for name, parameter in model.named_parameters():
        part = part_and_offsets(parameter)[0].detach()
        if part.numel() and not bool(torch.stack(torch.aminmax(part)).isfinite().all()):
            return name
    return None


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors, such as {names[0]}, are"
