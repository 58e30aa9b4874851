"""fit, validate, test and predict: a LightningCLI for one command."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace, set_dumper
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lit_llm.callbacks import PredictionWriter, RunCheckpoint, SaveConfig
from lit_llm.checkpoint.find import CHECKPOINTS, Found, find_in_folder, list_folder
from lit_llm.checkpoint.hf_folder import config_from_hf, config_like
from lit_llm.checkpoint.load import describe
from lit_llm.cli.arguments import Arguments, prepare_arguments
from lit_llm.cli.explain import explain
from lit_llm.cli.fit_tools import replay_file, schedule_picture
from lit_llm.cli.processes import Children, is_first_process
from lit_llm.cli.strategies import settle_strategy, strategy_words
from lit_llm.cli.trainer import LOG_EVERY, RunTrainer, make_trainer
from lit_llm.cli.yaml_text import dump_yaml
from lit_llm.data import TokenDataModule
from lit_llm.errors import UserError
from lit_llm.model.presets import PRESETS
from lit_llm.module import LitLLM

DEFAULT_ROOT = "runs/default"
_DESCRIPTIONS = {
    "fit": "Trains a model; checkpoints, logs and config.yaml go into --trainer.default_root_dir. Instead of training, "
    "--print_schedule draws the learning rate over the run, and --replay FILE computes a batch that the guard has "
    "saved in replays/ with the weights of --ckpt_path (default: last) and says where it goes wrong.",
    "validate": "Evaluates a checkpoint on the store's validation split.",
    "test": "Evaluates a checkpoint on the store's test split, or on validation where it has none.",
    "predict": "Completes prompts with a checkpoint and writes a JSON object a line.",
}
_MORE_HELP = (
    " The options of the model and of the data: --model.help, --data.help. All of them as they stand: --print_config. "
    "Later files and options win; single fields of model.config add to the mapping or preset before them."
)


def run_trainer_command(command: str, words: list[str]) -> int:
    """Runs ``lit-llm COMMAND WORDS``; errors as in :func:`lit_llm.cli.main.main`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own classes, also when started as a script
    _set_up_messages()
    set_dumper("yaml", dump_yaml)
    arguments = prepare_arguments(words, command)
    arguments.words = strategy_words(arguments.words)
    RunCLI(command, arguments).run()
    return 0


