"""Which dtype what has, for each precision of the Trainer and each strategy: the table that docs show and a test holds.

The rule behind it: what is added up over many terms is float32 unless the user chose ``bf16-true``, and what is added
up over processes is float32 even then.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

FLOAT32, BFLOAT16, FLOAT16, NONE = "float32", "bfloat16", "float16", "-"


@dataclass(frozen=True)
class Dtypes:
    """A row; values are names of torch's dtypes, ``-`` where there is no such thing.

    Args:
        precision: ``trainer.precision``.
        strategy: ``trainer.strategy``.
        parameters: as they are stored, checkpoints among them.
        gathered: parameters of a block while it computes, where a strategy gathers them.
        compute: operands of a block's matrix products.
        rotary: tables of sines and cosines; the model has no buffers.
        loss: that backward begins with and that is logged.
        reduction: in which gradients are added up over processes.
        gradients: as the optimizer gets them.
        optimizer: what the optimizer remembers of each weight.
    """

    precision: str
    strategy: str
    parameters: str
    gathered: str
    compute: str
    rotary: str
    loss: str
    reduction: str
    gradients: str
    optimizer: str


SINGLE, DDP, REPLICAS, SHARDS, HYBRID = (
    "single device",
    "ddp",
    "DataParallelStrategy",
    "MeshStrategy, shard",
    "MeshStrategy, replicate x shard",
)
_STRATEGIES = (SINGLE, DDP, REPLICAS, SHARDS, HYBRID)


def _row(precision: str, strategy: str) -> Dtypes:
    sharded = strategy in (SHARDS, HYBRID)
    compute = {"32-true": FLOAT32, "16-mixed": FLOAT16}.get(precision, BFLOAT16)
    stored = BFLOAT16 if precision == "bf16-true" else FLOAT32
    return Dtypes(
        precision=precision,
        strategy=strategy,
        parameters=stored,
        gathered=compute if sharded else NONE,
        compute=compute,
        rotary=FLOAT32,
        loss=FLOAT32,
        reduction=NONE if strategy == SINGLE else FLOAT32,
        gradients=stored,
        optimizer=stored,
    )


TABLE: tuple[Dtypes, ...] = tuple(
    _row(precision, strategy)
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
    for strategy in _STRATEGIES
    if precision != "16-mixed" or strategy not in (SHARDS, HYBRID)  # its loss scale knows no shards: Lightning refuses
)
"""Every precision and strategy that LitLLM trains with. ``compression`` changes ``reduction`` to what it says."""


def as_markdown() -> str:
    """The table in Markdown."""
    names = [field.name for field in fields(Dtypes)]
    rows = [names, ["---"] * len(names), *(list(astuple(row)) for row in TABLE)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
