"""The runbooks as pages of the exporter, so that the link in a notification works without the internet.

Only names of the table's alerts are served; no part of a request reaches a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core import page as pages
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.findings import TONES

_PLACEHOLDER = re.compile(r"\b(EXPORTER|SGLANG|LOG)\b")
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def render(sidecar: Sidecar, alert: str, host: str) -> str | None:
    """Return the runbook of an alert or a diagnosis as HTML, with its commands filled in for this server; None for an unknown name.

    `host` is the address of the request: what Prometheus calls `instance`.
    """
    row = runbooks.BY_ALERT.get(alert) or next((each for each in runbooks.ALERTS if each.id == alert), None)
    if row is None:
        return None
    with sidecar.view() as now:
        judged = sidecar.judged(now)
        profile = sidecar.watch.server.profile
    figure = judged.checks.get(row.id)
    present = next((each for each in judged.findings if each.diagnosis == row.id), None)
    return _page(
        runbooks.page(row.alert, profile),
        _known(host, sidecar),
        tone=TONES[row.severity],
        sections=runbooks.SECTIONS,
        present=present,
        # known not to hold; some diagnoses need Prometheus
        absent=present is None and figure is not None and not figure.holds,
    )


def render_index(host: str) -> str:
    """Return the list of all runbooks as HTML."""
    return _page(runbooks.index(), _known(host), tone="", sections=(), present=None, absent=False)


def _known(host: str, sidecar: Sidecar | None = None) -> dict[str, str]:
    """Return the known values of the placeholders in commands, quoted for a shell."""
    known = {"EXPORTER": host} if _HOST.fullmatch(host) else {}
    if sidecar is None:
        return known
    url = sidecar.config.sglang_url
    if url is not None and "@" not in url:
        known["SGLANG"] = url.rstrip("/")
    paths = [file.path for file in sidecar.log.files] if sidecar.log is not None else []
    if len(paths) == 1 and paths[0] != "-":
        known["LOG"] = shlex.quote(str(Path(paths[0]).absolute()))
    return known


@cache
def _parsed(text: str) -> tuple[Token, ...]:
    return tuple(_MARKDOWN.parse(text))


def _page(text: str, known: Mapping[str, str], **shown: object) -> str:
    """Return Markdown as a page: its title, its first paragraph, what is `shown` of the server, and the rest."""
    tokens = [_shown(token, known) for token in _parsed(text)]
    for heading, title in pairwise(tokens):
        if heading.type == "heading_open" and title.content in runbooks.SECTIONS:
            heading.attrSet("id", title.content.lower())
    end = next(number for number, token in enumerate(tokens) if token.type == "paragraph_close") + 1
    if tokens[end].type == "table_open":
        tokens[end].attrSet("class", "facts")
    lead, body = (_MARKDOWN.renderer.render(part, _MARKDOWN.options, {}) for part in (tokens[3:end], tokens[end:]))
    return pages.render("runbook.html", title=tokens[1].content, lead=lead, body=body, **shown)


def _shown(token: Token, known: Mapping[str, str]) -> Token:
    """Return a copy of a token with placeholders filled in and links between pages without `.md`."""
    children = None if token.children is None else [_shown(child, known) for child in token.children]
    changed = token.copy(children=children, attrs=dict(token.attrs))
    if token.type in {"fence", "code_inline"}:
        changed.content = _PLACEHOLDER.sub(lambda match: known.get(match[1], match[1]), token.content)
    elif token.type == "link_open":
        changed.attrSet("href", str(token.attrs["href"]).removesuffix(".md"))
    return changed
