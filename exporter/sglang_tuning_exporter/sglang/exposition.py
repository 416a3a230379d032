"""Prometheus text as samples, and as text that is safe to append to ours.

Pure. Reads the text format 0.0.4 and what OpenMetrics adds to it (timestamps in seconds, exemplars, `# UNIT`, `# EOF`,
counters declared without `_total`). Other lines are skipped and counted: one bad line never rejects a page, and nothing
here raises. A page of thousands of series is read at every scrape, so one regular expression reads the whole text, and
labels are parsed on demand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

# Name, raw labels (the text between the braces), value, value as printed.
Sample: TypeAlias = tuple[str, str, float, str]
_Line: TypeAlias = tuple[str, str, str]  # of a sample that is passed on: name, raw labels, value as printed

# Without NUL and lone surrogates, which no parser accepts; only the escapes of the format.
_VALUE = r'[^"\\\n\x00\ud800-\udfff]*(?:\\[\\"n][^"\\\n\x00\ud800-\udfff]*)*'
_LABELS = rf'(?:[ \t]*[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"{_VALUE}"[ \t]*(?:,|(?=\}}|$)))*[ \t]*'
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
# The form that servers print, or any other line whole. Labels are checked once per label set: a strict expression over
# every line takes three times as long.
_FIGURE = r"[0-9.eE+-]+|NaN|[+-]?Inf"
_LINES = re.compile(rf"^({_NAME})(?:\{{([^\n]*)\}})? ({_FIGURE})$|^([^\n]+)$", re.MULTILINE)
_ANY_SAMPLE = re.compile(
    rf"[ \t]*({_NAME})(?:[ \t]*\{{({_LABELS})\}}[ \t]*|[ \t]+)"
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf(?:inity)?|[nN]a[nN]))"
    r"(?:[ \t]+-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)?"  # a timestamp
    r"(?:[ \t]+#[ \t][^\n]*)?"  # an exemplar
    r"[ \t\r]*"
)
_COMMENT = re.compile(rf"[ \t]*#[ \t]*(TYPE|HELP)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_ONLY_LABELS = re.compile(_LABELS)
_QUOTED = re.compile(rf'"{_VALUE}"')
_LABEL = re.compile(rf'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"({_VALUE})"')
_ESCAPE = re.compile(r"\\(.)")
_ONLY_FIGURE = re.compile(_FIGURE)


# The page of one scheduler has about 700 lines, all shorter than a thousand characters.
MOST_LINES = 50_000
_MOST_LABEL_SETS = 16384
LONGEST_LINE = 4096  # label sets are cached, so their length must be limited too


def bounded(text: str) -> tuple[str, list[str], dict[str, int]]:
    """Drop lines longer than `LONGEST_LINE` characters, and those after the first `MOST_LINES`.

    Return what is left, also by lines, and how many were dropped, by why.
    """
    lines = text.split("\n", MOST_LINES)
    rest = lines.pop() if len(lines) > MOST_LINES else ""
    dropped = {"metric_lines": rest.count("\n") + (rest[-1:] not in ("", "\n")), "long_metric_lines": 0}
    if dropped["metric_lines"] or max(map(len, lines)) > LONGEST_LINE:
        kept = [line for line in lines if len(line) <= LONGEST_LINE]
        dropped["long_metric_lines"] = len(lines) - len(kept)
        text, lines = "\n".join(kept) + "\n", [*kept, ""]
    return text, lines, dropped


@dataclass(slots=True)
class Page:
    """What a page has."""

    samples: list[Sample] = field(default_factory=list)  # in order
    comments: list[tuple[str, str, str]] = field(default_factory=list)  # keyword, name, text
    broken: int = 0  # lines that are neither, nor blank
    canonical: bool = True  # every line but comments has the form that servers print: the value follows the last blank

    def take_comment(self, line: str) -> None:
        """Add a line that is a comment or blank."""
        self.canonical = self.canonical and line[0] == "#"
        if (comment := _COMMENT.fullmatch(line)) is not None:
            self.comments.append((comment[1], comment[2], (comment[3] or "").strip()))

    @property
    def values(self) -> list[float]:
        """The values of the samples, in order."""
        return [value for _, _, value, _ in self.samples]


def scan(text: str) -> Page:
    """Read a whole page."""
    page = Page()
    once: dict[str, str] = {}  # to keep equal texts only once
    for match in _LINES.finditer(text):
        name, raw, value, other = match.groups("")
        if other.lstrip(" \t\r")[:1] in ("", "#") and other:
            page.take_comment(other)
            continue
        if not other and (not raw or _are_labels(raw)) and (number := _number(value)) is not None:
            page.samples.append((once.setdefault(name, name), once.setdefault(raw, raw), number, value))
            continue
        page.canonical = False
        sample = _any_sample(other or f"{name}{{{raw}}} {value}")
        if sample is None:
            page.broken += 1
        else:
            page.samples.append(sample)
    return page


def _any_sample(line: str) -> Sample | None:
    """Return the sample of a line in any spelling that the two formats allow."""
    match = _ANY_SAMPLE.fullmatch(line)
    if match is None or not _are_labels(match[2] or "") or (number := _number(match[3])) is None:
        return None
    # Prometheus rejects some spellings of values that are no number: -nan, +NaN.
    canonical = match[3] if math.isfinite(number) else "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"
    return match[1], match[2] or "", number, canonical


def figure(text: str) -> float | None:
    """Return a figure in the form that servers print; None for other text."""
    return _number(text) if _ONLY_FIGURE.fullmatch(text) is not None else None


def _number(value: str) -> float | None:
    """Return a figure; None for other text, and for one that is too large for a float: Prometheus rejects a page with
    one.
    """
    try:
        number = float(value)
    except ValueError:  # 1.2.3
        return None
    return None if math.isinf(number) and not value[-1].isalpha() else number


# A server repeats its label sets in every family. The caches have room for those of sixty ranks, until `PageReader` has
# the structure.
@lru_cache(maxsize=_MOST_LABEL_SETS)
def _are_labels(raw: str) -> bool:
    return _ONLY_LABELS.fullmatch(raw) is not None and _are_names(_without_values(raw))


def _without_values(raw: str) -> str:
    """Return the names of labels in order, as printed: the same for all series of most families."""
    return _QUOTED.sub('""', raw)


@lru_cache(maxsize=1024)
def _are_names(form: str) -> bool:
    names = [name for name, _ in _LABEL.findall(form)]
    # Names with two underscores are reserved: with `__name__` twice in a series Prometheus rejects the page.
    return len(set(names)) == len(names) and not any(name.startswith("__") for name in names)


@lru_cache(maxsize=_MOST_LABEL_SETS)
def _identity(raw: str) -> frozenset[tuple[str, str]]:
    """Return the labels that identify a series: in any order, without empty ones."""
    return frozenset(item for item in labels(raw).items() if item[1])


@lru_cache(maxsize=_MOST_LABEL_SETS)
def labels(raw: str) -> Mapping[str, str]:
    """Return the labels of one sample, unescaped. The result is cached and shared, so read-only."""
    if "\\" not in raw:
        return MappingProxyType(dict(_LABEL.findall(raw)))
    return MappingProxyType({name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(raw)})


def clear_caches() -> None:
    """Empty the caches of label sets, which take a megabyte: with the structure of a page they are not needed."""
    for cached in (_are_labels, _are_names, _identity, labels):
        cached.cache_clear()


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def name_with_colon(name: str) -> str:
    """Return `sglang:x` for `sglang_x`: Ray, `/v1/loads` and gateways replace SGLang's colon by an underscore."""
    return "sglang:" + name[7:] if name.startswith("sglang_") else name


