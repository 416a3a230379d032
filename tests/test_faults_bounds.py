"""docs/faults.md has the limits in force and names tests that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sglang_tuning_exporter.collect import chain, scrape, selection, sidecar, stream, tail
from sglang_tuning_exporter.collect import log as logbook
from sglang_tuning_exporter.collect import state_file as statefile
from sglang_tuning_exporter.serve import connections, listener
from sglang_tuning_exporter.serve import run as serving
from sglang_tuning_exporter.serve.metrics import families
from sglang_tuning_exporter.sglang import events
from sglang_tuning_exporter.sglang.log import fast_path as usual
from sglang_tuning_exporter.sglang.log import wrappers
from sglang_tuning_exporter.sglang.log.prefix import parse_rank
from sglang_tuning_exporter.sglang.metrics import exposition, histograms
from sglang_tuning_exporter.state import deduplication as ledgers
from sglang_tuning_exporter.state import forgeries as credibility
from sglang_tuning_exporter.state import history
from sglang_tuning_exporter.state import schedulers as state

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
LINE_BYTES = inspect.signature(tail.LogFollower).parameters["max_line_bytes"].default


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a line of the log", f"{LINE_BYTES >> 20} MiB"),
        ("part of a line that is parsed", f"{wrappers.LONGEST_LINE} bytes"),
        ("bytes read of one log before the next file", f"{stream.BUDGET >> 20} MiB"),
        (
            "searched backwards for the server's arguments",
            f"{stream._LOOK_BACK >> 20} MiB, of which {stream._LOOK_BACK_TEXT >> 20} MiB of text are kept",
        ),
        ("files followed at once", f"{selection.MOST_FILES}, or half of `ulimit -n`"),
        ("files not followed whose positions survive a restart", f"{selection.MOST_REMEMBERED}"),
        ("the log's counters wait until its past is read", f"{logbook.FIRST_READ_SECONDS:.0f} s, some 70 GB"),
        ("time spent searching a glob for new files", f"{100 / tail._GLOB_REST:.0f} % of a core"),
        (
            "a deleted or rotated file without new lines stays open",
            f"{chain.DELETED_SECONDS:.0f} s, {chain.LINGER_SECONDS:.0f} s",
        ),
        ("ranks of a kind (DP, TP, PP)", f"{events.MOST_RANKS}"),
        ("the state file", f"{statefile.MOST_BYTES >> 20} MiB"),
        ("SGLang's page", f"{scrape.MOST_BYTES >> 20} MiB"),
        ("SGLang's other answers", f"{scrape.MOST_JSON_BYTES >> 20} MiB"),
        (
            "lines read of a page; characters of each",
            f"{exposition.MOST_LINES:,}; {exposition.LONGEST_LINE:,}",
        ),
        ("DP ranks with their own series", f"{state.MOST_SCHEDULERS}"),
        ("a label with text from the server", f"{families.LONGEST_LABEL} characters"),
        ("connections", f"{connections.MOST_CONNECTIONS}"),
        ("buckets of a histogram", f"{histograms.MOST_BOUNDS}"),
        ("suspicious events that wait for evidence", f"{credibility.MOST_PENDING}"),
        ("retractions that may still be repeated", f"{ledgers._MOST_KEYS}"),
        (
            "label sets, line starts remembered",
            f"{exposition.labels.cache_info().maxsize}, {usual._KEPT}",
        ),
        ("the page's history", f"{history.LENGTH_SECONDS:.0f} s, every {history.STEP_SECONDS:.0f} s"),
        ("requests in progress", f"{serving.uvicorn_config(None).limit_concurrency}"),
        ("connections waiting to be accepted", f"{listener.BACKLOG}"),
        ("an idle connection between two requests", f"{serving.uvicorn_config(None).timeout_keep_alive} s"),
        ("requests in progress at shutdown", f"{serving.GRACE_SECONDS} s"),
        ("its threads at shutdown", f"{sidecar.STOP_SECONDS:.0f} s together"),
    ],
)
def test_a_bound_in_the_document_is_the_one_in_force(what: str, words: str) -> None:
    assert f"\n| {what} | {words} |" in TEXT


def test_every_test_that_a_row_names_exists() -> None:
    files = (
        "test_faults_*.py",
        "test_chain.py",
        "test_cli.py",
        "test_logbook.py",
        "test_state.py",
        "test_state_file.py",
        "test_starts_with_other_ranks.py",
    )
    names = "\n".join(path.read_text(encoding="utf-8") for file in files for path in (ROOT / "tests").glob(file))
    for part in re.findall(r"`…([a-z0-9_]+)…`", TEXT):
        assert re.search(rf"def test_\w*{part}\w*\(", names), part
    for row in re.findall(r"`\[([a-z0-9_]+)\]`", TEXT):
        assert f'    "{row}": ' in names, row


def test_a_rank_beyond_the_bound_is_none() -> None:
    assert parse_rank(b" DP1023 TP7") == events.Rank(dp=1023, tp=7)
    assert parse_rank(b" DP1024 TP99999 PP3") == events.Rank(pp=3)
