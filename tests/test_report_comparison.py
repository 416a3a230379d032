"""Two runs side by side: what got better, and whether the change of arguments explains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.comparison import RunFigures, StartArgs, changed_args, compare
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import report, run
from sglang_tuning_exporter.state.profiles import PROFILES

RECORDINGS = Path(__file__).parent / "recordings"
RUN = RunFigures(
    serving_seconds=600,
    batches=500,
    generated_tokens_per_second=1000,
    prompt_tokens_per_second=200,
    mean_running_requests=8,
    mean_queued_requests=0,
    mean_token_usage=0.5,
    share_waiting=0.0,
    share_queue_above_range=0.0,
    retractions_per_minute=0.0,
    cuda_graph_coverage=1.0,
    out_of_memory=0,
    rejections_per_minute=0,
)


def change_of(arg: str, before: str, after: str) -> dict[str, Any]:
    return {"arg": arg, "flag": f"--{arg.replace('_', '-')}", "before": before, "after": after}


ONE = [change_of("schedule_conservativeness", "0.1", "1.3")]
TUNED = [change_of("chunked_prefill_size", "256", "1024")]
TWO = [*ONE, change_of("page_size", "1", "64")]


def like(**figures: float | None) -> RunFigures:
    return replace(RUN, **figures)  # type: ignore[arg-type]


def test_fewer_retractions_under_the_same_load_after_one_change_are_likely_its_work() -> None:
    change = compare(like(retractions_per_minute=4.4), RUN, ONE)
    assert (change["overall"], change["cause"]) == ("better", "likely")
    assert change["words"] == (
        "Better: retractions a minute. The load was alike and nothing else was changed, "
        "so --schedule-conservativeness 0.1 → 1.3 is the likely cause."
    )


def test_under_another_load_no_change_is_proven_and_throughput_is_not_compared() -> None:
    change = compare(
        like(retractions_per_minute=4.4),
        like(mean_running_requests=1, prompt_tokens_per_second=20, generated_tokens_per_second=100),
        ONE,
    )
    assert (change["overall"], change["cause"]) == ("better", "unproven")
    assert [row["change"] for row in change["figures"] if row["name"] == "generated tokens a second"] == ["different"]


def test_the_same_rate_of_prompts_is_the_same_load_though_more_wait() -> None:
    assert compare(like(mean_queued_requests=100, share_waiting=0.9), RUN, ONE)["cause"] == "likely"


LENGTHS = {"mean_prompt_tokens": 100.0, "mean_generated_tokens": 80.0, "share_cached": 0.5}


def test_prompts_twenty_times_as_long_are_another_load_though_as_many_clients_ask() -> None:
    change = compare(
        like(**LENGTHS, generated_tokens_per_second=3000),
        like(**{**LENGTHS, "mean_prompt_tokens": 1975.0}, generated_tokens_per_second=700),
        ONE,
    )
    assert change["cause"] == "unproven"
    assert (
        "100 → 1.98e+03 prompt tokens a request" in change["words"]
        or "100 → 1,975 prompt tokens a request" in change["words"]
    )
    assert [row["change"] for row in change["figures"] if row["name"] == "generated tokens a second"] == ["different"]


@pytest.mark.parametrize(
    ("figure", "after", "words"),
    [
        ("mean_generated_tokens", 200.0, "80 → 200 generated tokens a request"),
        ("mean_prompt_tokens", 70.0, "100 → 70 prompt tokens a request"),
        ("share_cached", 0.1, "50 → 10 % of the prompts cached"),
    ],
)
def test_other_requests_are_another_load(figure: str, after: float, words: str) -> None:
    change = compare(like(**LENGTHS, retractions_per_minute=4.4), like(**{**LENGTHS, figure: after}), TUNED)
    assert (change["cause"], words in change["words"]) == ("unproven", True)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, {"mean_prompt_tokens": 120.0, "mean_generated_tokens": 70.0, "share_cached": 0.55}]
)
def test_requests_of_about_the_same_size_are_the_same_load(lengths: dict[str, float]) -> None:
    assert compare(like(**LENGTHS, retractions_per_minute=4.4), like(**lengths), TUNED)["cause"] == "likely"


def test_more_cached_prompts_are_put_down_to_a_flag_that_affects_the_cache() -> None:
    cache = [change_of("disable_radix_cache", "on", "off")]
    change = compare(
        like(**{**LENGTHS, "share_cached": 0.0}, generated_tokens_per_second=494),
        like(**LENGTHS, generated_tokens_per_second=1035),
        cache,
    )
    assert change["cause"] == "likely"


def test_a_better_and_a_worse_figure_give_the_outcome_mixed() -> None:
    assert compare(RUN, like(generated_tokens_per_second=2000, retractions_per_minute=3), ONE)["overall"] == "mixed"


def test_a_difference_below_noise_is_no_change_and_has_no_cause() -> None:
    change = compare(
        RUN, like(generated_tokens_per_second=1100, retractions_per_minute=0.3, cuda_graph_coverage=0.97), ONE
    )
    assert (change["overall"], change["cause"]) == ("same", "none")
    assert "made no difference" in change["words"]


def test_without_a_change_of_arguments_none_is_the_cause() -> None:
    change = compare(RUN, like(generated_tokens_per_second=300, mean_queued_requests=90, share_waiting=0.9), [])
    assert (change["overall"], change["cause"]) == ("worse", "none")
    assert "load, machine or model" in change["words"]


def test_of_two_changes_the_one_of_the_limiting_flag_is_named_as_the_cause() -> None:
    change = compare(like(retractions_per_minute=4.4), RUN, TWO, "retracting_too_often")
    assert change["cause"] == "possible"
    assert "--schedule-conservativeness 0.1 → 1.3 is the flag for what limited the server before" in change["words"]


def test_of_two_changes_without_a_known_effect_neither_is_named_as_the_cause() -> None:
    assert "try them one by one" in compare(like(retractions_per_minute=4.4), RUN, TWO)["words"]


def test_arguments_that_are_not_known_are_no_cause() -> None:
    change = compare(like(retractions_per_minute=4.4), RUN, [], known=False)
    assert (change["overall"], change["cause"]) == ("better", "none")
    assert "not in its log" in change["words"]


@pytest.mark.parametrize("short", [{"serving_seconds": 20.0}, {"batches": 5.0}])
def test_runs_with_too_little_load_are_not_compared(short: dict[str, float]) -> None:
    assert (
        compare(like(**short), RUN, ONE)["overall"] == compare(RUN, like(**short), ONE)["overall"] == "not_comparable"
    )


def test_a_new_out_of_memory_failure_is_worse_however_short_the_run() -> None:
    assert compare(RUN, like(serving_seconds=5.0, out_of_memory=1), ONE)["overall"] == "worse"


def test_a_figure_that_one_run_lacks_is_no_row() -> None:
    assert "CUDA graph coverage" not in {
        row["name"] for row in compare(RUN, like(cuda_graph_coverage=None), [])["figures"]
    }


def args(**values: Any) -> StartArgs:
    return StartArgs({"model_path": "m", "random_seed": 1, "port": 1, "page_size": 1, **values})


def test_arguments_that_always_differ_or_that_only_one_release_has_are_no_change() -> None:
    assert changed_args(args(random_seed=1, port=1, old_only=1), args(random_seed=2, port=2, new_only=1)) == []


def test_a_changed_argument_has_its_flag_and_both_values_as_text() -> None:
    (change,) = changed_args(args(mem_fraction_static=None), args(mem_fraction_static=0.9))
    assert (change["flag"], change["before"], change["after"]) == ("--mem-fraction-static", "not set", "0.9")


def test_a_value_without_end_is_cut() -> None:
    (change,) = changed_args(args(x="a"), args(x="b" * 9999))
    assert len(change["after"]) <= 80


def recording(name: str) -> str:
    return str(RECORDINGS / name / "server.log.gz")


def test_a_comparison_of_two_logs_has_its_text(capfd: pytest.CaptureFixture[str]) -> None:
    run([recording("client_limited")], format="text", output=None, profile="online", against=[recording("big_queue")])
    said = capfd.readouterr().out
    assert f"Against {recording('big_queue')}: " in said
    assert "--max-running-requests 2 → not set" in said
    assert "serving time with requests waiting" in said


def test_the_file_to_compare_with_must_be_a_log_too(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("nothing of the kind\n")
    with pytest.raises(UsageError, match="no line of SGLang's"):
        run([recording("dp2")], format="text", output=None, profile="online", against=[str(other)])


def test_neither_log_is_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "before.log"
    log.write_bytes(Path(recording("dp2")).read_bytes())
    with pytest.raises(UsageError, match="is one of the logs"):
        run([recording("dp2")], format="json", output=log, profile="online", against=[str(log)])


START = (
    "[2025-11-20 {at}:00] server_args=ServerArgs(model_path='m', max_running_requests=64, schedule_policy='{policy}', "
    "random_seed=1)\n[2025-11-20 {at}:30] The server is fired up and ready to roll!\n"
)
BATCHES = (
    "[2025-11-20 {at}] Prefill batch, #new-seq: 4, #new-token: {tokens}, #cached-token: 0, token usage: 0.40, "
    "#running-req: 60, #queue-req: 0\n"
    "[2025-11-20 {at}] Decode batch, #running-req: 64, #token: 92500, token usage: 0.40, cuda graph: True, "
    "gen throughput (token/s): {throughput:.2f}, #queue-req: 0\n"
)


def served(minutes: range, policy: str, prompt: int, throughput: float) -> str:
    moments = [f"10:{minute:02}:{second:02}" for minute in minutes[1:] for second in range(0, 60, 5)]
    text = START.format(at=f"10:{minutes[0]:02}", policy=policy)
    return text + "".join(BATCHES.format(at=at, tokens=4 * prompt, throughput=throughput) for at in moments)


@pytest.mark.parametrize(("prompt", "throughput", "cause"), [(1975, 120, "unproven"), (110, 390, "likely")])
def test_a_policy_is_not_praised_or_blamed_for_other_prompts(
    tmp_path: Path, prompt: int, throughput: float, cause: str
) -> None:
    log = tmp_path / "server.log"
    log.write_text(served(range(20), "fcfs", 100, 500) + served(range(20, 40), "lpm", prompt, throughput))
    change = report(Logs([str(log)]), PROFILES["online"])["starts"][1]["against_last"]
    assert change["cause"] == cause
    assert ("prompt tokens a request" in change["words"]) == (cause == "unproven")
