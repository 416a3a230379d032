"""A capture cut down to a recording that is small enough for the tests: fewer scrapes, no paths of this machine, packed."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from closed_loop.situations import Situation

_DROPPED = (b"Ignore import error when loading", b"nanobind: ", b" - leaked ", b" - ... skipped")
_KEPT_EVENTS = {"start", "ready", "load_begin", "load_end", "exit"}


def cut(situation: Situation, capture: Path, target: Path, seconds: float) -> int:
    """Write the recording, with a scrape about every `seconds`; gives its size in bytes."""
    target.mkdir(parents=True)
    log = (capture / "server.log").read_bytes().splitlines(keepends=True)
    _pack(target / "server.log.gz", b"".join(line for line in log if not any(words in line for words in _DROPPED)))
    kept, last = 0, 0.0
    for path in sorted(capture.glob("metrics-*.prom")):
        at = int(path.stem.split("-")[2]) / 1000
        if at - last >= seconds:
            _pack(target / f"metrics-{kept:03d}-{1000 * at:.0f}.prom.gz", path.read_bytes())
            kept, last = kept + 1, at
    if (capture / "server_info.json").exists():
        _pack(target / "server_info.json.gz", (capture / "server_info.json").read_bytes())
    for name in ("scrapes.tsv", "health.tsv"):
        if (capture / name).exists():
            _pack(target / f"{name}.gz", (capture / name).read_bytes())
    events = [json.loads(line) for line in (capture / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [e for e in events if e["event"] in _KEPT_EVENTS or e["event"].startswith("SIG")]
    lines = "".join(json.dumps({"t": e["t"], "event": e["event"]}) + "\n" for e in told)
    (target / "events.jsonl").write_text(lines, encoding="utf-8")
    about = {"sglang_version": situation.version, "log_utc_offset_seconds": 0, "note": f"{situation.what}."}
    (target / "recording.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in target.iterdir())


def _pack(path: Path, text: bytes) -> None:
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/model-[0-9a-z.]+", b"/srv/sglang/tiny-llama", text)
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/venv-[0-9a-z.]+/", b"/opt/venv/", text)
    # Without the time of packing the same text gives the same bytes.
    path.write_bytes(gzip.compress(text, 9, mtime=0))
