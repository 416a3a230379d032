"""The YAML files of this folder as Python objects, with each `[[ expression ]]` in a text replaced by its value.

An expression is Jinja's; it may use every public name of `queries`, `words` and `looks`, and a panel's own names
(`with`). A text that is one expression alone becomes its value, such as a mapping or a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from types import ModuleType
from typing import Any

import yaml
from jinja2 import TemplateError

from sglang_tuning_exporter.config.profiles import GIGABYTE, PROFILES
from sglang_tuning_exporter.mixin.boards import looks, queries, words
from sglang_tuning_exporter.mixin.rendering import expression, rendered

# GUIDE is the guide's profile: its figures appear in descriptions, never in queries.
_NAMES: dict[str, Any] = {
    name: value
    for module in (queries, words, looks)
    for name, value in vars(module).items()
    if not (name.startswith("_") or isinstance(value, ModuleType))
} | {
    "GUIDE": PROFILES["offline"],
    "GIGABYTE": GIGABYTE,
}
_ALONE = re.compile(r"\[\[((?:(?!\]\]).)*)\]\]", re.DOTALL)


def load(name: str) -> Any:
    """Return the content of `<name>.yml`."""
    text = (files(__package__) / f"{name}.yml").read_text(encoding="utf-8")
    return filled(yaml.safe_load(text), _NAMES)


def filled(node: Any, names: Mapping[str, Any]) -> Any:
    """Return a node of a YAML file with its expressions replaced. Raises ValueError for one that is wrong."""
    if isinstance(node, dict):
        for name, text in node.get("with", {}).items():
            names = {**names, name: filled(text, names)}
        return {key: filled(value, names) for key, value in node.items() if key != "with"}
    if isinstance(node, list):
        return [filled(each, names) for each in node]
    if not isinstance(node, str) or "[[" not in node:
        return node
    alone = _ALONE.fullmatch(node)
    try:
        return expression(alone[1], names) if alone else rendered(node, names)
    except (TypeError, TemplateError) as error:
        raise ValueError(f"{node}: {error}") from error
