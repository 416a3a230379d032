"""What generated files share: Jinja templates and expressions, in which an undefined name is an error, and the labels
that identify a server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined, UndefinedError

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import advice, runbooks


def filled(text: str) -> str:
    """Return a text of the table of diagnoses without a server, with the default profile's figures."""
    return advice.fill(text, runbooks.figures(profiles.DEFAULT))


# Go templates use curly braces, so ours are square.
_ENVIRONMENT = Environment(
    loader=PackageLoader("sglang_tuning_exporter.mixin"),
    autoescape=False,  # noqa: S701 # nosec B701 # YAML and Markdown made of the program's tables alone
    undefined=StrictUndefined,
    variable_start_string="[[",
    variable_end_string="]]",
    block_start_string="[%",
    block_end_string="%]",
    comment_start_string="[#",
    comment_end_string="#]",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals |= {
    "json": json.dumps,
    "quoted": lambda text: "'" + text.replace("'", "''") + "'",  # for YAML
    "filled": filled,
}


def render(template: str, **values: object) -> str:
    """Return a template filled with these values."""
    return _ENVIRONMENT.get_template(template).render(values)


def rendered(text: str, values: Mapping[str, object]) -> str:
    """Return a template's text filled with these values."""
    return _ENVIRONMENT.from_string(text).render(values)


def expression(text: str, values: Mapping[str, object]) -> Any:
    """Return the value of a Jinja expression over these values. Raises `UndefinedError` for an unknown name."""
    value = _ENVIRONMENT.compile_expression(text, undefined_to_none=False)(values)
    if isinstance(value, Undefined):
        raise UndefinedError(f"{text.strip()} is not defined")
    return value


# The labels that identify a server: in rules, template queries, Alertmanager's grouping and inhibition, and boards.
# A target of Prometheus, which is one exporter. `up` has these, and no more.
TARGET = ("cluster", "namespace", "pod", "job", "instance")
# A server: the exporter's own label is that of several behind one exporter, and absent with one.
SERVER = (*TARGET, "server")


def listed(labels: tuple[str, ...]) -> str:
    """Return labels as PromQL and Alertmanager's configuration list them."""
    return ", ".join(labels)
