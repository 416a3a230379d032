"""The boards keep the rules that make a Grafana board portable, honest and readable."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.rows import ROWS
from sglang_tuning_exporter.core.runbooks import PROMETHEUS
from sglang_tuning_exporter.core.server import STATES
from sglang_tuning_exporter.mixin import boards
from sglang_tuning_exporter.mixin.boards import board as layout
from sglang_tuning_exporter.mixin.boards import definition, looks, queries, words
from sglang_tuning_exporter.mixin.boards.panel import panel as built

ROOT = Path(__file__).parents[1]
BOARDS = {path: json.loads(text) for path, text in boards.files().items()}
FLEET = BOARDS["dashboards/sglang-tuning-fleet.json"]
SERVER = BOARDS["dashboards/sglang-tuning-server.json"]


def everything(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Give rows and panels in reading order, those inside closed rows too."""
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in everything(board) if panel["type"] != "row"]


PANELS = [
    pytest.param(panel, id=f"{board['uid']}: {panel['title']}")
    for board in BOARDS.values()
    for panel in panels_of(board)
]
COUNTER = re.compile(r"\b[a-z0-9_:]+_(?:total|bucket|count|sum)\b(?=\{)")
LONGEST_TITLE = 16  # characters that fit beside the icon in a tile a sixth of a 1280 px screen wide
# Windows of a fixed length, and how a panel must say them.
WINDOWS = {
    "5m": ("last 5 minutes", "over 5 minutes"),
    "10m": ("last 10 minutes", "over 10 minutes"),
    "1h": ("last 1 hour", "over 1 hour"),
    "6h": ("over 6 hours",),
}
WINDOWS["$__range"] = ("in the time shown",)
# The budget used up exactly; every other figure that something is compared with comes from the exporter.
PACES = {"0", "1"}


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def board_expressions(board: dict[str, Any]) -> list[str]:
    found = [expr for panel in panels_of(board) for expr in expressions(panel)]
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


def test_every_board_leads_to_the_others_and_takes_the_time_along() -> None:
    uids = {board["uid"] for board in BOARDS.values()}
    for board in BOARDS.values():
        ways = [link for link in board["links"] if link["url"].startswith("/d/")]
        assert {link["url"].partition("?")[0] for link in ways} == {f"/d/{uid}" for uid in uids - {board["uid"]}}
        assert all(link["keepTime"] for link in ways)
        assert all("${datasource:queryparam}&${job:queryparam}" in link["url"] for link in ways)


def test_a_chosen_server_goes_along_between_the_boards_that_show_one() -> None:
    for board in BOARDS.values():
        for link in board["links"]:
            between = "sglang-tuning-fleet" not in (board["uid"], link["url"].partition("?")[0].removeprefix("/d/"))
            if link["url"].startswith("/d/"):
                assert ("${instance:queryparam}&${model:queryparam}&${dp_rank:queryparam}" in link["url"]) == between


def test_a_server_in_the_fleet_leads_to_its_own_board() -> None:
    rows = next(panel for panel in panels_of(FLEET) if panel["title"] == "Servers, the worst first")
    server = next(look for look in rows["fieldConfig"]["overrides"] if look["matcher"]["options"] == "instance")
    [link] = next(item["value"] for item in server["properties"] if item["id"] == "links")
    assert link["url"] == (
        "/d/sglang-tuning-server?var-instance=${__data.fields.instance}"
        "&${datasource:queryparam}&${job:queryparam}&${__url_time_range}"
    )


def test_people_choose_data_source_job_instance_model_and_rank() -> None:
    for board in BOARDS.values():
        names = [choice["name"] for choice in board["templating"]["list"]]
        assert names == ["datasource", "job", "instance", "model", "dp_rank"]


def test_only_the_fleet_shows_all_servers_at_once() -> None:
    for board in BOARDS.values():
        instance = next(choice for choice in board["templating"]["list"] if choice["name"] == "instance")
        assert instance["includeAll"] == instance["multi"] == (board is FLEET)


def test_alerts_starts_arguments_and_memory_failures_are_marked_by_name() -> None:
    for board in BOARDS.values():
        marks = board["annotations"]["list"]
        assert [mark["name"] for mark in marks] == [
            "Critical alerts",
            "Starts",
            "Changed arguments",
            "Out of GPU memory",
        ]
        assert all("{{" in mark["titleFormat"] for mark in marks)


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
        found = everything(board)
        assert [panel["id"] for panel in found] == list(range(1, len(found) + 1))
        places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in board["panels"]]
        assert places == sorted(places)


