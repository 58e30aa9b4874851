"""`lit-llm prepare` as a command: its summary, signals, exit codes, and the check of a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.cli.main import main
from lit_llm.data import TokenStore, encode
from lit_llm.data import prepare as command
from lit_llm.data.prepare import prepare
from lit_llm.data.tokenizer_training import _interruptibly
from lit_llm.errors import UserError
from tests.data_helpers import word_level, write_jsonl, write_tokenizer

COMMAND = """
import argparse, sys
from lit_llm.data import encode, prepare
encode.BATCH_CHARACTERS = 10_000
parser = argparse.ArgumentParser()
prepare.add_arguments(parser)
code = prepare.run(parser.parse_args())
assert "torch" not in sys.modules
sys.exit(code)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_command_prints_a_summary_and_imports_no_torch(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"body": "w1 w2 w3"}, {"body": ""}, *[{"body": "w4"}] * 10])
    write_tokenizer(tmp_path / "t", word_level(9))
    options = f"--output {tmp_path}/s --tokenizer {tmp_path}/t --text_key body --val_fraction 0.3 --workers 2 --seed 3"
    process = start(f"{tmp_path}/a.jsonl", *options.split())
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "train" in out
    assert "val" in out
    assert "skipped: 1 empty or only whitespace" in out
    train, val = TokenStore(tmp_path / "s"), TokenStore(tmp_path / "s", "val")
    assert train.num_tokens + val.num_tokens == 4 + 10 * 2


def test_the_options_have_defaults() -> None:
    parser = ArgumentParser()
    command.add_arguments(parser)
    options = vars(parser.parse_args(["a.txt", "b", "--output", "o"]))
    assert options == {
        "inputs": ["a.txt", "b"],
        "output": "o",
        "tokenizer": None,
        "vocab_size": None,
        "text_key": "text",
        "val_fraction": 0.02,
        "workers": None,
        "seed": 0,
        "shard_bytes": 1 << 30,
        "check": None,
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(tmp_path: Path, tokenizer: Path, number: signal.Signals, code: int) -> None:
    process = start("-", "--output", f"{tmp_path}/s", "--tokenizer", str(tokenizer), "--workers", "2")
    assert process.stdin is not None
    process.stdin.write(("a line of text " * 100 + "\n") * 200)  # then it waits for more
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".s.*.tmp/train-*.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob(".s.*.tmp/train-*.bin"))
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_workers_end_with_a_killed_parent(tmp_path: Path, tokenizer: Path) -> None:
    process = start("-", "--output", f"{tmp_path}/s", "--tokenizer", str(tokenizer), "--workers", "2")
    assert process.stdin is not None
    process.stdin.write(("a line of text " * 100 + "\n") * 200)
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.parent.exists():
        pytest.skip("needs /proc")
    deadline = time.monotonic() + 30
    while len(workers := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    process.communicate(timeout=30)

    def alive(pid: str) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(map(alive, workers))
    assert not (tmp_path / "s").exists()


def test_a_store_is_checked(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    store = tmp_path / "s"
    prepare([tmp_path / "a.txt"], store, tokenizer=tokenizer)
    assert main(["prepare", "--check", str(store)]) == 0
    assert "is whole" in capsys.readouterr().out
    good = (store / "train-00000.bin").read_bytes()
    for bad, message in (
        (good[:50], "train-00000.bin: 50 bytes"),
        (good[:2] + b"\x01\x00" + good[4:], "train-00000.bin: its checksum differs"),
    ):
        (store / "train-00000.bin").write_bytes(bad)
        assert main(["prepare", "--check", str(store)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lit-llm: error: ")
        assert message in err
        assert err.count("\n") == 1
    (store / "train-00000.bin").write_bytes(good)
    (store / "tokenizer.json").unlink()
    assert main(["prepare", "--check", str(store)]) == 1
    assert main(["prepare", "--check", str(tmp_path / "gone")]) == 2
    assert main(["prepare", "--check", str(store), "a.txt"]) == 2
    assert main(["prepare", "a.txt"]) == 2
    assert "--output DIR missing" in capsys.readouterr().err


def test_the_summary_shows_lengths(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 50)
    lengths = [1, 2, 5, 6, 30, 30, 200]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a " * n} for n in lengths])
    summary = prepare([path], tmp_path / "s", tokenizer=tokenizer, val_fraction=0, workers=1)
    tokens = np.array([2 * n + 2 for n in lengths])  # with BOS and EOS
    assert np.array_equal(np.diff(TokenStore(tmp_path / "s").offsets), tokens)
    rows = summary.lengths.rows()
    assert sum(count for _, count in rows) == len(lengths)
    assert rows[0] == ("3-4", 1)
    assert rows[-1] == ("257-512", 1)
    assert dict(rows)["33-64"] == 2


class Alarm(Exception):
    pass


def test_training_a_tokenizer_can_be_interrupted() -> None:
    """Signals are heard while the library is at work, which is in another thread."""
    done = threading.Event()
    threads: list[int] = []

    def work() -> None:
        threads.append(threading.get_ident())
        done.wait(60)

    def ring(number: int, frame: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Alarm):
            _interruptibly(work)
        assert not done.is_set()
        assert threads[0] != threading.get_ident()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        done.set()
    with pytest.raises(UserError, match="said there"):
        _interruptibly(lambda: _fail("said there"))


def _fail(message: str) -> None:
    raise UserError(message)


def test_a_summary_that_cannot_be_printed_is_no_failure(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    words = [sys.executable, "-m", "lit_llm", "prepare", f"{tmp_path}/a.txt", "--tokenizer", str(tokenizer)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*words, "--output", f"{tmp_path}/s"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*words, "--output", f"{tmp_path}/s"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0
    assert "but not this summary: No space left" in done.stderr
