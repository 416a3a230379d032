"""One alert for many servers: a third of a model's, and at least three, with the same diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest

from promtool import Alert, fired

RULES = Path(__file__).parents[1] / "alerts" / "rules" / "sglang-tuning.rules.yml"
NAME, QUEUE = "SGLangManyServers", "queue_too_long"


def server(
    number: int, diagnosis: str = "", *, model: str = "m", job: str = "sglang", flag: str = "--x", **labels: str
) -> dict[str, str]:
    """Give the series of a server; with a diagnosis its alert fires."""
    named = {"job": job, "instance": f"gpu{number}:9741", **labels}
    target = ", ".join(f'{key}="{word}"' for key, word in named.items())
    found = {f'sglang_tuning_server_info{{{target}, model_name="{model}", version="0.5.23"}}': "1x20"}
    for each in filter(None, (diagnosis,)):
        found |= {
            f'sglang_tuning_{name}{{{target}, diagnosis="{each}"}}': f"{value}x20"
            for name, value in (("condition", 0.8), ("condition_limit", 0.5), ("alert", 1))
        }
        words = f'diagnosis="{each}", flag="{flag}", suggested="2", text="Because."'
        found[f"sglang_tuning_advice_timestamp_seconds{{{target}, {words}}}"] = "60x20"
    return found


def fleet(saying: int, of: int, diagnosis: str = QUEUE, **labels: str) -> dict[str, str]:
    parts = [server(number, diagnosis if number < saying else "", **labels) for number in range(of)]
    return {name: values for part in parts for name, values in part.items()}


def found(series: dict[str, str], directory: Path) -> list[Alert]:
    return fired(RULES, series, [NAME], directory).get(NAME, [])


def test_a_third_of_the_servers_is_one_alert_with_their_number_model_and_advice(tmp_path: Path) -> None:
    [one] = found({**fleet(4, 12), **server(0, QUEUE, flag="--y")}, tmp_path)
    assert one.labels == {
        "alertname": NAME,
        "job": "sglang",
        "model_name": "m",
        "diagnosis": QUEUE,
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
    assert bool(found(fleet(saying, of), tmp_path)) is fires


def test_servers_of_another_model_do_not_count(tmp_path: Path) -> None:
    others = {name.replace("gpu", "other"): values for name, values in fleet(0, 30, model="big").items()}
    [one] = found({**fleet(3, 4), **others}, tmp_path)
    assert one.annotations["description"] == "sglang: 3 of 4 servers of m: queue too long."


def test_servers_behind_one_exporter_count_each(tmp_path: Path) -> None:
    parts = [server(0, QUEUE, server=name) for name in ("a", "b", "c")]
    series = {name: values for part in parts for name, values in part.items()}
    [one] = found(series, tmp_path)
    assert one.annotations["title"] == "3 servers of m: queue too long"
