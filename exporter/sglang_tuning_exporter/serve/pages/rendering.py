"""The Jinja environment of all pages: everything is escaped, and an undefined name is an error."""

from __future__ import annotations

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sglang_tuning_exporter.diagnosis.wording import capitalised
from sglang_tuning_exporter.sglang.clean import clean_for_page

_FLAG = re.compile(r"(--[a-z][a-z0-9-]*[a-z0-9])")


def environment(*rooms: str) -> Environment:
    """Return an environment with the templates of these rooms, then those of the exporter's own pages."""
    names = [*(f"sglang_tuning_exporter.{room}" for room in rooms), "sglang_tuning_exporter.serve.pages"]
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in names]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean_for_page,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(flags=flags, capitalised=capitalised)
    return made


def flags(words: str) -> Markup:
    """Return prose as HTML in which a browser breaks no line inside a flag."""
    parts = _FLAG.split(words)
    return Markup("").join(
        Markup('<span class="flag">{}</span>').format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )
