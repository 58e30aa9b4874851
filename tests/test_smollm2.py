"""A real model, SmolLM2-135M: what it says, a few steps of training on it, and the way back to transformers."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_llm import Transformer
from lit_llm.checkpoint import load_model
from lit_llm.cli.main import main
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.generation import GenerationConfig, generate
from tests.assets import smollm2

pytestmark = pytest.mark.slow
QUESTION = "The capital of France is"
TEXTS = ["def f(x):\n    return x ** 2  # squared\n", "Naïve Ærøskøbing, 東京 🙂"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers_model(folder)


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder whose GBs do not stay; the command's environment variables do not either."""
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(tmp_path)


def test_greedy_text_is_that_of_transformers(folder: Path, theirs: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer, their_tokenizer = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in (QUESTION, *TEXTS):
        assert tokenizer.encode(text, bos=False) == their_tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = [{"role": "user", "content": TEXTS[0]}]
    expected_ids = their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(chat) == expected_ids
    ours = Transformer.from_pretrained(folder)
    prompts = [tokenizer.encode(text, bos=False) for text in (QUESTION, TEXTS[0])]
    results = generate(ours, prompts, GenerationConfig(max_new_tokens=50, eos_token_id=[]), tokenizer=tokenizer)
    assert results[0].text is not None
    assert results[0].text.startswith(" Paris")
    theirs.generation_config.eos_token_id = None  # all 50 are to be compared
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 50, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        expected = theirs.generate(ids, **options)
        assert result.tokens == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            torch.testing.assert_close(ours(expected), theirs(expected).logits, atol=1e-4, rtol=0)


def test_untrained_it_comes_out_bit_equal(folder: Path, place: Path) -> None:
    assert main(["export", str(folder), "--output", str(place / "out")]) == 0
    before, after = load_file(folder / "model.safetensors"), load_file(place / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)


def test_fine_tuned_and_handed_back(folder: Path, theirs: Any, place: Path) -> None:
    from transformers import AutoTokenizer

    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")[20_000:22_700]
    place.joinpath("code.txt").write_text(text, encoding="utf-8")
    store, run, out = (str(place / name) for name in ("store", "run", "out"))
    words = ["--tokenizer", str(folder), "--val_fraction=0", "--workers=1"]
    assert main(["prepare", str(place / "code.txt"), "--output", store, *words]) == 0
    data = [f"--data.store={store}", "--data.seq_len=64", "--data.micro_batch_size=1", "--data.global_batch_size=2"]
    model = [f"--model.pretrained={folder}", "--model.optimizer.lr=1e-4", "--model.schedule.warmup_steps=1"]
    trainer = [f"--trainer.default_root_dir={run}", "--trainer.max_steps=5", "--trainer.accelerator=cpu"]
    assert main(["fit", *data, *model, *trainer]) == 0
    assert main(["export", run, "--output", out]) == 0

    tokenizer, trained = AutoTokenizer.from_pretrained(out), transformers_model(Path(out))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids.shape[1] > 600
    assert ids[0].tolist() == Tokenizer(folder).encode(text, bos=False)
    ours, _ = load_model(run)
    with torch.no_grad():
        before, after = (float(one(ids, labels=ids).loss) for one in (theirs, trained))
        assert after < before - 0.1
        torch.testing.assert_close(ours(ids), trained(ids).logits, atol=1e-4, rtol=0)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(folder).chat_template
