"""The runbooks: one for each alert, all of one shape, with commands that work, served by the exporter itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from promtool import promtool
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.mixin.wishes import read
from sglang_tuning_exporter.serve import metrics
from test_core_lines import EXAMPLES, STAMP

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PROSE = sorted(page.stem for page in (Path(runbooks.__file__).parent / "diagnoses" / "prose").glob("*.md"))
LOGS = sorted((ROOT / "tests" / "data" / "logs").glob("*.log"))
NAME = re.compile(r"sglang_tuning_[a-z_]+")


def fenced(text: str, language: str) -> list[str]:
    """Give the lines of every block of a language, without their indentation."""
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [line.removeprefix(indent) for indent, block in blocks for line in block.splitlines()]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("diagnosis", PROSE)
def test_a_runbook_has_the_four_sections_and_no_other(diagnosis: str) -> None:
    assert tuple(re.findall(r"^#+ (.+)$", without_code(runbooks.prose(diagnosis)), re.MULTILINE)) == runbooks.SECTIONS


@pytest.mark.parametrize("diagnosis", PROSE)
def test_a_runbook_has_how_to_see_that_it_helped_and_when_it_will_not(diagnosis: str) -> None:
    mitigation = runbooks.prose(diagnosis).partition("## Mitigation")[2]
    assert "It helped" in mitigation
    assert re.search(r"will not help|will help|no tuning flag|No tuning flag", mitigation, re.IGNORECASE)


@pytest.mark.parametrize("diagnosis", PROSE)
def test_a_runbook_gives_commands_that_a_shell_can_read(diagnosis: str) -> None:
    lines = fenced(runbooks.prose(diagnosis), "sh")
    assert lines
    read = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_every_query_of_a_runbook_is_one_that_prometheus_can_read(tmp_path: Path) -> None:
    queries = [query for diagnosis in PROSE for query in fenced(runbooks.prose(diagnosis), "promql")]
    assert len(queries) > len(PROSE)
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": rules}]}))
    checked = promtool("check", "rules", tmp_path / "rules.yml")
    assert checked.status == 0, checked.words


# Lines that no log kept here holds, as the code of 0.5.9 to 0.5.20, PyTorch and uvicorn have them.
SELDOM = """
[2025-11-20 11:40:10 TP0] Prefill out of memory. Try to lower your batch size.
[2025-11-20 11:40:10 TP0] Decode out of memory. Try to lower your batch size.
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[2025-11-20 11:45:12 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
[2025-11-20 11:40:13 DP1 TP0] Decode batch, #running-req: 320, #token: 92594, cuda graph: False, gen throughput (token/s): 971.70, #queue-req: 4
[2025-11-20 11:39:08 TP0] max_running_requests is capped to 64 by the mamba state cache size
[2025-11-20 11:40:08] INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 503 Service Unavailable
[2025-11-20 11:40:08] INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error
[2025-11-20 11:40:08] ERROR:    Exception in ASGI application
[2025-11-20 11:40:09] INFO:     10.0.0.1:5 - "POST /pause_generation HTTP/1.1" 200 OK
ServerArgs(swa_full_tokens_ratio=0.8, max_queued_requests=64, load_balance_method='round_robin', disable_cuda_graph=False,
 grammar_backend='xgrammar', enable_metrics=True, log_level='info', attention_backend='fa3')
[2025-11-20 11:40:08 TP0] Decode transfer failed for request rank=0 req.bootstrap_room=1 with exception KVTransferError(bootstrap_room=1): timed out after 300s
[2025-11-20 11:40:08 TP0] Could not fetch prefill parallel info from 10.0.0.1:8998 after 60 attempts
[2025-11-20 11:40:08 TP0] max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.
usage: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill
"""  # noqa: E501 - lines as SGLang prints them


def log_greps() -> list[str]:
    return sorted({
        pattern
        for diagnosis in PROSE
        for line in fenced(runbooks.prose(diagnosis), "sh")
        for pattern in re.findall(r"grep (?:-[a-zA-Z]+ )?(?:'([^']+)'|\"([^\"]+)\") LOG", line)
        for pattern in pattern
        if pattern
    })  # fmt: skip


@pytest.mark.parametrize("pattern", log_greps())
def test_a_grep_finds_the_words_that_sglang_prints(pattern: str) -> None:
    text = SELDOM + "".join(path.read_text(errors="replace") for path in LOGS)
    found = subprocess.run(["grep", "-cE", "-e", pattern], input=text, capture_output=True, text=True, check=False)
    assert int(found.stdout) > 0


def test_every_metric_of_ours_in_a_runbook_is_exposed() -> None:
    named = {
        name.removeprefix("sglang_tuning_").removesuffix("_total")
        for diagnosis in PROSE
        for language in ("sh", "promql")
        for line in fenced(runbooks.prose(diagnosis), language)
        for name in NAME.findall(line)
        if not name.endswith("_")
    }
    source = "".join(path.read_text(encoding="utf-8") for path in Path(metrics.__file__).parent.glob("*.py"))
    unknown = {name for name in named if not re.search(rf'"{name}(_info)?"', source)}
    assert unknown - {"build_info", "server_info", "scrape_error_info", "log", "retract"} == set()
    assert len(named) > 15


def test_the_committed_pages_are_those_of_the_table_and_no_other() -> None:
    committed = {f"{runbooks.FOLDER}/{path.name}" for path in (ROOT / runbooks.FOLDER).iterdir()}
    assert committed == set(runbooks.files())


# --- the links in a notification
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://h/{{", "http://h/}}", "http://h/{{ bad }}", "http://h/{{alert}}", 'http://h/{{ query "up" }}',
        "http://h/{{/* a */}}", "http://h/{{ $labels }}",
     "http://", "http://[", "http://h:99999", "http://a b", "http://h/\x1b", "http://h/\u202e", "ftp://h"],
)  # fmt: skip
def test_an_address_that_prometheus_could_not_fill_in_is_refused(url: str) -> None:
    for flag in ("runbook_url", "grafana_url"):
        with pytest.raises(UsageError, match=r"give (an address that begins with|templates over)"):
            read(None, **{flag: url})


# --- failures: the commands of a runbook find what the exporter counts
# ----------------------------------------------------

FAILURES = sorted((ROOT / "tests" / "data" / "failures").glob("*.log"))
# What a process leaves that crashed or hung, in words of 0.3.0 to 0.5.23 that no kept log has.
CRASHES = "".join(f"{STAMP}{line}\n" for line, kind, *_ in EXAMPLES if kind in {"end", "hang", "health"})
CRASHED = ("crashed", "server_down", "restart_loop", "often_down")
RUNBOOKS_OF: dict[str, tuple[str, ...]] = {
    "prefill": ("out_of_memory_prefill", "server_down", "crashed", "restart_loop", "often_down"),
    "decode": ("out_of_memory_decode", "server_down", "crashed", "restart_loop", "often_down"),
    "graph_capture": ("graph_memory_short", "restart_loop"),
    "startup": ("out_of_memory_any", "restart_loop"),
    "unknown": ("out_of_memory_any", "server_down", "crashed", "restart_loop", "often_down"),
    "process_died": CRASHED,
    "scheduler_exception": CRASHED,
    "launch_failed": CRASHED,
    "hang": ("scheduler_stuck", "server_down"),
    "health": ("scheduler_stuck", "server_down"),
}


def greps_of(diagnosis: str) -> list[str]:
    lines = fenced(runbooks.prose(diagnosis), "sh")
    return [found for line in lines for found in re.findall(r"grep (?:-[a-zA-Z]+ )?'([^']+)' LOG", line)]


def counted(text: str) -> Iterator[tuple[str, str]]:
    """Give each line that the exporter counts as a failure, and as which."""
    reader = Reader()
    for line in text.splitlines(keepends=True):
        for event in reader.read(line.encode()):
            kind = event.word if event.kind in {"out_of_memory", "end"} else event.kind
            if kind in RUNBOOKS_OF:
                yield line, kind


@pytest.mark.parametrize("log", [*FAILURES, CRASHES], ids=lambda log: log.stem if isinstance(log, Path) else "crashes")
def test_a_runbook_finds_the_line_that_the_exporter_counts(log: Path | str) -> None:
    found = list(counted(log.read_text() if isinstance(log, Path) else log))
    assert found
    missed = {
        (kind, diagnosis, line[:120])
        for line, kind in found
        for diagnosis in RUNBOOKS_OF[kind]
        if subprocess.run(
            ["grep", "-cE", *(word for each in greps_of(diagnosis) for word in ("-e", each))],
            input=line, capture_output=True, text=True, check=False,
        ).returncode
    }  # fmt: skip
    assert missed == set()
