"""Prometheus text as samples, and as text that is safe to append to ours.

Pure. Reads the text format 0.0.4 and what OpenMetrics adds to it (timestamps in seconds, exemplars, `# UNIT`, `# EOF`,
counters declared without `_total`). A line that is neither is skipped and counted: a page is never refused for one bad
line, and nothing here raises. A page of thousands of series is read at every scrape, hence one regular expression over
the whole text and labels parsed on demand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Sample: TypeAlias = tuple[str, str, float]  # name, labels as they stand between the braces, value

# NUL and lone surrogates cannot be written into a page that others can read; the escapes are the format's, no more.
_VALUE = r'[^"\\\n\x00\ud800-\udfff]*(?:\\[\\"n][^"\\\n\x00\ud800-\udfff]*)*'
_LABELS = rf'(?:[ \t]*[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"{_VALUE}"[ \t]*(?:,|(?=\}}|$)))*[ \t]*'
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
# The shape that servers print, and any other line whole. The labels of the first are looked at once a label set, not
# once a line: a strict expression over every line takes three times as long.
_PLAIN = rf"^({_NAME})(?:\{{([^\n]*)\}})? ([0-9.eE+-]+|NaN|[+-]?Inf)$"
_DATA_LINES = re.compile(rf"{_PLAIN}|^([ \t\r]*[^#\s][^\n]*)$", re.MULTILINE)
_LINES = re.compile(rf"{_PLAIN}|^([^\n]+)$", re.MULTILINE)
_ANY_SAMPLE = re.compile(
    rf"[ \t]*({_NAME})(?:[ \t]*\{{({_LABELS})\}}[ \t]*|[ \t]+)"
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf(?:inity)?|[nN]a[nN]))"
    r"(?:[ \t]+-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)?"  # a timestamp
    r"(?:[ \t]+#[ \t][^\n]*)?"  # an exemplar
    r"[ \t\r]*"
)
_COMMENT = re.compile(rf"[ \t]*#[ \t]*(TYPE|HELP)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_ONLY_LABELS = re.compile(_LABELS)
_LABEL = re.compile(rf'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"({_VALUE})"')
_ESCAPE = re.compile(r"\\(.)")


# The page of one scheduler has some 700 lines, a tenth of them its own, all shorter than a thousand characters.
MOST_LINES = 50_000
MOST_LABEL_SETS = 16384
LONGEST_LINE = 4096  # label sets are remembered, so their number alone would not bound the memory


@dataclass(frozen=True, slots=True)
class Bounded:
    """A page without what is too much, and how many lines that cost: too long ones, and those after the last kept."""

    text: str
    too_long: int = 0
    too_many: int = 0


def bounded(text: str) -> Bounded:
    """Leave out lines longer than `LONGEST_LINE` characters and what follows the first `MOST_LINES`."""
    lines = text.split("\n", MOST_LINES)
    too_many = 0
    if len(lines) > MOST_LINES:
        rest = lines.pop()
        too_many = rest.count("\n") + (not rest.endswith("\n"))
        if not rest:
            too_many = 0
    if not too_many and max(map(len, lines)) <= LONGEST_LINE:
        return Bounded(text)
    kept = [line for line in lines if len(line) <= LONGEST_LINE]
    return Bounded("\n".join(kept) + "\n", len(lines) - len(kept), too_many)


@dataclass(frozen=True, slots=True)
class Page:
    """Every sample of a page in its order, and how many lines were neither sample, comment nor blank."""

    samples: list[Sample]
    broken: int


def scan(text: str) -> Page:
    """Read a whole page."""
    found: list[Sample] = []
    broken = 0
    for name, raw, value, other in _DATA_LINES.findall(text):
        if not other and (not raw or _are_labels(raw)):
            try:
                found.append((name, raw, float(value)))
            except ValueError:  # 1.2.3
                broken += 1
            continue
        sample = _any_sample(other or f"{name}{{{raw}}} {value}")
        if sample is None:
            broken += 1
        else:
            found.append((sample[0], sample[1], float(sample[2])))
    return Page(found, broken)


def plain(text: str) -> list[tuple[str, str]] | None:
    """Names and raw labels of a page's samples in their order, where each line but comments is one as servers print it: else None.

    On such a page the value is what stands behind a line's last blank, and nothing but the value decides what it is.
    """
    found: list[tuple[str, str]] = []
    once: dict[str, str] = {}
    for match in _LINES.finditer(text):
        name, raw, value, other = match.groups("")
        if not other and _is_sound(raw, value):
            found.append((once.setdefault(name, name), once.setdefault(raw, raw)))
        elif not other.startswith("#"):
            return None
    return found


def samples(text: str) -> list[Sample]:
    """Every sample of a page as (name, raw labels, value); raw labels go to `labels`."""
    return scan(text).samples


def _any_sample(line: str) -> tuple[str, str, str] | None:
    """Name, raw labels and value of a line in any spelling the two formats allow."""
    match = _ANY_SAMPLE.fullmatch(line)
    if match is None or not _are_labels(match[2] or ""):
        return None
    return match[1], match[2] or "", match[3]


# A server repeats its label sets in every family. Both caches hold those of sixty ranks, while a page is laid out: then the
# layout is kept, and they are let go.
@lru_cache(maxsize=MOST_LABEL_SETS)
def _are_labels(raw: str) -> bool:
    if _ONLY_LABELS.fullmatch(raw) is None:
        return False
    names = [name for name, _ in _LABEL.findall(raw)]
    return len(set(names)) == len(names)


@lru_cache(maxsize=MOST_LABEL_SETS)
def labels(raw: str) -> Mapping[str, str]:
    """Labels of one sample, escapes undone. The answer is remembered and shared: it is read-only."""
    if "\\" not in raw:
        return MappingProxyType(dict(_LABEL.findall(raw)))
    return MappingProxyType({name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(raw)})


def forget() -> None:
    """Let go of the label sets remembered: who keeps a page's layout has no more use for them, and they are a megabyte."""
    _are_labels.cache_clear()
    labels.cache_clear()


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def native_name(name: str) -> str:
    """`sglang:x` for `sglang_x`: Ray, `/v1/loads` and gateways write SGLang's colon as an underscore."""
    return "sglang:" + name[7:] if name.startswith("sglang_") else name


