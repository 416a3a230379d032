"""One page of `/metrics` as figures of every scheduler, and as histograms.

How the pages were made: data/metrics/README.md.

The figures expected of a page are those that the same server printed in its log at the same moment: 0.3.6 adds up its
DP ranks, and 0.4.6 shows the one that wrote last (of 2594 and 2601 queued).
"""

from __future__ import annotations

import gzip
import re
from dataclasses import fields
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promtool import evaluated
from sglang_tuning_exporter.sglang import exposition
from sglang_tuning_exporter.sglang import metrics as facts
from sglang_tuning_exporter.sglang.metrics import MOST_BOUNDS, Histogram, PageReader, RankFigures, Scrape

PAGES = Path(__file__).parent / "data" / "metrics"


def page(name: str) -> Scrape:
    return facts.read((PAGES / f"{name}.prom").read_text())


def only_rank(name: str) -> RankFigures:
    (rank,) = page(name).ranks
    return rank


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.prom")), ids=lambda path: path.stem)
def test_the_next_page_of_every_release_is_read_as_if_it_were_the_first(path: Path) -> None:
    """The lines of the page before are known then, and only their figures are read."""
    text = path.read_text()
    following = re.sub(
        r"^((?!#).*) (\S+)$",
        lambda line: f"{line[1]} {float(line[2]) + 3.5!r}".replace("inf", "+Inf"),
        text,
        flags=re.MULTILINE,
    )
    assert following != text
    reader = PageReader()
    reader.read(text)
    native, refused = exposition.passthrough(exposition.scan(following))
    scrape, passed, dropped = reader.read(following)
    assert (scrape, passed, dropped["refused_metric_lines"]) == (facts.read(following), native, refused)


def test_tp_ranks_that_count_the_same_pass_are_one_pass() -> None:
    rank = only_rank("0.5.23_tp8-retract")
    assert (rank.replayed_batches, rank.eager_batches) == (120, 0)


def test_pp_ranks_are_one_scheduler_and_phases_of_one_rank_add_up() -> None:
    rank = only_rank("0.5.23_pp2-healthy")
    assert (rank.kv_pool_tokens, rank.available_gpu_memory_gb) == (1_040_384, 9.87)
    assert rank.graph_memory_gb == pytest.approx(2.31 + 0.87)
    assert (rank.weight_memory_gb, rank.kv_memory_gb) == (16.46, 39.69)


def test_hybrid_models_expose_their_other_pools_and_plain_models_none() -> None:
    swa, mamba, plain = (
        only_rank(name) for name in ("0.5.12_swa1-healthy", "0.5.12_mamba1-healthy", "0.5.12_prio1-bigqueue")
    )
    assert swa.swa_usage == pytest.approx(0.41, abs=0.005)
    assert mamba.mamba_usage == pytest.approx(0.69, abs=0.005)
    assert (swa.mamba_usage, mamba.swa_usage) == (None, None)
    assert (plain.swa_usage, plain.mamba_usage) == (None, None)


def test_queues_of_disaggregated_serving_are_read_under_every_release_s_name() -> None:
    assert only_rank("0.5.3.post3_pdprefill-bigqueue").queues == {"prealloc": 311, "inflight": 64, "transfer": 0}
    assert only_rank("0.5.12_pdprefill-healthy").queues == {"bootstrap": 2, "inflight": 9, "prealloc": 0, "transfer": 0}
    decode = only_rank("0.5.12_pddecode-bigqueue").queues
    assert (decode["prealloc"], decode["transfer"]) == (1400, 256)


def test_a_counter_nobody_incremented_is_zero_where_its_release_is_known_to_count() -> None:
    quiet = 'sglang:realtime_tokens_total{mode="decode",dp_rank="1"} 5\n'
    (rank,) = facts.read(quiet).ranks
    assert (rank.dp, rank.retracted_requests) == (1, 0)
    assert facts.read(quiet).aborted_requests == 0
    assert facts.read("sglang:num_running_reqs 1\n").ranks[0].retracted_requests is None
    assert facts.read("sglang:num_running_reqs 1\n").aborted_requests is None


def test_of_two_samples_of_one_series_the_first_counts() -> None:
    assert facts.read("sglang:num_queue_reqs 1\nsglang:num_queue_reqs 9\n").ranks[0].queued == 1


def test_a_label_dp_rank_outside_the_scheduler_makes_no_rank() -> None:
    assert (
        'eviction_duration_seconds_count{cache_type="UnifiedRadixCache",dp_rank="0"'
        in (PAGES / "recorded-0.5.23-retract.prom").read_text()
    )
    assert only_rank("recorded-0.5.23-retract").dp is None


def test_the_role_is_unknown_in_releases_where_every_server_is_called_unified() -> None:
    text = (PAGES / "0.5.3.post3_pdprefill-bigqueue.prom").read_text()
    assert 'engine_type="unified"' in text
    assert facts.read(text).engine_type is None


def test_families_of_a_later_release_are_counted_and_those_of_known_ones_are_not() -> None:
    assert {name.stem: facts.read(name.read_text()).unrecognised for name in PAGES.glob("*.prom")} == {
        name.stem: 0 for name in PAGES.glob("*.prom")
    }
    new = "sglang:brand_new 1\n" + "".join(f"sglang:other_seconds_{part} 1\n" for part in ("bucket", "count", "sum"))
    assert facts.read(new).unrecognised == 2


