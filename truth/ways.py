"""Ask the product: `report`, live with the log alone, with metrics alone, with both, or any command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import local
from typing import Any

from truth.cases import Answer, Case, Change, Finding
from truth.recording import ROOT, Recording

# How often the log grows, the exporter is scraped (each time it scrapes SGLang) and its findings are read; less often
# in a long recording.
STEP_SECONDS, SCRAPE_SECONDS, JUDGE_SECONDS = 0.5, 5.0, 1.0
LONG_SECONDS = 240.0
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG", "TMPDIR"}},
    "TZ": "UTC",
    "PYTHONPATH": os.environ.get("TRUTH_EXPORTER", str(ROOT / "exporter")),  # another revision's is judged the same way
}
_SERIES = re.compile(r"^([a-zA-Z_:][^ {]*(?:\{.*\})?) (\S+)$", re.MULTILINE)
_mine = local()


def _driver() -> subprocess.Popen[str]:
    """Return this thread's driver: it judges one job after the other, and ends with this process."""
    if not hasattr(_mine, "driver"):
        argv, pipe = [sys.executable, "-m", "truth.driver"], subprocess.PIPE
        _mine.driver = subprocess.Popen(argv, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True)
    driver: subprocess.Popen[str] = _mine.driver
    return driver


def _ask(job: Mapping[str, Any]) -> dict[str, Any]:
    driver = _driver()
    assert driver.stdin is not None
    assert driver.stdout is not None
    print(json.dumps(job), file=driver.stdin, flush=True)
    answer: dict[str, Any] = json.loads(driver.stdout.readline() or '{"error": "the driver has ended"}')
    if "error" in answer:
        raise RuntimeError(f"{job['argv']}: {answer['error']}")
    return answer


def command(argv: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command of the product; return its exit status, standard output and standard error."""
    answer = _ask({"argv": argv, "stdin": stdin.decode("latin-1")})
    return answer["status"], answer["out"], answer["err"]


def ask(case: Case, way: str) -> list[Answer]:
    """Return the answers over time: one by `report`, one a second live."""
    recording = case.recording()
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        log = Path(folder) / "server.log"
        options = ["--profile", case.profile, *case.options]
        if way == "report":
            log.write_bytes(recording.text)
            return [report(log, options, recording.end)]
        log.touch()
        return live(recording, way, log, options)


def report(log: Path, options: list[str], at: float = 0.0) -> Answer:
    """Ask `report` once for people and once as JSON."""
    status, text, error = command(["report", str(log), *options])
    if status not in {0, 1}:
        return Answer(at, status, f"exit {status}", text=error)
    return answer_of(json.loads(command(["report", "--format", "json", str(log), *options])[1]), at, status, text)


def live(recording: Recording, way: str, log: Path, options: list[str]) -> list[Answer]:
    """Let the exporter watch the recording."""
    argv = ["serve", "--listen-address", "127.0.0.1:{port}", "--no-passthrough", *options]
    argv += ["--log-file", str(log)] if way != "metrics" else []
    argv += ["--sglang-url", "http://127.0.0.1:{sglang}"] if way != "log" else []
    rarer = max(1.0, (recording.end - recording.begin) / LONG_SECONDS)
    seen = _ask({
        "argv": argv, "log": str(log), "begin": recording.begin, "end": recording.end, "step": STEP_SECONDS * rarer,
        "chunks": [(at, text.decode("latin-1")) for at, text in recording.log],
        "pages": [(page.at, page.path, page.status, page.text) for page in recording.pages],
        "every": {"/metrics": SCRAPE_SECONDS * min(rarer, 3.0), "/api/v1/findings": JUDGE_SECONDS * rarer},
    })  # fmt: skip
    if not seen["seen"]:
        raise RuntimeError(f"{argv}: no answer: {seen['err'][-500:]}")
    answers, series = [], {}
    for at, pages in seen["seen"]:
        if "/metrics" in pages:
            series = series_of(pages["/metrics"])
        if "/api/v1/findings" in pages:
            answers.append(answer_of(json.loads(pages["/api/v1/findings"]), at, 200, seen["err"], series))
    return answers


def answer_of(
    document: dict[str, Any], at: float, status: int, text: str, series: Mapping[str, float] | None = None
) -> Answer:
    """Read an answer off its JSON: of `report`, or of the API beside the series of the page."""
    findings = tuple(
        Finding(
            found["diagnosis"], found["severity"], found["confidence"], found.get("sentence", ""),
            tuple(_change(advice) for advice in found["advice"]),
        )
        for found in document["findings"]
    )  # fmt: skip
    alerts = tuple(each["alert"] for each in document.get("alerts", ()))
    return Answer(
        at, status, document["verdict"], findings, _flat(document["counts"]), alerts, document, series or {}, text
    )


def series_of(page: str) -> dict[str, float]:
    """Return the series of a page by name and labels."""
    return {name: float(value) for name, value in _SERIES.findall(page)}


def _change(advice: Mapping[str, Any]) -> Change:
    words = " ".join(str(advice.get(key) or "") for key in ("action", "suggestion", "why"))
    flag, said = str(advice.get("flag") or ""), str(advice.get("direction") or "")
    return Change(flag, advice.get("current"), advice.get("suggested"), words.strip(), said)


def _flat(counts: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """Name the counts of an object within the counts by both names."""
    flat: dict[str, float] = {}
    for name, value in counts.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return flat
