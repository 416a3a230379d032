"""Each kind of condition gives the same result in three places: measured live, as PromQL in a real engine, and in the report.

Hypothesis generates logs of servers, 30 minutes each. One pass over a log gives the exporter's series, its findings and the
report's alerts; `promtool` evaluates the committed rules over the series, all servers in one run.
"""

from __future__ import annotations

import json
import re
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from alert_matrix.promtool import alerts_firing
from sglang_tuning_exporter.diagnosis.alerting import is_evaluated
from sglang_tuning_exporter.diagnosis.promql import duration
from sglang_tuning_exporter.diagnosis.table import ALERTS, BY_ID, DIAGNOSES
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.report.backfill import BackfillView
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE, PROFILES
from test_core_and_rules import disagreements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RULES = alerts.files()["alerts/rules/sglang-tuning.rules.yml"]
USED = set(re.findall(r"(?<![:\w])(?:sglang_tuning_\w+|up)\b", re.sub(r"\{\{.*?\}\}", "", RULES)))
EVALUATED = [row for row in ALERTS if is_evaluated(row, row.profiles[0] if row.profiles else DEFAULT_PROFILE)]
MINUTES = 26
STARTS = 30.0  # seconds: no alert is asked for before
OUT_OF_MEMORY = """\
[{at}] Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/model_runner.py", line 2100, in {function}
    return self.model.forward(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""
GRAPHS_OFF: dict[str, dict[str, object]] = {
    "": {},
    "disable_cuda_graph": {"disable_cuda_graph": True},
    "disable_decode_cuda_graph": {"disable_decode_cuda_graph": True},
    "cuda_graph_config": {"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 256}}},
}


@dataclass(frozen=True)
class Life:
    """30 minutes of a server, from which its log is written; times are minutes since the start, rates are per minute."""

    name: str = "quiet"
    profile: str = DEFAULT_PROFILE
    graphs_off: str = ""
    conservativeness: float = 1.0
    reserve: float = 6.5
    running: int = 7
    queued: int = 0
    usage: float = 0.6
    graph: bool = True
    part: int = 10  # tenths of the time in which that is so; else nothing waits
    ranks: int = 1  # DP ranks: requests wait on the first
    retractions: int = 0
    refusals: int = 0
    ends: int = 18  # when load and rates end
    events: tuple[tuple[int, str], ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        return "".join(line for _, line in self.lines())

    def lines(self) -> list[tuple[float, str]]:
        lines: list[tuple[float, str]] = [(0.0, line) for line in self._start()]
        for second in range(60, 60 * self.ends, 5):
            lines += [(second, line) for line in self._batches(second)]
        for rate, line in (
            (
                self.retractions,
                "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 90, #new_token_ratio: 0.3002 -> 0.5783",
            ),
            (self.refusals, 'INFO:     10.0.0.7:41000 - "POST /generate HTTP/1.1" 503 Service Unavailable'),
        ):
            lines += [(60.0 + 60.0 * n / rate, line) for n in range(rate * (self.ends - 1))] if rate else []
        for minute, what in self.events:
            lines += [(60.0 * minute + 2, line) for line in self._happening(what)]
        lines.append((60.0 * MINUTES, 'INFO:     127.0.0.1:50000 - "GET /health HTTP/1.1" 200 OK'))
        return [
            (at, f"[{stamp(at)}{line}\n" if line.startswith(" DP") else f"[{stamp(at)}] {line}\n")
            for at, line in sorted(lines, key=lambda pair: pair[0])
        ]

    def _start(self) -> list[str]:
        args = {
            "model_path": "m", "tp_size": 1, "mem_fraction_static": 0.85, "chunked_prefill_size": 8192, "max_running_requests": 64, "cuda_graph_max_bs": 256,
            "schedule_conservativeness": self.conservativeness, "disable_cuda_graph": False, **GRAPHS_OFF[self.graphs_off],
        }  # fmt: skip
        return [
            f"server_args={args}",
            f"max_total_num_tokens=204800, chunked_prefill_size=8192, max_running_requests=64, context_len=8192, available_gpu_mem={self.reserve:.2f} GB",
            "The server is fired up and ready to roll!",
        ]

    def _batches(self, second: int) -> Iterator[str]:
        bad = second // 5 % 10 < self.part
        for rank in range(self.ranks):
            queued = self.queued if bad and not rank else 0
            of, usage = f" DP{rank} TP{rank}] " if self.ranks > 1 else "", self.usage if bad else 0.5
            graph = self.graph and not self.graphs_off
            yield of + (
                f"Decode batch, #running-req: {self.running}, #token: {round(204800 * usage)}, token usage: {usage:.2f}, cuda graph: {graph}, "
                f"gen throughput (token/s): 900.00, #queue-req: {queued}"
            )

    def _happening(self, what: str) -> list[str]:
        if what == "start":
            return self._start()
        if what == "unknown_key":
            return ["Decode batch, #running-req: 3, #flux: 7, token usage: 0.60"]
        if what == "watchdog":
            return ["Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"]
        function = {"prefill": "forward_extend", "decode": "forward_decode", "graph_capture": "capture_one_batch_size"}[
            what
        ]
        return OUT_OF_MEMORY.format(at="{at}", function=function).removeprefix("[{at}] ").splitlines()


def stamp(second: float) -> str:
    return f"2025-11-20 {11 + int(second) // 3600:02}:{int(second) // 60 % 60:02}:{int(second) % 60:02}"


# One for each kind that a log alone can show: well over its threshold.
OVER = (
    Life("share", queued=40, usage=0.97, running=64),
    Life("held_back", queued=9, usage=0.4),
    Life("eager", graph=False, running=30),
    Life("client_too_slow", profile="offline"),
    Life("spread", ranks=2, queued=30),
    Life("retractions", retractions=4, queued=3, usage=0.97),
    Life("capped", retractions=4, queued=3, usage=0.97, conservativeness=1.6),
    Life("rejections", refusals=5, queued=9, usage=0.97),
    Life("reserve_below", reserve=2.5, ends=25),
    Life("reserve_above", reserve=16.0, ends=25),
    *(Life(f"graph_memory {off}".strip(), reserve=0.7, graphs_off=off) for off in GRAPHS_OFF),
    Life("failures", events=((5, "prefill"), (9, "decode"), (14, "graph_capture"))),
    Life("stuck", events=((6, "watchdog"),)),
    Life("starts", events=((3, "start"), (6, "start"), (9, "start"))),
    Life("source", events=((5, "unknown_key"),)),
    Life("own_thresholds", queued=9, usage=0.8, thresholds={"token_usage_target": 0.7, "frequent_share": 0.3, "reserve_lower_gb": 7.0}),
)  # fmt: skip


@st.composite
def lives(draw: st.DrawFn) -> Life:
    happening = st.tuples(
        st.integers(2, 20), st.sampled_from(["start", "watchdog", "prefill", "decode", "graph_capture", "unknown_key"])
    )
    return Life(
        profile=draw(st.sampled_from(list(PROFILES))),
        graphs_off=draw(st.sampled_from(list(GRAPHS_OFF))),
        conservativeness=draw(st.sampled_from([0.1, 0.3, 1.0, 1.42, 1.44, 2.0])),
        reserve=draw(st.sampled_from([0.7, 0.99, 1.01, 4.9, 6.5, 9.9, 10.1, 30.0])),
        running=draw(st.sampled_from([1, 7, 63, 64, 300])),
        queued=draw(st.sampled_from([0, 1, 9, 150, 2500])),
        usage=draw(st.sampled_from([0.1, 0.6, 0.89, 0.91, 0.99])),
        graph=draw(st.booleans()),
        part=draw(st.sampled_from([0, 2, 4, 7, 10])),
        ranks=draw(st.sampled_from([1, 1, 2])),
        retractions=draw(st.sampled_from([0, 0, 1, 2, 5])),
        refusals=draw(st.sampled_from([0, 0, 1, 2, 5])),
        ends=draw(st.integers(4, 24)),
        events=tuple(draw(st.lists(happening, max_size=3))),
        thresholds=draw(st.sampled_from([{}, {"frequent_share": 0.25}, {"retractions_per_minute": 3.0, "reserve_least_gb": 0.5}])),
    )  # fmt: skip


@dataclass
class Outcome:
    """Ids of diagnoses at each evaluation, from three sources: found live, firing by the report, firing by the rules."""

    found: dict[float, frozenset[str]] = field(default_factory=dict)
    report: dict[float, frozenset[str]] = field(default_factory=dict)
    rules: dict[float, frozenset[str]] = field(default_factory=dict)


def outcomes_of(several: tuple[Life, ...], directory: Path, rules: str = RULES) -> list[Outcome]:
    lived = [Outcome() for _ in several]
    series: list[dict[str, str]] = []
    for number, (life, outcome) in enumerate(zip(several, lived, strict=True)):
        log = directory / f"{number}.log"
        log.write_text(life.text())
        series += exposed(
            BackfillView(Logs([str(log)]), PROFILES[life.profile].with_thresholds(life.thresholds)), outcome, number
        )
    steps = max(len(outcome.found) for outcome in lived)
    for number, step, ids in fired(series, steps, directory, rules):
        if step * EVALUATION_SECONDS in lived[number].found:
            lived[number].rules[step * EVALUATION_SECONDS] = ids
    return lived


def exposed(night: BackfillView, outcome: Outcome, number: int) -> list[dict[str, str]]:
    """Follow a log to its end; the series that the rules ask for, in promtool's notation, each sample 5 s before an evaluation."""
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, float]] = {}
    for step, (_, families) in enumerate(night.moments()):
        for family in families:
            for sample in family.samples:
                if sample.name in USED:
                    samples.setdefault((sample.name, tuple(sorted(sample.labels.items()))), {})[step] = sample.value
        now = step * EVALUATION_SECONDS
        outcome.found[now] = frozenset(
            dict(labels)["diagnosis"]
            for (name, labels), known in samples.items()
            if name == "sglang_tuning_diagnosis_active" and known.get(step)
        )
        outcome.report[now] = frozenset(row.id for row, state in night.alarms.states() if state == "firing")
    noted = []
    for (name, labels), values in samples.items():
        said = ",".join(f"{label}={json.dumps(word)}" for label, word in labels)
        steps = (values.get(step, "stale" if step - 1 in values else "_") for step in range(len(outcome.found)))
        noted.append(
            {
                "series": f'{name}{{job="sglang",instance="{number}",{said}}}',
                "values": " ".join(f"_ _ {value}" for value in steps),
            }
        )
    return noted


