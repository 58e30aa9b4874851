"""Rotary embeddings in config.json, in the words of transformers 5 (rope_parameters) and of 4 (rope_theta and more)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_llm.errors import UserError
from lit_llm.model import ModelConfig
from lit_llm.ops.rope import normalised_scaling

Keys = Mapping[str, Any]
_NOT_OF_THE_TYPE = ("rope_theta", "partial_rotary_factor", "type", "rope_type")


@dataclass(frozen=True)
class Rope:
    """What a family's config.json says of rotary embeddings.

    Args:
        theta: the base where nothing is said.
        theta_key: the base, outside of rope_parameters.
        partial: the rotated share of a head where nothing is said; None: heads are rotated as a whole.
        partial_key: the share, outside of rope_parameters.
        local: there are parameters for each type of layer; the base on sliding layers where nothing is said.
        local_key: that base, outside of rope_parameters; None: there is no such key.
        types: of scaling.
        other_names: of types, to the present ones.
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    partial: float | None = None
    partial_key: str = "partial_rotary_factor"
    local: float | None = None
    local_key: str | None = None
    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    other_names: Mapping[str, str] = field(default_factory=dict)

    def read(self, keys: Keys) -> dict[str, Any]:
        """The fields of ModelConfig.

        Raises:
            UserError: what our rotary embedding cannot do, by name.
        """
        fields: dict[str, Any] = {}
        # Where both are there, transformers 5 goes by rope_scaling.
        given = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
        if self.local is None and any(name in given for name in ("full_attention", "sliding_attention")):
            raise UserError(
                f"config.json: rope_parameters for each type of layer are not known of {keys.get('model_type')}"
            )
        if self.local is not None:
            given, fields["rope_local_base_freq"] = self._read_types(keys)
        theta = given.get("rope_theta")
        fields["rope_theta"] = keys.get(self.theta_key, self.theta) if theta is None else theta
        share = given.get("partial_rotary_factor")
        share = keys.get(self.partial_key) if share is None else share
        if self.partial is not None:
            fields["partial_rotary_factor"] = self.partial if share is None else share
        elif share not in (None, 1):
            raise UserError(f"config.json: partial_rotary_factor {share} is not known of {keys.get('model_type')}")
        fields["rope_scaling"] = self._read_scaling(given, keys)
        return fields

    def _read_types(self, keys: Keys) -> tuple[Keys, float]:
        """The parameters of full layers, and the base on sliding ones."""
        nested = keys.get("rope_parameters") or {}
        if nested and "full_attention" not in nested and "sliding_attention" not in nested:
            raise UserError(
                "config.json: rope_parameters must say it for full_attention and for sliding_attention, got "
                f"{', '.join(nested)}"
            )
        if "type" in (keys.get("rope_scaling") or {}) and "rope_type" not in keys["rope_scaling"]:
            raise UserError(
                "config.json: rope_scaling says type, which transformers passes over in this family; say rope_type, or "
                "leave it out"
            )
        full = {**(nested.get("full_attention") or {}), **(keys.get("rope_scaling") or {})}
        sliding = nested.get("sliding_attention") or {}
        kind = sliding.get("rope_type", "default")
        if kind != "default":
            raise UserError(f"config.json: rope_type {kind!r} of sliding_attention is not known; only default is")
        base = sliding.get("rope_theta")
        if base is None:
            assert self.local is not None
            base = self.local if self.local_key is None else keys.get(self.local_key, self.local)
        return full, base

    def _read_scaling(self, given: Keys, keys: Keys) -> dict[str, Any] | None:
        kind = given.get("rope_type", given.get("type", "default"))
        kind = self.other_names.get(kind, kind)
        if kind == "default":
            return None
        if kind not in self.types:
            raise UserError(f"config.json: rope_type {kind!r} is not known; known are {', '.join(self.types)}")
        scaling = {name: value for name, value in given.items() if name not in _NOT_OF_THE_TYPE and value is not None}
        original = keys.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        if self.local is not None:
            scaling.pop("truncate", None)  # transformers looks for it outside of the type's parameters
        if kind in ("llama3", "yarn", "longrope"):
            scaling["original_max_position_embeddings"] = original or keys.get("max_position_embeddings")
        return normalised_scaling({"rope_type": kind, **scaling}, keys.get("max_position_embeddings"))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The keys, of both versions."""
        scaling = normalised_scaling(config.rope_scaling, config.max_position_embeddings)
        partial = {} if self.partial is None else {"partial_rotary_factor": config.partial_rotary_factor}
        flat = {"rope_theta": config.rope_theta, **scaling, **partial}
        keys: dict[str, Any] = {
            "rope_parameters": flat,
            self.theta_key: config.rope_theta,
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        }
        if self.partial is not None:
            keys[self.partial_key] = config.partial_rotary_factor
        if scaling["rope_type"] == "longrope":
            keys["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
            # transformers 4 wants these three alone, and its own word for the type.
            known = ("short_factor", "long_factor", "attention_factor")
            keys["rope_scaling"] = {"type": "longrope", **{name: scaling[name] for name in known if name in scaling}}
        if self.local is not None:
            base = config.rope_local_base_freq or config.rope_theta
            keys["rope_parameters"] = {
                "full_attention": flat,
                "sliding_attention": {"rope_theta": base, "rope_type": "default"},
            }
            if self.local_key is not None:
                keys[self.local_key] = base
        return keys
