"""The families of Hugging Face models that our Transformer covers, one file each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from lit_llm.checkpoint.families.falcon import FALCON
from lit_llm.checkpoint.families.family import Family
from lit_llm.checkpoint.families.gemma import GEMMA, GEMMA2, GEMMA3
from lit_llm.checkpoint.families.gpt2 import GPT2, GPT_BIGCODE
from lit_llm.checkpoint.families.gpt_neox import GPT_NEOX
from lit_llm.checkpoint.families.granite import GRANITE, GRANITE_MOE
from lit_llm.checkpoint.families.layout import Names, Piece, Segment, Theirs, pieces
from lit_llm.checkpoint.families.llama import LLAMA
from lit_llm.checkpoint.families.mistral import MISTRAL, MIXTRAL
from lit_llm.checkpoint.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from lit_llm.checkpoint.families.phi import PHI
from lit_llm.checkpoint.families.phi3 import PHI3
from lit_llm.checkpoint.families.qwen2 import QWEN2, QWEN2_MOE
from lit_llm.checkpoint.families.qwen3 import QWEN3, QWEN3_MOE
from lit_llm.checkpoint.families.seed_oss import SEED_OSS
from lit_llm.checkpoint.families.smollm3 import SMOLLM3
from lit_llm.checkpoint.families.stablelm import STABLELM
from lit_llm.checkpoint.families.starcoder2 import STARCODER2
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, SEED_OSS, PHI3, *STABLELM, MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE),
    *(GPT2, GPT_BIGCODE, GPT_NEOX, GEMMA, GEMMA2, GEMMA3, PHI, OLMO, OLMO2, OLMO3, GRANITE, GRANITE_MOE),
    *(STARCODER2, *FALCON),
)
"""In the order in which they are tried for an export: the ones that most programs know come first."""

__all__ = [
    "FAMILIES",
    "Family",
    "Names",
    "Piece",
    "Segment",
    "Theirs",
    "config_of",
    "family_from",
    "family_of",
    "pieces",
]


def family_from(keys: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        UserError: we know none of that type; the line names it.
    """
    kind = keys.get("model_type")
    types = list(dict.fromkeys(family.model_type for family in FAMILIES))
    if quantised := keys.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise UserError(
            f"config.json: the weights are quantised (quantization_config, {method}), which is not read; give the "
            "folder of the model as it was before"
        )
    families = [family for family in FAMILIES if family.model_type == kind]
    if not families:
        if isinstance(keys.get("text_config"), Mapping):
            raise UserError(
                f"config.json: model_type {kind!r} takes other inputs than text beside it (text_config), which is not "
                "read; give a model of text alone"
            )
        near = difflib.get_close_matches(str(kind), types, n=1)
        architecture = ", ".join(keys.get("architectures") or []) or "no architecture"
        raise UserError(
            f"config.json: model_type {kind!r} ({architecture}) is not known; "
            f"{f'did you mean {near[0]}? Known' if near else 'known'} are {', '.join(sorted(types))}"
        )
    return min(families, key=lambda family: len(family.violated(keys)))


def config_of(keys: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a config.json describes, its tokens aside.

    Raises:
        UserError: a model that we do not compute; the line names what of it.
    """
    family = family_from(keys)
    try:
        return ModelConfig(**family.read(keys), model_type=family.model_type)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"config.json has a value of a wrong kind, which cannot be read: {error}") from error


def family_of(config: ModelConfig) -> Family:
    """The first family whose model computes exactly what a Transformer of this configuration does.

    The one that the model came from is tried before all others.

    Raises:
        UserError: none does; the line names the fields that the nearest one has no place for.
    """
    families = sorted(FAMILIES, key=lambda family: family.model_type != config.model_type)
    misfits = [family.misfits(config) for family in families]
    fewest = min(range(len(families)), key=lambda i: len(misfits[i]))
    if misfits[fewest]:
        raise UserError(
            f"no model class of transformers has model.config.{' with '.join(misfits[fewest])} beside the other fields "
            f"(the nearest is {families[fewest].architecture}); only a model without can be exported"
        )
    return families[fewest]
