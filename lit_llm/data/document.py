"""What sources give and the encoder takes: texts, whole or in parts, and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a part of one: the parts of a long text come one after another, only the first begins it, only the
    last ends it.

    Args:
        text: any valid Unicode text.
        source: where it stands (``file`` or ``file:line``), for messages.
        size: bytes of input it took, for progress.
        begins, ends: whether the text starts, and stops, with this part.
    """

    text: str
    source: str
    size: int
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat: mappings with ``role`` and ``content``. ``source`` and ``size`` as in :class:`Document`."""

    messages: Sequence[Mapping[str, Any]]
    source: str
    size: int


Item = Document | Conversation
