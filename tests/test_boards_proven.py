"""Every query of every panel, run on a real Prometheus with the exporter's metrics of
real servers of several releases.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
import requests
import yaml

from promql import Labels, can_draw, moving
from promtool import PRESENT, promtool
from scenes import Moment, Story, Timed, idle, played, recording, then
from sglang_tuning_exporter.mixin import boards
from sglang_tuning_exporter.recordings.demo import Process, free_port
from sglang_tuning_exporter.serve.metrics import collect, reference_sections, serving
from sglang_tuning_exporter.serve.metrics.families import Family, text_format
from test_dashboards import BOARDS, chosen, panels_of

HERE = Path(__file__).parent
PAGES = HERE / "data" / "metrics"
COUNTER = re.compile(r"_(?:total|count|sum|bucket)$")
pytestmark = pytest.mark.skipif(not PRESENT, reason="no Prometheus is installed")


ALL = [(name, panel) for name, board in BOARDS.items() for panel in panels_of(board)]
SPAN = {"__range": "10m"}
SHOWN = 240.0  # seconds that are asked for
RARE = "rare"  # the server whose exporter exposes every series that none of the others has


# --- the servers -----------------------------------------------------------------------------------------------------


def recorded(name: str, end: float, **how: Any) -> Story:
    info = recording(name).server_info if how.get("scraped", True) else None
    return Story(played(name, end=end), server_info=info, **how)


def repeated(name: str, end: float) -> Story:
    """Give one page again and again, its counters growing: what a server under an even load exposes."""
    moments = []
    for step in range(24):
        lines = []
        for line in (PAGES / name).read_text().splitlines():
            series, _, value = line.rpartition(" ")
            grows = line and line[0] != "#" and COUNTER.search(series.partition("{")[0])
            lines.append(f"{series} {float(value) * (1 + 0.02 * step)!r}" if grows else line)
        moments.append(Moment(end - (23 - step) * 5.0, b"", "\n".join(lines) + "\n"))
    return Story(moments, logged=False)


def crashed(end: float) -> Story:
    """Give a server that is killed from outside three minutes before the end, and says so in its log."""
    moments = list(played("retract", end=end - 180))
    stamp = datetime.fromtimestamp(end - 178, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    line = f"[{stamp}] Subprocess scheduler_0 (pid=4567) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    dead = [Moment(end - left, line.encode() if left == 175 else b"", None) for left in range(175, -1, -5)]
    return Story(moments + dead)


# instance -> what it is and was recorded of; the recordings' own pages say how each was made
SERVERS: dict[str, Callable[[float], Story]] = {
    "0.5.23": lambda end: recorded("retract", end),
    "0.5.23-log-only": lambda end: recorded("retract", end, scraped=False),
    "0.5.23-metrics-only": lambda end: recorded("retract", end, logged=False),
    "0.5.23-offline": lambda end: recorded("client_limited", end, profile="offline"),
    "0.5.9": lambda end: recorded("v0.5.9-retract", end),
    "0.4.9": lambda end: recorded("v0.4.9.post6-steady", end),
    "dp2": lambda end: recorded("dp2", end),
    "pd-decode": lambda end: repeated("0.5.23_pddecode-retract.prom", end),
    "pd-prefill": lambda end: repeated("0.5.23_pdprefill-bigqueue.prom", end),
    "speculating": lambda end: repeated("0.5.23_spec8-healthy.prom", end),
    "swa": lambda end: repeated("0.5.23_swa1-healthy.prom", end),
    "mamba": lambda end: repeated("0.5.23_mamba1-healthy.prom", end),
    "gpu": lambda end: recorded("gpu-graphs-too-small", end),
    "busy": lambda end: recorded("big_queue", end, profile="offline"),
    "down": crashed,
    "idle": lambda end: Story(idle(end=end)),
    "no-exporter": lambda end: Story(then(played("retract", end=end), 360.0, answers=False), gone_from=end - 360),
    RARE: lambda end: recorded("retract", end),
}


def write_story(
    story: Story, directory: Path, families: Collection[str], sink: IO[str], unseen: Collection[Family] = ()
) -> set[str]:
    """Write the samples that Prometheus would have scraped, and return the names of their metrics.

    Of the server's own families only `families` are kept: they are many. `unseen` are made up beside them.
    """
    log, place = directory / "server.log", f'job="sglang",instance="{directory.name}"'
    exporter, names = None, set[str]()
    for step, moment in enumerate(story.moments):
        if story.gone_from is not None and moment.at >= story.gone_from:
            sink.write(f"up{{{place}}} 0 {moment.at:.3f}\n")
            continue
        exporter = exporter or Timed.beside(story, log, moment.at)
        passed_on = exporter.live(story, moment, log)
        sink.write(f"up{{{place}}} 1 {moment.at:.3f}\n")
        shown = [*collect(exporter), *serving(None, {}, is_tls=False, is_up=None)]
        for line in (text_format([*shown, *made_up(unseen, step)]) + passed_on).splitlines():
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            if line and line[0] != "#" and (name in families or not name.startswith("sglang:")):
                sink.write(f"{name}{{{place}{',' if labels else '}'}{labels} {value} {moment.at:.3f}\n")
                names.add(name)
    assert exporter is not None
    exporter.stop()
    return names


def made_up(families: Collection[Family], step: int) -> Iterator[Family]:
    """Give one sample to each of these families: a counter that grows, or a gauge of 1, whose labels are all `any`."""
    for family in families:
        value = float(step) if family.type == "counter" else 1.0
        yield family.with_samples([(*["any"] * len(family.names), value)])


@dataclass(frozen=True)
class Proof:
    """A Prometheus that holds all of them, the moment at which they end, and the series that show something then."""

    url: str
    end: float
    series: Mapping[str, Collection[Labels]] = field(compare=False)  # in the time that a panel shows
    newest: Mapping[str, Collection[Labels]] = field(compare=False)  # in its last minute, which a tile shows

    def ask(self, path: str, **parameters: str) -> Any:
        answer = requests.post(self.url + path, data=parameters, timeout=30).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {parameters}"
        return answer["data"]

    @cache  # noqa: B019 - lives as long as the module's tests
    def values(self, expr: str, instance: str, *, instant: bool) -> tuple[float, ...]:
        """Give every sample of an expression of a board with this instance chosen."""
        expr = chosen(expr, instance=instance, **SPAN)
        if instant:
            found = self.ask("/api/v1/query", query=expr, time=f"{self.end}")["result"]
            return tuple(float(series["value"][1]) for series in found)
        span = {"start": f"{self.end - SHOWN}", "end": f"{self.end}", "step": "30"}
        found = self.ask("/api/v1/query_range", query=expr, **span)["result"]
        return tuple(float(value) for series in found for _, value in series["values"])

    def of(self, target: dict[str, Any], instance: str) -> tuple[float, ...]:
        return self.values(target["expr"], instance, instant=target["instant"])


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    directory = tmp_path_factory.mktemp("proof")
    end = time.time() // 300 * 300 - 210  # a board looks at the dead exporter at whole five minutes
    families = set(re.findall(r"sglang:[a-z0-9_]+", " ".join(boards.files().values())))
    with (directory / "all.om").open("w") as sink:
        unseen = {family.sample_name: family for section in reference_sections().values() for family in section}
        for instance, story in SERVERS.items():
            extra = unseen.values() if instance == RARE else ()
            for name in write_story(story(end), directory / instance, families, sink, extra):
                unseen.pop(name, None)
        labels = 'job="sglang",instance="down",alertname="SGLangServerDown",severity="critical",diagnosis="server_down"'
        sink.write(f'ALERTS{{{labels},alertstate="firing"}} 1 {end - 2:.3f}\n')
        sink.write(f"ALERTS_FOR_STATE{{{labels}}} {end - 60:.0f} {end - 2:.3f}\n")
        sink.write("# EOF\n")
    written = (directory / "all.om").read_text()
    ran = promtool("tsdb", "create-blocks-from", "openmetrics", directory / "all.om", directory / "data")
    assert ran.status == 0, ran.words[-2000:]
    (directory / "prometheus.yml").write_text(yaml.safe_dump({"global": {"scrape_interval": "15s"}}))
    address = f"127.0.0.1:{free_port()}"
    process = Process(
        "prometheus",
        ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
         f"--web.listen-address={address}", "--storage.tsdb.retention.time=100y", "--log.level=warn",
         # what was written into blocks has no mark for a series that ended
         "--query.lookback-delta=6s"],
        directory / "prometheus.log",
    )  # fmt: skip
    try:
        process.wait_until_ready(f"http://{address}/-/ready")
        yield Proof(f"http://{address}", end, moving(written, end - SHOWN), moving(written, end - 60))
    finally:
        process.stop()


# --- what is proven --------------------------------------------------------------------------------------------------


def absent(proof: Proof, instance: str) -> set[str]:
    """Return the panels that are empty on this server's boards."""
    return {
        f"{board}: {panel['title']}"
        for board, panel in ALL
        if not any(proof.of(target, instance) for target in panel["targets"] if not is_bound(target))
    }


