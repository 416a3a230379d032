"""What batch lines say about the KV cache of one scheduler: whether it can be full, and whether a waiting request fits. Pure."""

from __future__ import annotations

from math import ceil, inf
from typing import TypeAlias

from sglang_tuning_exporter.sglang.events import DecodeBatch, PrefillBatch
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.thresholds import Thresholds
from sglang_tuning_exporter.state.totals import Totals

# Reasons for the constants: docs/decisions.md, "Log lines that may be forged" and "Admission and load".
USAGE_ROUNDING = 0.011  # `token usage` is printed with two decimals
FULL_SHARE = 0.9
MEMORY_SECONDS = 60.0
SHARED_PREFIXES = 0.2
COARSE = 0.05
_LINES_KEPT = 16

_Lines: TypeAlias = "DecodeBatch | PrefillBatch | BatchRun"


class PoolMemory:
    """The tokens in the KV cache at the last decode line, and the prompts since.

    Lines are read when somebody asks: only a retraction does.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[_Lines, float]] = []
        self._at = 0.0
        self._tokens: float | None = None
        self._usage: float | None = None
        self._running = self._joined = 0.0
        self._vouched = False  # a doubtful retraction was accepted since the last decode line

    def see(self, lines: _Lines, now: float, *, decodes: int) -> None:
        """Add a batch line, or a run with so many decode lines."""
        if decodes:
            self._unread = [(lines, now)]
            return
        self._unread.append((lines, now))
        if len(self._unread) > _LINES_KEPT:  # a server that only computes prompts prints no decode line
            self._read()

    def forget(self) -> None:
        """Discard what is known: a line was rejected, so the tokens are unknown until the next decode line."""
        self._read()
        self._tokens = None

    def vouch(self) -> bool:
        """Accept one doubtful retraction per decode line; return whether this is the first."""
        self._read()
        was_first, self._vouched = not self._vouched, True
        return was_first

    def can_be_full(self, facts: ServerFacts, dp: int | None, now: float) -> bool:
        """Whether tokens in use, prompts since and one log interval of decoding can have filled the KV cache.

        True where that is not known.
        """
        self._read()
        pool = facts.kv_pool_tokens.get(dp)
        # Speculative decoding fills several places per step; without its arguments any server may use it.
        if self._tokens is None or not pool or not facts.args or facts.args.get("speculative_algorithm"):
            return True
        if now - self._at > MEMORY_SECONDS:
            return True
        if self._usage is None or abs(self._tokens / pool - self._usage) > USAGE_ROUNDING:
            return True  # another pool: the fuller of two, or another server's
        steps = 2 * facts.decode_log_interval
        slack = self._running * (facts.arg("page_size") or 1)
        return self._tokens + self._joined + steps * self._running + slack >= FULL_SHARE * pool

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for lines, now in unread:
            decode = lines.decode if isinstance(lines, BatchRun) else lines
            if isinstance(decode, DecodeBatch):
                self._read_decode(decode, now)
            for line in lines.joined if isinstance(lines, BatchRun) else [lines]:
                if isinstance(line, PrefillBatch):
                    self._joined += (line.new_tokens or 0) + (line.cached_tokens or 0)
                    self._running += line.new_sequences or 0

    def _read_decode(self, line: DecodeBatch, now: float) -> None:
        is_hybrid = line.swa_usage is not None or line.mamba_usage is not None
        is_transferred = "transfer" in line.queues or "prealloc" in line.queues
        self._tokens = None if is_hybrid or is_transferred or line.tokens is None else float(line.tokens)
        self._usage, self._at, self._vouched = line.full_usage, now, False
        self._running, self._joined = float(line.running or 0), 0.0


class Prompts:
    """The prompts of one scheduler: tokens that wait, and how much of the KV cache one more request needs."""

    def __init__(self, of: Thresholds, totals: Totals) -> None:
        self._of = of  # the scheduler
        self._totals = totals
        self.are_logged = False  # the log has cached and computed tokens
        self._pending: float | bytes | None = None  # bytes: as printed
        self.pending_at = -inf
        self.pending_of = 0.0  # requests that the pending tokens belong to

    @property
    def pending_tokens(self) -> float | None:
        """Tokens of prompts that wait, from the last prefill line that has them."""
        if isinstance(self._pending, bytes):
            self._pending = float(self._pending)
        return self._pending

    def wait(self, tokens: float | bytes, now: float) -> None:
        """Set the tokens that wait; `pending_of` are the requests that wait at the end of the same moment."""
        self._pending, self.pending_at = tokens, now

    def rest(self) -> None:
        """Set the tokens that wait to 0, where they are known: the server is idle."""
        self._pending = None if self._pending is None else 0.0

    def forget(self) -> None:
        """Discard the tokens that wait."""
        self._pending = None

    def next_fits(self, running: float, usage: float, target: float) -> bool | None:
        """Return whether one more request would leave the KV cache below `target`; None where its size is unknown.

        Small requests fill the cache smoothly: usage alone decides. A large one needs its prompt in whole pages and one more page
        to decode into; where few prefixes are shared, it also needs what the mean running request has.
        """
        counts, facts = self._totals.counts, self._of.facts
        pool = facts.kv_pool_tokens.get(self._of.dp) or max(facts.kv_pool_tokens.values(), default=None)
        computed, cached = counts["computed_tokens"], counts["cached_tokens"]
        shared = cached / (cached + computed) if cached else 0.0
        need = None if running <= 0 or shared > SHARED_PREFIXES else usage / (running * facts.micro_batches)
        waiting = self.pending_tokens
        if waiting and self.pending_of:
            prompt = (1.0 - shared) * waiting / self.pending_of
        else:
            prompt = computed / counts["new_sequences"] if counts["new_sequences"] else 0.0
        if pool and prompt:
            page = max(facts.arg("page_size") or 1.0, 1.0)
            need = max(need or 0.0, page * (ceil(prompt / page) + 1) / pool)
        if need is None:
            return None
        return need < COARSE or usage + need <= target
