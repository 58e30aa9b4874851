"""Sliding windows in config.json: on which layers, in the words of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_llm.errors import UserError
from lit_llm.model import ModelConfig

Keys = Mapping[str, Any]
_NAMES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Windows:
    """What a family's config.json says of sliding windows.

    Args:
        switch: whether there are windows at all is ``use_sliding_window``'s to say.
        layer_types: there is a key of that name, a type for each layer; otherwise all layers slide or none.
        slides: given all keys and the number of a layer, whether it slides where ``layer_types`` does not say.
    """

    switch: bool = False
    layer_types: bool = False
    slides: Callable[[Keys, int], bool] = lambda keys, layer: True

    def read(self, keys: Keys) -> dict[str, Any]:
        """The fields of ModelConfig; ``keys`` are complete.

        Raises:
            UserError: types of layers that the family, or we, do not know.
        """
        window = keys.get("sliding_window")
        if self.switch and not keys.get("use_sliding_window"):
            window = None
        if window == 0:
            raise UserError("config.json: sliding_window 0 lets no key be seen; null means no window")
        layers = range(keys["num_hidden_layers"])
        types = [_NAMES[window is not None and self.slides(keys, layer)] for layer in layers]
        given = keys.get("layer_types")
        if given is not None and self.layer_types:
            types = list(given)
        elif given is not None and list(given) != types:
            raise UserError(f"config.json: layer_types {sorted(set(given))} are not known of {keys.get('model_type')}")
        if window is None and "sliding_attention" in types:
            raise UserError("config.json: layer_types has sliding_attention and sliding_window is not set; give both")
        if len(set(types)) == 1 and types[0] in _NAMES:
            return {"sliding_window": window if types[0] == "sliding_attention" else None, "layer_types": None}
        return {"sliding_window": window, "layer_types": tuple(types)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The keys."""
        windows = windows_of(config)
        window = next((w for w in windows if w is not None), None)
        keys: dict[str, Any] = {"sliding_window": window}
        if window is None and self.layer_types and not self.switch:
            keys["sliding_window"] = config.max_position_embeddings  # some classes want one where no layer slides
        if self.switch:
            keys["use_sliding_window"] = window is not None
        if self.layer_types:
            keys["layer_types"] = [_NAMES[w is not None] for w in windows]
        return keys


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer."""
    return tuple(config.window_of(layer) for layer in range(config.num_hidden_layers))
