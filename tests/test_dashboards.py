"""The boards keep the rules that make a Grafana board portable, honest and readable."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.diagnoses import ALL, EXPORTER
from sglang_tuning_exporter.mixin import boards
from sglang_tuning_exporter.mixin.boards import looks

_ALL = [json.loads(text) for text in boards.files().values()]
BOARDS: dict[str, dict[str, Any]] = {board["uid"].removeprefix("sglang-tuning-"): board for board in _ALL}
FLEET, SERVER = BOARDS["fleet"], BOARDS["server"]
EVERYTHING = {
    "cluster": ".*", "job": ".+", "instance": ".+", "server": "", "step": "30s", "__range": "1h",
    "__rate_interval": "2m",
}  # fmt: skip


def chosen(expr: str, **choices: str) -> str:
    """Fill in a query's variables, as Grafana does."""
    for name, value in sorted((EVERYTHING | choices).items(), key=lambda item: -len(item[0])):
        expr = expr.replace(f"${name}", value)
    return expr


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the panels in reading order, those inside closed rows too."""
    every = [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]
    return [panel for panel in every if panel["type"] != "row"]


def panel_of(board: dict[str, Any], title: str) -> dict[str, Any]:
    [found] = [panel for panel in panels_of(board) if panel["title"] == title]
    return found


PANELS = [
    pytest.param(panel, id=f"{board['uid']}: {panel['title']}")
    for board in BOARDS.values()
    for panel in panels_of(board)
]
COUNTER = re.compile(r"\b[a-z0-9_:]+_(?:total|bucket|count|sum)\b(?=\{)")


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def choices(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {choice["name"]: choice for choice in board["templating"]["list"]}


def board_expressions(board: dict[str, Any]) -> list[str]:
    found = [expr for panel in panels_of(board) for expr in expressions(panel)]
    found += [mark["target"]["expr"] for mark in board["annotations"]["list"]]
    return found + [choice["query"]["query"] for choice in choices(board).values() if choice["type"] == "query"]


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


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_a_title_a_unit_and_words_for_no_value(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert defaults["noValue"] not in ("No data", "N/A", "-")


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_panel_asks_for_the_chosen_servers_only_one_by_its_exact_name(board: dict[str, Any]) -> None:
    jobs = 'cluster=~"$cluster", job=~"$job"'
    one = ', instance="$instance"' if board is not FLEET else ""
    target = f'up{{job=~"$job"{one}}}'
    for panel in panels_of(board):
        for expr in expressions(panel):
            selectors = re.findall(r"(?<!\$)\{([^}]*)\}", expr.replace(target, ""))
            assert selectors
            for selector in selectors:
                assert selector.startswith(jobs + one)
                of_exporter = any(name in expr for name in ("ALERTS", "sglang_tuning_web_info"))
                assert board is FLEET or 'server="$server"' in selector or of_exporter


@pytest.mark.parametrize("panel", PANELS)
def test_a_counter_is_only_seen_as_a_rate_or_an_increase(panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        for counter in COUNTER.finditer(expr):
            assert re.search(r"(rate|increase)\($", expr[: counter.start()]), f"{counter[0]} bare in {expr}"


@pytest.mark.parametrize("panel", PANELS)
def test_a_rate_is_never_empty_with_scrapes_a_minute_apart(
    panel: dict[str, Any],
) -> None:
    for target in panel["targets"]:
        windows = set(re.findall(r"\b(?:rate|increase)\([^\[]*\[([^\]]+)\]", target["expr"]))
        assert windows <= {"$__rate_interval", "$__range", "5m"}
        assert target["interval"] == "$step"  # 30 s, unless it is set


# --- colours ---------------------------------------------------------------------------------------------------------


def test_every_verdict_has_words_on_the_strip_and_in_the_tables() -> None:
    known = {row.id for row in (*ALL, *EXPORTER)} | set(judge.SENTENCES) | {judge.NOT_ENOUGH}
    strip = panel_of(SERVER, "What limited it")["fieldConfig"]["overrides"]
    assert {override["matcher"]["options"] for override in strip} == known
    [words_] = looks.HEADLINE_CELLS
    assert set(words_["options"]) == known


def test_no_query_judges_what_the_exporter_decides() -> None:
    """A figure is compared with 0, with 1 of a switch, or with Inf; a limit is drawn, and a condition is not compared
    with it.
    """
    for board in BOARDS.values():
        for expr in board_expressions(board):
            compared = re.findall(r"(?<![=!<>])(?:[<>]=?|==) (?:bool )?([\w.(]+)", expr)
            drawn = (
                {"max(sglang_tuning_running_requests_limit"} if "running_requests_limit" in expr else set()
            )  # whether a line would flatten the curve
            ordered = {"on"} if "max_over_time(timestamp(" in expr else set()  # the newest of two
            assert set(compared) <= {"0", "1", "Inf"} | drawn | ordered, expr
            for part in ("condition", "threshold"):
                assert not re.search(rf"[<>]=? [^,]*sglang_tuning_{part}", expr), expr
    asked = " ".join(board_expressions(SERVER))
    for signal, bound in (
        ("queue", "lower"),
        ("queue", "upper"),
        ("queue", "wait_seconds"),
        ("token_usage", "target"),
        ("cuda_graph", "lower"),
        ("time_to_first_token_seconds", "upper"),
        ("inter_token_latency_seconds", "upper"),
    ):
        assert f'signal="{signal}", bound="{bound}"' in asked
