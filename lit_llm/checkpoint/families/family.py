"""What a family of Hugging Face models is: how its configuration and its weight names map to ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_llm.model import ModelConfig

SHARED = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "hidden_act",
        "attention_dropout",
        "initializer_range",
        "tie_word_embeddings",
    )
}
"""ModelConfig's field to the key in config.json: what every family has."""
RMS = {"rms_norm_eps": "rms_norm_eps"}
_ELSEWHERE = ("head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor", "sliding_window", "layer_types")
_TOKENIZERS = ("unpadded_vocab_size", "bos_token_id", "eos_token_id")
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ModelConfig)} | {"attention_output_bias": False}


@dataclass(frozen=True)
class Family:
    """A model class of transformers that computes what our Transformer does under some configurations.

    A field of ModelConfig that is named nowhere here must have its default: the family knows no such thing.

    Args:
        model_type, architecture: as in config.json.
        fields: ModelConfig's field to the key in config.json.
        fixed: the only value that the family has for a field; no key says it.
        same: a field that shares its value, and its key, with another one.
        constants: keys that always have this value.
        constants_by_layer: keys that always have a list with this value for each layer.
        head_dim: a head's width is ``free``; ``whole``, free where hidden_size divides by the heads; or ``derived``,
            hidden_size / heads, without a key.
        windows: which layers may slide: ``none``; ``all`` of them or none; or each as in ``layers``.
        rope_types: of rope_scaling.
        partial_rotary: whether a head may be rotated in part.
        modules: within a layer, their module to ours; several are concatenated along the output dimension. All others
            have the same name.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    constants_by_layer: Mapping[str, Any] = field(default_factory=dict)
    head_dim: Literal["free", "whole", "derived"] = "free"
    windows: Literal["none", "all", "layers"] = "none"
    rope_types: tuple[str, ...] = ("default", "linear", "llama3")
    partial_rotary: bool = False
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def misfits(self, config: ModelConfig) -> list[str]:
        """The fields of a configuration, with their values, that the family has no place for."""
        wrong = []
        for name, default in _DEFAULTS.items():
            if name in self.fields or name in _ELSEWHERE or name in _TOKENIZERS:
                continue
            wanted = getattr(config, self.same[name]) if name in self.same else self.fixed.get(name, default)
            if getattr(config, name) != wanted:
                wrong.append(name)
        if config.hidden_size % config.num_attention_heads if self.head_dim == "whole" else self._other_head(config):
            wrong.append("head_dim")
        if config.partial_rotary_factor != 1 and not self.partial_rotary:
            wrong.append("partial_rotary_factor")
        if rope_scaling(config)["rope_type"] not in self.rope_types:
            wrong.append("rope_scaling")
        windows = set(windows_of(config))
        if (self.windows == "none" and windows != {None}) or (self.windows == "all" and len(windows) > 1):
            wrong.append("sliding_window" if config.layer_types is None else "layer_types")
        return [f"{name} {_shown(getattr(config, name))}" for name in wrong]

    def _other_head(self, config: ModelConfig) -> bool:
        return self.head_dim == "derived" and config.head_size * config.num_attention_heads != config.hidden_size

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json without what the tokenizer and the weights say; for a configuration without misfits."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        keys |= {key: getattr(config, name) for name, key in self.fields.items()}
        if self.head_dim != "derived":
            keys["head_dim"] = config.head_size
        keys |= {key: [value] * config.num_hidden_layers for key, value in self.constants_by_layer.items()}
        return keys | self._window_keys(config) | self._rope_keys(config) | dict(self.constants)

    def _window_keys(self, config: ModelConfig) -> dict[str, Any]:
        windows = windows_of(config)
        window = next((w for w in windows if w is not None), None)
        if self.windows == "none":
            return {}
        if self.windows == "all":
            return {"sliding_window": window}
        full = [w is None for w in windows]
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            # What readers without layer_types go by: the layers before it are full.
            "max_window_layers": full.index(False) if False in full else len(full),
            "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        }

    def _rope_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The rotary embedding in the words of transformers 5 (rope_parameters) and of 4 (the other keys)."""
        scaling = rope_scaling(config)
        partial = {"partial_rotary_factor": config.partial_rotary_factor} if self.partial_rotary else {}
        return {
            "rope_parameters": {"rope_theta": config.rope_theta, **scaling, **partial},
            "rope_theta": config.rope_theta,
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            **partial,
        }

    def tensors(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Their tensor's name to ours, in the order of ``names``; several are concatenated along dimension 0."""
        whole: dict[str, tuple[str, ...]] = {}
        fused = {ours: (theirs, parts) for theirs, parts in self.modules.items() for ours in parts}
        for name in names:
            layer, module, kind = _parts(name)
            theirs, parts = fused.get(module, (module, (module,)))
            new = ".".join(filter(None, (layer, theirs, kind)))
            new = new if new.startswith("lm_head.") else f"model.{new}"
            whole.setdefault(new, tuple(".".join(filter(None, (layer, part, kind))) for part in parts))
        return whole


def rope_scaling(config: ModelConfig) -> dict[str, Any]:
    """The configuration's rope_scaling with nothing but what its type needs; floats, as transformers wants them."""
    given = config.rope_scaling or {}
    kind = given.get("rope_type", given.get("type", "default"))
    needed = {"default": (), "linear": _ROPE_NUMBERS[:1]}.get(kind, _ROPE_NUMBERS)
    numbers = {name: int(given[name]) if name.startswith("original") else float(given[name]) for name in needed}
    return {"rope_type": kind, **numbers}


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return [config.window_of(layer) for layer in range(config.num_hidden_layers)]


def _parts(name: str) -> tuple[str, str, str]:
    """``layers.0``, the module in it, and weight or bias; the first is empty outside of layers."""
    words = name.split(".")
    start = 2 if words[0] == "layers" else 0
    return ".".join(words[:start]), ".".join(words[start:-1]), words[-1]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({', '.join(sorted(set(value)))})"
    return str(value.get("rope_type", value.get("type"))) if isinstance(value, dict) else str(value)