def test_panels_lie_inside_a_row_only_while_it_is_closed() -> None:
    rows = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] == "row"]
    assert any(row["collapsed"] for row in rows)
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows)
    for row in rows:
        assert all(panel["gridPos"]["y"] > row["gridPos"]["y"] for panel in row["panels"])


def test_no_panel_lies_over_another_or_beyond_the_grid() -> None:
    for board in BOARDS.values():
        places = [panel["gridPos"] for panel in board["panels"]]
        assert all(place["x"] >= 0 and place["x"] + place["w"] <= layout.COLUMNS for place in places)
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
    said = re.fullmatch(r"(.+\.) `([A-Za-z0-9_:]+)`", panel["description"])
    assert said
    assert len(said[1]) > 60
    assert "guide" in said[1]
    assert any(said[2] in expr for expr in expressions(panel))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_no_threshold_of_grafanas_own_and_none_that_judges(panel: dict[str, Any]) -> None:
    threshold_steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [(step["value"], step["color"]) for step in threshold_steps] == [(None, looks.QUIET), (0, looks.NEUTRAL)]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_panel_asks_only_for_the_chosen_servers_and_for_one_of_them_by_its_exact_name(board: dict[str, Any]) -> None:
    chosen = 'job=~"$job", instance=~"$instance"' if board is FLEET else 'job=~"$job", instance="$instance"'
    for panel in panels_of(board):
        for expr in expressions(panel):
            selectors = re.findall(r"\{([^}]*)\}", expr)
            assert selectors or "vector(" in expr
            assert all(selector.startswith(chosen) for selector in selectors)


def test_a_variable_of_one_value_is_never_taken_for_a_pattern() -> None:
    for board in BOARDS.values():
        for choice in board["templating"]["list"]:
            if not (choice.get("multi") or choice.get("includeAll")):
                assert f'=~"${choice["name"]}"' not in " ".join(board_expressions(board))


