"""What one scheduler is compared with, from profile and facts. Pure."""

from __future__ import annotations

from math import inf

from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL, DRAFTED_TOKENS
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.signals import ASSUMED_CAPTURED, Classifier


class Thresholds:
    """The thresholds in force; they change with the facts, at a start and hardly ever else."""

    def __init__(self, dp: int | None, profile: Profile, facts: ServerFacts) -> None:
        self.dp = dp
        self.facts = facts
        self._profile = profile
        self.revision = -1  # of the facts when the rest was computed
        self.classifier = Classifier(profile, None)
        self.interval = int(DECODE_LOG_INTERVAL)  # decode steps between two lines
        self.tokens_per_interval = DECODE_LOG_INTERVAL  # the same times the tokens that one step may give
        self.chunk: float | None = None  # the most prompt tokens of one prefill batch where prompts are chunked
        self.most: float | None = None  # the most prompt tokens of any prefill batch
        self.initial_ratio: float | None = None  # `initial_new_token_ratio` of the arguments
        self.largest_captured = ASSUMED_CAPTURED

    def use(self, facts: ServerFacts) -> None:
        """Take the facts of a new start."""
        self.facts, self.revision = facts, -1

    def renew(self) -> None:
        """Compute everything again: the facts have another `revision`."""
        facts = self.facts
        self.revision = facts.revision
        chunk = facts.arg("chunked_prefill_size")
        self.chunk = chunk if chunk is not None and chunk > 0 else None
        self.most = facts.prefill_batch_tokens
        self.initial_ratio = facts.initial_new_token_ratio
        self.largest_captured = facts.largest_captured or ASSUMED_CAPTURED
        self.interval = int(facts.decode_log_interval)
        drafted = facts.arg("speculative_num_draft_tokens") or DRAFTED_TOKENS
        self.tokens_per_interval = self.interval * (drafted if facts.args.get("speculative_algorithm") else 1.0)
        self.classifier = Classifier(
            self._profile.for_server(facts),
            facts.running_limit(self.dp),
            self.largest_captured,
            facts.without_graph,
            facts.waits_by,
        )

    def filling(self, tokens: float, running: float, joined: float) -> float:
        """Return the tokens of a prefill batch: a mixed one also has one of each running request.

        0 where it holds as many requests as one may start, and tokens did not end it: at most its last page is empty.
        """
        args = self.facts.args
        if tokens and args.get("enable_mixed_chunk"):
            tokens += running
        requests = args.get("prefill_max_requests") if tokens else None
        if isinstance(requests, int) and 0 < requests <= joined:
            page = self.facts.arg("page_size") or 1.0
            if tokens <= (self.most or inf) - page:
                return 0.0
        return tokens
