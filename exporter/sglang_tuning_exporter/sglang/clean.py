"""Text from outside without control characters: none that moves a cursor, hides, reorders or ends a line. Pure.

Text is cleaned where it is shown, because inside the program a name must stay unchanged: files are opened, arguments compared and
labels matched by it. Each output has one place that calls this: documents, pages, metrics, log lines, error lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

T = TypeVar("T")


def clean(text: str) -> str:
    r"""Return the text on one line; characters that cannot be printed (C0, C1, bidi, line ends, surrogates) become `\x1b` or `\u202e`.

    Different names stay different, because they are labels of series.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: T) -> T:
    """Return a value with all its texts clean: a JSON document, tuples of texts, or data classes of these."""
    made: Any = value
    if isinstance(value, str):
        made = clean(value)
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{each.name: cleaned(getattr(value, each.name)) for each in fields(value)})
    elif isinstance(value, Mapping):
        made = {cleaned(key): cleaned(item) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)(*map(cleaned, value))
    elif isinstance(value, tuple | list):
        made = type(value)(map(cleaned, value))
    return cast("T", made)


def clean_for_page(value: Any) -> Any:
    """Return a value for a template: text clean, markup kept."""
    if not isinstance(value, str) or value.isprintable():
        return value
    # Markup is ours or escaped; its line ends lay out the page.
    return type(value)("\n".join(map(clean, value.split("\n")))) if hasattr(value, "__html__") else clean(value)
