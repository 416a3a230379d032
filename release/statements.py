"""Where the version is said again: every place must say what `sglang_tuning_exporter.__version__` says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOURCE = "exporter/sglang_tuning_exporter/__init__.py"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
# Where it must be said, and how it looks there.
PLACES = {
    "CHANGELOG.md": re.compile(r"^## \[(\d[^\]]*)\]", re.MULTILINE),
    "docker-compose.yml": re.compile(r"image: sglang-tuning-exporter:(\S+)"),
    "deploy/kubernetes-sidecar.yml": re.compile(r"image: \S+/sglang-tuning-exporter:(\S+)"),
    "deploy/kubernetes-node-log.yml": re.compile(r"image: \S+/sglang-tuning-exporter:(\S+)"),
    "exporter/Dockerfile": re.compile(r'image\.version="([^"]+)"'),
}
# Where it may be said: an image, a wheel or a requirement with a version in it.
_NAMED = re.compile(
    r"sglang[-_]tuning[-_]exporter(?::|-|==|@)v?(\d+\.\d+\.\d+[0-9a-z.+-]*?)(?=[\s\"'`,)]|-py3|\.tar|$)"
)
_PROSE = ("*.md", "docs/*.md", "deploy/*", "exporter/Dockerfile", "docker-compose.yml", ".env.example")
_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """One version's part of the changelog; `date` is YYYY-MM-DD, another word, or empty."""

    version: str
    date: str
    text: str


def version(root: Path) -> str:
    """The one version. Raises `ValueError` where the module has none."""
    found = _VERSION.search((root / SOURCE).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{SOURCE}: no __version__")
    return found[1]


def contradictions(root: Path) -> list[str]:
    """Every place that says another version, or nothing where it must say one; empty when all agree."""
    own, wrong = version(root), []
    for name, pattern in PLACES.items():
        said = pattern.search((root / name).read_text(encoding="utf-8"))
        if said is None or said[1] != own:
            wrong.append(f"{name}: says {said[1] if said else 'no version'}, not {own}")
    for path in sorted(path for pattern in _PROSE for path in root.glob(pattern) if path.is_file()):
        named = _NAMED.findall(path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(root)}: names {other}, not {own}" for other in named if other != own]
    return list(dict.fromkeys(wrong))


def sections(changelog: str) -> list[Section]:
    """The changelog by version, newest first; `Unreleased` is one of them where it stands."""
    heads = list(_HEADING.finditer(changelog))
    ends = [head.start() for head in heads[1:]] + [len(changelog)]
    return [
        Section(head[1], head[2] or "", changelog[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=True)
    ]


def unreleasable(root: Path, tag: str | None = None) -> list[str]:
    """What keeps this version from being released beside contradictions: a changelog without its date, a tag of another
    version.
    """
    own, wrong = version(root), contradictions(root)
    found = {section.version: section for section in sections((root / "CHANGELOG.md").read_text(encoding="utf-8"))}
    if own not in found or not found[own].text:
        wrong.append(f"CHANGELOG.md: nothing is said of {own}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", found[own].date):
        wrong.append(f"CHANGELOG.md: give [{own}] its date, as in `## [{own}] - YYYY-MM-DD`")
    if "Unreleased" in found and found["Unreleased"].text:
        wrong.append(f"CHANGELOG.md: move what is under [Unreleased] to [{own}]")
    if tag is not None and tag != f"v{own}":
        wrong.append(f"tag {tag}: the version is {own}, so its tag is v{own}")
    return wrong