class RunCLI(LightningCLI):
    """Parses, builds model, data and Trainer, and runs one command.

    It differs from Lightning's own in what a user meets: the model's and the data's options need no class_path, errors
    are one line, hyperparameters inside a checkpoint never win over what was typed, and `last` and `best` are found
    from the files.
    """

    def __init__(self, command: str, arguments: Arguments) -> None:
        self.command = command
        self.arguments = arguments
        self.found: Found | None = None
        self.saved: dict[str, Any] | None = None  # the model's configuration in the checkpoint
        super().__init__(
            LitLLM,
            LightningDataModule,
            save_config_callback=None,
            trainer_class=RunTrainer,
            trainer_defaults={"default_root_dir": DEFAULT_ROOT, "log_every_n_steps": LOG_EVERY},
            seed_everything_default=0,
            parser_class=RunParser,
            parser_kwargs={
                "prog": f"lit-llm {command}",
                "usage": f"lit-llm {command} [--config FILE]... [OPTION]...",
                "description": _DESCRIPTIONS[command] + _MORE_HELP,
                "allow_abbrev": False,
            },
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=arguments.words,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # Options

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults, checkpoints, and the links from the data to the model."""
        parser.set_defaults(
            {"model": {"class_path": "lit_llm.LitLLM"}, "data": {"class_path": "lit_llm.TokenDataModule"}}
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        start = "start afresh" if self.command == "fit" else "last"
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            help=f"last, best or a file; last and best are looked for in the run's checkpoints. Without it: {start}.",
        )
        parser.add_argument(
            "--weights_only",
            type=bool | None,
            help="false reads a checkpoint that holds other objects than plain types, and runs code that it may hold.",
        )
        if self.command == "predict":
            parser.add_argument(
                "--output", type=str | None, help="file of the completions; null: predictions.jsonl in the run's folder"
            )
        for name, value in (("vocab_size", self._data_vocab_size), ("seq_len", self._data_seq_len)):
            if name not in self.arguments.given:  # what the user types wins
                parser.link_arguments("data", f"model.init_args.{name}", compute_fn=value, apply_on="instantiate")

    def _data_vocab_size(self, data: LightningDataModule) -> int | None:
        if self.command == "predict" and self.saved is not None:  # the checkpoint's tokenizer is used, not the store's
            return self.saved["unpadded_vocab_size"] or self.saved["vocab_size"]
        return getattr(data, "vocab_size", None)

    def _data_seq_len(self, data: LightningDataModule) -> int | None:
        return None if self.command == "predict" else getattr(data, "seq_len", None)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the words; a mistake is told in one line."""
        assert isinstance(args, list)
        try:
            self.config = parser.parse_args(args)
        except ParseError as error:
            raise UserError(explain(str(error), _known_names(parser, self.arguments.classes))) from None

    # From the options to objects

    def before_instantiate_classes(self) -> None:
        """Refuses what can't run, and finds the checkpoint to start from."""
        settings = self.config.trainer
        root = Path(settings.default_root_dir)
        if (line := settle_strategy(settings)) is not None:
            say(line)
        if self.command == "fit":
            _check_writable(root, "trainer.default_root_dir")
            if self.config.checkpoint.dirpath and settings.enable_checkpointing is not False:
                _check_writable(self._place, "checkpoint.dirpath")
            self._say_what_may_surprise()
        self.found = self._find_checkpoint()
        if self.found is not None:
            self._fill_from(self.found)
        elif self._pretrained is not None:
            config_from_hf(self._pretrained)  # refuses what can't be read, before anything is written

    @property
    def _pretrained(self) -> str | None:
        """The Hugging Face folder or hub's name that the model begins with."""
        return (self.config.model.get("init_args") or {}).get("pretrained")

    @property
    def _place(self) -> Path:
        """Where the run's checkpoints lie."""
        elsewhere = self.config.checkpoint.dirpath
        root = Path(self.config.trainer.default_root_dir)
        return Path(elsewhere).expanduser() if elsewhere else root / CHECKPOINTS

    def _newest(self) -> Path | None:
        return next(iter(list_folder(self._place)), None)

    @property
    def _trains(self) -> bool:
        return self.command == "fit" and not self.arguments.print_schedule and self.arguments.replay is None

    def _say_what_may_surprise(self) -> None:
        """An unbounded run, and one that starts afresh in the folder of another."""
        settings = self.config.trainer
        if not self._trains or settings.fast_dev_run:
            return
        if settings.max_steps == -1 and settings.max_epochs is None and settings.max_time is None:
            say("neither trainer.max_steps nor max_epochs is given, so Lightning trains 1,000 epochs; give one")
        if self.config.ckpt_path is None and (earlier := self._newest()):
            say(f"{earlier} is of an earlier run, which is left alone; --ckpt_path last would go on with it")

    def _find_checkpoint(self) -> Found | None:
        which = self.config.ckpt_path
        if self.arguments.print_schedule or (which is None and self._trains):
            return None
        if which is None and self._pretrained is not None and "pretrained" in self.arguments.typed:
            if (newest := self._newest()) is not None:
                say(f"{newest} is left alone; --ckpt_path last would take it")
            return None
        found = find_in_folder(self._place, which or "last", weights_only=self.config.weights_only is not False)
        if found is None:
            place = self._place
            if self._pretrained is not None and (which is None or self.command == "fit"):
                say(f"no checkpoint in {place}: the weights of {self._pretrained}")
                return None
            if self.command != "fit":
                raise UserError(
                    f"{self.command} needs a checkpoint and there is none in {place}; train one by `lit-llm fit`, or "
                    "give --ckpt_path FILE, the run's --trainer.default_root_dir (or checkpoint.dirpath), or "
                    "--model.pretrained FOLDER"
                )
            say(f"no checkpoint in {place}: {'training starts afresh' if self._trains else 'the initial weights'}")
            return None
        for line in found.skipped:
            say(f"passed over: {line}")
        unread = "" if self._pretrained is None else f"; {self._pretrained} is not read"
        say(f"checkpoint: {found.path} (step {found.content.get('global_step', 'unknown')}){unread}")
        if self._trains and "optimizer_states" not in found.content:
            raise UserError(f"{found.path} holds weights only, without what resuming needs; give another --ckpt_path")
        return found

    def _fill_from(self, found: Found) -> None:
        """What the user did not say of the model's shape comes from the checkpoint."""
        self.saved, _ = describe(found.content, found.path)
        init_args = self.config.model.get("init_args")
        if self.saved is None or init_args is None or "config" not in init_args:
            return
        if self.arguments.model_config is None:
            init_args["config"] = self.saved
        elif self.command != "fit":
            init_args["config"] = {**self.saved, **_fields(self.arguments.model_config)}

    def instantiate_classes(self) -> None:
        """Builds data, model and Trainer."""
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except ValueError as error:  # in which jsonargparse wraps what a class refuses, where several types would do
            refused = [line[4:] for line in str(error).splitlines() if line.startswith("  - ")]
            refused = [line for line in refused if not line.startswith("Expected a ")]
            if not refused:
                raise
            raise UserError(refused[0]) from error
        if self.command != "predict" and isinstance(self.datamodule, TokenDataModule):
            self.datamodule.require_store()  # before anything is written

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with the callbacks of this command."""
        settings = {**self.config_init.trainer.as_dict(), **kwargs}
        save_config = SaveConfig(self._dumped()) if self.command == "fit" else None
        return make_trainer(self.command, settings, self.config_init.checkpoint, save_config, self.config.get("output"))

    def _dumped(self) -> str:
        config = self.config.clone()
        config["ckpt_path"] = None  # says where this process began, not what the run is
        permission = "data.init_args.resume_with_other_data"  # given once, and not to every later resume
        if permission in config:
            config[permission] = False
        return self.parser.dump(config, skip_none=False)

    # The run

    def run(self) -> None:
        """Runs the command."""
        trainer = self.trainer
        if self.arguments.print_schedule:
            print(schedule_picture(self.model, self.datamodule, trainer))
            return
        if self.arguments.replay is not None:
            print(replay_file(self.model, trainer, self.arguments.replay, self.found))
            return
        run = getattr(trainer, self.command)
        begun_at = None if self.found is None else self.found.content.get("global_step")
        options: dict[str, Any] = {"return_predictions": False} if self.command == "predict" else {}
        ckpt_path = None if self.found is None else str(self.found.path)
        self.found = None  # lets the mapped file go
        with Children(trainer):
            try:
                run(
                    self.model,
                    datamodule=self.datamodule,
                    ckpt_path=ckpt_path,
                    weights_only=self.config.weights_only,
                    **options,
                )
            except SystemExit:
                if trainer.state.fn == "fit" and self._newest():
                    say("the same command with --ckpt_path last goes on")
                raise
            except RuntimeError as error:
                if not str(error).startswith("Error(s) in loading state_dict"):
                    raise
                raise UserError(
                    f"{ckpt_path} does not fit {type(self.model).__name__}: {' '.join(str(error).split())[:300]}; give "
                    "the --model and model.config that it was trained with"
                ) from error
        if self.command == "fit" and trainer.global_step == begun_at:
            say(
                f"no step was taken: the checkpoint is at step {begun_at}, where trainer.max_steps or max_epochs ends "
                "the run; raise it to train on"
            )
        if is_first_process():
            self._report()

    def _report(self) -> None:
        """Says where the results lie."""
        root = self.trainer.default_root_dir
        if self.command == "fit":
            newest = self._newest()
            print(f"run: {root}" + ("" if newest is None else f", last checkpoint: {newest}"))
        for callback in getattr(self.trainer, "callbacks", []):
            if isinstance(callback, PredictionWriter):
                print(f"{callback.records} completion{'' if callback.records == 1 else 's'} in {callback.output}")


class ParseError(Exception):
    """What jsonargparse does not accept, in its own many lines."""


class RunParser(LightningArgumentParser):
    """Raises where Lightning's prints the usage and exits."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises ParseError."""
        raise ParseError(message) from ex


def _set_up_messages() -> None:
    """Drops what Lightning says of itself rather than of the run, and shows what our own modules have to say."""
    for text in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
        r"The '\w+_dataloader' does not have many workers",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.formatwarning = _warning_line  # type: ignore[assignment]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    # Ours speak up: which attention runs, and why. A new handler each time, as stderr may be another one by now.
    ours = logging.getLogger("lit_llm")
    ours.handlers = [logging.StreamHandler()]
    ours.setLevel(logging.INFO if is_first_process() else logging.WARNING)


def _warning_line(message: Warning | str, *where: Any) -> str:
    """The warning itself, without the line of code that gave it."""
    return f"warning: {message}\n"


def _is_no_tip(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "Tip:" not in message and "Detected KeyboardInterrupt" not in message


def say(line: str) -> None:
    """A line to the user, once over all processes."""
    if is_first_process():
        print(line, file=sys.stderr, flush=True)


def _fields(config: Any) -> dict[str, Any]:
    """The fields that the user gave; a preset's size of vocabulary and context follow the data, so they are none."""
    given = {"preset": config} if isinstance(config, str) else dict(config)
    if "preset" not in given:
        return given
    name = given.pop("preset")
    like = config_like(name)
    if name in PRESETS:
        del like["vocab_size"], like["max_position_embeddings"]
    return {**like, **given}


def _check_writable(folder: Path, option: str) -> None:
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{option} {folder}: {place} is a file, not a folder; choose another")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {place} can't be written to; choose another")


def _known_names(parser: LightningArgumentParser, classes: dict[str, str]) -> set[str]:
    """Names of all options, those of the chosen classes included."""
    names = {action.dest for action in parser._actions}
    chosen = [f"--{section}={path}" for section, path in classes.items()]
    for words in (chosen, *([word] for word in chosen), []):  # a class may be what is wrong
        with contextlib.suppress(Exception):
            config: Namespace = parser.parse_args(words)
            return names | set(config.keys())
    return names
