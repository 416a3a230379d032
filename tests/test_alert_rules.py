"""The alert rules: one for each diagnosis that somebody is called for, all of one form, with texts that name figure,
limit and flag.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from promtool import Alert, fired, promtool
from sglang_tuning_exporter.core.diagnoses import ALL as DIAGNOSES
from sglang_tuning_exporter.core.diagnoses import BY_ID, EXPORTER
from sglang_tuning_exporter.core.runbooks import BY_ALERT
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.mixin.wishes import Wishes
from sglang_tuning_exporter.serve.metrics import reference_sections

ROOT = Path(__file__).parents[1]
RULES = "alerts/rules/sglang-tuning.rules.yml"
TEXT = (ROOT / RULES).read_text(encoding="utf-8")
GROUPS: list[dict[str, Any]] = yaml.safe_load(TEXT)["groups"]
ALL: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in ALL if "alert" in rule}
FLEET = "SGLangManyServers"
THIN = sorted(name for name, row in BY_ALERT.items() if row not in EXPORTER)
FORM = """\
last_over_time(sglang_tuning_condition{diagnosis="%s"}[15m])
and last_over_time(sglang_tuning_alert{diagnosis="%s"}[15m]) == 1"""


def test_prometheus_accepts_the_rules_at_every_clock(tmp_path: Path) -> None:
    for scale in (1.0, 7.5, 1000.0):
        (tmp_path / "rules.yml").write_text(alerts.files(scale)[RULES])
        checked = promtool("check", "rules", tmp_path / "rules.yml")
        assert checked.status == 0, checked.words


def test_each_diagnosis_that_is_a_warning_or_worse_has_an_alert() -> None:
    assert [row.id for row in DIAGNOSES if row.severity != "info" and not row.alert] == []
    assert set(ALERTS) == set(BY_ALERT)
    assert {name: rule["labels"] for name, rule in ALERTS.items() if name != FLEET} == {
        name: {"severity": row.severity} for name, row in BY_ALERT.items() if name != FLEET
    }
    assert "labels" not in ALERTS[FLEET]  # it has the severity of the alerts that it counts


@pytest.mark.parametrize("name", THIN)
def test_a_rule_asks_for_what_the_exporter_decided_and_for_nothing_else(name: str) -> None:
    rule, row = ALERTS[name], BY_ALERT[name]
    assert rule["expr"] == FORM % (row.id, row.id)
    assert not {"for", "keep_firing_for"} & set(rule)


def test_every_series_of_a_rule_is_exposed_or_recorded() -> None:
    named = {name for rule in ALL for name in re.findall(r"[a-z:]*sglang_tuning[\w:]*", rule["expr"])}
    exposed = {family.sample_name for families in reference_sections().values() for family in families}
    assert named - exposed - {rule["record"] for rule in ALL if "record" in rule} == set()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_at_most_two_queries_for_its_texts(name: str) -> None:
    words = "".join(ALERTS[name]["annotations"].values())
    assert words.count("| query") <= 2
    assert "sglang:" not in words


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_what_to_do_and_when_that_will_not_help(name: str) -> None:
    notes = ALERTS[name]["annotations"]
    assert all(notes[key].strip() for key in ("title", "summary", "past", "description", "advice"))
    assert "It will not help if " in notes["advice"]
    assert "{{" not in notes["summary"] + notes["past"]


@pytest.mark.parametrize("name", ALERTS)
def test_what_is_over_is_said_in_the_past(name: str) -> None:
    words = ALERTS[name]["annotations"]["past"]
    said = words.partition(";")[0]  # behind it stands what is always so
    assert not re.search(r"\b(?:is|are|has|keeps|misses|hangs|wait|waits|does|do)\b", said), words
    assert re.fullmatch(r"[A-Z][^{]+\.", words)


# --- texts, as promtool renders them
# ------------------------------------------------------------------------------------

TARGET = 'job="sglang", instance="gpu1:9741"'


def about(diagnosis: str, value: float, limit: float, target: str = TARGET) -> dict[str, str]:
    """Give the series of a diagnosis that fires: eleven minutes of one value."""
    return {
        f'sglang_tuning_{name}{{{target}, diagnosis="{diagnosis}"}}': f"{figure:g}x20"
        for name, figure in (("condition", value), ("condition_limit", limit), ("alert", 1))
    }


def advised(diagnosis: str, since: float, target: str = TARGET, **labels: str) -> dict[str, str]:
    words = ", ".join(f'{name}="{text}"' for name, text in labels.items() if text)
    return {
        f'sglang_tuning_advice_timestamp_seconds{{{target}, diagnosis="{diagnosis}", {words}}}': f"{since:g}x20",
    }


def alert(series: dict[str, str], name: str, directory: Path) -> Alert:
    [found] = fired(ROOT / RULES, series, [name], directory)[name]
    return found


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Alert]]:
    series: dict[str, str] = {}
    for name in THIN:
        series |= about(BY_ALERT[name].id, 0.75, 0.5)
    return fired(ROOT / RULES, series, THIN, tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("name", THIN)
def test_every_text_of_an_alert_is_rendered(name: str, rendered: dict[str, list[Alert]]) -> None:
    [found] = rendered[name]
    assert found.labels["diagnosis"] == BY_ALERT[name].id
    assert found.annotations["description"].startswith("gpu1:9741: ")
    for text in found.annotations.values():
        assert not re.search(r"\{|<no value>|<error|%!|\$|  ", text), text


@pytest.mark.parametrize(
    ("measured", "title", "description"),
    [
        (("queue_too_long", 0.8125, 0.5), "queue too long 81% of the time",
         "81.25% of the serving time with a longer queue than its profile allows (limit 50%)."),
        (("retracting_too_often", 4, 1.2), "retracting 4.0/min", "4.0 retractions/min (limit 1.2/min)."),
        (("latency_batch_too_large", 0.15, 0.1), "tokens slow, 150ms apart",
            "150ms between two tokens of a request (limit 100ms)."),
        (("memory_reserve_too_large", 14.25, 10), "memory reserve too large",
            "14.2 GB free on the GPU at start-up (limit 10.0 GB)."),
        (("memory_reserve_too_small", 1.5, 0), "memory reserve too small",
         "1.5 GB less left on the GPU at start-up than its profile asks for."),
        (("out_of_memory_decode", 1, 0), "out of memory in decode", "1 out-of-memory failure in decode."),
        (("out_of_memory_decode", 3, 0), "out of memory in decode", "3 out-of-memory failures in decode."),
        (
            ("restart_loop", 4, 2),
            "restarts again and again, 4 times in 30 min",
            "4 starts in 30 minutes with the same arguments (limit 2).",
        ),
        (("server_down", 1, 0), "server down", "the last scrapes of SGLang failed, or its log shows its end."),
        (("time_to_first_token_burning_fast", 0.4, 0.144), "TTFT too long for 40% of requests (1 h)",
         ("40% of the first tokens came later than the objective in the last hour, and the short window shows that it"
         " goes on (limit 14.4%).")),
    ],
)  # fmt: skip
def test_title_and_description_have_the_figure_with_its_unit_beside_its_limit(
    measured: tuple[str, float, float], title: str, description: str, tmp_path: Path
) -> None:
    found = alert(about(*measured), BY_ID[measured[0]].alert, tmp_path)
    assert found.annotations["title"] == title
    assert found.annotations["description"] == f"gpu1:9741: {description}"


RETRACTING = about("retracting_too_often", 4, 1.2)


def retracting(series: dict[str, str], directory: Path) -> str:
    return alert({**RETRACTING, **series}, "SGLangRetractingTooOften", directory).annotations["advice"]


def test_an_advice_names_the_flag_its_value_the_value_to_try_and_the_reason(tmp_path: Path) -> None:
    flag = advised("retracting_too_often", 60, flag="--x", current="0.1", suggested="1.3", text="Too many run.")
    assert retracting(flag, tmp_path) == "--x 0.1 → 1.3: Too many run."


def test_an_advice_says_when_the_flag_that_it_names_will_not_help_and_what_it_costs(tmp_path: Path) -> None:
    flag = advised("retracting_too_often", 60, flag="--mem-fraction-static", suggested="0.9", text="Too small.",
                   not_if="the GPU is full", cost="The cache shrinks.")  # fmt: skip
    assert (
        retracting(flag, tmp_path)
        == "--mem-fraction-static → 0.9: Too small. It will not help if the GPU is full. It costs: The cache shrinks."
    )


def test_without_an_advice_of_the_exporter_the_guides_is_said(tmp_path: Path) -> None:
    assert retracting({}, tmp_path).startswith("--schedule-conservativeness → 1.3: SGLang admits more requests than")


@pytest.mark.parametrize(("name", "diagnosis"), [("SGLangCrashed", "crashed"), ("SGLangServerDown", "server_down")])
def test_an_end_is_notified_with_the_words_of_its_log(name: str, diagnosis: str, tmp_path: Path) -> None:
    end = {f'sglang_tuning_end_info{{{TARGET}, class="check", words="ValueError: a leak of {{1}} tokens"}}': "1x20"}
    found = alert({**about(diagnosis, 1, 0), **end}, name, tmp_path)
    assert found.annotations["description"].endswith(". In its log: “ValueError: a leak of {1} tokens”.")


def test_each_of_two_clusters_with_one_address_has_its_own_limit_and_advice(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for cluster, limit in (("a", 1.5), ("b", 2.5)):
        target = f'{TARGET}, cluster="{cluster}"'
        series |= about("retracting_too_often", 4, limit, target)
        series |= advised("retracting_too_often", 60, target, flag=f"--{cluster}", suggested="1", text="T.")
    name = "SGLangRetractingTooOften"
    found = {each.labels["cluster"]: each.annotations for each in fired(ROOT / RULES, series, [name], tmp_path)[name]}
    assert {cluster: notes["advice"] for cluster, notes in found.items()} == {"a": "--a → 1: T.", "b": "--b → 1: T."}
    assert {cluster: notes["description"] for cluster, notes in found.items()} == {
        "a": "gpu1:9741: 4.0 retractions/min (limit 1.5/min).",
        "b": "gpu1:9741: 4.0 retractions/min (limit 2.5/min).",
    }


def test_links_carry_the_labels_of_the_alert(tmp_path: Path) -> None:
    links = Wishes(runbook_url="http://{{ $labels.instance }}/runbooks", grafana_url="https://grafana.example")
    (tmp_path / "linked.yml").write_text(alerts.files(wishes=links)[RULES])
    name = "SGLangRetractingTooOften"
    [found] = fired(tmp_path / "linked.yml", RETRACTING, [name], tmp_path)[name]
    assert found.annotations["runbook_url"] == f"http://gpu1:9741/runbooks/{name}"
    assert (
        found.annotations["dashboard_url"]
        == "https://grafana.example/d/sglang-tuning-server?var-job=sglang&var-instance=gpu1%3A9741"
    )


def test_the_exporters_own_alerts_are_worded_without_an_instance_that_is_gone(tmp_path: Path) -> None:
    series = {
        f"up{{{TARGET}}}": "1 1 _x20",
        f'sglang_tuning_build_info{{{TARGET}, version="1"}}': "1 1 stale",
        f"sglang_tuning_last_request_timestamp_seconds{{{TARGET}}}": "0 60 stale",
    }
    found = alert(series, "SGLangTuningExporterGone", tmp_path)
    assert found.labels == {"alertname": "SGLangTuningExporterGone", "job": "sglang", "severity": "critical"}
    assert found.annotations["description"] == "sglang: the last target left while its server had requests."


# --- one alert for many servers: a third of a model's, and at least three, with the same diagnosis
# ----------------------------


def server(number: int, diagnosis: str = "", *, model: str = "m", flag: str = "--x", **labels: str) -> dict[str, str]:
    """Give the series of a server; with a diagnosis its alert fires."""
    named = {"job": "sglang", "instance": f"gpu{number}:9741", **labels}
    target = ", ".join(f'{key}="{word}"' for key, word in named.items())
    found = {f'sglang_tuning_server_info{{{target}, model_name="{model}", version="0.5.23"}}': "1x20"}
    if diagnosis:
        found |= about(diagnosis, 0.8, 0.5, target)
        found |= advised(diagnosis, 60, target, flag=flag, suggested="2", text="Because.")
    return found


def fleet(saying: int, of: int, **labels: str) -> dict[str, str]:
    parts = [server(number, "queue_too_long" if number < saying else "", **labels) for number in range(of)]
    return {name: values for part in parts for name, values in part.items()}


def many(series: dict[str, str], directory: Path) -> list[Alert]:
    return fired(ROOT / RULES, series, [FLEET], directory).get(FLEET, [])


def test_a_third_of_the_servers_is_one_alert_with_their_number_model_and_advice(tmp_path: Path) -> None:
    [one] = many({**fleet(4, 12), **server(0, "queue_too_long", flag="--y")}, tmp_path)
    assert one.labels == {
        "alertname": FLEET,
        "job": "sglang",
        "model_name": "m",
        "diagnosis": "queue_too_long",
        "severity": "warning",
    }
    assert one.annotations["title"] == "4 servers of m: queue too long"
    assert one.annotations["description"] == "sglang: 4 of 12 servers of m: queue too long."
    assert one.annotations["advice"] == "--x → 2: Because. (advised to 4 of them)"


@pytest.mark.parametrize(
    ("saying", "of", "fires"),
    [(3, 9, True), (3, 3, True), (3, 10, False), (2, 2, False), (2, 6, False), (30, 90, True)],
)
def test_it_takes_a_third_and_three(saying: int, of: int, *, fires: bool, tmp_path: Path) -> None:
    assert bool(many(fleet(saying, of), tmp_path)) is fires


def test_servers_of_another_model_do_not_count(tmp_path: Path) -> None:
    others = {name.replace("gpu", "other"): values for name, values in fleet(0, 30, model="big").items()}
    [one] = many({**fleet(3, 4), **others}, tmp_path)
    assert one.annotations["description"] == "sglang: 3 of 4 servers of m: queue too long."


def test_servers_behind_one_exporter_count_each(tmp_path: Path) -> None:
    parts = [server(0, "queue_too_long", server=name) for name in ("a", "b", "c")]
    series = {name: values for part in parts for name, values in part.items()}
    [one] = many(series, tmp_path)
    assert one.annotations["title"] == "3 servers of m: queue too long"
