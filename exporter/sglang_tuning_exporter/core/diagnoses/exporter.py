"""The exporter itself, as only Prometheus sees it. The PromQL of these alerts is in the rules' template. Pure."""

from __future__ import annotations

from sglang_tuning_exporter.core.diagnoses.base import NOT_IN_GUIDE, Diagnosis, fact, limit, look

EXPORTER_DOWN = Diagnosis(
    id="exporter_down",
    title="exporter down",
    past="Prometheus could not scrape the SGLang exporter.",
    alert="SGLangTuningExporterDown",
    severity="critical",
    when=fact(name="failed scrapes", needs="Prometheus"),
    summary="Prometheus cannot scrape the SGLang exporter.",
    seen="every scrape of the exporter's /metrics failed for 5 minutes, or for 10 where few were made",
    guide=NOT_IN_GUIDE + "the exporter must be scraped before it can say anything",
    remedy=look(
        words="check whether the exporter runs and whether Prometheus reaches it; then whether SGLang answers",
        why="Alerts that fired hold for 15 minutes by the exporter's last word; no new one can fire.",
        not_if="the server was taken out of service together with its exporter: remove both from the targets",
    ),
    silences="target",
)


EXPORTER_GONE = Diagnosis(
    id="exporter_gone",
    title="exporter gone",
    past="Prometheus had no SGLang exporter left to scrape in this job.",
    alert="SGLangTuningExporterGone",
    severity="critical",
    when=fact(name="targets", needs="Prometheus"),
    summary="Prometheus has no SGLang exporter left to scrape in this job.",
    seen="the last target left while its server had requests",
    guide=NOT_IN_GUIDE + "without a target no scrape fails and no alert can fire",
    remedy=look(
        words="check whether the servers run, and what service discovery finds",
        why="A target that is gone has no series, so no other alert of these servers can fire.",
        not_if="the servers were taken out of service under load, on purpose: silence it, it ends after a day",
    ),
    scope="job",
    shade=1,
)


SCRAPED_TOO_SELDOM = Diagnosis(
    id="scraped_too_seldom",
    title="scraped too seldom",
    past="Prometheus scraped the exporter too rarely.",
    when=fact(name="scrapes in half an hour", needs="Prometheus"),
    summary="Prometheus scrapes the exporter too rarely.",
    seen="fewer than 14 scrapes in 30 minutes",
    guide=NOT_IN_GUIDE + "with more than two minutes between scrapes alerts come late, and rates have gaps",
    remedy=look(
        words="set scrape_interval of this job to 15s, at most 2m",
        why="Prometheus learns late of what the exporter decided, and takes its target for gone.",
        not_if="the interval was just changed: the alert resolves within half an hour",
    ),
    shade=2,
)


MANY_SERVERS = limit(
    id="many_servers",
    past="Many servers of one model had the same trouble.",
    alert="SGLangManyServers",
    when=fact(name="servers whose alert of one diagnosis fires", needs="Prometheus"),
    summary="Many servers of one model have the same trouble.",
    seen="an alert of one diagnosis fires for a third of a model's servers, and for at least three",
    guide=NOT_IN_GUIDE + "what many servers have in common is their load, their flags or their release",
    remedy=look(
        words="look for what they share: a change of flags, of release or of load",
        why="One message stands for all of them: their own are held back while it fires.",
        not_if="they were taken out of service on purpose",
    ),
    scope="pool",
    silences="pool and diagnosis",
)
