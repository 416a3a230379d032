"""Many series of a latency as one histogram, and estimates from it. Quantiles are compared with those of Prometheus."""

from __future__ import annotations

import gzip
import re
from math import inf
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fuzz.promtool import promtool
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.histograms import MOST_BOUNDS, Histogram
from sglang_tuning_exporter.sglang.metrics.page_figures import Scrape

PAGES = Path(__file__).parent / "data" / "metrics"
NAME = "sglang:time_to_first_token_seconds"


def page(name: str) -> Scrape:
    return facts.read((PAGES / f"{name}.prom").read_text())


def series(counts: dict[str, float], labels: str = "") -> str:
    return "".join(f'{NAME}_bucket{{{labels}le="{bound}"}} {count}\n' for bound, count in counts.items())


def first_token(text: str) -> Histogram | None:
    return facts.read(text).time_to_first_token


def known(histogram: Histogram | None) -> Histogram:
    assert histogram is not None
    return histogram


@pytest.mark.parametrize(
    ("name", "bounds", "first", "inter", "whole", "queued"),
    [
        ("0.3.6.post3_tp1-latencies", 21, 400, None, 400, None),
        ("0.4.3.post4_tp1-latencies", 18, 400, 2000, 400, None),
        ("recorded-0.4.9.post6-latencies", 19, 301, 18900, 301, None),
        ("0.5.12_prio1-latencies", 19, 300, 1500, 300, None),
        ("recorded-0.5.23-latencies", 19, 69, 3799, 101, 106),
    ],
)
def test_every_release_exposes_the_latencies_that_it_has(  # noqa: PLR0917
    name: str, bounds: int, first: int, inter: int | None, whole: int, queued: int | None
) -> None:
    scrape = page(name)
    latencies = (scrape.time_to_first_token, scrape.inter_token, scrape.request_latency, scrape.queue_time)
    assert [None if histogram is None else histogram.observations for histogram in latencies] == [
        first, inter, whole, queued,
    ]  # fmt: skip
    assert len(known(scrape.time_to_first_token).bounds) == bounds


def test_first_tokens_of_answers_without_streaming_are_not_latencies() -> None:
    streamed, whole = (
        series({"1": 3, "+Inf": 4}, 'is_streaming="true",'),
        series({"1": 0, "+Inf": 9}, 'is_streaming="false",'),
    )
    assert known(first_token(streamed + whole)).counts == (3, 4)
    assert first_token(whole) is None


def test_priorities_are_requests_of_their_own_and_none_is_the_total() -> None:
    text = series({"1": 2, "+Inf": 3}, 'priority="",') + series({"1": 1, "+Inf": 5}, 'priority="9",')
    assert known(first_token(text)).counts == (3, 8)


def test_tensor_parallel_ranks_repeat_a_wait_and_data_parallel_ranks_do_not() -> None:
    text = "".join(
        series({"1": seen, "+Inf": seen}, f'tp_rank="{tp}",pp_rank="0",dp_rank="{dp}",')
        for tp, dp, seen in ((0, 0, 7), (1, 0, 7), (2, 1, 4), (3, 1, 3))
    )
    assert known(first_token(text)).observations == 11


def test_thousands_of_labels_are_added_up_and_thousands_of_boundaries_are_not_read() -> None:
    many = "".join(series({"1": 1, "+Inf": 2}, f'tenant="{n}",') for n in range(5000))
    assert known(first_token(many)).counts == (5000, 10000)
    assert first_token(series({**{str(n): 1.0 for n in range(MOST_BOUNDS + 1)}, "+Inf": 2})) is None


samples = st.lists(
    st.tuples(
        st.builds(
            '{}le="{}"'.format,
            st.sampled_from(["", 'priority="",', 'tp_rank="1",', 'dp_rank="1",', 'is_streaming="true",']),
            st.sampled_from(["1", "0.5", "-1", "0", "+Inf", "NaN", "", "1e400", "0x"]),
        ),
        st.floats(),
    ),
    max_size=40,
)


@given(samples, samples, samples, st.floats(), st.floats(0, 1))
def test_on_any_page_a_histogram_is_monotonic_and_estimates_lie_within_it(
    buckets: list[tuple[str, float]],
    counts: list[tuple[str, float]],
    sums: list[tuple[str, float]],
    seconds: float,
    share: float,
) -> None:
    parts = {"bucket": buckets, "count": counts, "sum": sums}
    histogram = first_token(
        "".join(f"{NAME}_{part}{{{raw}}} {value}\n" for part in parts for raw, value in parts[part])
    )
    if histogram is None:
        return
    assert list(histogram.bounds) == sorted(set(histogram.bounds))
    assert list(histogram.counts) == sorted(histogram.counts)
    assert histogram.bounds[-1] == inf
    assert 0 <= histogram.above(seconds) <= histogram.observations
    quantile = histogram.quantile(share)
    assert (quantile is None) == (histogram.observations == 0)
    assert quantile is None or min(0, histogram.bounds[0]) <= quantile <= histogram.bounds[-2]


def test_quantiles_are_those_of_histogram_quantile(tmp_path: Path) -> None:
    """promtool computes them from the same buckets."""
    recording = Path(__file__).parent / "recordings" / "big_queue"
    text = gzip.decompress(max(recording.glob("metrics-*.prom.gz")).read_bytes()).decode()
    streamed = [
        (match[1], float(match[2]))
        for match in re.finditer(
            rf'^{NAME}_bucket{{(?=.*is_streaming="true").*le="([^"]*)".*}} (\S+)$', text, re.MULTILINE
        )
    ]
    shares = (0.01, 0.25, 0.5, 0.9, 0.99)
    ours = known(first_token(text))
    document = {
        "rule_files": [],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f't_bucket{{le="{bound}"}}', "values": f"{count:g}"} for bound, count in streamed
                ],
                "promql_expr_test": [
                    {
                        "expr": f"histogram_quantile({share}, t_bucket)",
                        "eval_time": "0m",
                        "exp_samples": [{"labels": "{}", "value": ours.quantile(share)}],
                    }
                    for share in shares
                ],
            }
        ],
    }
    (tmp_path / "quantiles.yml").write_text(yaml.safe_dump(document))
    played = promtool("test", "rules", tmp_path / "quantiles.yml")
    assert played.status == 0, played.words
    assert len(streamed) == 19
