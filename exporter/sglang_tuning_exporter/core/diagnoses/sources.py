"""The sources of the exporter: metrics and log that are missing, foreign, or contradict each other. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import NOT_IN_GUIDE, event, fact, hint, limit, look, trouble
from sglang_tuning_exporter.core.findings import Change

NOT_SGLANG = limit(
    id="not_sglang",
    trouble="not_sglang",
    title="not an SGLang server",
    past="The address given to the exporter was not that of an SGLang server.",
    alert="SGLangWrongAddress",
    any_load=True,
    when=fact(
        measure=trouble("not_sglang"),
        name="1 while something else answers at its address",
        needs="metrics",
        in_log=False,
    ),
    summary="The address given to the exporter is not that of an SGLang server.",
    seen="{value}",
    sign="something answers at --sglang-url that is not SGLang",
    guide=NOT_IN_GUIDE + "nothing is watched at a wrong address",
    remedy=look(
        words="check --sglang-url: host, port and path",
        why=(
            "Something answers there, and it is not SGLang. Until the address is right, the exporter sees nothing of"
            " the server."
        ),
        not_if="SGLang is stopped and a proxy answers in its place: then start it",
    ),
    shade=1,
)


METRICS_DISABLED = hint(
    id="metrics_disabled",
    trouble="metrics_disabled",
    title="metrics disabled",
    past="SGLang ran without metrics: only its log was available.",
    after=600.0,
    any_load=True,
    when=fact(
        measure=trouble("metrics_disabled"), name="1 while it answers without metrics", needs="a sidecar", in_log=False
    ),
    summary="SGLang runs without metrics: only its log is available.",
    seen="/metrics answers 404",
    guide="start with --enable-metrics --enable-cache-report",
    remedy=Change(
        arg="enable_metrics",
        direction="add",
        words="add --enable-metrics --enable-cache-report",
        why="Latency, prefix cache hits and aborted requests are only in the metrics.",
        not_if="the release is older than 0.3.5: it has no metrics",
    ),
    shade=2,
)


LOG_SILENT = hint(
    id="log_silent",
    trouble="log_silent",
    title="log silent",
    past="SGLang's log was unreadable or had no new lines while the server worked.",
    severity="warning",
    after=120.0,
    any_load=True,
    when=fact(
        measure=trouble("log_silent"),
        name="1 while tokens are generated and no line comes",
        needs="a sidecar",
        in_log=False,
    ),
    summary="SGLang's log is unreadable or has no new lines while the server works.",
    seen="{value}",
    sign="the log cannot be read, or has no new line while the server works",
    guide=NOT_IN_GUIDE + "retractions and out-of-memory failures are only in the log",
    remedy=look(
        words="check that the file grows, that the exporter may read it, and that --log-level is info",
        why="Without the log the exporter misses out-of-memory failures and cannot count retractions.",
        not_if=(
            "the server runs with --log-level warning on purpose: then it logs retractions and failures, but no batch"
            " lines"
        ),
    ),
    shade=1,
)


SOURCES_DISAGREE = hint(
    id="sources_disagree",
    trouble="sources_disagree",
    title="sources disagree",
    past="SGLang's log and its metrics disagreed.",
    severity="warning",
    any_load=True,
    when=fact(
        measure=trouble("sources_disagree"), name="1 while log and metrics differ", needs="a sidecar", in_log=False
    ),
    summary="SGLang's log and its metrics disagree.",
    seen="KV cache size or retractions differ between log and metrics",
    guide=NOT_IN_GUIDE + "figures of two servers, or an incomplete log, lead to wrong advice",
    remedy=look(
        words="check that --log-file is the complete log of the server at --sglang-url",
        why="--log-file is another server's log, or retraction lines do not reach the file.",
        not_if="several servers write into one log: give each its own",
    ),
    shade=2,
)


FORMAT_DRIFT = hint(
    id="format_drift",
    title="format drift",
    past="SGLang logged something that this exporter did not support.",
    after=600.0,
    any_load=True,
    when=event("unreadable", name="lines that this version cannot read"),
    summary="SGLang logs something that this exporter does not support.",
    seen="{value} unknown log lines or keys",
    sign="its log or its metrics have lines or keys that this version cannot read",
    guide=NOT_IN_GUIDE + "a newer SGLang may log a figure differently",
    remedy=Change(
        direction="update",
        words="update the exporter; if that does not help, report your SGLang version",
        why="All other figures stay available; a renamed one is absent.",
        not_if="a plug-in of yours logs such lines",
    ),
    shade=1,
)
