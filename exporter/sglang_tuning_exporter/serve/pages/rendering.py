"""The Jinja environment of all pages: everything is escaped, and an undefined name is an error."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from sglang_tuning_exporter.sglang.clean import shown


def environment(*rooms: str) -> Environment:
    """Return an environment with the templates of these rooms, then those of the exporter's own pages."""
    names = [*(f"sglang_tuning_exporter.{room}" for room in rooms), "sglang_tuning_exporter.serve.pages"]
    return Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in names]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
