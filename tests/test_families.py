"""The families' own statements, held against transformers' classes: defaults, keys, and layouts that fit together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_llm.checkpoint.families import FAMILIES, Family, config_of, family_from, family_of, pieces
from lit_llm.checkpoint.families.family import Key
from lit_llm.checkpoint.families.layout import shapes_of
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig
from tests.test_model import TINY

TYPES = sorted({family.model_type for family in FAMILIES})
# What any config.json may hold that says nothing of what the model computes.
_OF_ALL = {
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "is_decoder", "id2label", "label2id"),
    *("_name_or_path", "pretraining_tp", "classifier_dropout"),
}
# Of one family, and why it says nothing of what a language model of it computes.
_OF_ONE = {
    "gpt2": {  # other heads than a language model's; and a matter of rounding
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        "reorder_and_upcast_attn",
    },
    "gpt_bigcode": {  # likewise; rounding, and how the kernel is written
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        "num_key_value_heads",  # which multi_query says
    },
    # Read with rope_scaling, where there is one; and applied nowhere.
    "phi3": {"original_max_position_embeddings", "embd_pdrop"},
    "gemma3_text": {"_sliding_window_pattern", "attn_logit_softcapping"},  # layer_types says it; it means nothing there
    "qwen3_moe": {"num_local_experts", "max_window_layers"},
}


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def _known(family: Family) -> set[str]:
    """The keys that a family reads."""
    known = {key.name if isinstance(key, Key) else key for key in family.fields.values()}
    known |= set(family.defaults) | set(family.constants) | set(family.config_json(_any_config(family)))
    return known


def _any_config(family: Family) -> ModelConfig:
    return ModelConfig(**family.read(_small(family.model_type, **family.constants)))


def _small(model_type: str, **more: Any) -> dict[str, Any]:
    """A config.json of a small model that says nothing that could be left out."""
    sizes = {
        "gpt2": {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4},
        "gpt_bigcode": {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4},
    }.get(model_type, {name: TINY[name] for name in TINY if name.startswith(("vocab", "hidden", "num"))})
    if model_type in ("gpt_neox", "falcon"):
        sizes = {name: size for name, size in sizes.items() if name != "num_key_value_heads"}
    if model_type not in ("gpt2", "gpt_bigcode", "falcon"):
        sizes = {**sizes, "intermediate_size": 128}
    return {"model_type": model_type, **sizes, **more}


@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_left_out_means_what_it_means_to_transformers(model_type: str) -> None:
    bare = _small(model_type)
    complete = _config_class(model_type)(**{k: v for k, v in bare.items() if k != "model_type"}).to_dict()
    ours = config_of(bare)
    theirs = config_of(complete | {"model_type": model_type})
    assert dataclasses.replace(ours, rope_scaling=None) == dataclasses.replace(theirs, rope_scaling=None)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_of_transformers_is_read_or_known_to_mean_nothing(model_type: str) -> None:
    theirs = set(_config_class(model_type)().to_dict())
    known = set().union(*(_known(family) for family in FAMILIES if family.model_type == model_type))
    assert theirs - known - _OF_ALL - _OF_ONE.get(model_type, set()) == set()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_rows_of_ours_are_each_in_one_place_of_theirs(family: Family) -> None:
    keys = _small(family.model_type, **family.constants)
    config = ModelConfig(**family.read(keys))
    shapes, theirs = shapes_of(config), family.tensors(config)
    found = pieces(theirs.values())
    assert set(found) == set(shapes)
    for name, shape in shapes.items():
        stacked = found[name][0].segment.index is not None
        covered = torch.zeros(shape[:2] if stacked else shape[:1], dtype=torch.int64)
        for piece in found[name]:
            place = covered if piece.segment.index is None else covered[piece.segment.index]
            place[piece.segment.start : piece.segment.stop] += 1
        assert bool((covered == 1).all()), name
    numbers = {name: torch.Size(one.shape).numel() for name, one in theirs.items()}
    assert sum(numbers.values()) == sum(torch.Size(shape).numel() for shape in shapes.values())
    assert family.misfits(config) == []
    assert family_of(dataclasses.replace(config, model_type=family.model_type)).architecture == family.architecture


def test_refusals_name_what_is_not_known() -> None:
    for keys, said in (
        ({"model_type": "t5"}, "model_type 't5' (no architecture) is not known; "),
        ({"model_type": "lama", "architectures": ["L"]}, "model_type 'lama' (L) is not known; did you mean llama?"),
        ({}, "model_type None"),
        (_small("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not known"),
        (_small("llama", rope_parameters={"rope_type": "mrope"}), "rope_type 'mrope' is not known"),
        (_small("llama", partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not known of llama"),
        (_small("llama", quantization_config={"quant_method": "gptq"}), "quantised (quantization_config, gptq)"),
        (_small("llama", hidden_act="mish"), "hidden_act 'mish' is unknown"),
        (_small("falcon", alibi=True), "alibi True is not known of falcon"),
        (_small("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention True is not known"),
        (_small("mixtral", router_jitter_noise=0.1), "router_jitter_noise 0.1 is not known of mixtral"),
        (_small("mistral", layer_types=["full_attention"] * 3), "layer_types ['full_attention'] are not known of"),
        (_small("qwen3", layer_types=["chunked_attention"] * 3), "'chunked_attention' is unknown"),
        ({"model_type": "llama", "vocab_size": 9}, "config.json does not say hidden_size"),
        ({k: v for k, v in _small("llama").items() if k != "intermediate_size"}, "does not say intermediate_size"),
        (_small("mistral", sliding_window=0), "sliding_window 0 lets no key be seen"),
        (_small("olmo2", head_dim=24), "head_dim 24 is not hidden_size / num_attention_heads"),
        (_small("qwen3", rope_parameters={"full_attention": {}}), "for each type of layer are not known of qwen3"),
        (_small("gemma3_text", rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling says type"),
        (_small("llama", num_hidden_layers="two"), "num_hidden_layers must be a whole number, got 'two'"),
        (_small("llama", hidden_size="64"), "hidden_size must be a whole number, got '64'"),
        (_small("llama", rope_parameters=3), "config.json has a value of a wrong kind"),
        (_small("qwen3", layer_types=3, use_sliding_window=True), "config.json has a value of a wrong kind"),
        (_small("gemma3_text", rope_parameters={"full_attention": 3}), "config.json has a value of a wrong kind"),
        (
            _small("gemma3_text", rope_parameters={"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}),
            "rope_type 'linear' of sliding_attention is not known",
        ),
        (_small("olmo3", rope_parameters={"rope_theta": 5.0}), "rope_parameters must say it for full_attention"),
        (_small("gemma3_text", query_pre_attn_scalar="x"), "config.json has a value of a wrong kind"),
        ({"model_type": "gemma3", "text_config": {}}, "takes other inputs than text beside it"),
        (_small("llama", quantization_config=True), "quantised"),
    ):
        with pytest.raises(UserError) as refused:
            config_of(keys)
        assert said in str(refused.value), str(refused.value)
        assert "\n" not in str(refused.value)


def test_files_of_a_family_stay_small() -> None:
    folder = Path(str(Path(__file__).parent.parent / "lit_llm/checkpoint/families"))
    for path in folder.glob("*.py"):
        if path.name not in ("family.py", "layout.py", "rope.py"):
            assert len(path.read_text().splitlines()) <= 120, path.name


def test_the_variant_is_told_by_its_constants() -> None:
    new = family_from(_small("falcon", new_decoder_architecture=True))
    assert new.constants["num_ln_in_parallel_attn"] == 2
    one = family_from(_small("falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=1))
    assert config_of(_small("falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=1)).shared_norm
    assert one.constants["num_ln_in_parallel_attn"] == 1
    assert not config_of(_small("falcon", multi_query=False, parallel_attn=False)).use_parallel_residual
    assert config_of(_small("falcon")).kv_heads == 1
    assert config_of(_small("stablelm", use_parallel_residual=True)).shared_norm
    json.dumps([family.config_json(_any_config(family)) for family in FAMILIES if not family.constants])


def test_where_both_styles_are_there_rope_scaling_counts() -> None:
    """As in transformers 5, which takes the rest of it from the keys of the older style too."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_scaling": {"type": "linear", "factor": 4},
    }
    keys = _small("llama", **both, rope_theta=700.0)
    theirs = _config_class("llama")(**{k: v for k, v in keys.items() if k != "model_type"}).rope_parameters
    ours = config_of(keys)
    assert ours.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert (ours.rope_theta, theirs["rope_theta"], theirs["rope_type"]) == (700.0, 700.0, "linear")


