"""The rules among troubles: scrape intervals, missed scrapes, restarts, a dead exporter, a pool that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rule_stories import BEGIN, DIAGNOSIS, END, INTERVALS, OVER, Exporter, Fired, burst, play, trouble
from sglang_tuning_exporter.core.diagnoses import BY_ID

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
GROUPS: list[dict[str, Any]] = yaml.safe_load((ROOT / "alerts/rules/sglang-tuning.rules.yml").read_text())["groups"]
ALERT, DOWN, GONE = BY_ID[DIAGNOSIS].alert, "SGLangTuningExporterDown", "SGLangTuningExporterGone"
CALLED = BEGIN + 300  # the exporter waits for five minutes, and so does the end
A, B = {"cluster": "a"}, {"cluster": "b"}


def flapping(at: float) -> float:
    return 0.6 if at // 90 % 2 else 0.4


def dipping(seconds: float) -> Callable[[float], float]:
    return lambda at: 0.3 if 1800 <= at < 1800 + seconds else trouble(at)


def unsure(at: float) -> float | None:
    return None if BEGIN + 120 <= at < BEGIN + 360 else burst(480)(at)


def calm(_: float) -> float:
    return 0.3


# One call, one end.
FIRES: dict[str, Exporter] = {
    **{f"every {n} s: for half an hour": Exporter(every=n) for n in INTERVALS},
    **{f"every {n} s: the exporter restarts while it fires": Exporter(every=n, restarts=(1800,)) for n in INTERVALS},
    **{f"every {n} s: above its limit from the first scrape on": Exporter(every=n, born=BEGIN) for n in INTERVALS},
    **{f"every {n} s: a tenth of the scrapes is missed": Exporter(every=n, missed=0.1) for n in INTERVALS},
    "a third of the scrapes is missed": Exporter(missed=0.33, seed=3),
    "no scrape for thirteen minutes": Exporter(away=((1700, 2480),)),
    "not known for four minutes": Exporter(lambda at: None if 1700 <= at < 1940 else trouble(at)),
    "one scrape below the limit": Exporter(dipping(15)),
    "below the limit for three minutes": Exporter(dipping(180)),
}
SILENT: dict[str, Exporter] = {
    **{f"every {n} s: for 280 s": Exporter(burst(280), n) for n in INTERVALS},
    **{f"every {n} s: for 240 s, a third of the scrapes missed": Exporter(burst(240), n, 0.33) for n in INTERVALS},
    "up and down every 90 s": Exporter(flapping),
    "for eight minutes, of which four in the middle are not known": Exporter(unsure),
    "never above its limit, though the exporter restarts": Exporter(calm, restarts=(600, 1500, 2700)),
}
DOWN_FIRES: dict[str, tuple[Exporter, float]] = {  # at most so many seconds after it died
    "every 15 s: dead": (Exporter(calm, away=((BEGIN, OVER),)), 300),
    "every 60 s: dead": (Exporter(calm, 60, away=((BEGIN, OVER),)), 660),
    "every 120 s: dead": (Exporter(calm, 120, away=((BEGIN, OVER),)), 720),
}
DOWN_SILENT: dict[str, list[Exporter]] = {
    **{f"every {n} s: away for 200 s": [Exporter(calm, n, away=((BEGIN, BEGIN + 200),))] for n in INTERVALS},
    **{f"every {n} s: 40 % of the scrapes missed": [Exporter(calm, n, 0.4, 11)] for n in INTERVALS},
    "dead for three minutes, then removed": [Exporter(calm, away=((BEGIN, BEGIN + 180),), gone=BEGIN + 180)],
    "another program's target is dead": [Exporter(calm, away=((0, END),), is_exporter=False)],
}
GONE_FIRES: dict[str, Exporter] = {
    f"every {n} s: removed while it serves": Exporter(calm, n, gone=BEGIN) for n in INTERVALS
}
GONE_SILENT: dict[str, list[Exporter]] = {
    "idle for five minutes, then scaled to zero": [Exporter(calm, gone=BEGIN, idle=lambda at: at >= BEGIN - 300)],
    "removed, and back after three minutes": [
        Exporter(calm, gone=BEGIN, labels={"pod": "a"}),
        Exporter(calm, born=BEGIN + 180, labels={"pod": "b"}),
    ],
    "replaced on another node": [
        Exporter(calm, gone=BEGIN, labels={"pod": "a", "node": "x"}),
        Exporter(calm, born=BEGIN + 120, labels={"pod": "b", "node": "y"}),
    ],
    "one of two servers removed": [Exporter(calm, gone=BEGIN, labels={"pod": "a"}),
        Exporter(calm, labels={"pod": "b"})],
    "dead, and still a target": [Exporter(calm, away=((BEGIN, END),))],
}  # fmt: skip
OTHERS: dict[str, list[Exporter]] = {
    "removed while it fires": [Exporter(lambda at: 0.8 if at >= BEGIN else 0.3, gone=OVER)],
    "two clusters with one address": [Exporter(labels=A), Exporter(calm, labels=B)],
    "two clusters with one address, one dead": [Exporter(calm, away=((BEGIN, OVER),), labels=A),
        Exporter(calm, labels=B)],
    "gone in one of two clusters": [Exporter(calm, gone=BEGIN, labels=A), Exporter(calm, labels=B)],
    "scraped every five minutes": [Exporter(calm, 300)],
}  # fmt: skip
STORIES: dict[str, list[Exporter]] = {
    **{name: [exporter] for name, exporter in {**FIRES, **SILENT, **GONE_FIRES}.items()},
    **{name: [exporter] for name, (exporter, _) in DOWN_FIRES.items()},
    **DOWN_SILENT,
    **GONE_SILENT,
    **OTHERS,
}


def rules() -> dict[str, Any]:
    """Give one of the thin rules, and those about the exporter, without their texts."""
    kept = [
        [rule for rule in group["rules"] if group["name"].endswith(".exporter") or rule.get("alert") == ALERT]
        for group in GROUPS
    ]
    return {
        "groups": [
            {"name": str(n), "rules": [{k: v for k, v in rule.items() if k != "annotations"} for rule in each]}
            for n, each in enumerate(kept)
            if each
        ]
    }


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Fired]]:
    played = play(rules(), list(STORIES.values()), tmp_path_factory.mktemp("stories"))
    return dict(zip(STORIES, played, strict=True))


@pytest.mark.parametrize("name", FIRES)
def test_an_alert_is_called_once_and_ends_once(name: str, fired: dict[str, dict[str, Fired]]) -> None:
    found, late = fired[name][ALERT], 2 * FIRES[name].every
    assert found.times == 1
    assert CALLED - 15 <= found.begun <= CALLED + late
    assert OVER + 300 - late <= found.ended <= OVER + 300 + late


@pytest.mark.parametrize("name", SILENT)
def test_what_does_not_last_calls_nobody(name: str, fired: dict[str, dict[str, Fired]]) -> None:
    assert fired[name] == {}


def test_an_alert_of_a_target_that_is_removed_ends_after_the_window(fired: dict[str, dict[str, Fired]]) -> None:
    assert fired["removed while it fires"][ALERT].ended == pytest.approx(OVER + 900, abs=30)


def test_an_alert_of_one_cluster_says_nothing_of_another_with_the_same_address(
    fired: dict[str, dict[str, Fired]],
) -> None:
    assert set(fired["two clusters with one address"]) == {f"{ALERT} a"}
    assert set(fired["two clusters with one address, one dead"]) == {f"{DOWN} a"}
    assert set(fired["gone in one of two clusters"]) == {f"{GONE} a"}


@pytest.mark.parametrize("name", DOWN_FIRES)
def test_a_dead_exporter_is_called_once_until_it_is_back(name: str, fired: dict[str, dict[str, Fired]]) -> None:
    exporter, most = DOWN_FIRES[name]
    found = fired[name][DOWN]
    assert found.times == 1
    assert BEGIN + 285 <= found.begun <= BEGIN + most
    assert OVER - 15 <= found.ended <= OVER + exporter.every


@pytest.mark.parametrize("name", DOWN_SILENT)
def test_an_exporter_that_is_not_dead_is_not_called_down(name: str, fired: dict[str, dict[str, Fired]]) -> None:
    assert DOWN not in fired[name]


@pytest.mark.parametrize("name", GONE_FIRES)
def test_a_pool_that_left_while_it_served_is_called_for_hours(name: str, fired: dict[str, dict[str, Fired]]) -> None:
    found = fired[name][GONE]
    assert BEGIN + 240 <= found.begun <= BEGIN + 420
    assert (found.ended, found.times) == (END, 1)


@pytest.mark.parametrize("name", GONE_SILENT)
def test_a_pool_that_is_still_there_or_was_idle_is_not_called_gone(
    name: str, fired: dict[str, dict[str, Fired]]
) -> None:
    assert GONE not in fired[name]
