"""The Trainer of the command line: Lightning's, with a run's folder, checkpoints and progress."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_llm.callbacks import PredictionWriter, ProgressLines
from lit_llm.errors import UserError
from lit_llm.parallel.strategy import MeshStrategy

PREDICTIONS = "predictions.jsonl"
LOG_EVERY = 10


class RunTrainer(Trainer):
    """Lightning's Trainer.

    The four limits are declared again because jsonargparse, given Lightning's own declaration, reads 1 as 1.0, which is
    all batches instead of one.

    Args:
        limit_train_batches: batches of an epoch to train on: a whole number, or a share of them as a float.
        limit_val_batches: likewise for validation.
        limit_test_batches: likewise for test.
        limit_predict_batches: likewise for predict.
    """

    def __init__(
        self,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            **kwargs,
        )


def follow_torchrun(settings: dict[str, Any]) -> None:
    """As many devices and nodes as torchrun has started processes for, where the user names none.

    Lightning's auto is one on a CPU: each process would train a run of its own, all in one folder. After an elastic
    restart there may be fewer processes than devices, even one alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nodes = world // local
    if settings["devices"] in (None, "auto", -1, "-1"):
        settings["devices"] = local
    if settings["num_nodes"] == 1:
        settings["num_nodes"] = nodes
    if str(settings["devices"]) != str(local) and settings["devices"] != [*range(local)]:
        raise UserError(
            f"torchrun has started {local} process{'' if local == 1 else 'es'} here, but trainer.devices is "
            f"{settings['devices']}; leave trainer.devices out, or give {local}"
        )
    if settings["num_nodes"] != nodes:
        raise UserError(
            f"torchrun runs on {nodes} node{'' if nodes == 1 else 's'} now, but trainer.num_nodes is "
            f"{settings['num_nodes']}; leave trainer.num_nodes out, since torchrun may change it"
        )


def _check_slurm(devices: Any, nodes: int) -> None:
    """Refuses other numbers than those of the processes that srun has started; Lightning would wait, or run each alone.

    Lightning's own check runs only where it starts the processes itself.
    """
    tasks, machines = (os.environ.get(f"SLURM_{name}") for name in ("NTASKS_PER_NODE", "NNODES"))
    if tasks is None and (count := os.environ["SLURM_NTASKS"]) != "1":
        raise UserError(f"SLURM's --ntasks {count} says not how many run on a node; give --ntasks-per-node instead")
    if tasks is not None and tasks != str(devices):
        raise UserError(
            f"trainer.devices {devices} does not match SLURM's --ntasks-per-node {tasks}; give both the same number"
        )
    if machines is not None and machines != str(nodes):
        raise UserError(
            f"trainer.num_nodes {nodes} does not match SLURM's --nodes {machines}; give both the same number"
        )


def make_trainer(
    command: str, settings: dict[str, Any], checkpoint: Callback, save_config: Callback | None, output: str | None
) -> Trainer:
    """The Trainer for a command.

    The user's callbacks come first. fit adds checkpoints, the saved configuration and a TensorBoard log in ``logs/`` of
    the run's folder; predict the writer of its file; all show progress, as a bar on a terminal and as lines elsewhere.

    Args:
        command: fit, validate, test or predict.
        settings: arguments of the Trainer.
        checkpoint: writes the checkpoints of fit.
        save_config: writes the configuration of fit.
        output: file for predict; None: in the run's folder.

    Raises:
        UserError: settings that contradict each other or this machine.
    """
    callbacks = settings.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    root = settings["default_root_dir"]
    if command == "predict":
        callbacks.append(PredictionWriter(output or Path(root) / PREDICTIONS))
    if settings["barebones"]:
        if settings["log_every_n_steps"] == LOG_EVERY:
            settings["log_every_n_steps"] = None  # our default, which Lightning would refuse here
    else:
        if command == "fit":
            if settings["enable_checkpointing"] is not False:
                callbacks.append(checkpoint)
            if save_config is not None and not settings["fast_dev_run"]:
                callbacks.append(save_config)
            if settings["logger"] in (None, True):
                settings["logger"] = TensorBoardLogger(root, name="", version="logs")
        else:
            settings["logger"] = settings["logger"] or False
            if not any(isinstance(one, Checkpoint) for one in callbacks):
                settings["enable_checkpointing"] = False
        if settings["enable_progress_bar"] is None and not any(isinstance(one, ProgressBar) for one in callbacks):
            terminal = sys.stdout.isatty()
            settings["enable_progress_bar"] = terminal
            callbacks.append(RichProgressBar() if terminal else ProgressLines())
    follow_torchrun(settings)
    if isinstance(settings["strategy"], MeshStrategy) and str(settings["precision"]) in ("16", "16-mixed"):
        raise UserError("trainer.precision 16-mixed does not exist with MeshStrategy; use bf16-mixed or 32-true")
    try:
        trainer = RunTrainer(**{**settings, "callbacks": callbacks})
        alone = isinstance(trainer.strategy, SingleDeviceStrategy) and "SLURM_STEP_ID" not in os.environ  # no srun
        if isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment) and not alone:
            _check_slurm(trainer.num_devices, trainer.num_nodes)
    except UserError:
        raise
    except (IndexError, RuntimeError):
        if SLURMEnvironment.detect() and "TORCHELASTIC_RUN_ID" not in os.environ:
            _check_slurm(settings["devices"], settings["num_nodes"])
        raise
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
    asked = str(settings["precision"])
    if asked in ("16", "16-mixed") and trainer.precision != "16-mixed":
        device = trainer.strategy.root_device.type
        raise UserError(f"trainer.precision {asked} does not exist on {device}; use bf16-mixed or 32-true")
    return trainer