def test_windows_that_are_none() -> None:
    assert config_of(_small("qwen2_moe", sliding_window=0, use_sliding_window=False)).sliding_window is None
    assert config_of(_small("mistral", sliding_window=None)).sliding_window is None
    assert config_of(_small("mistral")).sliding_window == 4096


def test_olmo3_has_a_base_of_its_own_where_windows_slide() -> None:
    """As transformers 5 has it: the older style's rope_theta is for the full layers alone."""
    config = config_of(_small("olmo3", rope_theta=10000.0))
    assert (config.rope_theta, config.rope_local_base_freq) == (10000.0, 500000.0)


def test_null_is_as_good_as_nothing() -> None:
    config = config_of(_small("falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=None, bias=None))
    assert (config.shared_norm, config.attention_bias) == (False, False)
    assert config_of(_small("gpt_neox", hidden_dropout=0.25)).embedding_dropout == 0.25


def test_a_dense_model_is_of_no_family_of_mixtures() -> None:
    for model_type in ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "qwen2_moe"):
        config = ModelConfig(**TINY, model_type=model_type)
        assert family_of(config).model_type == "llama"


def test_truncate_of_a_type_of_layers_is_passed_over() -> None:
    """transformers looks for it beside the types, where nobody writes it; an export that needs it is refused."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
    keys = _small("gemma3_text", rope_parameters={"full_attention": {**yarn, "truncate": False}})
    config = config_of(keys)
    assert "truncate" not in (config.rope_scaling or {})
    with pytest.raises(UserError, match="rope_scaling yarn"):
        family_of(dataclasses.replace(config, rope_scaling={**yarn, "truncate": False}))