def fired(
    series: list[dict[str, str]], steps: int, directory: Path, rules: str
) -> Iterator[tuple[int, int, frozenset[str]]]:
    """Give instance, step and the ids that fire, as Prometheus' engine has them."""
    numbers = {json.loads(re.findall(r'instance=("\d+")', each["series"])[0]) for each in series}
    moments = [15.0 * step + 15 for step in range(steps)]
    for step, fires in enumerate(alerts_firing(series, moments, rules, directory, interval="5s", evaluation="15s")):
        for number in numbers:
            yield int(number), step, frozenset(fires.get(number, ()))


def differences(life: Life, outcome: Outcome) -> list[str]:
    """Say where the three differ by more than they may."""
    ids = {row.id for row in EVALUATED if is_evaluated(row, life.profile)}
    at_minutes = {at: set(fire & ids) for at, fire in outcome.rules.items() if at % 60 == 0}
    said = disagreements(outcome.found, {at: fire for at, fire in at_minutes.items() if at < 60 * life.ends})
    # A finding stays for minutes after the load, in the past tense. An alert that fires must have been found even then.
    said += [each for each in disagreements(outcome.found, at_minutes) if ": fires at" in each and each not in said]
    said = [f"measured {each}" for each in said if each.split(":")[0] in ids]
    for one, other, words in (
        (outcome.report, outcome.rules, "the report alone"),
        (outcome.rules, outcome.report, "the rules alone"),
    ):
        for at, fire in one.items():
            near = [other.get(at + shift, frozenset()) for shift in (-EVALUATION_SECONDS, 0.0, EVALUATION_SECONDS)]
            lonely = (fire & ids) - frozenset().union(*near)
            if lonely and at >= STARTS:
                said.append(f"{words} at {at:g} s: {', '.join(sorted(lonely))}")
    return said


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return dict(zip((life.name for life in OVER), outcomes_of(OVER, tmp_path_factory.mktemp("over")), strict=True))