@pytest.mark.parametrize("panel", PANELS)
def test_a_counter_is_only_seen_as_a_rate_or_an_increase(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for counter in COUNTER.finditer(expr):
            assert re.search(r"(rate|increase|present_over_time)\($", expr[: counter.start()]), (
                f"{counter[0]} bare in {expr}"
            )


@pytest.mark.parametrize("panel", PANELS)
def test_a_rate_uses_the_interval_of_grafana_or_says_its_own(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        # the last known value, not a window that a figure is about
        spoken = re.sub(r"(?:last|min|max|present)_over_time\([^\[]+\[[^\]]+\]", "", target["expr"])
        spoken = re.sub(r"\[\$__range:\w+\] @ end\(\)", "", spoken)  # which servers are drawn, and not what of them
        for window in set(re.findall(r"\[([^\]]+)\]", spoken)):
            said = f"{target['legendFormat']} {panel['description']}"
            assert target["range"] == (window == "$__rate_interval") or any(words in said for words in WINDOWS[window])


@pytest.mark.parametrize("panel", PANELS)
def test_a_division_never_divides_by_nothing(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for match in re.finditer(r" / (?:on \(\) group_left \(\) )?", expr):
            divisor = expr[match.end() :]
            constant = r"10(?:\)| or|$)|1073741824(?:\)|$)"  # events in so many minutes; bytes of a GB
            kept = r"\((?:sum|\(\().*?> 0\)|\(\(1 - max\(.*?\)\) > 0\)"
            assert re.match(f"{kept}|{constant}", divisor), expr


@pytest.mark.parametrize("panel", PANELS)
def test_a_quantile_of_no_requests_is_no_point_and_not_nan(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for match in re.finditer(r"histogram_quantile\(", expr):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(expr[end], 0)
                end += 1
            assert expr[end:].startswith(" >= 0"), expr


@pytest.mark.parametrize("panel", PANELS)
def test_a_timeline_takes_its_colours_from_its_words(panel: dict[str, Any]) -> None:
    if panel["type"] == "state-timeline":
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["color"]["mode"] != "thresholds"  # Grafana 12.2 would merge by range and show "-∞+"
        looks = [look for mapping in defaults["mappings"] for look in mapping["options"].values()]
        renamed = [item["id"] for override in panel["fieldConfig"]["overrides"] for item in override["properties"]]
        assert all("color" in look for look in looks) or "color" in renamed


@pytest.mark.parametrize("name", BOARDS)
def test_the_linters_rules_for_variables_are_kept(name: str) -> None:
    """Rules template-datasource, template-job, template-instance and template-on-time-change-reload of dashboard-linter.

    One is broken on purpose: only the fleet lets people choose several instances.
    """
    source, job, instance, *others = BOARDS[name]["templating"]["list"]
    assert (source["name"], source["label"], source["query"]) == ("datasource", "Data source", "prometheus")
    assert (job["label"], job["allValue"], job["multi"]) == ("Job", ".+", True)
    assert instance["label"] == "Instance"
    assert instance.get("allValue", ".+") == ".+"
    for choice in (job, instance, *others):
        if choice["type"] == "query":
            assert choice["datasource"]["uid"] == "${datasource}"
            assert choice["refresh"] == 2  # again when the time changes


@pytest.mark.parametrize("panel", PANELS)
def test_a_table_of_several_queries_is_merged_into_one(panel: dict[str, Any]) -> None:
    if panel["type"] == "table" and len(panel["targets"]) > 1:
        assert panel["transformations"][0]["id"] == "merge"


@pytest.mark.parametrize("panel", PANELS)
def test_a_tile_is_coloured_only_by_the_words_of_its_judgement(panel: dict[str, Any]) -> None:
    if panel["type"] == "stat":
        said = " ".join(str(target["expr"]) + target["legendFormat"] for target in panel["targets"])
        for look in panel["fieldConfig"]["overrides"]:
            assert f'"{look["matcher"]["options"]}"' in said or panel["targets"][0]["legendFormat"] in (
                "{{verdict}}",
                look["matcher"]["options"],
            )


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_is_of_a_kind_that_grafana_brings(panel: dict[str, Any]) -> None:
    assert panel["type"] in {"stat", "timeseries", "table", "state-timeline", "bargauge", "text", "heatmap"}


@pytest.mark.parametrize("panel", PANELS)
def test_the_title_of_a_small_tile_fits(panel: dict[str, Any]) -> None:
    if panel["gridPos"]["w"] <= 4:
        assert len(panel["title"]) <= LONGEST_TITLE or panel["gridPos"]["h"] > 4


def luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [looks.GOOD, looks.WATCH, looks.BAD, looks.NEUTRAL, looks.QUIET])
def test_white_words_on_a_colour_and_its_words_on_either_theme_can_be_read(colour: str) -> None:
    def contrast(other: str) -> float:
        low, high = sorted((luminance(colour), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert contrast("#ffffff") >= 4.5  # WCAG AA
    assert contrast("#181b1f") >= 3  # large words on Grafana's dark panel


def test_states_that_hold_requests_back_are_amber_and_a_full_kv_cache_is_not_green() -> None:
    holding = {"pool_full", "held_back", "running_limit", "prefill_bound", "recovering", "above_range", "grammar_queue"}
    assert {state for state, (_, colour) in words.STATE_WORDS.items() if colour == looks.WATCH} >= holding


def test_the_lanes_of_a_healthy_server_are_green() -> None:
    healthy = ("serving", "empty", "no_queue", "below_target", "at_target", "replayed", "in_range")
    assert {words.STATE_WORDS[state][1] for state in healthy} == {looks.GOOD}


def test_an_alert_is_marked_where_it_began_and_the_fleet_shows_no_marks_until_asked() -> None:
    for board in BOARDS.values():
        marks = board["annotations"]["list"]
        assert "unless" in marks[0]["target"]["expr"]
        assert 'severity="critical"' in marks[0]["target"]["expr"]
        assert {mark["enable"] for mark in marks} == {board is not FLEET}


def test_there_are_few_enough_panels_to_read() -> None:
    assert sum(len(panels_of(board)) for board in BOARDS.values()) <= 60


def test_parentheses_and_braces_of_every_expression_are_closed() -> None:
    for board in BOARDS.values():
        for expr in board_expressions(board):
            assert [expr.count(sign) for sign in "([{"] == [expr.count(sign) for sign in ")]}"], expr


def mapped(panel: dict[str, Any], column: str) -> dict[str, Any]:
    """Give the words of a table's column, by value."""
    looks_ = next(item for item in panel["fieldConfig"]["overrides"] if item["matcher"]["options"] == column)
    words_: dict[str, Any] = next(item["value"] for item in looks_["properties"] if item["id"] == "mappings")[0]
    options: dict[str, Any] = words_["options"]
    return options


def test_every_verdict_has_words_and_a_line_of_advice() -> None:
    known = {row.id for row in (*ROWS, *PROMETHEUS)} | set(judge.SENTENCES) | {judge.NOT_ENOUGH}
    table, timeline, change = (
        next(panel for panel in panels_of(board) if panel["title"] == title)
        for board, title in (
            (FLEET, "Servers, the worst first"),
            (SERVER, "What limited it"),
            (SERVER, "What to change"),
        )
    )
    assert {override["matcher"]["options"] for override in timeline["fieldConfig"]["overrides"]} == known
    assert set(mapped(table, "verdict")) == set(mapped(change, "advice")) == known
    assert mapped(change, "advice")["client_too_slow"]["text"] == "send more requests at once"


def test_no_words_on_a_board_wait_for_a_figure() -> None:
    assert not re.search(r"\{[a-z_]+\}", " ".join([*words.HEADLINES.values(), *words.ADVICE_IN_WORDS.values()]))


def test_the_sentence_of_a_verdict_is_the_exporters() -> None:
    tile = next(panel for panel in panels_of(SERVER) if panel["title"] == "What limits it now")
    [target] = tile["targets"]
    assert target["legendFormat"] == "{{sentence}}{{figure}}"
    assert tile["fieldConfig"]["overrides"] == []


def test_every_state_of_every_signal_has_words() -> None:
    assert {"idle", "unknown", *(state for states in STATES.values() for state in states)} == set(words.STATE_WORDS)


def test_the_figures_of_the_profile_in_force_are_asked_for_and_not_written_down() -> None:
    for board in BOARDS.values():
        for expr in board_expressions(board):
            compared = re.findall(r"(?:[<>]=?) ([0-9.e]+)", expr)
            assert set(compared) <= (PACES if "latency_breaches" in expr else {"0"}), expr
    asked = " ".join(board_expressions(SERVER))
    for signal, bound in (
        ("queue", "lower"),
        ("queue", "upper"),
        ("queue", "wait_seconds"),
        ("token_usage", "target"),
        ("cuda_graph", "lower"),
        ("retractions_per_minute", "upper"),
        ("available_gpu_memory_bytes", "lower"),
        ("available_gpu_memory_bytes", "upper"),
        ("time_to_first_token_seconds", "upper"),
        ("inter_token_latency_seconds", "upper"),
    ):
        assert f'signal="{signal}", bound="{bound}"' in asked


def test_a_panel_row_that_does_not_fill_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="widths="):
        layout.widths({"panels": [{}, {}], "widths": [6, 6]})


def test_a_key_that_no_panel_has_is_refused() -> None:
    row = {
        "title": "Queue",
        "type": "stat",
        "description": "Its length.",
        "metric": "queued",
        "queries": [{"expr": "queued"}],
    }
    assert built(row)["title"] == "Queue"
    with pytest.raises(ValueError, match="Queue: ceiling: no key of a stat panel"):
        built(row | {"ceiling": 1})


def test_a_panel_without_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="Queue: has neither queries nor judged"):
        built({"title": "Queue", "type": "stat", "description": "Its length.", "metric": "queued"})


def test_an_expression_may_use_the_names_of_its_panel_and_no_unknown_ones() -> None:
    row = {"with": {"queued": "[[ own('queued') ]]"}, "expr": "max([[ queued ]])", "look": "[[ painted('red') ]]"}
    assert definition.filled(row, {"own": queries.own, "painted": looks.fixed_colour}) == {
        "expr": 'max(queued{job=~"$job", instance=~"$instance"})',
        "look": {"color": {"mode": "fixed", "fixedColor": "red"}},
    }
    for text in ("[[ lenght ]]", "max([[ lenght ]])", "[[ own(metrics='queued') ]]"):
        with pytest.raises(ValueError, match=re.escape(text)):
            definition.filled(text, {"own": queries.own})


def test_words_are_those_of_the_first_case_that_holds() -> None:
    assert queries.judged("x", [("y > 1", "high")], otherwise="fine") == (
        '(x) * on () group_left (verdict) (label_replace(group(y > 1), "verdict", "high", "", "")'
        ' or on () label_replace(vector(1), "verdict", "fine", "", ""))'
    )


def test_grafana_gets_the_address_of_prometheus_from_the_environment() -> None:
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