# Types of OpenMetrics and those of 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/): Prometheus
# rejects a page with another type.
TYPES = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "summary": "summary",
    "untyped": "untyped",
    "unknown": "untyped",
    "info": "gauge",
    "stateset": "gauge",
}
_SUFFIXES = {
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
}
_OPENMETRICS_SUFFIXES = {
    "counter": "total",
    "info": "info",
}  # suffixes of samples that the declaration of a family does not have


_BOUND_LABELS = {"histogram": "le", "summary": "quantile"}  # with numbers as values


_MEMBER = re.compile(r"^sglang:|_(?:bucket|sum|count)$")


def passthrough(page: Page, only: frozenset[str] | None = None) -> tuple[str, int]:
    """Return SGLang's own page in 0.0.4, safe to append to another page of 0.0.4 without `sglang:` families; `only`
    some families of it.

    `sglang_x` becomes `sglang:x`. Dropped, and not counted: what is not SGLang's (`process_…` would collide),
    `sglang_tuning_…` (our own through a gateway), timestamps, exemplars, `_created`, a second HELP or TYPE. Dropped and
    counted: what would make Prometheus reject the page, and a second sample of one series. All lines of a family are
    placed at its first sample: strict parsers reject a page with a family in two parts, or with a TYPE after its
    samples. Also return how many samples and broken lines were counted as dropped.
    """
    declarations = _declarations(page)
    samples = [
        (name_with_colon(name), raw, value)
        for name, raw, _, value in page.samples
        if is_sglang_series(name) and (only is None or _MEMBER.sub("", name_with_colon(name)) in only)
    ]
    names = {name for name, _, _ in samples}
    unique = _first_of_each_series(samples)
    left_out = page.broken + len(samples) - len(unique)
    families: dict[str, tuple[Mapping[str, str], list[_Line]]] = {}
    for sample in unique:
        home = _family_of(declarations, names, sample[0])
        if home is not None:
            families.setdefault(home[0], (home[1], []))[1].append(sample)
    out: list[str] = []
    for name, (declared, members) in families.items():
        lines = _lines(declared.get("TYPE", ""), members)
        left_out += len(members) - len(lines)
        if lines:
            out += (*_head(name, declared), *lines)
    return "\n".join(out) + "\n" if out else "", left_out


