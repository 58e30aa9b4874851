"""The families of Hugging Face models that our Transformer covers, one file each."""

from __future__ import annotations

from lit_llm.checkpoint.families.family import Family
from lit_llm.checkpoint.families.llama import LLAMA
from lit_llm.checkpoint.families.mistral import MISTRAL
from lit_llm.checkpoint.families.phi3 import PHI3
from lit_llm.checkpoint.families.qwen2 import QWEN2
from lit_llm.checkpoint.families.qwen3 import QWEN3
from lit_llm.checkpoint.families.seed_oss import SEED_OSS
from lit_llm.checkpoint.families.smollm3 import SMOLLM3
from lit_llm.checkpoint.families.stablelm import STABLELM
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, SEED_OSS, PHI3, STABLELM)
"""In the order in which they are tried: the ones that most programs know come first."""

__all__ = ["FAMILIES", "Family", "family_of"]


def family_of(config: ModelConfig) -> Family:
    """The first family whose model computes exactly what a Transformer of this configuration does.

    Raises:
        UserError: none does; the line names the fields that the nearest one has no place for.
    """
    misfits = [family.misfits(config) for family in FAMILIES]
    fewest = min(range(len(FAMILIES)), key=lambda i: len(misfits[i]))
    if misfits[fewest]:
        raise UserError(
            f"no model class of transformers has model.config.{' with '.join(misfits[fewest])} beside the other fields "
            f"(the nearest is {FAMILIES[fewest].architecture}); only a model without can be exported"
        )
    return FAMILIES[fewest]
