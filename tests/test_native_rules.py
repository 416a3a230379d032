"""Rules over SGLang's own series, for servers without the exporter: each alert among what it must call and what it must
not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from promtool import fired
from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.mixin.native import FILE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / FILE).read_text(encoding="utf-8")
[GROUP] = yaml.safe_load(TEXT)["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in GROUP["rules"] if "alert" in rule}
TARGET = 'job="sglang", instance="gpu1:30000"'
MODEL = 'engine_type="unified", model_name="m"'
RANK0, RANK1 = (f'{TARGET}, {MODEL}, moe_ep_rank="0", pp_rank="0", tp_rank="{rank}"' for rank in (0, 1))
SERVER = f'{TARGET}, {MODEL}, is_streaming="true"'
GROWS, STANDS = "0+600x30", "600x30"  # 10 a second; not at all


def ranks(name: str, values: str, more: str = "") -> dict[str, str]:
    """Give a series of both TP ranks."""
    return {f"{name}{{{rank}{more}}}": values for rank in (RANK0, RANK1)}


def busy(*, running: int = 8, queued: int = 0, usage: float = 0.95, moves: bool = True) -> dict[str, str]:
    """Give the series of a server of 0.5.23 under load."""
    counts = GROWS if moves else STANDS
    return {
        f"up{{{TARGET}}}": "1x30",
        **ranks("sglang:num_running_reqs", f"{running}x30"),
        **ranks("sglang:num_queue_reqs", f"{queued}x30"),
        **ranks("sglang:token_usage", f"{usage}x30"),
        **ranks("sglang:full_token_usage", f"{usage}x30"),
        **ranks("sglang:queue_time_seconds_count", counts),
        **ranks("sglang:realtime_tokens_total", counts, ', mode="decode"'),
        **ranks("sglang:startup_available_gpu_memory_gb", "6.5x30"),
        f"sglang:time_to_first_token_seconds_count{{{SERVER}}}": counts,
        f"sglang:inter_token_latency_seconds_count{{{SERVER}}}": counts,
    }


def buckets(name: str, late: float) -> dict[str, str]:
    """Give a histogram in which so many of a hundred observations are in the last bucket."""
    edges = {"0.05": 100 - late, "2.0": 100 - late, "8.0": 100.0, "+Inf": 100.0}
    return {f'sglang:{name}_bucket{{{SERVER}, le="{edge}"}}': f"0+{number * 6:g}x30" for edge, number in edges.items()}


def passes(graph: int, eager: int) -> dict[str, str]:
    return {
        key: values
        for mode, number in (("decode_cuda_graph", graph), ("decode_none", eager), ("prefill_none", 900))
        for key, values in ranks("sglang:cuda_graph_passes_total", f"0+{number}x30", f', mode="{mode}"').items()
    }


FIRES: dict[str, dict[str, dict[str, str]]] = {
    "SGLangDown": {"dead for ten minutes": {**busy(), f"up{{{TARGET}}}": "1x14 0x16"}},
    "SGLangStalled": {
        "eight run, none waits": busy(moves=False),
        "one runs, many wait": busy(running=1, queued=50, moves=False),
        "all wait, none runs": busy(running=0, queued=50, moves=False),
    },
    "SGLangMemoryLeftTooSmall": {"2 GB left": {**busy(), **ranks("sglang:startup_available_gpu_memory_gb", "2x30")}},
    "SGLangMemoryLeftTooLarge": {"14 GB left": {**busy(), **ranks("sglang:startup_available_gpu_memory_gb", "14x30")}},
    "SGLangRetracting": {"four a minute": {**busy(), **ranks("sglang:num_retracted_requests_total", "0+4x30")}},
    "SGLangQueueWait": {
        "300 wait, 10 a second start": busy(queued=300),
        "a total stall": busy(queued=300, moves=False),
        "before 0.5.3": {name: values for name, values in busy(queued=300).items() if "queue_time" not in name},
    },
    "SGLangKVCacheUnderused": {"usage 0.5 with a queue": busy(queued=20, usage=0.5)},
    "SGLangDecodeWithoutCudaGraph": {"nine of ten": {**busy(), **passes(60, 540)}},
    "SGLangTimeToFirstTokenHigh": {"a third is late": {**busy(), **buckets("time_to_first_token_seconds", 33)}},
    "SGLangInterTokenLatencyHigh": {
        "a third of the gaps is late": {**busy(), **buckets("inter_token_latency_seconds", 33)}
    },
}
SILENT: dict[str, dict[str, str]] = {
    "healthy and full": {
        **busy(),
        **passes(540, 60),
        **buckets("time_to_first_token_seconds", 1),
        **buckets("inter_token_latency_seconds", 1),
    },
    "idle": busy(running=0, usage=0.0, moves=False),
    "a queue beside a full cache that moves": busy(queued=40),
    "low usage without a queue": busy(usage=0.3),
    "one retraction in two minutes": {**busy(), **ranks("sglang:num_retracted_requests_total", "0+0.5x30")},
    "one long request decodes": {
        **busy(running=1, moves=False),
        f"sglang:inter_token_latency_seconds_count{{{SERVER}}}": GROWS,
    },
    "a long prompt is computed": {
        **busy(running=1, moves=False),
        **ranks("sglang:realtime_tokens_total", GROWS, ', mode="prefill_compute"'),
    },
    "away for two minutes": {**busy(), f"up{{{TARGET}}}": "1x14 0 0 1x14"},
    "another program is dead": {'up{job="node", instance="gpu1:9100"}': "0x30"},
}
SPELLINGS = ("sglang:", "sglang_")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """What each story makes fire, with its labels and words: every story in each spelling is one server, and all are
    played at once.
    """
    stories = {story: series for stories in FIRES.values() for story, series in stories.items()} | SILENT
    played = {f"{spelling} {story}": series for spelling in SPELLINGS for story, series in stories.items()}
    places = {f"gpu{number}:30000": name for number, name in enumerate(played)}
    every = {
        series.replace("sglang:", name.partition(" ")[0]).replace("gpu1:", f"{place.partition(':')[0]}:"): values
        for place, name in places.items()
        for series, values in played[name].items()
    }
    found: dict[str, dict[str, dict[str, str]]] = {name: {} for name in (*played, "other")}
    for name, alerts in fired(ROOT / FILE, every, RULES, tmp_path_factory.mktemp("rules"), "27m").items():
        for each in alerts:
            found[places.get(each.labels["instance"], "other")][name] = {**each.labels, **each.annotations}
    return found


Told = dict[str, dict[str, dict[str, str]]]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("name", "story"), [(name, story) for name, stories in FIRES.items() for story in stories])
def test_it_calls_with_the_figure_and_the_flag(name: str, story: str, spelling: str, told: Told) -> None:
    found = told[f"{spelling} {story}"]
    assert name in found
    assert re.match(r"gpu\d+:30000: ", found[name]["description"])
    assert not re.search(r"\{|<no value>|<error|%!", " ".join(found[name].values()))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("story", SILENT)
def test_it_calls_nobody(story: str, spelling: str, told: Told) -> None:
    assert told[f"{spelling} {story}"] == told["other"] == {}


def test_ranks_of_one_scheduler_count_once(told: Told) -> None:
    assert "4.0 requests/min" in told["sglang: four a minute"]["SGLangRetracting"]["description"]


def test_a_server_of_another_cluster_at_the_same_address_has_its_own_alert(tmp_path: Path) -> None:
    series = {
        name.replace(TARGET, f'{TARGET}, cluster="{cluster}"'): values
        for cluster, story in (("a", busy(queued=300)), ("b", busy()))
        for name, values in story.items()
    }
    [only] = fired(ROOT / FILE, series, ["SGLangQueueWait"], tmp_path, "27m")["SGLangQueueWait"]
    assert only.labels["cluster"] == "a"


def test_no_alert_waits_in_the_memory_of_a_prometheus_that_may_restart() -> None:
    assert [name for name, rule in RULES.items() if {"for", "keep_firing_for"} & set(rule)] == []


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"SGLangDown", "SGLangStalled"}))
def test_an_alert_asks_for_a_figure_that_was_beyond_its_limit_before(name: str) -> None:
    [place] = [place for place, rule in enumerate(GROUP["rules"]) if rule.get("alert") == name]
    record = GROUP["rules"][place - 1]["record"]  # evaluated just before it
    present, wait, before = RULES[name]["expr"].split("\nand ")
    limit = present.removeprefix(record)
    assert re.fullmatch(r" [<>] [\d.]+", limit)
    assert wait == f"{'min' if '>' in limit else 'max'}_over_time({record}[5m]){limit}"
    assert before == f"last_over_time({record}[5m] offset 5m){limit}"


def test_an_alert_begins_after_its_wait_and_goes_on_over_minutes_without_samples(tmp_path: Path) -> None:
    def fires(series: dict[str, str], minute: int) -> bool:
        return bool(fired(ROOT / FILE, series, ["SGLangQueueWait"], tmp_path, f"{minute}m")["SGLangQueueWait"])

    story = busy(queued=300)
    assert [fires(story, minute) for minute in (3, 5, 12)] == [False, False, True]
    gap = {name: f"{values} _x3 {values}" for name, values in story.items()}
    assert all(fires(gap, minute) for minute in range(28, 38))


def test_its_limits_are_those_of_the_table() -> None:
    bounds = {
        name: float(rule["expr"].split()[-1])
        for name, rule in RULES.items()
        if "expr" in rule and name not in {"SGLangDown", "SGLangStalled"}
    }
    assert bounds == {
        "SGLangMemoryLeftTooSmall": DEFAULT.reserve_lower_gb,
        "SGLangMemoryLeftTooLarge": DEFAULT.reserve_upper_gb,
        "SGLangRetracting": DEFAULT.retractions_per_minute,
        "SGLangQueueWait": DEFAULT.queue_wait_seconds,
        "SGLangKVCacheUnderused": DEFAULT.frequent_share,
        "SGLangDecodeWithoutCudaGraph": DEFAULT.frequent_share,
        "SGLangTimeToFirstTokenHigh": DEFAULT.time_to_first_token_seconds,
        "SGLangInterTokenLatencyHigh": DEFAULT.inter_token_seconds,
    }
