"""Which command runs, and what becomes of its errors."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Sequence

from lit_llm import __version__
from lit_llm.cli.options import OptionParser, did_you_mean
from lit_llm.errors import RunStopped, UserError

TRAINER_COMMANDS = {
    "fit": "train a model",
    "validate": "evaluate a checkpoint on the store's validation split",
    "test": "evaluate a checkpoint on the store's test split, or on validation where it has none",
    "predict": "complete prompts with a checkpoint, into a file",
}
COMMANDS = {
    "prepare": "make a token store out of text or chats, or verify one",
    "inspect": "show what a token store holds",
    **TRAINER_COMMANDS,
    "generate": "complete prompts with a checkpoint, on the screen",
    "export": "write a checkpoint as a Hugging Face folder",
    "trace": "say from profiler traces which rank lags, and why",
}
HELP = f"""\
usage: lit-llm COMMAND [OPTION]...

Train and run language models with PyTorch Lightning.

commands:
{chr(10).join(f"  {name:<10}{what}" for name, what in COMMANDS.items())}

options:
  -h, --help  this text; after a command, its options
  --version   the version

Begin with:
  lit-llm prepare python-stdlib --output store
  lit-llm fit --data.store store --trainer.max_steps 200
  lit-llm predict --data.prompts '["def "]'
"""

# What the other ranks meet when one is killed.
_LOST = re.compile(r"[Cc]onnection (closed|reset) by (remote )?peer")
# How long a rank other than the first keeps an error to itself: rank 0 mostly meets the same one and ends the run.
_PATIENCE_S = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: done, or ended and saved by SIGTERM or SIGUSR1. 1: the run failed, told in one line as below where it stopped by
    itself; another exception goes on to the caller, as a traceback. 2: a user's mistake; the last line on stderr starts
    with ``lit-llm: error:``. 130: Ctrl-C. 143: SIGTERM, with nothing to save.

    Args:
        argv: the words after ``lit-llm``; None: those of this process.
    """
    # Before torch is imported. Threads that spin while they wait for one another lose whole time slices as soon as
    # anything else runs: with one other process on 2 cores a training step took six times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Twenty lines of C++ frames from each rank whose store is gone, around the one that says who has died.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except SystemExit as done:
        if isinstance(done.__context__, KeyboardInterrupt):  # Lightning's own exit after Ctrl-C
            return 130
        if type(done).__name__ == "SIGTERMException" and done.code is None:  # Lightning's own, with nothing saved
            return 143
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BrokenPipeError:  # `lit-llm ... | head`: the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line, code = _mistake(error), 2
        if line is None:
            line, code = _failure(error), 1
        if line is None:
            raise
        if any(os.environ.get(name, "0") != "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID")):
            time.sleep(_PATIENCE_S)
        sys.stdout.flush()
        print(f"lit-llm: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
        return code


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(f"lit-llm {__version__}")
        return 0
    if command in TRAINER_COMMANDS:
        from lit_llm.cli.lightning import run_trainer_command

        return run_trainer_command(command, words[1:])
    if command in ("generate", "export", "trace"):
        tool = importlib.import_module(f"lit_llm.cli.{command}")
        return tool.run(tool.parser().parse(words[1:]))
    if command in ("prepare", "inspect"):
        tool = importlib.import_module(f"lit_llm.data.{command}")
        parser = OptionParser(command, COMMANDS[command])
        tool.add_arguments(parser)
        args = parser.parse(words[1:])
        if command == "prepare" and args.tokenizer is not None:
            args.tokenizer = _tokenizer_folder(args.tokenizer)
        return tool.run(args)
    what = "option" if command.startswith("-") else "command"
    known = ["--help", "--version"] if what == "option" else list(COMMANDS)
    raise UserError(f"unknown {what} {command!r}; {did_you_mean(command, known)}")


def _tokenizer_folder(name: str) -> str:
    """Where a tokenizer lies that may be named as on the hub, ``org/model``."""
    if os.path.lexists(name) or name.partition("@")[0].count("/") != 1 or name.endswith((".model", ".tiktoken")):
        return name
    from lit_llm.checkpoint.hub import is_hub_name, resolve  # with torch, which prepare does without

    return str(resolve(name, weights=False)) if is_hub_name(name) else name


def _is_lightnings_own(error: BaseException) -> bool:
    """Whether Lightning itself has raised a ValueError: it does so for settings that don't go together."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    # Early stopping on a metric that nobody logs is a RuntimeError.
    return (isinstance(error, ValueError) and name.startswith("lightning.")) or name.endswith(".early_stopping")


def _failure(error: BaseException | None) -> str | None:
    """The line of a run that stopped by itself, or whose connection to another process broke."""
    lost = None
    while error is not None:
        if isinstance(error, RunStopped) or type(error).__name__ == "CheckpointWriteError":
            return str(error)
        if type(error).__name__ == "ProcessRaisedException":  # from a rank that torch.multiprocessing started
            told = re.search(r"^lit_llm\.[\w.]+\.?(?:RunStopped|CheckpointWriteError): (.*)", str(error), re.M)
            return told.group(1) if told else lost
        if lost is None and isinstance(error, RuntimeError) and _LOST.search(str(error)):
            why = " ".join(str(error).split())
            lost = f"another process of this run is gone, see above why ({why[:200]}); --ckpt_path last goes on"
        error = error.__cause__  # which may say who
    return lost


def _mistake(error: BaseException | None) -> str | None:
    """The line for the user if the error, or what caused it, is a mistake of theirs."""
    while error is not None:
        if isinstance(error, UserError):
            # out of a loader's process it comes with its traceback as text
            told = re.search(rf"{UserError.__module__}\.{UserError.__name__}: (.*)\Z", str(error), re.S)
            return told.group(1) if told and "Original Traceback" in str(error) else str(error)
        # By name, as most commands never import Lightning.
        if type(error).__name__ == "MisconfigurationException" or _is_lightnings_own(error):
            return str(error)
        if type(error).__name__ == "ProcessRaisedException":  # from a rank that torch.multiprocessing started
            told = re.search(rf"^{UserError.__module__}\.{UserError.__name__}: (.*)", str(error), re.M | re.S)
            return told.group(1) if told else None
        error = error.__cause__
    return None