def _declarations(page: Page) -> dict[str, dict[str, str]]:
    """Return the first HELP and the first TYPE of each family of SGLang's."""
    declarations: dict[str, dict[str, str]] = {}
    for keyword, name, rest in page.comments:
        if is_sglang_series(name):
            declared = declarations.setdefault(name_with_colon(name), {})
            if keyword == "HELP" or rest in TYPES:
                declared.setdefault(keyword, rest)
    return declarations


def _first_of_each_series(samples: Sequence[_Line]) -> Collection[_Line]:
    """Return the first sample of each series."""
    forms: dict[str, set[str]] = {}
    for name, raw, _ in samples:
        forms.setdefault(name, set()).add(raw if '""' in raw else _without_values(raw))
    unique: dict[tuple[str, str | frozenset[tuple[str, str]]], _Line] = {}
    for sample in samples:
        name, raw, _ = sample
        # In one form, without empty labels, two texts are two series.
        unique.setdefault((name, raw if len(forms[name]) == 1 else _identity(raw)), sample)
    return unique.values()


def _family_of(
    declarations: Mapping[str, Mapping[str, str]], names: set[str], name: str
) -> tuple[str, Mapping[str, str]] | None:
    """Return the name of a sample's family and what is declared of it; None for
    `_created`, which 0.0.4 does not have.
    """
    base, _, suffix = name.rpartition("_")
    owner = declarations.get(base, {})
    if "_" + suffix in _SUFFIXES.get(owner.get("TYPE", ""), ()):
        return base, owner
    if name in declarations:
        return name, declarations[name]
    if suffix == "created" and (base in declarations or base + "_total" in declarations):
        return None
    if _OPENMETRICS_SUFFIXES.get(owner.get("TYPE", "")) == suffix and base not in names:
        return name, owner  # in 0.0.4 a counter is declared under the name of its samples
    return name, {}