def drawable(proof: Proof, instance: str) -> set[str]:
    """Return the panels that cannot be empty: one of their queries reads only series that this server exposes, and that
    move.
    """
    return {
        f"{board}: {panel['title']}"
        for board, panel in ALL
        for target in panel["targets"]
        if not is_bound(target) and can_draw(chosen(target["expr"], instance=instance), proof.series)
    }


def is_bound(target: dict[str, Any]) -> bool:
    """Return whether the query only draws a limit of the profile or the board: a panel with nothing else counts as
    empty.
    """
    return re.match(r"max\(sglang_tuning_(?:threshold|condition_limit)", target["expr"]) is not None


@pytest.mark.parametrize("instance", SERVERS)
def test_a_panel_is_empty_only_where_the_server_exposes_nothing_for_it(proof: Proof, instance: str) -> None:
    assert absent(proof, instance) & drawable(proof, instance) == set()


@pytest.mark.parametrize("instance", SERVERS)
def test_a_tile_has_no_figure_only_where_the_server_exposes_none(proof: Proof, instance: str) -> None:
    tiles = [target for _, panel in ALL for target in panel["targets"] if "vector(NaN)" in target["expr"]]
    missing = [target["expr"] for target in tiles if math.isnan(proof.of(target, instance)[-1])]
    assert [expr for expr in missing if can_draw(chosen(expr, instance=instance), proof.newest)] == []