def test_the_table_describes_every_fact_and_every_row_names_a_family_that_exists() -> None:
    rows = facts.describe()
    described = {fact.split(".")[0] for fact, *_ in rows}
    per_rank = {field.name for field in fields(RankFigures)} - {"dp", "running_limit"}  # the limit is in answers alone
    of_the_server = {field.name for field in fields(Scrape)} - {
        "ranks",
        "model_name",
        "engine_type",
        "unrecognised",
        "progress",  # sent and scheduled together
        "counters_invalid",
    }
    assert described == per_rank | of_the_server
    pages = "".join(name.read_text() for name in PAGES.glob("*.prom"))
    # The first is of 0.5.4 to 0.5.6, of which there is no page; the others were cut out of the pages here.
    unexposed_here = {
        "sglang:num_retractions_sum",
        "sglang:generation_tokens_histogram_bucket",
        "sglang:http_requests_active",
        "sglang:per_stage_req_latency_seconds_count",
        "sglang:num_bootstrap_failed_reqs_total",  # of a prefill/decode pair
        "sglang:num_transfer_failed_reqs_total",
    }
    assert {metric for _, metric, *_ in rows if f"{metric}{{" not in pages} <= unexposed_here | {
        "sglang:time_to_first_token_seconds_count",
        "sglang:inter_token_latency_seconds_count",
    }
    assert all(versions.count("-") == 1 for *_, versions in rows)


# Lines of real servers on a CPU after a while of load; all other families are cut.
REQUESTS = {
    "0.5.23": (
        """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="false",model_name="tiny"} 105.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="true",model_name="tiny"} 170.0
sglang:e2e_request_latency_seconds_count{engine_type="unified",is_streaming="false",model_name="tiny"} 105.0
sglang:e2e_request_latency_seconds_count{engine_type="unified",is_streaming="true",model_name="tiny"} 168.0
sglang:queue_time_seconds_count{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 280.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny"} 11002.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny"} 17341.0
"""
    ),
    "0.4.9.post6": (
        """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 2.0
sglang:prompt_tokens_total{model_name="tiny"} 27420.0
sglang:time_to_first_token_seconds_count{model_name="tiny"} 170.0
sglang:e2e_request_latency_seconds_count{model_name="tiny"} 169.0
"""
    ),
}


@pytest.mark.parametrize(
    ("release", "started", "finished", "prompts"), [("0.5.23", 275, 273, 28343), ("0.4.9.post6", 170, 169, 27420)]
)
def test_requests_count_whether_they_are_streamed_or_not(
    release: str, started: int, finished: int, prompts: int
) -> None:
    scrape = facts.read(REQUESTS[release])
    assert (scrape.started_requests, scrape.finished_requests) == (started, finished)
    assert scrape.finished_prompt_tokens == prompts


def test_only_endpoints_that_generate_are_counted() -> None:
    posts = "".join(
        f'sglang:http_{name}{{endpoint="{endpoint}",method="POST"{status}}} {value}\n'
        for name, endpoint, status, value in (
            ("requests_total", "/generate", "", 83.0),
            ("requests_total", "/flush_cache", "", 7.0),
            ("responses_total", "/generate", ',status_code="200"', 53.0),
            ("responses_total", "/generate", ',status_code="400"', 29.0),
            ("responses_total", "/v1/chat/completions", ',status_code="503"', 3.0),
            ("responses_total", "/flush_cache", ',status_code="200"', 7.0),
            ("requests_active", "/generate", "", 0.0),
        )
    )
    scrape = facts.read(posts + 'sglang:http_requests_total{endpoint="/health",method="GET"} 5.0\n')
    assert (scrape.generation_posts, scrape.generation_responses, scrape.open_requests) == (83.0, 85.0, 0.0)
    assert (scrape.answered_requests, scrape.refused_requests) == (53.0, 3.0)


@pytest.mark.parametrize(
    ("page", "cached"),
    [
        (
            ('sglang:cached_tokens_total{cache_source="device"} 30.0\n'
            'sglang:cached_tokens_total{cache_source="host"} 5.0\n'),
            35.0,
        ),
        ('sglang:cached_tokens_total{model_name="m"} 30.0\n', 30.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_cached_tokens_are_those_of_all_sources(page: str, cached: float) -> None:
    counted = "sglang:time_to_first_token_seconds_count 4.0\nsglang:prompt_tokens_total 100.0\n"
    assert facts.read(counted + page).finished_cached_tokens == cached


# Histograms

NAME = "sglang:time_to_first_token_seconds"


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
    series = {f't_bucket{{le="{bound}"}}': f"{count:g}" for bound, count in streamed}
    asked = [f"histogram_quantile({share}, t_bucket)" for share in shares]
    [answers] = evaluated(tmp_path, [series], asked, at="0m")
    ours = known(first_token(text))
    assert [value for [(_, value)] in answers] == pytest.approx([ours.quantile(share) for share in shares])
    assert len(streamed) == 19