def _lines(declared: str, samples: list[_Line]) -> list[str]:
    """Return the lines of a family, without samples whose bucket or quantile is no number."""
    bound = _BOUND_LABELS.get(declared)
    return [
        f"{name}{{{raw}}} {value}" if raw else f"{name} {value}"
        for name, raw, value in samples
        if bound is None or bound not in raw or _is_bound(labels(raw).get(bound))
    ]


def _is_bound(text: str | None) -> bool:
    return text is None or figure(text) is not None


def _head(name: str, declared: Mapping[str, str]) -> Iterator[str]:
    if "HELP" in declared:
        yield f"# HELP {name} {_help(declared['HELP'])}"
    if "TYPE" in declared:
        yield f"# TYPE {name} {TYPES[declared['TYPE']]}"


def is_sglang_series(name: str) -> bool:
    """Whether a series is SGLang's, not one of ours through a gateway."""
    return name.startswith(("sglang:", "sglang_")) and not name.startswith("sglang_tuning_")


def _help(text: str) -> str:
    """Return a HELP text with only the escapes of the format; strict parsers reject others."""
    if "\\" not in text and "\x00" not in text and text.isascii():
        return text
    kept = "".join(c for c in text if c != "\x00" and not "\ud800" <= c <= "\udfff")
    return re.sub(r"\\(.?)", lambda match: match[0] if match[1] in ("\\", "n") else "\\\\" + match[1], kept)


# Whose page an address gave, known by the names of its series

_ITSELF = "that of sglang-tuning-exporter itself"
_OWNERS: tuple[tuple[str, str], ...] = (
    ("sglang_tuning_", _ITSELF),
    ("sgl_router_|smg_", "that of SGLang's router (model gateway)"),
    ("vllm[:_]", "vLLM's"),
    ("tgi_", "that of Text Generation Inference"),
    ("trtllm_|nv_inference_|nv_trt_llm_", "that of Triton or TensorRT-LLM"),
    ("lmdeploy[:_]", "LMDeploy's"),
    ("llamacpp[:_]", "that of llama.cpp"),
    ("dynamo_", "that of NVIDIA Dynamo"),
    ("litellm_", "LiteLLM's"),
    ("ray_", "Ray's"),
    ("DCGM_FI_", "that of NVIDIA's DCGM exporter"),
    ("node_", "that of the node exporter"),
    ("container_|cadvisor_", "cAdvisor's"),
    ("kube_|kubelet_|apiserver_", "that of Kubernetes"),
    ("nginx_", "that of an nginx exporter"),
    ("envoy_|istio_", "Envoy's"),
    ("alertmanager_", "Alertmanager's"),
    ("grafana_", "Grafana's"),
    ("prometheus_", "that of Prometheus"),
)
_SERIES = re.compile(
    r"^[ \t]*(?:" + "|".join(f"(?P<of{place}>{names})" for place, (names, _) in enumerate(_OWNERS)) + r")\w",
    re.MULTILINE,
)
_OWN_NAME = "sglang_tuning_build_info"  # every page of this exporter has it, beside the series that it passes on
_OWN = re.compile(rf"^[ \t]*{_OWN_NAME}\b", re.MULTILINE)
_SGLANGS = re.compile(r"^[ \t]*sglang(?::|_(?!tuning_))", re.MULTILINE)


def owner_of(page: str) -> str | None:
    """Return whose a page is, in words that complete "its /metrics is …"; empty for one of SGLang's, None where it is
    not known whose.

    This exporter's own page is its own, also where it passes SGLang's series on.
    """
    if _OWN_NAME in page and _OWN.search(page) is not None:
        return _ITSELF
    if _SGLANGS.search(page) is not None:
        return ""
    found = {int(match.lastgroup[2:]) for match in _SERIES.finditer(page) if match.lastgroup}
    return _OWNERS[min(found)][1] if found else None
