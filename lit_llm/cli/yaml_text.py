"""YAML as jsonargparse reads it: floats may lack the point (1e-5), also when it is written.

PyYAML follows YAML 1.1, where 1e-5 is a text. It would write the text "1e-5" without quotes, which then comes back as a
number.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = re.compile(
    r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.[\d_]+(?:[eE][-+]?\d+)?)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def dump_yaml(value: Any) -> str:
    """YAML that ``load_yaml`` and jsonargparse read back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
