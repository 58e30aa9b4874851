"""Keeps the configuration of a run beside its results."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

CONFIG_FILE = "config.yaml"


class SaveConfig(Callback):
    """Writes ``config.yaml`` into the run's folder when training starts.

    An equal one is left as it is; an earlier, different one is kept as config-1.yaml, config-2.yaml and so on.

    Args:
        text: the configuration as YAML.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file, on rank 0."""
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / CONFIG_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if _content(path.read_text(encoding="utf-8")) == _content(self.text):
                return
            number = 1
            while (kept := path.with_name(f"config-{number}.yaml")).exists():
                number += 1
            os.replace(path, kept)
        partial = path.with_name(f".{CONFIG_FILE}.partial")
        partial.write_text(self.text, encoding="utf-8")
        os.replace(partial, path)


def _content(text: str) -> list[str]:
    """The lines that mean something: the comments hold the version of Lightning."""
    return [line for line in text.splitlines() if not line.startswith("#")]