# Types of OpenMetrics in the words of 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/): Prometheus
# refuses a page that declares another.
_TYPES = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "summary": "summary",
    "untyped": "untyped",
    "unknown": "untyped",
    "info": "gauge",
    "stateset": "gauge",
    "gaugehistogram": "untyped",
}
_SUFFIXES = {
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
    "gaugehistogram": ("_bucket", "_gcount", "_gsum"),
}
_OPENMETRICS_SUFFIXES = {
    "counter": "total",
    "info": "info",
}  # that the samples of a family have and its declaration has not


@dataclass(slots=True)
class _Family:
    declared: str | None = None  # a key of _TYPES
    help: str | None = None
    lines: list[str] = field(default_factory=list)


def passthrough(text: str) -> str:
    """Give SGLang's own page in 0.0.4, safe to append to another page of 0.0.4 that has no `sglang:` family.

    Names lost to `sglang_x` come back as `sglang:x`. Left out: what is not SGLang's (`process_…` would collide),
    `sglang_tuning_…` (our own through a gateway), broken lines, timestamps, exemplars, `_created`, a second HELP or
    TYPE, a second sample of one series. A family's lines come together where the family first appears, because one
    family in two pieces, or a TYPE behind its samples, makes a strict parser refuse the whole page.
    """
    families: dict[str, _Family] = {}
    seen: set[tuple[str, str]] = set()
    once: dict[str, str] = {}
    for match in _LINES.finditer(text):
        printed, raw, value, other = match.groups("")
        printed, raw = once.setdefault(printed, printed), once.setdefault(raw, raw)
        comment = _COMMENT.fullmatch(other) if other else None
        if comment is not None:
            if _is_native(comment[2]):
                _declare(
                    families.setdefault(native_name(comment[2]), _Family()), comment[1], (comment[3] or "").strip()
                )
            continue
        if other or not _is_sound(raw, value):
            sample = _any_sample(other or f"{printed}{{{raw}}} {value}")
        else:
            sample = (printed, raw, value)
        if sample is None or not _is_native(sample[0]):
            continue
        _add(families, seen, native_name(sample[0]), sample[1], sample[2])
    out: list[str] = []
    for name, family in families.items():
        if family.lines:
            if family.help is not None:
                out.append(f"# HELP {name} {family.help}")
            if family.declared is not None:
                out.append(f"# TYPE {name} {_TYPES[family.declared]}")
            out.extend(family.lines)
    return "\n".join(out) + "\n" if out else ""


def _add(families: dict[str, _Family], seen: set[tuple[str, str]], name: str, raw: str, value: str) -> None:
    if (name, raw) in seen:
        return
    seen.add((name, raw))
    home = _home(families, name)
    if home is not None:
        families.setdefault(home, _Family()).lines.append(f"{name}{{{raw}}} {value}" if raw else f"{name} {value}")


def _is_sound(raw: str, value: str) -> bool:
    return (not raw or _are_labels(raw)) and _is_number(value)


def _is_native(printed: str) -> bool:
    return printed.startswith(("sglang:", "sglang_")) and not printed.startswith("sglang_tuning_")


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _declare(family: _Family, keyword: str, rest: str) -> None:
    if keyword == "HELP" and family.help is None:
        family.help = _help(rest)
    elif keyword == "TYPE" and family.declared is None and rest in _TYPES:
        family.declared = rest


def _home(families: dict[str, _Family], name: str) -> str | None:
    """Name of the family a sample belongs to; None for `_created`, which 0.0.4 has no place for."""
    if name in families:
        return name
    base, _, suffix = name.rpartition("_")
    if suffix == "created" and (base in families or base + "_total" in families):
        return None
    family = families.get(base)
    if family is None or family.declared is None:
        return name
    if _OPENMETRICS_SUFFIXES.get(family.declared) == suffix and not family.lines:
        families[name] = families.pop(base)  # in 0.0.4 a counter is declared under the name of its samples
        return name
    return base if "_" + suffix in _SUFFIXES.get(family.declared, ()) else name


def _help(text: str) -> str:
    """HELP text with only the escapes that the format has; a strict parser refuses others."""
    if "\\" not in text and "\x00" not in text and text.isascii():
        return text
    kept = "".join(c for c in text if c != "\x00" and not "\ud800" <= c <= "\udfff")
    return re.sub(r"\\(.?)", lambda match: match[0] if match[1] in ("\\", "n") else "\\\\" + match[1], kept)
