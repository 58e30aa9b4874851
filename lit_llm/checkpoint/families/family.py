"""What a family of Hugging Face models is: how its configuration and its weight names map to ours, both ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lit_llm.checkpoint.families.layout import Names, Theirs, tensors
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows, windows_of
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig
from lit_llm.ops.rope import normalised_scaling

Keys = Mapping[str, Any]

# Other names for the same functions; "gelu_fast" differs from the others in the order of its products alone.
_ACTIVATIONS = {
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Key:
    """A key whose value is not the field's.

    Args:
        name: of the key.
        read: its value to the field's.
        write: the field's value to its.
    """

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


def activation(key: str, tanh: str = "gelu_pytorch_tanh") -> Key:
    """The key of the activation; ``tanh``: what the family calls gelu by tanh."""
    return Key(
        key, lambda name: _ACTIVATIONS.get(name, name), lambda name: tanh if name == "gelu_pytorch_tanh" else name
    )


SHARED: dict[str, str | Key] = {
    "hidden_act": activation("hidden_act"),
    **{
        name: name
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "attention_dropout",
            "initializer_range",
            "tie_word_embeddings",
        )
    },
}
"""ModelConfig's field to the key in config.json: what most families have."""
RMS: dict[str, str | Key] = {"rms_norm_eps": "rms_norm_eps"}
# What training alone goes by, or the tokenizer, or an export: another value is no other model.
_FREE = {
    *("attention_dropout", "hidden_dropout", "embedding_dropout", "initializer_range", "model_type"),
    *("router_aux_loss_coef", "router_z_loss_coef", "unpadded_vocab_size", "bos_token_id", "eos_token_id"),
}
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SAID_BY_ALL = {"tie_word_embeddings": False, "attention_dropout": 0.0, "initializer_range": 0.02, "hidden_act": "silu"}


@dataclass(frozen=True)
class Family:
    """A model class of transformers that computes what our Transformer does under some configurations.

    A field of ModelConfig that is named nowhere here has its default.

    Args:
        model_type, architecture: as in config.json.
        fields: ModelConfig's field to the key in config.json.
        fixed: fields that no key says, to their value, or to a function of the fields that are read.
        defaults: keys to what they mean where config.json leaves them out.
        constants: keys that have this value in every model that we compute; another is refused by name.
        head_dim: a head's width is ``free``; ``whole``, free where hidden_size divides by the heads; or ``derived``,
            hidden_size / heads, without a key.
        rope: what is said of rotary embeddings; None: the family has none.
        windows: what is said of sliding windows; None: the family has none.
        names: of the weights.
        other_names: that files may have instead; they are read, and not written.
        read_more: all keys to further fields.
        write_more: the configuration to further keys.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str | Key]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Keys = field(default_factory=dict)
    constants: Keys = field(default_factory=dict)
    head_dim: Literal["free", "whole", "derived"] = "free"
    rope: Rope | None = Rope()  # noqa: RUF009 (frozen)
    windows: Windows | None = None
    names: Names = Names()  # noqa: RUF009 (frozen)
    other_names: tuple[Names, ...] = ()
    read_more: Callable[[Keys], dict[str, Any]] | None = None
    write_more: Callable[[ModelConfig], dict[str, Any]] | None = None

    # From theirs to ours

    def violated(self, keys: Keys) -> list[str]:
        """The constants that a config.json has another value of, with that value."""
        complete = {**self.defaults, **{name: value for name, value in keys.items() if value is not None}}
        return [
            f"{name} {complete[name]!r}"
            for name, value in self.constants.items()
            if name in complete and complete[name] != value and (value or complete[name])
        ]

    def read(self, keys: Keys) -> dict[str, Any]:
        """Fields of ModelConfig.

        Args:
            keys: of config.json.

        Raises:
            UserError: a key that is missing, or has a value that we cannot compute; the line names it.
        """
        if wrong := self.violated(keys):
            raise UserError(f"config.json: {wrong[0]} is not known of {self.model_type}; models without it can be read")
        complete = {**_SAID_BY_ALL, **self.defaults, **{k: v for k, v in keys.items() if v is not None}}
        fields: dict[str, Any] = {}
        for name, key in self.fields.items():
            theirs, read = (key, None) if isinstance(key, str) else (key.name, key.read)
            if theirs in complete:
                value = complete[theirs]
                if name in _SIZES and (isinstance(value, bool) or not isinstance(value, int)):
                    raise UserError(f"config.json: {theirs} must be a whole number, got {value!r}")
                fields[name] = value if read is None else read(value)
            elif name in _SIZES or theirs == "intermediate_size":
                raise UserError(f"config.json does not say {theirs}, which a model of type {self.model_type} needs")
        # What is null means "as usual" here, and the family's default only where the key is not there at all.
        null = [name for name, value in keys.items() if value is None]
        fields = {n: v for n, v in fields.items() if _name_of(self.fields[n]) not in null}
        if self.head_dim != "derived" and complete.get("head_dim") is not None and "head_dim" not in null:
            fields["head_dim"] = complete["head_dim"]
        width = complete.get("head_dim") if self.head_dim == "derived" and self.rope is not None else None
        if width is not None and width * fields["num_attention_heads"] != fields["hidden_size"]:
            raise UserError(
                f"config.json: head_dim {width} is not hidden_size / num_attention_heads, as every model of type "
                f"{self.model_type} has it"
            )
        if self.rope is not None:
            fields |= self.rope.read({**complete, "model_type": self.model_type})
        if self.windows is not None:
            given = {n: v for n, v in keys.items() if v is not None or n == "sliding_window"}
            fields |= self.windows.read({**self.defaults, **given, "num_hidden_layers": fields["num_hidden_layers"]})
        if self.read_more is not None:
            fields |= self.read_more(complete)
        for name, value in self.fixed.items():
            fields[name] = value(fields) if callable(value) else value
        return fields

    # From ours to theirs

    def misfits(self, config: ModelConfig) -> list[str]:
        """The fields of a configuration, with their values, that come back otherwise than they are written."""
        try:
            back = ModelConfig(**self.read(self.config_json(config)))
        except UserError:
            return list(_meaning(config))  # nothing comes back
        wrong = []
        if self.head_dim == "whole" and config.hidden_size % config.num_attention_heads:
            wrong.append("head_dim")
        if "num_experts" in self.fields and not any(map(config.is_sparse, range(config.num_hidden_layers))):
            wrong.append("num_experts")  # its class builds some, whatever is said
        mine, theirs = _meaning(config), _meaning(back)
        wrong += [name for name in mine if not _equal(mine[name], theirs[name])]
        return [f"{name} {_shown(getattr(config, name))}" for name in dict.fromkeys(wrong)]

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json without what the tokenizer and the weights say; for a configuration without misfits."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for name, key in self.fields.items():
            value = getattr(config, name)
            keys[_name_of(key)] = value if isinstance(key, str) else key.write(value)
        if self.head_dim != "derived":
            keys["head_dim"] = config.head_size
        if self.windows is not None:
            keys |= self.windows.write(config)
        if self.rope is not None:
            keys |= self.rope.write(config)
        if self.write_more is not None:
            keys |= self.write_more(config)
        return keys | dict(self.constants)

    # Weights

    def tensors(self, config: ModelConfig, names: Names | None = None) -> dict[str, Theirs]:
        """The tensors of such a model: their name to what they are made of; ``names``: others than the family's."""
        return tensors(names or self.names, config)

    def names_in(self, found: Container[str], config: ModelConfig) -> Names:
        """Those of its names that the tensors of files have; the usual ones where none fit."""
        every = (self.names, *self.other_names)
        if len(every) == 1:
            return self.names
        return next((n for n in every if all(one in found for one in self.tensors(config, n))), self.names)


