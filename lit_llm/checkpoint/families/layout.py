"""How a family's tensors are made of ours, row by row.

Each of their tensors, turned over where it is stored so, is rows of ours one behind the other. That covers projections
that are fused, in one piece or head by head, and experts that are tensors of their own; it can be read in both
directions, and any range of rows of ours can be found without reading the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from lit_llm.model import ModelConfig, Transformer

Shapes = Mapping[str, tuple[int, ...]]
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""All experts in two tensors, as transformers 5 holds them, and saves them with ``save_original_format=False``."""


@dataclass(frozen=True)
class Segment:
    """Rows of a tensor of ours.

    Args:
        ours: its name.
        start, stop: rows of it, or of what ``index`` names.
        index: one of the matrices that the tensor is a stack of; None: it is no stack, or is taken as a whole.
    """

    ours: str
    start: int
    stop: int
    index: int | None = None


@dataclass(frozen=True)
class Theirs:
    """A tensor of theirs.

    Args:
        name: in their files.
        shape: there.
        segments: what its rows are, or its columns where it is ``transposed``.
        transposed: it is stored (in, out), as GPT-2's Conv1D does, while ours are (out, in).
    """

    name: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Piece:
    """Where rows of a tensor of ours lie in their files.

    Args:
        theirs: the tensor.
        their_start: the first row of them there (a column where it is transposed).
        segment: the rows of ours.
    """

    theirs: Theirs
    their_start: int
    segment: Segment


@dataclass(frozen=True)
class Names:
    """What a family calls our modules.

    Args:
        prefix: of all but the head.
        layers: the list of layers.
        outer: our module outside of the layers to theirs; one that is not here has the same name.
        head: the head.
        modules: within a layer, their module to ours; several are one tensor, one behind the other. A module that is
            not here has the same name.
        grouped: those of ``modules`` whose rows go key-value head by key-value head: its queries, its key, its value.
        transposed: those of ``modules`` whose matrices are stored (in, out).
        experts: their names of an expert's gate, up and down projections within a layer, with ``{e}`` for its number;
            or of all experts' gate and up projections in one, and of their down projections.
        stacks: our module to theirs, with ``{h}`` for the number of a row of ours, each of which is one of theirs.
    """

    prefix: str = "model."
    layers: str = "layers"
    outer: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head"
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    experts: tuple[str, ...] = tuple(f"mlp.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    stacks: Mapping[str, str] = field(default_factory=dict)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a Transformer's tensors, without making it."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}


def tensors(names: Names, config: ModelConfig, shapes: Shapes | None = None) -> dict[str, Theirs]:
    """All tensors of theirs that a model of this configuration has, in the order of ours.

    Args:
        names: of the family.
        config: of the model.
        shapes: of ours; None: they are worked out.
    """
    shapes = shapes_of(config) if shapes is None else shapes
    fused = {ours: (theirs, parts) for theirs, parts in names.modules.items() for ours in parts}
    found: dict[str, Theirs] = {}
    for name, shape in shapes.items():
        layer, module, kind = split_name(name)
        place = f"{names.prefix}{names.layers}.{layer}." if layer else ""
        if module == "mlp.experts":
            made: Iterable[Theirs] = _experts(names, place, name, shape)
        elif module in names.stacks:
            made = [
                Theirs(f"{place}{names.stacks[module].format(h=h)}.{kind}", shape[1:], (Segment(name, 0, shape[1], h),))
                for h in range(shape[0])
            ]
        elif not layer:
            outer = names.head if module == "lm_head" else names.prefix + names.outer.get(module, module)
            made = [_whole(f"{outer}.{kind}", name, shape)]
        else:
            theirs, parts = fused.get(module, (module, (module,)))
            new = f"{place}{theirs}.{kind}"
            if new in found:
                continue
            ours = [f"layers.{layer}.{part}.{kind}" for part in parts]
            made = [_joined(new, ours, shapes, config, theirs in names.grouped, theirs in names.transposed)]
        found.update({one.name: one for one in made})
    return found


def pieces(theirs: Iterable[Theirs]) -> dict[str, tuple[Piece, ...]]:
    """The other way round: each tensor of ours to where it lies in theirs, in the order of its rows."""
    found: dict[str, list[Piece]] = {}
    for one in theirs:
        start = 0
        for segment in one.segments:
            found.setdefault(segment.ours, []).append(Piece(one, start, segment))
            start += segment.stop - segment.start
    for many in found.values():
        many.sort(key=lambda piece: (piece.segment.index or 0, piece.segment.start))
    return {name: tuple(many) for name, many in found.items()}


def split_name(name: str) -> tuple[str, str, str]:
    """The layer's number, the module in it, and weight or bias; the first is empty outside of layers."""
    words = name.split(".")
    if words[0] == "layers":
        return words[1], ".".join(words[2:-1]), words[-1]
    return "", ".".join(words[:-1]), words[-1]


def _whole(name: str, ours: str, shape: tuple[int, ...]) -> Theirs:
    return Theirs(name, shape, (Segment(ours, 0, shape[0]),))


def _joined(name: str, ours: list[str], shapes: Shapes, config: ModelConfig, grouped: bool, transposed: bool) -> Theirs:
    rows = [shapes[one][0] for one in ours]
    segments = tuple(Segment(one, 0, number) for one, number in zip(ours, rows, strict=True))
    if grouped:
        groups = config.kv_heads
        segments = tuple(
            Segment(one, group * (number // groups), (group + 1) * (number // groups))
            for group in range(groups)
            for one, number in zip(ours, rows, strict=True)
        )
    shape = (sum(rows), *shapes[ours[0]][1:])
    turned = transposed and len(shape) == 2
    return Theirs(name, shape[::-1] if turned else shape, segments, turned)


def _experts(names: Names, place: str, ours: str, shape: tuple[int, ...]) -> Iterable[Theirs]:
    down = ours.endswith("down_proj")
    if len(names.experts) == 2:
        yield _whole(place + names.experts[down], ours, shape)
        return
    gate_name, up_name, down_name = names.experts
    for e in range(shape[0]):
        if down:
            yield Theirs(place + down_name.format(e=e), shape[1:], (Segment(ours, 0, shape[1], e),))
            continue
        half = shape[1] // 2
        for name, start in ((gate_name, 0), (up_name, half)):
            yield Theirs(place + name.format(e=e), (half, shape[2]), (Segment(ours, start, start + half, e),))
