"""bfloat16: our distance from the float32 model beside transformers' own."""

from __future__ import annotations

import pytest
import torch

from lit_llm import Transformer
from tests.hf_models import VARIANTS, load_theirs, made, our_logits, ours, their_logits, tokens


@pytest.mark.parametrize("name", VARIANTS)
def test_as_near_to_float32_as_transformers(name: str) -> None:
    """Means over 576 positions: few routers that decide otherwise must not tip them."""
    folder, ids = made(name).folder, tokens(12, 48, seed=2)
    narrow = Transformer.from_pretrained(folder, dtype=torch.bfloat16)
    off = (our_logits(narrow, ids) - our_logits(ours(name), ids)).abs().mean()
    theirs = (their_logits(load_theirs(folder, torch.bfloat16), ids) - their_logits(made(name).model, ids)).abs().mean()
    assert 0 < off <= 1.5 * theirs


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("gemma")])
def test_gemma_rounds_in_the_right_places(name: str) -> None:
    """Against transformers' float32, in its logits' standard deviations; transformers itself: 0.02 and 0.2."""
    ids = tokens(2, 24)
    reference = their_logits(made(name).model, ids)
    narrow = Transformer.from_pretrained(made(name).folder, dtype=torch.bfloat16)
    off = (our_logits(narrow, ids) - reference).abs() / reference.std()
    assert off.mean() < 0.05
    assert off.max() < 0.3
