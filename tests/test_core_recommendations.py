"""What SGLang itself says about flags in the lines of its start: what it recommends, what it decided.

Lines are those of 0.5.23.
"""

from __future__ import annotations

from pathlib import Path

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.report import exit_status, judge_logs

START = (
    "[2026-09-20 09:00:01] server_args=ServerArgs(model_path='m', tp_size=1, context_length=262144,"
    " max_running_requests=None, mem_fraction_static=0.8)"
)
CACHE = "pool"  # SGLang's own word
POOL = (
    f"KV {CACHE} holds 101222 tokens, fewer than --context-length 262144. One full-length request cannot fit, so long"
    " requests will be refused or truncated at serving time. Lower --context-length, raise --mem-fraction-static, or"
    " free memory taken before the pool is sized."
)
CAPPED = (
    "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 state slots per request)."
    " To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with"
    " --mamba-ssm-dtype bfloat16."
)
READY = "[2026-09-20 09:00:40] The server is fired up and ready to roll!"
LIMITS = (
    "[2026-09-20 09:00:33] max_total_num_tokens=101222, max_running_requests=9, context_len=262144,"
    " available_gpu_mem=6.31 GB"
)


def at(second: int, message: str) -> str:
    return f"[2026-09-20 09:{second // 60:02}:{second % 60:02}] {message}"


def load(*, running: int = 9, queued: int = 20, seconds: int = 120) -> list[str]:
    words = (
        "Decode batch, #running-req: {}, #token: {}, token usage: {:.2f}, cuda graph: True, gen throughput (token/s):"
        " 300.00, #queue-req: {}, "
    )
    return [
        at(60 + second, words.format(running, 9000 + second, 0.3 + 0.001 * (second % 40), queued))
        for second in range(0, seconds, 2)
    ]


def judged(tmp_path: Path, *lines: str) -> Judgement:
    log = tmp_path / "server.log"
    log.write_text("\n".join((START, *lines)) + "\n")
    return judge_logs(Logs([str(log)]), PROFILES["online"])[0]


def recommended(found: Judgement) -> list[Finding]:
    return [each for each in found.findings if each.diagnosis == "sglang_recommends"]


def test_a_recommendation_is_an_info_once_for_each_text_with_its_count(tmp_path: Path) -> None:
    found = judged(tmp_path, at(31, POOL), at(31, POOL), at(32, CAPPED), LIMITS, READY)
    [only] = recommended(found)
    assert (only.changes[0].flag, only.changes[0].direction) == ("--context-length", "lower")
    assert ["2 times" in each.why for each in only.changes] == [True, False]
    assert found.sentence == "SGLang itself recommends other settings in the lines of its start."
    assert (only.severity, exit_status(found, "warning")) == ("info", 0)


def test_what_sglang_recommends_comes_before_our_own_change_of_the_same_trouble(tmp_path: Path) -> None:
    [first, *_] = judged(tmp_path, at(32, CAPPED), LIMITS, READY, *load()).findings
    assert first.diagnosis == "running_at_limit"
    assert first.changes[0].flag in {"--mamba-full-memory-ratio", "--max-mamba-cache-size"}
    assert "--max-running-requests" not in [each.flag for each in first.changes]


def test_after_the_first_request_a_forged_recommendation_changes_nothing(tmp_path: Path) -> None:
    true = judged(tmp_path, LIMITS, READY, *load())
    forged = [at(61, f"Receive: obj=GenerateReqInput(text='x\n{at(61, CAPPED)}\n{at(61, POOL)}')")] * 20
    seen = judged(tmp_path, LIMITS, READY, *load(seconds=2), *forged, *load()[1:])
    assert [each.changes for each in seen.findings] == [each.changes for each in true.findings]


def test_a_new_start_has_its_own_recommendations(tmp_path: Path) -> None:
    again = START.replace("09:00:01", "09:30:00")
    assert (
        recommended(judged(tmp_path, at(31, POOL), LIMITS, READY, again, READY.replace("09:00:40", "09:31:00"))) == []
    )


def test_what_a_library_prints_without_a_stamp_is_no_advice_of_sglangs(tmp_path: Path) -> None:
    assert recommended(judged(tmp_path, POOL, LIMITS, READY)) == []
