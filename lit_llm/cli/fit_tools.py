"""What `lit-llm fit` can do instead of training: show the schedule, or compute a bad step's batch again."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from lit_llm.checkpoint.find import Found
from lit_llm.module import LitLLM
from lit_llm.optim import draw_schedule
from lit_llm.training.replay import describe, load_batches, replay
from lit_llm.training.streams import begin_stream

_ASCII = {"\u2500": "-", "\u2514": "+", "\u2524": "|", "\u2800": " "}  # axes, and the empty braille cell


def schedule_picture(model: LitLLM, data: Any, trainer: Any) -> str:
    """The learning rate of the run that these would train, as a plot and a table.

    Raises:
        UserError: nothing bounds the run, and the schedule needs its length.
    """
    model.trainer = trainer
    trainer.strategy.connect(model)
    trainer._data_connector.attach_datamodule(model, data)
    if model.schedule_config.total_steps is None and trainer.max_steps == -1:
        data.setup("fit")  # its steps an epoch
    config, width = model.schedule_config, min(max(shutil.get_terminal_size((72, 24)).columns, 40), 100)
    picture = draw_schedule(
        config, model.optimizer_config.lr, model.total_steps(), model.tokens_per_step(), width=width
    )
    try:
        picture.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        picture = "".join(_ASCII.get(c, c if c.isascii() else "*") for c in picture)
    return picture


def replay_file(model: LitLLM, trainer: Any, file: str, found: Found | None) -> str:
    """Computes the micro-batches of a saved file with a checkpoint's weights, and describes what happens.

    Args:
        model: not yet built.
        trainer: whose device and precision are used.
        file: that the guard has saved.
        found: the checkpoint; None: the initial weights.

    Raises:
        UserError: no such file, or one of another kind.
    """
    saved = load_batches(file)
    if found is None:
        model.configure_model()
    else:
        content = {**found.content, "callbacks": {}}  # the weights that were trained, not their average
        model.on_load_checkpoint(content)
        model.load_state_dict(content["state_dict"])
    model.trainer = trainer
    trainer.precision_plugin.convert_module(model).to(trainer.strategy.root_device).train()

    def seed(micro_batch: int) -> None:
        begin_stream(saved.seed, saved.step - 1, micro_batch, saved.rank)

    reports = replay(model, saved, forward_context=trainer.precision_plugin.forward_context, seed_microbatch=seed)
    weights = "the initial weights" if found is None else f"the weights of {found.path}"
    return f"{describe(reports, saved)}\ncomputed with {weights}"