def _name_of(key: str | Key) -> str:
    return key if isinstance(key, str) else key.name


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """The fields that a model's function depends on, each in one form whatever way it was said."""
    layers = range(config.num_hidden_layers)
    sparse = tuple(config.is_sparse(layer) for layer in layers)
    windows = windows_of(config)
    rotary, qk, layer_norm = config.position_embedding == "rotary", config.use_qk_norm, config.norm_type == "layer_norm"
    scaling = normalised_scaling(config.rope_scaling, config.max_position_embeddings)
    local = config.rope_local_base_freq
    if not any(windows) or (local == config.rope_theta and scaling["rope_type"] == "default"):
        local = None
    meaning = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _FREE}
    return meaning | {
        "sliding_window": max((w for w in windows if w is not None), default=None),
        "layer_types": windows,
        "rope_theta": config.rope_theta if rotary else None,
        "rope_scaling": scaling if rotary else None,
        "rope_local_base_freq": local if rotary else None,
        "partial_rotary_factor": config.rotary_dim if rotary else None,
        "no_rope_layers": tuple(config.is_rotated(layer) for layer in layers),
        "attention_multiplier": config.score_scale(0),
        # True where there is nothing to say, so that another norm_type alone is named.
        "norm_bias": config.norm_bias or not (layer_norm and config.norm_weight),
        "qk_norm_scope": config.qk_norm_scope if qk else "head",
        "qk_norm_bias": config.qk_norm_bias or not (qk and layer_norm and config.norm_weight),
        "intermediate_size": None if all(sparse) else config.mlp_size,
        "mlp_layer_types": sparse,
        "num_experts": config.num_experts if any(sparse) else None,
        "num_experts_per_tok": config.num_experts_per_tok if any(sparse) else None,
        "moe_intermediate_size": config.expert_size if any(sparse) else None,
        "norm_topk_prob": config.norm_topk_prob if any(sparse) else None,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size if any(sparse) else None,
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({', '.join(sorted({str(one) for one in value}))})"
    return str(value.get("rope_type", value.get("type"))) if isinstance(value, dict) else str(value)
