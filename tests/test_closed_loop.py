"""The closed loop without an engine: its table of loops, its measurements, how it reads the exporter's JSON, and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from closed_loop import convergence
from closed_loop.advice import Change, advised
from closed_loop.collection import beside, collect, diagnosed, forbidden, notified_after, spread, won
from closed_loop.document import render
from closed_loop.engine import PROGRAM, arguments_of
from closed_loop.load import Load, Record
from closed_loop.loops import BY_NAME, LOOPS, Loop
from closed_loop.measures import measure, quantile
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.sglang.args.flags import flag_of

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "closed_loop" / "results.json"
BEGIN = 1_763_712_000.0  # 2025-11-21 08:00:00 UTC
LOG = """\
[2025-11-21 08:00:01] Prefill batch, #new-seq: 1, #new-token: 24, #cached-token: 8, token usage: 0.58, #running-req: 31, #queue-req: 0
[2025-11-21 08:00:02] Decode batch, #running-req: 32, #token: 10280, token usage: 0.50, cpu graph: False, gen throughput (token/s): 1337.22, #queue-req: 4
[2025-11-21 08:00:04] Decode batch, #running-req: 16, #token: 10280, token usage: 0.70, cpu graph: False, gen throughput (token/s): 1337.22, #queue-req: 0
[2025-11-21 08:00:05] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.1 -> 0.6
[2025-11-21 08:00:30] Decode batch, #running-req: 99, #token: 10280, token usage: 0.99, cpu graph: False, gen throughput (token/s): 1337.22, #queue-req: 9
"""


def record(*, sent: float, first: float, ended: float | None, tokens: int = 10, status: int = 200) -> Record:
    arrivals = [(BEGIN + first, tokens // 2), (BEGIN + (ended or first), tokens - tokens // 2)]
    end = None if ended is None else BEGIN + ended
    return Record(0, 24, BEGIN + sent, BEGIN + first, end, status, "", arrivals)


def finding(diagnosis: str, *advice: dict[str, Any]) -> dict[str, Any]:
    return {"diagnosis": diagnosis, "confidence": "high", "evidence": [{"value": 1}], "advice": list(advice)}


def turn(flag: str | None, current: object, suggested: object) -> dict[str, Any]:
    return {
        "flag": flag,
        "current": current,
        "suggested": suggested,
        "typed": f"{flag} {suggested}" if flag else None,
        "action": "Try" if flag else None,
    }


def findings(*found: dict[str, Any], command: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"verdict": found[0]["diagnosis"] if found else "healthy", "command": command, "findings": list(found)}


def side(**figures: Any) -> dict[str, Any]:
    names = "tokens_per_second latency_p50 latency_p99 first_token_p50 first_token_p99 retractions_per_minute"
    names += " tokens_per_cpu_second token_usage running queued cached_share errors cpu_share"
    measured = {**dict.fromkeys(names.split(), 1.0), **figures.pop("measures", {})}
    usual = {
        "verdict": "healthy",
        "findings": [],
        "notifications": [],
        "others": 0.1,
        "measures": measured,
        "time_scale": 12,
        "load": {"seconds": 60},
    }
    return {**usual, **figures}


# --- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_loop_expects_a_row_of_the_table_and_its_alert(loop: Loop) -> None:
    if loop.expected:
        row = BY_ID[loop.expected]
        assert loop.alert in {row.alert, ""}
        assert loop.wins
        assert not row.profiles or loop.profile in row.profiles
    else:
        assert not loop.alert


def test_every_loop_and_start_sets_flags_that_the_release_has() -> None:
    flag_lines = [loop.flags for loop in LOOPS] + [f"{start.fixed} {start.wrong}" for start in convergence.STARTS]
    for flags in flag_lines:
        for word in flags.split():
            if word.startswith("--"):
                found = flag_of(word[2:].replace("-", "_"), "0.5.23")
                assert found is not None, word
                assert found.flag == word


@pytest.mark.parametrize("start", convergence.STARTS, ids=lambda start: start.name)
def test_a_grid_searches_three_to_twelve_points_over_the_flags_that_are_wrong(start: convergence.Start) -> None:
    assert 3 <= len(start.points) <= 12
    assert len(set(start.points)) == len(start.points)
    wrong = {word for word in start.wrong.split() if word.startswith("--")}
    assert wrong <= set(start.grid)


# --- the load ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_sends_the_same_requests_and_another_seed_others() -> None:
    one, same, other = Load(clients=4, seed=7), Load(clients=9, seed=7), Load(clients=4, seed=8)
    assert [one.request(n) for n in range(20)] == [same.request(n) for n in range(20)]
    assert one.request(3) != other.request(3)


def test_requests_of_a_family_share_their_prefix_and_nothing_else() -> None:
    load = Load(clients=1, families=3, prefix_tokens=50, prompt_tokens=(10,))
    prompts = [load.request(number)["input_ids"] for number in range(60)]
    assert {len(prompt) for prompt in prompts} == {60}
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 3
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 60


def test_a_load_is_the_same_after_json() -> None:
    load = Load(clients=4, prompt_tokens=(24, 1200), families=2, prefix_tokens=9)
    assert Load.of_json(json.loads(json.dumps(load.as_json()))) == load


# --- the figures ------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_when_they_arrive_and_requests_when_they_are_answered() -> None:
    records = [
        record(sent=0, first=1, ended=4, tokens=10),
        record(sent=2, first=3, ended=30, tokens=10),  # answered after the measured time
        record(sent=5, first=6, ended=None, tokens=4),
    ]
    figures = measure(records, [], BEGIN, BEGIN + 10)
    assert figures.tokens_per_second == pytest.approx((10 + 5 + 4) / 10)
    assert figures.requests_per_minute == pytest.approx(6)
    assert figures.latency_p50 == pytest.approx(4)
    assert (figures.errors, figures.unstarted) == (0, 0)


def test_the_log_is_read_within_the_measured_time_only() -> None:
    figures = measure([], LOG.splitlines(), BEGIN, BEGIN + 10)
    assert (figures.running, figures.queued) == (24, 2)
    assert figures.token_usage == pytest.approx(0.6)
    assert figures.retractions_per_minute == pytest.approx(6)
    assert figures.cached_share == pytest.approx(0.25)


def test_an_idle_run_has_no_latencies_and_no_rate_of_a_cpu_that_was_not_asked() -> None:
    figures = measure([], [], BEGIN, BEGIN + 10).as_json()
    assert [figures[name] for name in ("latency_p50", "first_token_p99", "running", "tokens_per_cpu_second")] == [
        None
    ] * 4
    assert figures["tokens_per_second"] == 0


def test_tokens_are_divided_by_the_cpu_that_the_scheduler_got() -> None:
    figures = measure([record(sent=0, first=1, ended=4)], [], BEGIN, BEGIN + 10, cpu_seconds=5.0)
    assert (figures.tokens_per_cpu_second, figures.cpu_share) == (2, 0.5)


def test_errors_and_refusals_are_counted() -> None:
    refused = record(sent=0, first=1, ended=2, status=503)
    lost = Record(1, 24, BEGIN, error="ClientOSError()", ended=BEGIN + 1)
    assert measure([refused, lost], [], BEGIN, BEGIN + 10).errors == 2


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert [quantile([3, 1, 2], share) for share in (0.0, 0.5, 0.99)] == [1, 2, 3]
    assert quantile([], 0.5) is None


# --- what the exporter's JSON says ----------------------------------------------------------------------------------------

LOAD = Load(clients=8)
NOW = ("--model-path", "tiny", "--port", "31000")


def test_the_command_line_is_taken_word_by_word() -> None:
    text = "python3 -m sglang.launch_server --model-path 'a b' --schedule-conservativeness 1.3"
    changes = [{"flag": "--schedule-conservativeness", "current": "0.1", "suggested": "1.3"}]
    found = advised(findings(finding("retracting_too_often"), command={"text": text, "changes": changes}), NOW, LOAD)
    assert found.args == ("--model-path", "a b", "--schedule-conservativeness", "1.3")
    assert found.load is LOAD
    assert [(c.what, c.old, c.new) for c in found.changes] == [("--schedule-conservativeness", "0.1", "1.3")]


def test_the_flag_of_an_optional_improvement_is_added_to_the_present_command_line() -> None:
    found = advised(findings(finding("shared_prefixes_unused", turn("--schedule-policy", "fcfs", "lpm"))), NOW, LOAD)
    assert found.args == (*NOW, "--schedule-policy", "lpm")


def test_a_flag_that_is_to_be_removed_goes_with_its_value() -> None:
    advice = {**turn("--prefill-max-requests", 1, "start without it"), "typed": "--prefill-max-requests"}
    advice["action"] = "Remove"
    now = (*NOW, "--prefill-max-requests", "1", "--chunked-prefill-size", "-1")
    assert advised(findings(finding("admission_too_conservative", advice)), now, LOAD).args == (
        *NOW, "--chunked-prefill-size", "-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "clients"),
    [
        ("send about 1,307 requests at once (now 1): about 207 can run, 1,100 more keep the queue filled", 1307),
        ("send at most 44 requests at once (now about 64), or add a replica", 44),
    ],
)
def test_clients_follow_the_advised_number(words: str, clients: int) -> None:
    found = advised(findings(finding("client_too_slow", turn(None, None, words))), NOW, LOAD)
    assert (found.args, found.load.clients) == (NOW, clients)
    assert found.changes[0].what == "requests at once"


def test_a_finding_with_a_flag_that_must_not_change_does_not_hide_the_next_one() -> None:
    left = finding("retracting_too_often", turn(None, None, "leave it, or enlarge the pool"))
    long = finding("queue_too_long", turn(None, None, "send at most 24 requests at once (now about 47)"))
    assert advised(findings(left, long), NOW, LOAD).load.clients == 24


@pytest.mark.parametrize("words", ["send more requests at once", "wait: it comes down by itself within minutes"])
def test_advice_without_a_number_changes_nothing(words: str) -> None:
    found = advised(findings(finding("admission_recovering", turn(None, None, words))), NOW, LOAD)
    assert (found.args, found.load, found.changes, found.words) == (NOW, LOAD, (), words)


def test_a_flag_that_is_fixed_in_this_loop_is_not_changed_by_the_advice() -> None:
    turned = [turn("--max-total-tokens", 3000, 6000), turn("--chunked-prefill-size", 128, 4096)]
    after = "--chunked-prefill-size 4096 --max-total-tokens 6000"
    document = findings(finding("prefill_bound"), command={"text": " ".join([*PROGRAM, after]), "changes": turned})
    before = ("--max-total-tokens", "3000", "--chunked-prefill-size", "128")
    found = advised(document, before, LOAD, ["--max-total-tokens"])
    assert found.args == ("--chunked-prefill-size", "4096", "--max-total-tokens", "3000")
    assert found.changes == (Change("--chunked-prefill-size", "128", "4096"),)
    assert len(advised(document, before, LOAD).changes) == 2


def test_if_the_flag_of_one_finding_is_fixed_the_next_finding_is_followed() -> None:
    pool, policy = turn("--max-total-tokens", 3000, 6000), turn("--schedule-policy", "fcfs", "lpm")
    command = {"text": " ".join([*PROGRAM, "--max-total-tokens 6000"]), "changes": [pool]}
    both = [finding("running_far_below_limit", pool), finding("shared_prefixes_unused", policy)]
    before = ("--max-total-tokens", "3000")
    found = advised(findings(*both, command=command), before, LOAD, ["--max-total-tokens"])
    assert found.args == (*before, "--schedule-policy", "lpm")
    alone = advised(findings(both[0], command=command), before, LOAD, ["--max-total-tokens"])
    assert (alone.changes, alone.words) == ((), "--max-total-tokens 3000 -> 6000, which is held here")


def test_a_healthy_server_is_left_as_it_is() -> None:
    assert advised(findings(), NOW, LOAD).changes == ()


def test_a_command_line_of_another_program_is_refused() -> None:
    assert arguments_of(" ".join([*PROGRAM, "--port", "1"])) == ["--port", "1"]
    with pytest.raises(UsageError, match="does not start SGLang"):
        arguments_of("sh -c true")


# --- results ----------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, result: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def loop_result(loop: str, *, found: str, alert: str = "", advice: tuple[object, ...] = ()) -> dict[str, Any]:
    notified = [{"alert": alert, "after_seconds": 41.0, "flag": "", "current": "", "suggested": ""}] if alert else []
    reported = [{"diagnosis": found, "advice": [list(advice)] if advice else []}] if found else []
    before = side(verdict=found or "healthy", findings=reported, notifications=notified)
    after = side(measures={"tokens_per_cpu_second": 2.0, "running": 2.0, "latency_p50": 0.5})
    return {"loop": loop, "before": before, "after": after, "advice": {"changes": [], "words": ""}}


def test_results_are_judged_by_what_the_loop_expects(tmp_path: Path) -> None:
    result = loop_result(
        "running-limit",
        found="running_at_limit",
        alert="SGLangRunningAtLimit",
        advice=("--schedule-conservativeness", 1, 0.3),
    )
    write(tmp_path, "running-limit.1", result)
    loop = BY_NAME["running-limit"]
    (run,) = collect(tmp_path)["loops"]["running-limit"]
    assert diagnosed(loop, run)
    assert notified_after(loop, run) == 41.0
    assert forbidden(loop, run) == ["--schedule-conservativeness 1 -> 0.3"]
    assert won(loop, [run]) == {"tokens_per_cpu_second": True, "running": True, "latency_p50": True}


def test_a_control_with_a_finding_or_a_notification_has_failed(tmp_path: Path) -> None:
    write(tmp_path, "healthy.1", loop_result("healthy", found=""))
    write(tmp_path, "healthy.2", loop_result("healthy", found="queue_too_long"))
    write(tmp_path, "healthy.3", loop_result("healthy", found="", alert="SGLangQueueTooLong"))
    runs = collect(tmp_path)["loops"]["healthy"]
    assert [diagnosed(BY_NAME["healthy"], run) for run in runs] == [True, False, False]


def test_runs_are_collected_in_their_order_and_half_a_file_is_no_run(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write(tmp_path, f"idle.{number}", {**loop_result("idle", found=""), "before": side(others=number / 100)})
    (tmp_path / "idle.3.part").write_text("{")
    assert [run["before"]["others"] for run in collect(tmp_path)["loops"]["idle"]] == [0.01, 0.02, 0.1]


def test_the_page_compares_a_convergence_with_its_grid(tmp_path: Path) -> None:
    start = convergence.STARTS[0]
    change = {"what": "--max-running-requests", "old": "2", "new": "16"}
    for number, (speed, changes) in enumerate([(100.0, [change]), (950.0, [])]):
        step = side(measures={"tokens_per_cpu_second": speed})
        write(tmp_path, f"{start.name}.1.step{number}", {**step, "advice": {"changes": changes, "words": ""}})
    for place, speed in enumerate([1000.0, 700.0]):
        write(tmp_path, f"{start.name}.grid{place}.1", side(measures={"tokens_per_cpu_second": speed}))
    write(tmp_path, f"{start.name}.final.1", side(measures={"tokens_per_cpu_second": 950.0}))
    page = render(collect(tmp_path))
    assert "`--max-running-requests` 2 → 16" in page
    assert "100 → 950 | 1,000 with `" in page
    assert "| 95 % |" in page


def test_results_that_a_folder_lacks_stay_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, "idle.1", loop_result("idle", found=""))
    known = {"loops": {"idle": [], "healthy": ["earlier result"]}}
    data = beside(collect(tmp_path), known)
    assert len(data["loops"]["idle"]) == 1
    assert data["loops"]["healthy"] == ["earlier result"]
    assert list(data["loops"]) == ["healthy", "idle"]


def test_clients_that_are_advised_how_many_tokens_are_enough_ask_for_so_many() -> None:
    words = "ask for at most 1,472 max_new_tokens (now about 4,096): the flag is low enough"
    followed = advised(findings(finding("admission_too_conservative", turn(None, None, words))), NOW, LOAD)
    assert (followed.args, followed.load.most_new_tokens, followed.load.clients) == (NOW, 1472, LOAD.clients)
    assert followed.changes == (Change("max_new_tokens", str(LOAD.most_new_tokens), "1472"),)


def test_the_committed_page_is_what_the_committed_figures_say() -> None:
    data = json.loads(KEPT.read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "closed-loop.md").read_text(encoding="utf-8") == render(data)


def test_the_committed_page_is_at_most_one_screen() -> None:
    assert len((ROOT / "docs" / "closed-loop.md").read_text(encoding="utf-8").splitlines()) <= 50


KNOWN = json.loads(KEPT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KNOWN["loops"])
def test_the_committed_figures_show_what_the_loop_expects(name: str) -> None:
    loop, runs = BY_NAME[name], KNOWN["loops"][name]
    assert sum(diagnosed(loop, run) for run in runs) > len(runs) / 2
    assert not [given for run in runs for given in forbidden(loop, run)]
    assert all(won(loop, runs).values())


@pytest.mark.parametrize("name", KNOWN["convergence"])
def test_the_committed_advice_ends_within_a_tenth_of_the_best_by_hand(name: str) -> None:
    result = KNOWN["convergence"][name]
    (reached, *_) = spread(result["final"] or [path[-1] for path in result["paths"]], "tokens_per_cpu_second") or (0.0,)
    best = max((spread(point["runs"], "tokens_per_cpu_second") or (0.0,))[0] for point in result["grid"])
    assert reached >= 0.9 * best


# --- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--only", "nothing"), "--only=nothing: give all, or some of conservative"),
        (("run", "--converge", "nothing"), "--converge=nothing: give all, or some of everything-small"),
        (("document", "--results", "nowhere"), "--results=nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "closed_loop", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1
