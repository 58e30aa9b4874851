"""What a Transformer looks like: one frozen dataclass whose fields carry Hugging Face's names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lit_llm.errors import UserError
from lit_llm.model.config_checks import check_config
from lit_llm.model.presets import PRESETS

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"]
NormType = Literal["rms_norm", "layer_norm"]
NormPlacement = Literal["pre", "post", "sandwich"]
MLPType = Literal["gated", "plain"]
QKNormScope = Literal["head", "layer", "each_head"]
PositionEmbedding = Literal["rotary", "learned"]


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only Transformer computes.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP; None: 8/3 of hidden_size, rounded up to a multiple of 64, and 4 times
            hidden_size where ``mlp_type`` is plain.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads (GQA); None: as many as query heads.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        max_position_embeddings: longest sequence, in tokens.
        hidden_act: activation of the MLP; ``relu2`` is the square of relu, ``quick_gelu`` x sigmoid(1.702 x).
        mlp_type: ``gated``: down(act(gate(x)) * up(x)); ``plain``: down(act(up(x))).
        norm_type: ``rms_norm`` or ``layer_norm``.
        rms_norm_eps: epsilon of every norm.
        norm_weight: whether norms have a gain.
        norm_bias: whether layer norms have a bias.
        norm_zero_centered: the gain is 1 + weight (Gemma).
        norm_placement: ``pre``: before attention and MLP; ``post``: on what they give (OLMo 2); ``sandwich``: both
            (Gemma 2).
        use_parallel_residual: attention and MLP both read the block's input, x + attention(norm(x)) + mlp(norm(x)).
        shared_norm: in such a block, one norm serves both.
        rope_theta: base of the rotary embedding.
        rope_scaling: None or a mapping with ``rope_type`` (linear, llama3, yarn, longrope) and its fields.
        partial_rotary_factor: share of head_dim that is rotated.
        rope_local_base_freq: base on sliding layers, which are then not scaled (Gemma 3); None: as all others.
        no_rope_layers: per layer 1 where queries and keys are rotated and 0 where not (SmolLM3); None: all are.
        position_embedding: ``rotary``, or ``learned``: a vector a position, added to the embedding (GPT-2).
        attention_bias: biases on the query, key and value projections.
        attention_output_bias: bias on the output projection; None: as attention_bias.
        mlp_bias: biases in the MLP.
        use_qk_norm: a norm on queries and keys, before they are rotated.
        qk_norm_scope: over each ``head``, with one gain for all (Qwen3); over the whole ``layer`` (OLMo 2); over
            ``each_head`` with a gain of its own (StableLM 2).
        qk_norm_bias: whether those norms have a bias, where layer norms; None: as norm_bias.
        clip_qkv: queries, keys and values are clamped to this size (OLMo), or None.
        tie_word_embeddings: the head is the embedding.
        lm_head_bias: a bias on the logits (Phi-2).
        sliding_window: keys that a sliding layer sees, the query's own included.
        layer_types: per layer ``full_attention`` or ``sliding_attention``; None: all sliding if sliding_window is set.
        attn_logit_softcapping: soft cap on attention scores (Gemma 2), or None.
        final_logit_softcapping: soft cap on the logits (Gemma 2), or None.
        attention_multiplier: what scores are multiplied by (Granite); None: 1 / sqrt(head_dim).
        scale_attn_by_inverse_layer_idx: scores of layer i are divided by i + 1 as well (GPT-2 of Mistral).
        embedding_multiplier: of the embeddings (Gemma, Granite).
        residual_multiplier: of what attention and MLP add (Granite).
        logits_scaling: what the logits are divided by (Granite).
        attention_dropout: dropout on attention probabilities in training.
        hidden_dropout: dropout in training on what attention and MLP add.
        embedding_dropout: dropout in training on the embeddings.
        initializer_range: standard deviation of the initial weights.
        unpadded_vocab_size: ids that the tokenizer knows when the vocabulary is padded beyond them; ids from there on
            are never generated. None: all of vocab_size.
        bos_token_id, eos_token_id: of the tokenizer the model was trained with; eos may be a list.
        num_experts: experts of a sparse layer's MLP (Shazeer et al. 2017); None: all layers are dense.
        num_experts_per_tok: experts that a token is sent to.
        moe_intermediate_size: width of an expert; None: intermediate_size.
        norm_topk_prob: the weights of the chosen experts are made to sum to 1.
        mlp_layer_types: per layer ``dense`` or ``sparse``; None: all sparse if num_experts is set.
        shared_expert_intermediate_size: width of an expert that every token goes to (Qwen2-MoE), or None.
        router_aux_loss_coef: coefficient of the loss that balances the experts' load, and
        router_z_loss_coef: of the one that keeps the router's logits small; see :class:`lit_llm.model.moe.MoE`.
        model_type: the family of transformers that the model came from, which an export prefers; changes nothing here.

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
    mlp_type: MLPType = "gated"
    norm_weight: bool = True
    norm_bias: bool = True
    norm_zero_centered: bool = False
    norm_placement: NormPlacement = "pre"
    use_parallel_residual: bool = False
    shared_norm: bool = False
    qk_norm_scope: QKNormScope = "head"
    qk_norm_bias: bool | None = None
    clip_qkv: float | None = None
    rope_local_base_freq: float | None = None
    no_rope_layers: tuple[int, ...] | None = None
    position_embedding: PositionEmbedding = "rotary"
    lm_head_bias: bool = False
    attention_multiplier: float | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    mlp_layer_types: tuple[str, ...] | None = None
    shared_expert_intermediate_size: int | None = None
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    model_type: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), kind))
        for name in _FLAGS:
            value = getattr(self, name)
            derived = value is None and name in ("attention_output_bias", "qk_norm_bias")
            if not isinstance(value, bool) and not derived:
                raise UserError(f"model.config.{name} must be true or false, got {value!r}")
        self._fill()
        check_config(self, _CHOICES)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the documented way for a frozen dataclass's own __post_init__

    def _fill(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) is None or getattr(self, name) < 1:
                raise UserError(f"model.config.{name} must be at least 1, got {getattr(self, name)}")
        if self.intermediate_size is None:
            gated = -(-self.hidden_size * 8 // (3 * 64)) * 64
            self._set("intermediate_size", gated if self.mlp_type == "gated" else 4 * self.hidden_size)
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UserError(
                    f"model.config.hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or give head_dim"
                )
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
            if getattr(self, name) is not None:
                self._set(name, tuple(getattr(self, name)))
        if isinstance(self.eos_token_id, list | tuple):
            self._set("eos_token_id", tuple(_number("eos_token_id", i, int) for i in self.eos_token_id))
        else:
            self._set("eos_token_id", _number("eos_token_id", self.eos_token_id, int))
        if self.attention_output_bias is None:
            self._set("attention_output_bias", self.attention_bias)
        if self.qk_norm_bias is None:
            self._set("qk_norm_bias", self.norm_bias)

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
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.moe_intermediate_size or self.mlp_size

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

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.num_experts is not None and (
            self.mlp_layer_types is None or self.mlp_layer_types[layer] == "sparse"
        )

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated."""
        return self.position_embedding == "rotary" and (self.no_rope_layers is None or bool(self.no_rope_layers[layer]))

    def score_scale(self, layer: int) -> float:
        """What a layer's attention scores are multiplied by."""
        scale = self.head_size**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

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
    def from_hf(cls, source: str | Path, **changes: Any) -> ModelConfig:
        """The configuration of a model in Hugging Face's format; ``changes`` replace fields.

        Args:
            source: a folder, a config.json, or a name on the hub (``org/model``).

        Raises:
            UserError: nothing there, or a model that our Transformer does not compute; the line names what it is.
        """
        # By name: the model lies below the checkpoints, and this method is but a door to them.
        config = importlib.import_module("lit_llm.checkpoint.hf_folder").config_from_hf(source)
        return dataclasses.replace(config, **changes)

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
_CHOICES = {
    "hidden_act": get_args(Activation),
    "norm_type": get_args(NormType),
    "norm_placement": get_args(NormPlacement),
    "mlp_type": get_args(MLPType),
    "qk_norm_scope": get_args(QKNormScope),
    "position_embedding": get_args(PositionEmbedding),
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
