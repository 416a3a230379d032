"""FailedScrape SGLang has no metrics, and for how long that may be a start. Pure; `now` is on the state's clock."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sglang_tuning_exporter.sglang.args.flags import is_before
from sglang_tuning_exporter.state.lifecycle import STARTING_SECONDS
from sglang_tuning_exporter.state.server import ServerState

# A server that was never seen up, without a start in its log, may be starting for so long.
UNSEEN_SECONDS = 900.0
# Nothing answers, or a proxy in the server's place; another server may answer next time.
AWAY: frozenset[str] = frozenset({"connection_refused", "unreachable", "not_ready"})
# From this release on a page has figures before the first request.
FIRST_WITH_FIGURES = (0, 5, 0)


class Failure(Protocol):
    """A failed scrape; `str` gives a sentence."""

    @property
    def reason(self) -> str:
        """What went wrong, in one word, a label value."""

    @property
    def serves(self) -> bool:
        """Whether the server answers with an empty page."""


class FailedScrape(NamedTuple):
    """FailedScrape there are no metrics: a label value, a sentence, and whether the server may be starting."""

    reason: str
    message: str
    starting: bool = False


class Outage:
    """Explains failed scrapes from what was seen of this server before."""

    def __init__(self) -> None:
        self._since: float | None = None  # the first of the failed scrapes in a row
        self._seen_with: int | None = None  # how many starts were known when a page last came
        self._answers: bool | None = None  # without metrics, whether it answers other requests; None: it never has

    def ends(self, starts: int) -> None:
        """Note a successful scrape; `starts` are those known by now."""
        self._since, self._seen_with, self._answers = None, starts, None

    def asked(self, *, answered: bool) -> None:
        """Note whether the server answered another request than that for its metrics."""
        if answered or self._answers:
            self._answers = answered

    def explain(self, failure: Failure, state: ServerState, now: float) -> FailedScrape:
        """Return why a scrape failed."""
        self._since = now if self._since is None else self._since
        if failure.reason == "metrics_disabled":
            return self._without_metrics(failure, state, now)
        self._answers = None
        seconds = now - self._since
        if failure.serves:
            if not state.life.died and (seconds < STARTING_SECONDS or _is_empty_at_first(state)):
                return FailedScrape("not_ready", str(failure))
            return FailedScrape("invalid", f"its page has been empty for {seconds / 60:.0f} minutes")
        if failure.reason in AWAY and self._may_start(failure.reason, state, now, seconds):
            # The port opens only when the model is loaded.
            return FailedScrape("not_ready", f"{failure} (it may still be starting)", starting=True)
        if failure.reason == "not_ready":
            return FailedScrape("http_503", f"{failure}, and nothing shows that it starts")
        return FailedScrape(failure.reason, str(failure))

    def _without_metrics(self, failure: Failure, state: ServerState, now: float) -> FailedScrape:
        """Distinguish a server without --enable-metrics from a proxy that answers 404 for a server that is gone."""
        had = self._seen_with == state.starts
        gone = had or self._answers is False or state.life.died or state.life.start_is_overdue(now)
        if self._answers or not gone:
            return FailedScrape("metrics_disabled", str(failure))
        return FailedScrape(
            "http_404",
            "it answers 404" + (", and had metrics before" if had else ", as a proxy does for a server that is gone"),
        )

    def _may_start(self, reason: str, state: ServerState, now: float, seconds: float) -> bool:
        """Return whether a server that is away may be starting: its log shows a start, or nothing shows that it ever served.

        An end in the log is decisive.
        """
        if state.life.died:
            return False
        if state.life.starts(now):
            return True
        if self._seen_with is not None or state.life.has_served:
            return False
        return seconds < (STARTING_SECONDS if reason == "not_ready" else UNSEEN_SECONDS)


def _is_empty_at_first(state: ServerState) -> bool:
    """Whether the release has an empty page until its first request, which may take days."""
    release = state.facts.release
    return release is not None and is_before(release, FIRST_WITH_FIGURES)
