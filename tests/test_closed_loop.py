"""The closed loop without an engine: its table of starts, its measurements, how it follows the exporter's JSON, its page, and kept captures."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from closed_loop.advice import Change, advised
from closed_loop.captures import ARCHIVES, MOST_BYTES, pack
from closed_loop.engine import PROGRAM, arguments_of
from closed_loop.load import Load, Record
from closed_loop.results import KEPT, PAGE, collected, page, problems, spread
from closed_loop.side import Side, measure, quantile
from closed_loop.starts import BY_NAME, STARTS, Start
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.rows import BY_ID
from sglang_tuning_exporter.recordings.recording import from_files
from sglang_tuning_exporter.sglang.args.flags import flag_of

ROOT = Path(__file__).parent.parent
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


def side(verdict: str, *found: dict[str, Any], notified: str = "", **figures: float) -> Side:
    document = {**findings(*found), "verdict": verdict}
    measured = {**measure([], [], BEGIN, BEGIN + 10, 1.0), "tokens_per_cpu_second": 1.0, **figures}
    return Side(measured, document, [(notified, 41.0)] if notified else [])


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_every_start_expects_a_row_with_its_alert_and_sets_flags_that_the_release_has(start: Start) -> None:
    if start.expected not in {"", "healthy"}:
        row = BY_ID[start.expected]
        assert start.alert in {row.alert, ""}
        assert not row.profiles or start.profile in row.profiles
    for word in f"{start.fixed} {start.right} {start.wrong} {start.by_hand or ''}".split():
        if word.startswith("--"):
            found = flag_of(word[2:].replace("-", "_"), "0.5.23")
            assert found is not None, word
            assert found.flag == word


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


def test_shares_of_the_requests_stream_and_of_the_clients_leave_in_the_middle_of_an_answer() -> None:
    load = Load(clients=1, streamed=0.1, stopped=1 / 6, most_new_tokens=100)
    assert 0 < sum(load.request(number)["stream"] for number in range(300)) < 60
    after = [tokens for number in range(300) if (tokens := load.stops_after(number)) is not None]
    assert 20 < len(after) < 80
    assert all(2 <= tokens <= 50 for tokens in after)


def test_a_request_has_only_the_fields_that_its_load_sets() -> None:
    assert {"priority", "routed_dp_rank"} & Load(clients=1).request(0).keys() == set()
    both = Load(clients=1, priorities=(3,), body={"routed_dp_rank": 1}).request(0)
    assert (both["priority"], both["routed_dp_rank"]) == (3, 1)


# --- the figures ------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_when_they_arrive_and_requests_when_they_are_answered() -> None:
    records = [
        record(sent=0, first=1, ended=4, tokens=10),
        record(sent=2, first=3, ended=30, tokens=10),  # answered after the measured time
        record(sent=5, first=6, ended=None, tokens=4),
    ]
    figures = measure(records, [], BEGIN, BEGIN + 10, 5.0)
    assert figures["tokens_per_second"] == pytest.approx((10 + 5 + 4) / 10)
    names = ("latency_p50", "errors", "tokens_per_cpu_second", "cpu_share")
    assert [figures[name] for name in names] == pytest.approx([4, 0, 19 / 5, 0.5])


def test_the_log_is_read_within_the_measured_time_only() -> None:
    figures = measure([record(sent=0, first=1, ended=4)], LOG.splitlines(), BEGIN, BEGIN + 10, 5.0)
    names = ("running", "queued", "token_usage", "retractions_per_million_tokens", "cached_share")
    assert [figures[name] for name in names] == pytest.approx([24, 2, 0.6, 1e5, 0.25])


def test_an_idle_run_has_no_latencies() -> None:
    figures = measure([], [], BEGIN, BEGIN + 10, 0.0)
    names = ("latency_p50", "first_token_p99", "running", "tokens_per_cpu_second")
    assert [figures[name] for name in names] == [None] * 4
    assert figures["tokens_per_second"] == 0


def test_errors_and_refusals_are_counted() -> None:
    refused = record(sent=0, first=1, ended=2, status=503)
    lost = Record(1, 24, BEGIN, error="ClientOSError()", ended=BEGIN + 1)
    assert measure([refused, lost], [], BEGIN, BEGIN + 10, 1.0)["errors"] == 2


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
    found = advised(findings(finding("retracting_too_often", turn(None, None, words))), NOW, LOAD)
    assert (found.args, found.load, found.changes) == (NOW, LOAD, ())


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
    assert alone.changes == ()


def test_a_healthy_server_is_left_as_it_is() -> None:
    assert advised(findings(), NOW, LOAD).changes == ()


def test_a_command_line_of_another_program_is_refused() -> None:
    assert arguments_of(" ".join([*PROGRAM, "--port", "1"])) == ["--port", "1"]
    with pytest.raises(UsageError, match="does not start SGLang"):
        arguments_of("sh -c true")


def test_clients_that_are_advised_how_many_tokens_are_enough_ask_for_so_many() -> None:
    words = "ask for at most 1,472 max_new_tokens (now about 4,096): the flag is low enough"
    followed = advised(findings(finding("admission_too_conservative", turn(None, None, words))), NOW, LOAD)
    assert (followed.args, followed.load.most_new_tokens, followed.load.clients) == (NOW, 1472, LOAD.clients)
    assert followed.changes == (Change("max_new_tokens", str(LOAD.most_new_tokens), "1472"),)


# --- results ----------------------------------------------------------------------------------------------------------

LIMIT = finding("running_at_limit", turn("--max-running-requests", 2, 16))


def test_a_run_is_as_it_must_be_where_the_start_is_found_notified_and_better_afterwards() -> None:
    first = side("running_at_limit", LIMIT, notified="SGLangRunningAtLimit", running=2.0, latency_p50=9.0)
    last = side("healthy", running=12.0, latency_p50=3.0, tokens_per_cpu_second=2.0)
    assert problems(BY_NAME["running-limit"], [first, last]) == []


def test_what_a_run_lacks_is_named() -> None:
    advice = turn("--schedule-conservativeness", 1.0, 0.3)
    first = side("queue_too_long", finding("queue_too_long", advice), running=2.0, latency_p50=9.0)
    assert problems(BY_NAME["running-limit"], [first, side("healthy", running=2.0, latency_p50=10.0)]) == [
        "no running_at_limit, but ['queue_too_long']",
        "no notification SGLangRunningAtLimit",
        "advises --schedule-conservativeness down",
        "tokens_per_cpu_second 1.0 -> 1.0",
        "running 2.0 -> 2.0",
        "latency_p50 9.0 -> 10.0",
    ]
    assert problems(BY_NAME["chunks"], [side("healthy")])[-1] == "no advice to follow"


def test_a_control_with_a_finding_or_a_notification_has_failed() -> None:
    control = BY_NAME["healthy"]
    assert problems(control, [side("healthy")]) == []
    assert problems(control, [side("queue_too_long", finding("queue_too_long"))]) == ["queue_too_long in a control"]
    assert problems(control, [side("healthy", notified="SGLangQueueTooLong")]) == ["SGLangQueueTooLong in a control"]


def test_the_page_compares_a_path_with_the_setting_by_hand_and_keeps_what_a_folder_lacks(tmp_path: Path) -> None:
    changed = [{"what": "--max-running-requests", "old": "2", "new": "16"}]
    for number in (10, 9):
        steps = [
            {**side("running_at_limit", tokens_per_cpu_second=100.0).as_json(), "changes": changed},
            {**side("healthy", tokens_per_cpu_second=950.0 + number).as_json(), "changes": []},
        ]
        by_hand = {**side("healthy", tokens_per_cpu_second=1000.0).as_json(), "flags": ""}
        result = json.dumps({"steps": steps, "by_hand": by_hand, "problems": []})
        (tmp_path / f"everything-small.{number}.json").write_text(result)
    known = json.loads(KEPT.read_text(encoding="utf-8"))
    data = collected(tmp_path, known)
    assert data["starts"].keys() == known["starts"].keys() | {"everything-small"}
    row = next(line for line in page(data, PAGE.read_text()).splitlines() if "two requests at once" in line)
    assert "| `--max-running-requests` 2 → 16 | 100 → 960 (959 to 960) | 1,000 with none of these flags | 96 % |" in row


def test_the_committed_page_is_what_the_committed_figures_say_and_one_screen() -> None:
    committed = PAGE.read_text(encoding="utf-8")
    assert committed == page(json.loads(KEPT.read_text(encoding="utf-8")), committed)
    assert len(committed.splitlines()) <= 50


KNOWN = json.loads(KEPT.read_text(encoding="utf-8"))["starts"]


@pytest.mark.parametrize("name", KNOWN)
def test_the_committed_advice_ends_within_a_tenth_of_the_setting_by_hand(name: str) -> None:
    reached = spread(run["steps"][-1] for run in KNOWN[name])
    by_hand = spread(run["by_hand"] for run in KNOWN[name])
    assert reached is not None
    assert by_hand is not None
    assert reached[0] >= 0.9 * by_hand[0]


# --- captures ---------------------------------------------------------------------------------------------------------


def test_an_archive_of_the_same_files_has_the_same_bytes() -> None:
    files = {"server.log": b"[2026-11-22 10:12:02] hello\n" * 1000, "metrics-000-1.prom": b"up 1\n"}
    assert pack(files) == pack(dict(reversed(files.items())))


@pytest.mark.parametrize("archive", sorted(ARCHIVES.glob("*.tar.xz")), ids=lambda path: path.name)
def test_a_kept_capture_is_small_can_be_replayed_and_has_no_path_of_its_machine(archive: Path) -> None:
    assert archive.stat().st_size <= MOST_BYTES
    with tarfile.open(archive) as packed:
        files = {member.name: file.read() for member in packed if (file := packed.extractfile(member))}
    recording = from_files(files, name=archive.name)
    assert recording.lines
    assert recording.length_seconds > 5  # of one that ends at its start
    assert not [name for name, text in files.items() if b"/root/" in text or b"/home/" in text]


# --- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--only", "nothing"), "--only=nothing: give all, or some of conservative"),
        (("--results", "nowhere", "document"), "--results=nowhere: no such folder"),
        (("capture", "SITUATION"), "SITUATION: steps.0.0.client: "),
        (("capture", "nowhere.yaml"), "nowhere.yaml: "),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    situation = tmp_path / "a.yaml"
    situation.write_text("{name: idle, what: x, steps: [[{clients: 1, client: 2}]]}")
    command = [sys.executable, "-m", "closed_loop", *(each.replace("SITUATION", str(situation)) for each in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(words.replace("SITUATION", str(situation)))
    assert done.stderr.count("\n") == 1