@pytest.mark.parametrize("life", OVER, ids=lambda life: life.name)
def test_a_trouble_of_each_kind_is_reported_alike(life: Life, over: dict[str, Outcome]) -> None:
    assert differences(life, over[life.name]) == []


def test_every_kind_that_a_log_can_show_has_fired_by_the_rules_and_in_the_report(over: dict[str, Outcome]) -> None:
    for way in ("rules", "report"):
        ids = frozenset().union(*(fire for outcome in over.values() for fire in getattr(outcome, way).values()))
        assert {type(BY_ID[row].condition) for row in ids} == {type(row.condition) for row in EVALUATED}


@settings(
    max_examples=1,
    database=None,
    phases=[Phase.generate],  # each example is two dozen servers; what fails is said in words
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(lives(), min_size=24, max_size=24))
def test_any_course_of_a_server_is_reported_alike(
    tmp_path_factory: pytest.TempPathFactory, several: list[Life]
) -> None:
    outcomes = outcomes_of(tuple(several), tmp_path_factory.mktemp("lives"))
    said = {repr(life): differences(life, outcome) for life, outcome in zip(several, outcomes, strict=True)}
    assert {life: words for life, words in said.items() if words} == {}


def test_a_rule_that_ignores_that_graphs_are_off_is_found(tmp_path: Path) -> None:
    right = "unless on (job, instance) last_over_time(sglang_tuning_cuda_graph_off[5m]) == 1"
    wrong = 'unless on (job, instance) instance:sglang_tuning_server_arg:last5m{arg="disable_cuda_graph"} == 1'
    assert right in RULES
    chosen = tuple(life for life in OVER if life.name.startswith("graph_memory"))
    outcomes = outcomes_of(chosen, tmp_path, RULES.replace(right, wrong))
    found = {life.graphs_off for life, outcome in zip(chosen, outcomes, strict=True) if differences(life, outcome)}
    assert found == {"disable_decode_cuda_graph", "cuda_graph_config"}


@pytest.mark.parametrize("row", DIAGNOSES, ids=lambda row: row.id)
def test_a_row_with_an_alert_has_a_rule_and_its_condition_names_what_it_needs(row: Any) -> None:
    condition = row.condition
    assert bool(condition.promql()) == bool(row.alert) or not row.alert
    assert condition.needs
    assert condition.description or condition.kind in {"chance", "remark"}  # their rows' summaries say it
    assert bool(condition.counted) <= condition.is_in_logs
    assert all(duration(window) > 0 for _, window in condition.counted)


def test_equal_conditions_compare_equal_and_hash_equal() -> None:
    for row in DIAGNOSES:
        twin = copy(row.condition)
        assert twin == row.condition
        assert hash(twin) == hash(row.condition)
