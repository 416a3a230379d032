"""A capture as one small archive with everything that its judgement needs, without paths of this machine.

Pages of `/metrics` hardly differ, so all of them in one archive are smaller than a few in single ones.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

from closed_loop.situations import Situation
from sglang_tuning_exporter.config.values import UsageError

ARCHIVES = Path(__file__).parent.parent / "tests" / "captures"
MOST_BYTES = 100_000
_DROPPED = (b"Ignore import error when loading", b"nanobind: ", b" - leaked ", b" - ... skipped")
_KEPT_EVENTS = {"start", "ready", "load_begin", "load_end", "exit"}
_KEPT_FILES = ("metrics-*.prom", "v1_loads-*.json", "server_info.json", "scrapes.tsv", "health.tsv", "NOTE.md")


def archive_of(name: str, folder: Path = ARCHIVES) -> Path:
    """Return the path of a kept capture."""
    return folder / f"{name}.tar.xz"


def keep(situation: Situation, capture: Path, folder: Path = ARCHIVES) -> int:
    """Pack a capture in place of the kept one; return the size in bytes. Raises `UsageError` if it is too large."""
    files = {path.name: path.read_bytes() for pattern in _KEPT_FILES for path in sorted(capture.glob(pattern))}
    lines = (capture / "server.log").read_bytes().splitlines(keepends=True)
    files["server.log"] = b"".join(line for line in lines if not any(words in line for words in _DROPPED))
    events = [json.loads(line) for line in (capture / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    data = [e for e in events if e["event"] in _KEPT_EVENTS or e["event"].startswith("SIG")]
    files["events.jsonl"] = "".join(json.dumps({"t": e["t"], "event": e["event"]}) + "\n" for e in data).encode()
    about = {"sglang_version": situation.version, "log_utc_offset_seconds": 0, "note": f"{situation.what}."}
    files["recording.json"] = (json.dumps(about, indent=2) + "\n").encode()
    packed = _packed_small({name: _without_paths(text) for name, text in files.items()})
    if len(packed) > MOST_BYTES:
        raise UsageError(
            f"{situation.name}: {len(packed):,} bytes packed; shorten its load until it takes {MOST_BYTES:,}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    archive_of(situation.name, folder).write_bytes(packed)
    return len(packed)


def _packed_small(files: dict[str, bytes]) -> bytes:
    """Pack with every page of `/metrics`; with every second one where that is too large, or every fourth."""
    pages = sorted(name for name in files if name.startswith("metrics-"))
    packed = b""
    for every in (1, 2, 4):
        left_out = set(pages) - set(pages[::every])
        packed = pack({name: text for name, text in files.items() if name not in left_out})
        if len(packed) <= MOST_BYTES:
            break
    return packed


def pack(files: dict[str, bytes]) -> bytes:
    """Pack files by name; the same files give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", format=tarfile.USTAR_FORMAT, preset=9) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive by name. Only plain files with a plain name are taken."""
    found = {}
    with tarfile.open(archive, mode="r:xz") as packed:
        for member in packed:
            file = packed.extractfile(member) if member.isfile() else None
            if file is not None and "/" not in member.name and not member.name.startswith("."):
                found[member.name] = file.read()
    return found


def unpack(archive: Path, folder: Path) -> Path:
    """Write the files of an archive into the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents(archive).items():
        (folder / name).write_bytes(text)
    return folder


def _without_paths(text: bytes) -> bytes:
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/model-[0-9a-z.]+", b"/srv/sglang/tiny-llama", text)
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/venv-[0-9a-z.]+/", b"/opt/venv/", text)
    return re.sub(rb'(?<=")/(?!opt/venv/)[^\s"]*(?=/lib/python3)', b"/usr", text)  # Python's own files
