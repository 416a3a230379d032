"""Content negotiation of a metrics page: text 0.0.4 or OpenMetrics, plain or gzip."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_COMMENT = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)")
_BOUND = re.compile(r'(?:^|,)le="[^"]*"')


def response(page: str, headers: Mapping[str, str]) -> Response:
    """Return a page of text 0.0.4 in the format and encoding that the request headers accept.

    OpenMetrics only where plain text is not accepted: Prometheus accepts both, and plain text costs less.
    """
    accepted = qualities(headers.get("Accept", ""))
    is_open = accepted.get("application/openmetrics-text", 0.0) > 0 and not any(
        accepted.get(kind, 0.0) > 0 for kind in ("text/plain", "text/*", "*/*")
    )
    body = (openmetrics(page) if is_open else page).encode()
    answer = {"Content-Type": OPENMETRICS if is_open else TEXT, "Vary": "Accept, Accept-Encoding"}
    if qualities(headers.get("Accept-Encoding", "")).get("gzip", 0.0) > 0:
        body = gzip.compress(body, compresslevel=1, mtime=0)
        answer["Content-Encoding"] = "gzip"
    return Response(body, headers=answer)


def qualities(header: str) -> dict[str, float]:
    """Parse `Accept` or `Accept-Encoding`: the `q` of each item, 1 where it has none and 0 where it is not a number."""
    found: dict[str, float] = {}
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        found[name] = float(weight) if re.fullmatch(r"[01](\.\d{0,3})?", weight) else 0.0
    return found


def openmetrics(page: str) -> str:
    """Convert a page of text 0.0.4 without timestamps to OpenMetrics 1.0."""
    families: list[_Family] = []
    by_name: dict[str, _Family] = {}
    for line in page.splitlines():
        comment = _COMMENT.fullmatch(line)
        if comment is None:
            families[-1:] = families[-1:] or [_Family("")]
            families[-1].samples.append(line)
            continue
        keyword, name, rest = comment.groups()
        if name not in by_name:
            by_name[name] = _Family(name)
            families.append(by_name[name])
        setattr(by_name[name], keyword.lower(), rest)
    return "".join(line + "\n" for family in families for line in family.lines()) + "# EOF\n"


@dataclass(slots=True)
class _Family:
    name: str
    type: str = "untyped"
    help: str = ""
    samples: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        name, kind = self.name, "unknown" if self.type == "untyped" else self.type
        samples = self.samples
        if kind == "counter":  # the family's name has no `_total`
            name, kind = (name[: -len("_total")], kind) if name.endswith("_total") else (name, "unknown")
        elif kind == "histogram":
            series = self._series()
            if not all(any('le="+Inf"' in line for line in lines) for lines in series.values()):
                name = ""  # OpenMetrics requires this bucket: without it the samples have no type
            else:
                samples = [line for lines in series.values() for line in lines]
        if name:
            yield f"# TYPE {name} {kind}"
        if name and self.help:
            yield f"# HELP {name} " + self.help.replace('"', r"\"")
        yield from samples

    def _series(self) -> dict[str, list[str]]:
        """Return the lines of each series of a histogram, buckets first; SGLang's processes write sums first."""
        series: dict[str, list[str]] = {}
        for line in self.samples:
            labels = line.rpartition(" ")[0].partition("{")[2].rstrip("}")
            series.setdefault(_BOUND.sub("", labels).strip(","), []).append(line)
        for lines in series.values():
            lines.sort(key=lambda line: not line.startswith(f"{self.name}_bucket"))
        return series
