"""Text from the world as it may be shown: no character that moves a cursor, hides, reorders or ends a line. Pure.

It is cleaned where it goes out, because inside a name must stay what it is: a file is opened, an argument compared and a
label matched by it. Each way out has one place that calls this: documents, pages, metrics, log lines, error lines.
"""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    r"""Give the text on one line; what cannot be printed (C0, C1, bidi, ends of lines, surrogates) is written as `\x1b` or `\u202e`.

    Two names that differ stay two: they are labels of series.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: Any) -> Any:
    """Give a JSON document with all its words clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return value


def shown(value: Any) -> Any:
    """Give what a template writes: words clean, with the marks of what is already markup kept."""
    if not isinstance(value, str) or value.isprintable():
        return value
    # Markup is ours or escaped; its line ends lay out the page.
    return type(value)("\n".join(map(clean, value.split("\n")))) if hasattr(value, "__html__") else clean(value)
