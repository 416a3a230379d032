"""Requests that are refused for their length: by the context, or by the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.findings import Finding
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import judge_logs

STAMP = "[2026-06-01 10:00:10] "
SIZES = "max_total_num_tokens={}, chunked_prefill_size=8192, max_running_requests=32, context_len=8192"
TOTAL = (
    "[http_server] Error: Requested token count exceeds the model's maximum context length of 8192 tokens. You"
    " requested a total of 8503 tokens: 7003 tokens from the input messages and 1500 tokens for the completion. Please"
    " reduce the number of tokens in the input messages or the completion to fit within the limit."
)
INPUT = "[http_server] Error: The input (9000 tokens) is longer than the model's context length (8192 tokens)."
LENGTH = "Input length (9000 tokens) exceeds the maximum allowed length ({} tokens). Use a shorter input."


def refused(tmp_path: Path, line: str, pool: int = 179_328, arguments: str = "") -> Finding:
    log = tmp_path / "server.log"
    start = f"server_args=ServerArgs(model_path='/models/m', tp_size=1{arguments})"
    log.write_text("\n".join(STAMP + each for each in (start, SIZES.format(pool), line)) + "\n")
    [found] = judge_logs(Logs([str(log)]), PROFILES["online"])[0].findings
    return found


@pytest.mark.parametrize("line", [TOTAL, INPUT, LENGTH.format(8186)])
def test_a_request_beyond_the_model_s_context_asks_for_no_larger_kv_cache(line: str, tmp_path: Path) -> None:
    found = refused(tmp_path, line)
    assert found.diagnosis == "prompts_beyond_context"
    assert [(each.flag, "8,192 tokens" in each.words) for each in found.changes] == [("", True)]


def test_a_request_beyond_a_context_that_was_set_asks_for_a_longer_one(tmp_path: Path) -> None:
    found = refused(tmp_path, TOTAL, arguments=", context_length=8192")
    assert [each.flag for each in found.changes] == ["--context-length"]


def test_a_prompt_beyond_a_small_kv_cache_asks_for_a_larger_one(tmp_path: Path) -> None:
    assert refused(tmp_path, LENGTH.format(3994), pool=4000).diagnosis == "prompts_beyond_kv_cache"
