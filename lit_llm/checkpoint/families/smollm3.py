"""SmolLM3 (Hugging Face, 2025): Llama with layers that are not rotated, and windows layer by layer."""

from typing import Any

from lit_llm.checkpoint.families.family import RMS, SHARED, Family
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows, windows_of
from lit_llm.model import ModelConfig


def _rotated(keys: Any, layer: int) -> int:
    given = keys.get("no_rope_layers")
    if given is not None and layer < len(given):
        return int(given[layer])
    return int((layer + 1) % keys.get("no_rope_layer_interval", 4) != 0)


def _read(keys: Any) -> dict[str, Any]:
    rotated = keys.get("no_rope_layers") or [_rotated(keys, layer) for layer in range(keys["num_hidden_layers"])]
    return {"no_rope_layers": None if all(rotated) else tuple(int(one) for one in rotated)}


def _slides(keys: Any, layer: int) -> bool:
    """Where layer_types does not say it, which has the last word over use_sliding_window too."""
    return bool(keys.get("use_sliding_window")) and not _rotated(keys, layer)


def _write(config: ModelConfig) -> dict[str, Any]:
    rotated = [int(config.is_rotated(layer)) for layer in range(config.num_hidden_layers)]
    return {"no_rope_layers": rotated, "use_sliding_window": any(windows_of(config))}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    fixed={"attention_output_bias": lambda fields: fields.get("attention_bias", False)},
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    rope=Rope(theta=2e6),
    windows=Windows(layer_types=True, slides=_slides),
    read_more=_read,
    write_more=_write,
)
