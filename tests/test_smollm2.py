"""A real model, SmolLM2-135M: what it says, a few steps of training on it, and the way back to transformers."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_llm import LitLLM, TokenDataModule, Transformer
from lit_llm.cli.main import main
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.generation import GenerationConfig, generate
from tests.assets import smollm2

pytestmark = pytest.mark.slow
QUESTION = "The capital of France is"
TEXTS = ["def f(x):\n    return x ** 2  # squared\n", "naïve Ærøskøbing 東京 🙂", " 1234567 3.14", "<|im_start|>user\nHi<|im_end|>\n"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def kept_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_greedy_text_is_that_of_transformers(folder: Path, theirs: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer, their_tokenizer = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in (QUESTION, *TEXTS):
        assert tokenizer.encode(text, bos=False) == their_tokenizer(text, add_special_tokens=False)["input_ids"]
    ours = Transformer.from_pretrained(folder)
    prompts = [tokenizer.encode(text, bos=False) for text in (QUESTION, *TEXTS[:2])]
    results = generate(ours, prompts, GenerationConfig(max_new_tokens=50, eos_token_id=[]), tokenizer=tokenizer)
    assert results[0].text is not None
    assert results[0].text.startswith(" Paris")
    for prompt, result in zip(prompts, results, strict=True):
        # As in generate, but without an end: eos_token_id=None is taken for the model's own there.
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=-1, pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )
        assert result.tokens == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            torch.testing.assert_close(ours(expected), theirs(expected).logits, atol=1e-3, rtol=0)


@pytest.mark.usefixtures("kept_environment")
def test_fine_tuned_and_handed_back(folder: Path, theirs: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
