"""``trainer.ckpt_path`` as soon as a run begins: Lightning 2.6 sets it only after setup and configure_model."""

from __future__ import annotations

from typing import Any


def foretell_checkpoint(trainer: Any) -> None:
    """Lets a Trainer's ``ckpt_path`` say in ``setup`` already which checkpoint will be loaded; None: none will.

    A test fails once Lightning does so itself.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)
    select = getattr(connector, "_select_ckpt_path", None)
    if select is not None and not isinstance(select, _Selection):
        connector._select_ckpt_path = _Selection(connector)  # type: ignore[union-attr]


class _Selection:
    """Lightning's choice of a checkpoint, which is noted."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        connector = self._connector
        connector._ckpt_path = type(connector)._select_ckpt_path(connector, *args, **kwargs)
        return connector._ckpt_path
