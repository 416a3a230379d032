"""Text from outside without control characters: none that moves a cursor, hides, reorders or ends a line. Pure.

Text is cleaned where it is shown, because inside the program a name must stay unchanged: files are opened, arguments compared and
labels matched by it. Each output has one place that calls this: documents, pages, metrics, log lines, error lines.
"""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    r"""Return the text on one line; characters that cannot be printed (C0, C1, bidi, line ends, surrogates) become `\x1b` or `\u202e`.

    Different names stay different, because they are labels of series.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: Any) -> Any:
    """Return a JSON document, or tuples of texts, with all texts clean."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, tuple):
        items = map(cleaned, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def clean_for_page(value: Any) -> Any:
    """Return a value for a template: text clean, markup kept."""
    if not isinstance(value, str) or value.isprintable():
        return value
    # Markup is ours or escaped; its line ends lay out the page.
    return type(value)("\n".join(map(clean, value.split("\n")))) if hasattr(value, "__html__") else clean(value)