@pytest.mark.parametrize(
    ("query", "is_drawn"),
    [
        ("sum(rate(up[2m]))", True),
        ('up{job="other"}', False),
        ('up{job=~"sgl.*", server=""}', True),
        ('up{job!="sglang"} or vector(NaN)', False),
        ('up{job="other"} or max(up)', True),
        ("sum(up) / (sum by (job) (ALERTS) > 0)", False),
        ("up unless on (job) (ALERTS)", True),
        ('label_replace(ALERTS, "to", "$1 or (none)", "of", "(.+)") or on (job) up', True),
    ],
)
def test_a_query_draws_where_each_operand_has_a_series(query: str, *, is_drawn: bool) -> None:
    assert can_draw(query, {"up": [{"job": "sglang"}]}) == is_drawn


def test_every_query_of_every_panel_finds_something_on_one_of_the_servers(proof: Proof) -> None:
    unanswered = [
        f"{board}: {panel['title']} {target['refId']}: {target['expr']}"
        for board, panel in ALL
        for target in panel["targets"]
        if not any(proof.of(target, instance) for instance in (*SERVERS, ".+"))
        and "burning_slow" not in target["expr"]  # known after half an hour
    ]
    assert unanswered == []


@pytest.mark.parametrize("instance", SERVERS)
def test_no_panel_shows_a_value_that_is_not_a_number(proof: Proof, instance: str) -> None:
    for _, panel in ALL:
        for target in panel["targets"]:
            if "vector(NaN)" not in target["expr"]:  # NaN is what a tile shows as unknown
                assert all(map(math.isfinite, proof.of(target, instance))), target["expr"]


def test_every_metric_asked_for_is_exposed_by_the_exporter(proof: Proof) -> None:
    every = 'group by (__name__) (last_over_time({__name__=~".+"}[10m]))'
    found = proof.ask("/api/v1/query", query=every, time=f"{proof.end}")["result"]
    exposed = {series["metric"]["__name__"] for series in found}
    asked = {
        name
        for _, panel in ALL
        for target in panel["targets"]
        for name in re.findall(r"(?<![:\w])(sglang_tuning_[a-z_]+|sglang:[a-z0-9_]+)", target["expr"])
    }
    # a histogram without buckets is a classic one that Prometheus converts
    exposed |= {name.removesuffix("_bucket") for name in exposed}
    # time_per_output_token was the name until 0.4.3, before the first recording
    assert {name for name in asked if "time_per_output_token" not in name} <= exposed


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_variable_offers_a_choice(proof: Proof, board: dict[str, Any]) -> None:
    span = {"start": f"{proof.end - 300}", "end": f"{proof.end}"}
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        if asked is None or variable["name"] in ("cluster", "server"):  # no page and no such label here
            continue
        values = set()
        for instance in SERVERS:
            wanted = {"match[]": chosen(asked[1], instance=instance, **SPAN), **span}
            answer = requests.get(f"{proof.url}/api/v1/label/{asked[2]}/values", params=wanted, timeout=10)
            values |= set(answer.json()["data"])
        assert values
        if variable["current"].get("text") not in ("All", ["All"], None):
            assert variable["current"]["value"] in values


def test_the_fleet_shows_one_row_for_each_server_in_every_column(proof: Proof) -> None:
    rows: defaultdict[str, int] = defaultdict(int)
    for _, panel in ALL:
        if panel["title"] == "Servers, the worst first":
            for target in panel["targets"]:
                expr = chosen(target["expr"], **SPAN)
                found = proof.ask("/api/v1/query", query=expr, time=f"{proof.end}")["result"]
                places = [series["metric"]["instance"] for series in found]
                assert len(places) == len(set(places)), target["expr"]
                rows[target["refId"]] = len(places)
    assert rows["A"] == len(SERVERS)
