"""What a Transformer looks like: one frozen dataclass whose fields carry Hugging Face's names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lit_llm.errors import UserError
from lit_llm.model.presets import PRESETS
from lit_llm.ops.rope import rope_inverse_frequencies

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]
NormType = Literal["rms_norm", "layer_norm"]
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only, pre-norm Transformer.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP; None: 8/3 of hidden_size, rounded up to a multiple of 64.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads (GQA); None: as many as query heads.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        max_position_embeddings: longest sequence, in tokens.
        hidden_act: activation of the gated MLP.
        norm_type: ``rms_norm`` or ``layer_norm``.
        rms_norm_eps: epsilon of every norm.
        rope_theta: base of the rotary embedding.
        rope_scaling: None or a mapping with ``rope_type`` linear or llama3 and its fields.
        partial_rotary_factor: share of head_dim that is rotated.
        attention_bias: biases on the query, key and value projections.
        attention_output_bias: bias on the output projection; None: as attention_bias.
        mlp_bias: biases in the MLP.
        use_qk_norm: a norm over each query and key head (Qwen3).
        tie_word_embeddings: the head is the embedding.
        sliding_window: keys that a sliding layer sees, the query's own included.
        layer_types: per layer ``full_attention`` or ``sliding_attention``; None: all sliding if sliding_window is set.
        attn_logit_softcapping: soft cap on attention scores (Gemma 2), or None.
        final_logit_softcapping: soft cap on the logits (Gemma 2), or None.
        attention_dropout: dropout on attention probabilities in training.
        initializer_range: standard deviation of the initial weights.
        unpadded_vocab_size: ids that the tokenizer knows when the vocabulary is padded beyond them; ids from there on
            are never generated. None: all of vocab_size.
        bos_token_id, eos_token_id: of the tokenizer the model was trained with; eos may be a list.

    Raises:
        UserError: sizes that do not fit together; the line names them.
    """

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    hidden_act: Activation = "silu"
    norm_type: NormType = "rms_norm"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    unpadded_vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), kind))
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "attention_output_bias"):
                raise UserError(f"model.config.{name} must be true or false, got {value!r}")
        self._fill()
        self._check()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the documented way for a frozen dataclass's own __post_init__

    def _fill(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) is None or getattr(self, name) < 1:
                raise UserError(f"model.config.{name} must be at least 1, got {getattr(self, name)}")
        if self.intermediate_size is None:
            self._set("intermediate_size", -(-self.hidden_size * 8 // (3 * 64)) * 64)
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UserError(
                    f"model.config.hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or give head_dim"
                )
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        if self.layer_types is not None:
            self._set("layer_types", tuple(self.layer_types))
        if isinstance(self.eos_token_id, list | tuple):
            self._set("eos_token_id", tuple(int(i) for i in self.eos_token_id))
        if self.attention_output_bias is None:
            self._set("attention_output_bias", self.attention_bias)

    def _check(self) -> None:
        positive = ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta")
        for name in (*positive, "rms_norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                raise UserError(f"model.config.{name} must be above 0, got {getattr(self, name)}")
        for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "unpadded_vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise UserError(f"model.config.{name} must be above 0 or null, got {getattr(self, name)}")
        if self.num_attention_heads % self.kv_heads:
            raise UserError(
                f"model.config.num_attention_heads {self.num_attention_heads} does not divide by num_key_value_heads "
                f"{self.num_key_value_heads}; each key-value head serves a whole number of query heads"
            )
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise UserError(
                f"model.config: head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor} rotates "
                f"{self.rotary_dim} dimensions of a head; it must be an even number above 0 and at most head_dim"
            )
        if not 0 <= self.attention_dropout < 1:
            raise UserError(f"model.config.attention_dropout must be in [0, 1), got {self.attention_dropout}")
        for name, known in (("hidden_act", get_args(Activation)), ("norm_type", get_args(NormType))):
            if getattr(self, name) not in known:
                raise UserError(f"model.config.{name} {getattr(self, name)!r} is unknown; known are {', '.join(known)}")
        if self.layer_types is not None:
            if len(self.layer_types) != self.num_hidden_layers:
                raise UserError(
                    f"model.config.layer_types has {len(self.layer_types)} entries for num_hidden_layers "
                    f"{self.num_hidden_layers}; give one per layer"
                )
            unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
            if unknown:
                raise UserError(
                    f"model.config.layer_types: {unknown[0]!r} is unknown; known are {', '.join(LAYER_TYPES)}"
                )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise UserError("model.config.layer_types has sliding_attention; give sliding_window as well")
        if self.unpadded_vocab_size is not None and self.unpadded_vocab_size > self.vocab_size:
            raise UserError(
                f"model.config.unpadded_vocab_size {self.unpadded_vocab_size} is above vocab_size {self.vocab_size}"
            )
        rope_inverse_frequencies(self.rotary_dim, self.rope_theta, self.rope_scaling)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, as an int."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head, as an int."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def mlp_size(self) -> int:
        """Width of the MLP, as an int."""
        assert self.intermediate_size is not None
        return self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def generated_vocab_size(self) -> int:
        """Ids below this number can be generated."""
        return self.unpadded_vocab_size or self.vocab_size

    def window_of(self, layer: int) -> int | None:
        """Keys that a layer sees, its own included; None: all before it."""
        if self.layer_types is not None and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types (lists, numbers, strings), complete, for checkpoints and JSON."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], **defaults: Any) -> ModelConfig:
        """A configuration from a mapping; ``defaults`` fill what the mapping leaves out.

        Raises:
            UserError: an unknown field, with the nearest known one.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise UserError(f"model.config.{name} is no field of ModelConfig{hint}")
        merged = {**defaults, **fields}
        if "vocab_size" not in merged:
            raise UserError("model.config.vocab_size is missing; give it, or a data.store that it is taken from")
        return cls(**merged)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A configuration by name; ``changes`` replace fields.

        Raises:
            UserError: an unknown name; the line lists the known ones.
        """
        return cls.from_dict({**preset_fields(name), **changes})


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a preset, as a new mapping."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise UserError(f"model.config: no preset is called {name!r}; {hint} are {', '.join(PRESETS)}")
    return dict(PRESETS[name])


_NUMBERS = {
    f.name: float if "float" in str(f.type) else int
    for f in dataclasses.fields(ModelConfig)
    if any(kind in str(f.type) for kind in ("int", "float")) and "tuple" not in str(f.type)
}
_FLAGS = [f.name for f in dataclasses.fields(ModelConfig) if "bool" in str(f.type)]


def _number(name: str, value: Any, kind: type) -> Any:
    """A number, also out of text: YAML reads 1e-5 as a string."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if kind is int:
            if number != int(number):
                raise ValueError
            return value if isinstance(value, int) else int(number)
        if number != number or number in (float("inf"), float("-inf")):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"model.config.{name} must be {what}, got {value!r}") from None
