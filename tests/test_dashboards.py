"""The boards keep the rules that make a Grafana board portable, honest and readable."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_tuning_exporter.generate import boards, panels
from sglang_tuning_exporter.guide.table import DIAGNOSES
from sglang_tuning_exporter.signals import STATES

ROOT = Path(__file__).parents[1]
BOARDS = {path: json.loads(text) for path, text in boards.files().items()}
PANELS = [
    pytest.param(panel, id=f"{board['uid']}: {panel['title']}")
    for board in BOARDS.values()
    for panel in board["panels"]
    if panel["type"] != "row"
]

# What the exporter exposes, in its /metrics.
EXPOSED = {
    "sglang_tuning_up",
    "sglang_tuning_scrape_duration_seconds",
    "sglang_tuning_scrape_error_info",
    "sglang_tuning_build_info",
    "sglang_tuning_sources_info",
    "sglang_tuning_log_up",
    "sglang_tuning_log_last_line_timestamp_seconds",
    "sglang_tuning_log_lines_total",
    "sglang_tuning_log_unrecognised_total",
    "sglang_tuning_server_info",
    "sglang_tuning_server_arg",
    "sglang_tuning_server_starts_total",
    "sglang_tuning_queued_requests",
    "sglang_tuning_running_requests",
    "sglang_tuning_running_requests_limit",
    "sglang_tuning_token_usage_ratio",
    "sglang_tuning_kv_pool_tokens",
    "sglang_tuning_queue_wait_seconds",
    "sglang_tuning_decode_batches_total",
    "sglang_tuning_cuda_graph_coverage_ratio",
    "sglang_tuning_retraction_events_total",
    "sglang_tuning_retracted_requests_total",
    "sglang_tuning_new_token_ratio",
    "sglang_tuning_out_of_memory_total",
    "sglang_tuning_available_gpu_memory_bytes",
    "sglang_tuning_generation_tokens_per_second",
    "sglang_tuning_state",
    "sglang_tuning_state_seconds_total",
    "sglang_tuning_diagnosis_active",
    "sglang_tuning_recommended_arg",
    "sglang_tuning_threshold",
}
# Native series of SGLang 0.5.23, read off a running server; of these 0.4.9 lacks only the time in the queue.
NATIVE = {
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:e2e_request_latency_seconds_bucket",
    "sglang:queue_time_seconds_bucket",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:cached_tokens_total",
}
COUNTER = re.compile(r"\b[a-z0-9_:]+_(?:total|bucket|count|sum)\b(?=\{)")
LONGEST_TITLE = 16  # characters that fit beside the icon in a tile a sixth of a 1280 px screen wide


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def board_expressions(board: dict[str, Any]) -> list[str]:
    found = [expr for panel in board["panels"] if panel["type"] != "row" for expr in expressions(panel)]
    found += [mark["target"]["expr"] for mark in board["annotations"]["list"]]
    return found + [choice["query"]["query"] for choice in board["templating"]["list"] if choice["type"] == "query"]


def test_the_committed_boards_are_what_the_builders_write() -> None:
    for path, text in boards.files().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, (
            f"{path} is stale: run sglang-tuning-exporter generate"
        )


def test_every_committed_board_has_a_builder() -> None:
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "dashboards").glob("*.json")} == set(boards.files())


def test_a_board_is_written_with_the_same_bytes_every_time() -> None:
    assert boards.files() == boards.files()
    assert all(text.endswith("}\n") for text in boards.files().values())


def test_a_board_has_its_own_uid_and_can_be_edited() -> None:
    uids = [board["uid"] for board in BOARDS.values()]
    assert len(set(uids)) == len(uids)
    for board in BOARDS.values():
        assert board["editable"] is True
        assert board["refresh"] == "10s"
        assert board["time"] == {"from": "now-1h", "to": "now"}
        assert board["schemaVersion"] >= 39


def test_boards_find_each_other_by_tag() -> None:
    for board in BOARDS.values():
        assert panels.TAG in board["tags"]
        assert any(link["type"] == "dashboards" and link["tags"] == [panels.TAG] for link in board["links"])


def test_people_choose_data_source_job_instance_model_and_rank() -> None:
    for board in BOARDS.values():
        assert [choice["name"] for choice in board["templating"]["list"]] == [
            "datasource",
            "job",
            "instance",
            "model_name",
            "dp_rank",
        ]


def test_all_ranks_also_means_a_server_without_ranks() -> None:
    for board in BOARDS.values():
        rank = next(choice for choice in board["templating"]["list"] if choice["name"] == "dp_rank")
        assert rank["includeAll"]
        assert re.fullmatch(rank["allValue"], "")


def test_no_data_source_is_hard_coded() -> None:
    def uids(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["datasource"]["uid"]] if "datasource" in node else []
            return own + [uid for value in node.values() for uid in uids(value)]
        return [uid for value in node for uid in uids(value)] if isinstance(node, list) else []

    for board in BOARDS.values():
        found = uids(board)
        assert len(found) > len(board["panels"])
        assert set(found) == {"${datasource}"}


def test_ids_are_unique_and_in_reading_order() -> None:
    for board in BOARDS.values():
        assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
        places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in board["panels"]]
        assert places == sorted(places)


def test_no_panel_lies_over_another_or_beyond_the_grid() -> None:
    for board in BOARDS.values():
        places = [panel["gridPos"] for panel in board["panels"]]
        assert all(place["x"] >= 0 and place["x"] + place["w"] <= panels.COLUMNS for place in places)
        for one, other in combinations(places, 2):
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_a_title_a_unit_and_words_for_no_value(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert defaults["noValue"] not in ("No data", "N/A", "-")


@pytest.mark.parametrize("panel", PANELS)
def test_a_description_names_the_guide_and_ends_with_the_metric_that_is_queried(panel: dict[str, Any]) -> None:
    said = re.fullmatch(r"(.+\.) `([a-z0-9_:]+)`", panel["description"])
    assert said
    assert len(said[1]) > 60
    assert any(said[2] in expr for expr in expressions(panel))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_no_threshold_of_grafanas_own(panel: dict[str, Any]) -> None:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps] == [None]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_only_for_the_chosen_server(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        selectors = re.findall(r"\{([^}]*)\}", expr)
        assert selectors
        assert all(selector.startswith('job=~"$job", instance=~"$instance"') for selector in selectors)


@pytest.mark.parametrize("panel", PANELS)
def test_a_counter_is_only_seen_as_a_rate_or_an_increase(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for counter in COUNTER.finditer(expr):
            assert re.search(r"(rate|increase)\($", expr[: counter.start()]), f"{counter[0]} bare in {expr}"


@pytest.mark.parametrize("panel", PANELS)
def test_a_line_over_time_uses_the_rate_interval_and_a_tile_says_its_window(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        windows = set(re.findall(r"\[([^\]]+)\]", target["expr"]))
        if target["range"]:
            assert windows <= {"$__rate_interval"}
        elif windows:
            words = {"5m": "last 5 minutes", "$__range": "in the time shown"}
            assert all(words[window] in panel["description"] for window in windows)


@pytest.mark.parametrize("panel", PANELS)
def test_a_division_never_divides_by_nothing(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for match in re.finditer(r" / (?:on \(\) group_left \(\) )?", expr):
            assert re.match(r"\(sum\(.*> 0\)", expr[match.end() :]), expr


@pytest.mark.parametrize("panel", PANELS)
def test_a_quantile_of_no_requests_is_no_point_and_not_nan(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        assert ("histogram_quantile" in expr) == expr.startswith("histogram_quantile")
        assert "histogram_quantile" not in expr or expr.endswith(" >= 0")


@pytest.mark.parametrize("panel", PANELS)
def test_a_timeline_takes_its_colours_from_its_words(panel: dict[str, Any]) -> None:
    if panel["type"] == "state-timeline":
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["color"]["mode"] != "thresholds"  # Grafana 12.2 would merge by range and show "-∞+"
        assert all("color" in look for mapping in defaults["mappings"] for look in mapping["options"].values())


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_is_of_a_kind_that_grafana_brings(panel: dict[str, Any]) -> None:
    assert panel["type"] in {"stat", "timeseries", "table", "state-timeline", "bargauge", "text", "heatmap"}


@pytest.mark.parametrize("panel", PANELS)
def test_the_title_of_a_small_tile_fits(panel: dict[str, Any]) -> None:
    if panel["gridPos"]["w"] <= 4:
        assert len(panel["title"]) <= LONGEST_TITLE or panel["gridPos"]["h"] > 4


def test_every_metric_asked_for_is_exposed() -> None:
    for board in BOARDS.values():
        asked = {
            name
            for expr in board_expressions(board)
            for name in re.findall(r"\bsglang_tuning_[a-z_]+|\bsglang:[a-z0-9_]+", expr)
        }
        assert asked
        assert asked <= EXPOSED | NATIVE


def test_parentheses_and_braces_of_every_expression_are_closed() -> None:
    for board in BOARDS.values():
        for expr in board_expressions(board):
            assert [expr.count(sign) for sign in "([{"] == [expr.count(sign) for sign in ")]}"], expr


def test_every_diagnosis_has_a_headline_a_colour_and_a_line_of_advice() -> None:
    board = BOARDS["dashboards/sglang-tuning.json"]
    tile, advice = (
        next(panel for panel in board["panels"] if panel["title"] == title and panel["type"] != "row")
        for title in ("What limits it now", "What to change")
    )
    headlines = {override["matcher"]["options"] for override in tile["fieldConfig"]["overrides"]}
    assert {row.id for row in DIAGNOSES} | {"healthy", "idle", "unknown"} == headlines
    change = next(item for item in advice["fieldConfig"]["overrides"] if item["matcher"]["options"] == "arg")
    mapped = next(item["value"][0]["options"] for item in change["properties"] if item["id"] == "mappings")
    assert mapped["client_too_slow"]["text"] == "speed up"
    assert {row.id for row in DIAGNOSES} == set(mapped)


def test_every_state_of_every_signal_has_words() -> None:
    assert {state for states in STATES.values() for state in states} == set(boards.STATE_WORDS)


def test_the_figures_of_the_profile_in_force_are_asked_for_and_not_written_down() -> None:
    for board in BOARDS.values():
        for expr in board_expressions(board):
            compared = re.findall(r"(?:[<>]=?) ([0-9.e]+)", expr)
            assert set(compared) <= {"0"}, expr
    asked = " ".join(board_expressions(BOARDS["dashboards/sglang-tuning.json"]))
    for signal, bound in (
        ("queue", "lower"),
        ("queue", "upper"),
        ("queue", "wait_seconds"),
        ("token_usage", "target"),
        ("cuda_graph", "lower"),
    ):
        assert f'signal="{signal}", bound="{bound}"' in asked


def test_a_shelf_that_does_not_fill_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="widths="):
        panels.Shelf(6, ({}, {}), (6, 6)).places()


def test_words_are_those_of_the_first_case_that_holds() -> None:
    assert panels.words("x", ("y > 1", "high"), otherwise="fine") == (
        'label_replace(x and on () (y > 1), "verdict", "high", "", "")'
        ' or on () label_replace(x, "verdict", "fine", "", "")'
    )


def test_grafana_is_told_where_prometheus_is_by_the_environment() -> None:
    source = yaml.safe_load((ROOT / "dashboards/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))[
        "datasources"
    ][0]
    assert source["type"] == "prometheus"
    assert source["url"] == "${PROMETHEUS_URL}"  # Grafana expands no default inside the braces: ${A:-b} would be empty


def test_grafana_reads_the_boards_from_where_they_are_mounted() -> None:
    provider = yaml.safe_load(
        (ROOT / "dashboards/provisioning/dashboards/sglang-tuning.yml").read_text(encoding="utf-8")
    )["providers"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
