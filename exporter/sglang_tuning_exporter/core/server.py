"""A server over time: events in, seconds in each state and counts out. Pure; times are unix seconds.

Everything is added up in buckets of ten seconds, so any stretch of time is a sum of buckets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import ClassVar

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core.account import Account
from sglang_tuning_exporter.core.counters import Counters, RankGains
from sglang_tuning_exporter.core.events import CAUSE, COUNTED_KINDS, ENDINGS, Event, Rank, says_why
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.ledger import COUNTED_BY_PAGE, REQUESTS, RETRACTED, Ledger
from sglang_tuning_exporter.core.progress import CHECK_GAP_SECONDS, CHECK_SECONDS, Hang, Progress
from sglang_tuning_exporter.core.reasons import STUCK_SECONDS
from sglang_tuning_exporter.core.scheduler import LOGGED_SECONDS, Scheduler, Silence
from sglang_tuning_exporter.core.shown import Shown
from sglang_tuning_exporter.core.sums import LATENCIES_JUDGED, LIVENESS, PAGE_SUMS, Sums, Totals
from sglang_tuning_exporter.sglang.flags import are_same_settings
from sglang_tuning_exporter.sglang.metrics import Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo

QUEUE_FULL = 0.5  # of --max-queued-requests: gauges are older than the rejections
SURVIVED_SECONDS = 60.0  # of work after a failure: it did not end by it
WORKS_ON_SECONDS = 30.0  # after a line that says it is about to end, or an exception: then it did not end by it
COVERAGE_SECONDS = 600.0  # over which the share of the batches with a graph is shown
CHECK_APART_SECONDS = 5.0  # between two health checks: closer ones are several clients' of one moment
MOST_SILENCES = 64  # that are noted
MANY_RUNNING = 8  # a silence that began with so many is worth a note
MOST_STARTS = 64  # whose times are kept
MOST_SCHEDULERS = 384  # DP ranks; those of a larger server are not taken
REPEAT_SECONDS = 10.0  # within which other ranks print the same event
MOST_REPEATED = 4096  # events that other ranks may print, such as failed transfers
ENDS = {
    "process_died": "one of its processes died",
    "scheduler_exception": "an exception ended its scheduler",
    "launch_failed": "its start failed",
    "aborted": "one of its processes was aborted",
}
_LIVENESS_OF = {"hang": "watchdog_timeout", "health": "health_check_failed", "aborted": "process_died"}


class Server:
    """One server: facts since its start, its schedulers, buckets, and what happened."""

    def __init__(self, profile: profiles.Profile, late: float = 0.0) -> None:
        self.base = profile
        self.profile = profile
        self.late = late  # seconds that lines may come after the second that they print: until then it is not counted
        self.facts = Facts()
        self.schedulers: dict[int | None, Scheduler] = {}
        self._sums = Sums()
        self.last = self._sums.last  # when something happened last
        self._lives: dict[int | None, Totals] = {}  # counts of each scheduler since the beginning, by `life`
        self.absent: set[int | None] = set()  # of these, schedulers that are not there now: nothing of them is shown
        self.capped: Counter[str] = Counter()  # what was dropped because there is too much of it
        self.unexplained: float | None = None  # a failure for want of memory whose phase may still be printed
        self.begin: float | None = None  # the first and the last time
        self.now: float | None = None
        self.starts = 0
        self.starting = False  # arguments were printed, and nothing served yet
        self.stopping = False  # it was asked to end
        self.ended = ""  # how it ended, in words, while it has not started again
        self.how_ended = ""  # the last end
        self.explanation: Event | None = None  # the line that may explain an end, while it did not work on
        self.end_explanation: Event | None = None  # that of the last end
        self._failures = Totals()  # ends, and failures by which a server ends, since it was ready last
        self.hangs: list[Hang] = []
        self.silences: list[Hang] = []
        self.started_at: deque[float] = deque(maxlen=MOST_STARTS)  # those in a row with the same arguments
        self._after_a_stop: deque[float] = deque(maxlen=MOST_STARTS)  # starts after an end that was asked for
        self._settings: Mapping[str, object] = {}  # the arguments of the last start that shows some, as printed
        self._repeated: dict[tuple[float | str | None, ...], tuple[float, Counter[Rank]]] = {}
        self._failed: dict[str, float] = {}
        self._failing_beside = 0.0  # requests that ran while health checks have failed
        self.counters = Counters()
        self._was_away = False  # nothing answered since the last page
        self.progress = Progress()
        self.ledger = Ledger()  # of what log and pages both count
        self.transfer: Event | None = None  # the last failed one whose line says why, else the last
        self.hicache: Event | None = None  # what its host or storage cache could not do, at last
        self._is_one_of_some = False  # the last failed one was a warning about "some requests"

    @property
    def objectives(self) -> Mapping[str, float | None]:
        """The profile's objective for each latency that is judged."""
        return {name: getattr(self.profile, f"{name}_seconds") for name in LATENCIES_JUDGED}

    @property
    def page(self) -> Scrape | None:
        """The last page of its metrics."""
        return self.counters.page

    @property
    def buckets(self) -> deque[tuple[float, Totals]]:
        """Sums of ten seconds each, with their first second."""
        self._sums.settle()
        return self._sums.buckets

    @property
    def totals(self) -> Totals:
        """Sums of this start, without the last bucket."""
        return self._sums.of_start

    @property
    def counted(self) -> Totals:
        """Sums since the beginning: they never fall."""
        self._sums.settle()
        return self._sums.counted

    @property
    def by_page(self) -> set[str]:
        """What pages count of schedulers, so that lines need not."""
        return self._sums.by_page

    @property
    def lives(self) -> dict[int | None, Totals]:
        """Sums of each scheduler since the beginning, as `life` returns them."""
        self._sums.settle()
        return self._lives

    def take_info(self, answer: ServerInfo) -> None:
        """Take an answer of `/server_info`."""
        if not self.facts.knows_arguments:
            self._note_settings(answer.args)
        self.facts.take_info(answer)

    def take_page(self, page: Scrape, now: float) -> None:
        """Take a page of the server's own metrics."""
        counters = self.counters
        self._sums.settle()  # lines before it count, whatever this page counts
        self.now = now = now if self.now is None else max(self.now, now)
        self.begin = now if self.begin is None else self.begin
        longest = self.facts.size("max_queued_requests")
        queues = (*(rank.queued for rank in page.ranks), *(shown.queued for shown in self._all_shown()))
        full = longest is not None and max(filter(None, queues), default=0.0) >= QUEUE_FULL * longest
        follows = counters.page is None and counters.whole is not None  # the first page since the exporter before
        # A start that the log shows, or that nothing answered before, makes smaller counters certain.
        counters.take(page, queue_is_full=full, is_new=self.ledger.log_is_ahead or self._was_away)
        if counters.restarted:
            if self.ledger.start_of_pages(now):
                self._take_start(Event("arguments", now, arguments={}), now)
        elif counters.are_used:
            self.ledger.same_start()
        if not page.counters_invalid:
            self._was_away = False
        if counters.is_set_aside:
            self.capped["pages"] += 1
        else:
            self._take_figures(page, now, follows=follows)

    def _take_figures(self, page: Scrape, now: float, *, follows: bool) -> None:
        """Take the figures of a page that a server can have. `follows`: the exporter before took the page before it."""
        counters = self.counters
        self.facts.take_page(page)
        self._count_gains(page, now, follows=follows)
        for rank in counters.ranks:
            scheduler = self._scheduler(rank.figures.dp)
            gains = self._complete(rank)
            if follows:
                gains = self._count_gap(gains)
            if scheduler is not None:
                scheduler.take_page(gains, rank.gained, now)
        self._leave_out(page, now)
        self.progress = Progress() if counters.restarted else self.progress
        self.progress.take_page(
            page, counters, logged_steps=self._sums.take_logged_steps(),
            speculates=self.facts.is_on("speculative_algorithm"),
            interval=self.facts.size("stream_interval") or 0.0, now=now,
        )  # fmt: skip
        if counters.moved:
            self.last["work"] = now
            self._work_on(now)
        if self.starting or (self.ended and counters.moved):
            self._come_back(now)
        if self.ended or self.starting:
            self.ended, self.starting = "", False

    def _count_gains(self, page: Scrape, now: float, *, follows: bool) -> None:
        """Count what the whole server gained. What is counted is there from the first page on, as 0.

        follows: the gains are those of a time without an exporter, longer perhaps than any window: they are no part of
        one.
        """
        bucket = Totals() if follows else self.bucket(now)
        counts, counted = self.counters.counts, self._sums.counted
        for name in PAGE_SUMS:
            if getattr(page, name, None) is not None:
                counted[name] += 0.0  # it is counted from here on
        if page.answered_requests is not None:
            counted["rejected_requests"] += 0.0
        for name in PAGE_SUMS:
            if (gained := counts.get(name)) is None:
                continue
            more = self.ledger.gain(name, gained, now) if name in COUNTED_BY_PAGE and gained > 0 else gained
            bucket[name] += more
            counted[name] += max(more, 0.0)
            if more > 0 and not follows:
                self.last[name] = now
        for rank in self.counters.ranks:
            self.ledger.gain(RETRACTED, rank.gained.get(RETRACTED, 0.0), now, rank.figures.dp)
        self.ledger.gain(REQUESTS, counts.get("generation_posts", counts.get(REQUESTS, 0.0)), now)
        self._count_latencies(page, bucket)

    def _count_gap(self, gains: RankGains) -> RankGains:
        """Count what a scheduler did while there was no exporter; return its figures without it."""
        life = self.life(gains.figures.dp)
        for name in ("computed_tokens", "cached_tokens", "replayed_batches", "eager_batches"):
            if name in gains.gained:
                life[name] += gains.gained[name]
        return replace(gains, gained={})

    def _count_latencies(self, page: Scrape, bucket: Totals) -> None:
        for name, histogram in self.counters.latencies.items():
            for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
                bucket[f"{name}/{bound:g}"] += count
            bucket[f"{name}:s"] += histogram.seconds or 0.0
        for name, objective in self.objectives.items():
            if getattr(page, name) is not None:
                seen = self.counters.latencies.get(name)
                self._sums.counted[f"latency_observations.{name}"] += 0.0 if seen is None else seen.observations
                self._sums.counted[f"latency_breaches.{name}"] += (
                    0.0 if seen is None or objective is None else seen.above(objective)
                )

    def counts_by_now(self) -> Totals:
        """Return what was counted, with a failure whose phase may still be printed as one of an unknown phase."""
        counted = Totals(self.counted)  # with the lines of the present moment
        if self.unexplained is not None:
            counted["out_of_memory.unknown"] += 1
        return counted

    @property
    def running_limit(self) -> float | None:
        """How many requests may run at once, of all schedulers together; None where unknown."""
        limits = [limit for dp in self.schedulers if (limit := self.facts.limit(dp)) is not None]
        return sum(limits) if limits else None

    def life(self, dp: int | None) -> Totals:
        """Return what a scheduler did since the beginning, restarts of SGLang and of this program included.

        No sum falls.

        | name | |
        |---|---|
        | `retraction_events` | of the log |
        | `retracted_requests` | of the log or of the server's counter |
        | `computed_tokens` `cached_tokens` | of the server's counter, else of the log; absent until one shows some |
        | `replayed_batches` `eager_batches` | all where the server counts them, else those of the log's decode lines |
        | `SIGNAL/STATE` | seconds in each state of `STATES`, in `idle` and in `unknown` |
        """
        lives = self.lives
        life = lives.get(dp)
        if life is None:
            life, gone = Totals(), self.absent & lives.keys()
            if len(lives) > MOST_SCHEDULERS and gone:  # its place is for one that is there
                del lives[gone.pop()]
            if len(lives) <= MOST_SCHEDULERS:
                lives[dp] = life
        return life

    def _scheduler(self, dp: int | None) -> Scheduler | None:
        """Return a scheduler; None for one too many."""
        scheduler = self.schedulers.get(dp)
        if scheduler is None:
            if len(self.schedulers) >= MOST_SCHEDULERS:
                self.capped["dp_ranks"] += 1
                return None
            account = Account(dp, self._sums, self.life(dp))
            scheduler = self.schedulers[dp] = Scheduler(
                dp, facts=self.facts, profile=self.profile, account=account, peers=self.schedulers
            )
            self.absent.discard(dp)
        return scheduler

    def _all_shown(self) -> Iterator[Shown]:
        """Yield what each scheduler shows."""
        return (scheduler.shown for scheduler in self.schedulers.values())

    def _leave_out(self, page: Scrape, now: float) -> None:
        """Drop schedulers that are not on the page: those that only pages showed.

        If the page names its DP ranks, ranks of the log go, too.
        """
        present, names_ranks = {rank.dp for rank in page.ranks}, any(rank.dp is not None for rank in page.ranks)
        for dp in self.schedulers.keys() - present:
            logged_at = self.schedulers[dp].logged_at
            if logged_at == -inf or (names_ranks and dp is not None and now - logged_at > LOGGED_SECONDS):
                del self.schedulers[dp]
                self.absent.add(dp)

    def lose(self, now: float) -> None:
        """Note that nothing answers: what the last scrape showed holds no longer."""
        self._stop(now, rest=True)
        self._was_away = True
        self.progress = Progress()

    def count_by_log(self) -> None:
        """Count by the log from now on: pages count nothing any more."""
        self._sums.settle()
        self._sums.by_page.clear()

    @contextmanager
    def uncounted(self, now: float) -> Iterator[None]:
        """Count nothing of the lines that are taken within, nor of the time up to `now`."""
        ledger, self.ledger = self.ledger, Ledger()
        counted, lives = Totals(self.counted), {dp: Totals(life) for dp, life in self.lives.items()}
        yield
        self.advance(now)
        self.unexplained, self.ledger = None, ledger
        _restore(self.counted, counted)
        for dp, life in self.lives.items():
            _restore(life, lives.get(dp, Totals()))

    def count_retracted(self, requests: float, now: float, dp: int | None = None) -> None:
        """Count retracted requests of a scheduler that only a counter shows."""
        bucket = self.bucket(now)
        for name in ("retraction_events", "retracted_requests"):
            bucket[name] += requests
        self._sums.counted["retracted_requests"] += requests
        self.life(dp)["retracted_requests"] += requests
        self.last["retraction_events"] = now

    def forget(self, before: float) -> None:
        """Drop the sums from before a time."""
        self._sums.forget(before)
        if len(self.hangs) > MOST_STARTS:
            del self.hangs[:-MOST_STARTS]

    def _complete(self, rank: RankGains) -> RankGains:
        """Return the gains of a server's only scheduler, completed by counts of the whole server.

        Older releases count tokens only there, when requests end.
        """
        if len(self.counters.ranks) > 1 or "computed_tokens" in rank.gained:
            return rank
        counts = self.counters.counts
        names = (("finished_answer_tokens", "decoded_tokens"), ("started_requests", "admitted_requests"))
        cached = counts.get("finished_cached_tokens", 0.0)
        computed = max(counts.get("finished_prompt_tokens", 0.0) - cached, 0.0)
        whole = {"computed_tokens": computed, "cached_tokens": cached}
        whole |= {name: counts[count] for count, name in names if count in counts}
        return replace(rank, gained={**whole, **rank.gained})

    def bucket(self, now: float) -> Totals:
        """Return the sums of ten seconds."""
        return self._sums.at(now)

    def window(self, seconds: float, now: float | None = None) -> Totals:
        """Return the sums of the last `seconds` up to `now`, by default the present."""
        return self._sums.window(seconds, (self.now or 0.0) if now is None else now)

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        self.now = now if self.now is None else max(self.now, now)
        for scheduler in self.schedulers.values():
            scheduler.advance(self.now - self.late)
        if self.unexplained is not None and self.now - self._failed.get("unknown", self.unexplained) > REPEAT_SECONDS:
            self.unexplained = None
            self._sums.counted["out_of_memory.unknown"] += 1

    def take_line(self, event: Event) -> None:
        """Take a line, at the time of the last one where it has none."""
        now = self._time_of(event)
        if event.kind in _BATCHES:
            self._take_batch(event, now)
            return
        self._count_liveness(event, now)
        take = self._LINES.get(event.kind)
        if take is not None:
            take(self, event, now)
        elif event.kind in COUNTED_KINDS and not self.is_repeated(event, now):
            self._take_counted(event, now)
        else:
            self._take_fact(event)
            if event.kind == "ready" and not self.starting:
                self._come_back(now)

    def _count_liveness(self, event: Event, now: float) -> None:
        """Count an event in the life of the server once: several processes or lines say it."""
        name = event.word if event.kind == "end" else event.kind
        name = _LIVENESS_OF.get(name, name)
        if name in LIVENESS:
            name = f"liveness_events.{name}"
            self._sums.counted[name] += now - self.last.get(name, -inf) > REPEAT_SECONDS
            self.last[name] = now

    def _take_counted(self, event: Event, now: float) -> None:
        """Count an event of a kind that is only counted."""
        self.count(event.kind, now, event)
        if event.kind == "hicache":
            self.hicache = event
        self.facts.take_line(event)

    def _take_fact(self, event: Event) -> None:
        """Take what SGLang prints at its start only; beside text of others, no setting of a running server changes."""
        if event.marked and not self.starting and "work" in self.last:
            return
        self.facts.take_line(event)
        self.starting = self.starting and event.kind != "ready"

    def _take_logged_start(self, event: Event, now: float) -> None:
        """Take a start that the log shows; pages may have shown it before."""
        if self.ledger.start_of_log(now if event.time is None else event.time):
            self._take_start(event, now)
        else:
            self._take_arguments(event)
            self.starting = True  # until the next page, or the line that it is ready

    def _take_draining(self, event: Event, now: float) -> None:
        self.stopping = True
        if event.figures.get("remaining") == 0:  # the figures of the last batch line are over
            self._stop(now, rest=True)
            for scheduler in self.schedulers.values():
                scheduler.shown.note_empty()

    def _take_watchdog(self, event: Event, now: float) -> None:
        self.count("watchdogs", now, event)
        if seconds := event.figures.get("seconds"):
            self.hung(Hang(now - seconds, seconds, 0.0, 0.0), now)

    def _take_rejected(self, event: Event, now: float) -> None:
        self.count("rejected_requests", now, event)

    def _take_pause(self, event: Event, now: float) -> None:
        self.last[event.kind] = now

    def _take_server_error(self, event: Event, now: float) -> None:
        self.count("server_errors", now, event)

    def _take_refused(self, event: Event, now: float) -> None:
        self.count("refused", now, event)
        self.bucket(now)["refused_for_grammar"] += event.figures.get("grammar", 0.0)

    def _take_too_long(self, event: Event, now: float) -> None:
        """Count a prompt that is longer than the KV cache, or than the context."""
        longest = (self.facts.context or inf) - 8
        is_beyond = event.word == "context" or event.figures.get("most", 0.0) >= longest
        name = "beyond_context" if is_beyond else "too_long"
        self.count(name, now, event)
        self.bucket(now)[f"{name}_tokens"] += event.figures.get("tokens", 0.0)

    def _time_of(self, event: Event) -> float:
        """Return when a line is, at most so many seconds before the last one, and let the present be that at least."""
        time, last = event.time, self.now
        if time is None:
            now = 0.0 if last is None else last
        else:
            if self.begin is None:
                self.begin = time
            now = time if last is None or time >= last - self.late else last - self.late
        if last is None or now > last:
            self.now = now
        return now

    def count(self, name: str, now: float, event: Event, number: float = 1.0) -> None:
        """Count what happened, and what of it is marked."""
        if name in COUNTED_BY_PAGE:
            number = self.ledger.show(name, number, now)
        bucket = self.bucket(now)
        bucket[name] += number
        if event.marked:
            bucket[f"marked.{name}"] += number
        self.last[name] = now
        if name in _ENDING or name.startswith("out_of_memory."):
            self._failures[name] += number
        if name == "out_of_memory.unknown":
            self.unexplained = now
        else:
            self._sums.counted[name] += number

    def _work_on(self, now: float) -> None:
        """Note work: whoever works on long after it was asked to end, or after an exception, has not ended by it."""
        if now - self.last.get("liveness_events.draining", -inf) > WORKS_ON_SECONDS:
            self.stopping = False
        if now - self.last.get("words", -inf) > WORKS_ON_SECONDS:
            self.explanation = None

    def _take_batch(self, event: Event, now: float) -> None:
        dp = event.rank.dp
        scheduler = self.schedulers.get(dp) or self._scheduler(dp)
        if scheduler is None or scheduler.repeats(event):
            return
        self.last["work"] = now
        if self.stopping or self.explanation is not None:
            self._work_on(now)
        if self.ended or self.starting:
            self.ended, self.starting = "", event.kind != "decode" and self.starting and not self.facts.ready
            self._come_back(now)
            self.advance(now)
        if not self.facts.arguments:  # the form of the lines shows the guide's edition
            is_later = not event.figures.keys().isdisjoint({"graph", "pending"})
            if is_later or event.kind == "decode":
                self.facts.first_form = not is_later
            if self.facts.is_first_edition != (self.profile is not self.base):
                self._choose_profile()
        silence = scheduler.take_batch(event, now)
        if silence is not None:
            self._note_silence(silence, now)

    def _choose_profile(self) -> None:
        """Judge by the guide's edition for this server."""
        self.profile = self.base.for_server(is_first_edition=self.facts.is_first_edition, role=self.facts.role)
        for scheduler in self.schedulers.values():
            scheduler.profile = self.profile

    def _note_silence(self, silence: Silence, now: float) -> None:
        """Note a silence that nothing explains: a hang, or one of many requests that are gone."""
        hang = silence.hang
        broke_off = max(self.last.get(name, -inf) for name in ("server_starts", "pause", "ends"))
        if self.stopping or broke_off > hang.begin:
            return
        if silence.is_hang:
            self.hung(hang, now)
        elif hang.before >= MANY_RUNNING and len(self.silences) < MOST_SILENCES:
            self.silences.append(hang)

    def _take_retraction(self, event: Event, now: float) -> None:
        figures = event.figures
        if figures.get("testing") or self.is_repeated(event, now):
            return
        scheduler = self._retracts(event)
        if scheduler is not None:
            scheduler.take_retraction(event, now)
        life = self.life(scheduler.dp if scheduler is not None else event.rank.dp)
        at = now if event.time is None else event.time
        requests = self.ledger.show(RETRACTED, figures.get("requests", 0.0), at, event.rank.dp)
        self.count("retraction_events", now, event)
        self.count(RETRACTED, now, event, requests)
        life["retraction_events"] += 1
        life["retracted_requests"] += requests
        if "ratio_after" in figures:
            self.bucket(now).observe("ratio_after", figures["ratio_after"])

    def _retracts(self, event: Event) -> Scheduler | None:
        """Return the scheduler of a retraction; None where it is not known."""
        only = next(iter(self.schedulers.values())) if len(self.schedulers) == 1 else None
        return self.schedulers.get(event.rank.dp) or only

    def with_moment(self, event: Event) -> Event:
        """Return a retraction that is to wait, with the usage of this moment."""
        scheduler = self._retracts(event)
        usage = None if scheduler is None else scheduler.shown.usage
        return event if usage is None else replace(event, figures={"usage": usage, **event.figures})

    def is_repeated(self, event: Event, now: float) -> bool:
        """Whether another rank has printed this event: the n-th line of a rank is the n-th line of any other.

        An event of one request has one line.
        """
        room = event.figures.get("room")
        key = (
            (event.kind, event.rank.dp, *(event.figures.get(name) for name in _ALIKE))
            if room is None
            else (event.kind, room)
        )
        last, lines = self._repeated.pop(key, (now, Counter[Rank]()))
        if now - last > REPEAT_SECONDS and room is None:
            lines = Counter[Rank]()
        before = max(lines.values(), default=0)
        lines[event.rank] += 1
        self._repeated[key] = (now, lines)
        if len(self._repeated) > MOST_REPEATED:
            self._repeated.pop(next(iter(self._repeated)))
        return lines[event.rank] <= before or (room is not None and before > 0)

    def _take_out_of_memory(self, event: Event, now: float) -> None:
        """Count a failure once, though each rank and the parent process log and raise it.

        Not every one of these lines has its phase.
        """
        recent = {phase for phase, at in self._failed.items() if now - at <= REPEAT_SECONDS}
        phase = event.word or "unknown"
        self.bucket(now).most("failed_batch", max((shown.running or 0.0 for shown in self._all_shown()), default=0.0))
        if held := event.figures.get("held_elsewhere_gb"):
            self.bucket(now).most("held_elsewhere_gb", held)
        if phase == "unknown" and recent - {phase}:
            return
        self._failed[phase] = now
        if phase in recent:
            return
        if "unknown" in recent:
            del self._failed["unknown"]
            if self.unexplained is not None:
                self.bucket(self.unexplained)["out_of_memory.unknown"] -= 1
                self._failures["out_of_memory.unknown"] -= 1
            self.unexplained = None
        self.end_explanation = self.explanation
        self.count(f"out_of_memory.{phase}", now, event)

    def _take_end(self, event: Event, now: float) -> None:
        if self.stopping and event.word in {"process_died", "aborted"}:
            return  # how processes end that were asked to is no crash
        if not self.ended:
            self.count("ends", now, event)
            self.last["work_before_the_end"] = self.last.get("work", -inf)
        self.ended = self.how_ended = event.text or self.ended or ENDS.get(event.word, event.word)
        self.end_explanation = self.explanation
        self._stop(now)

    def settle(self) -> None:
        """Take the last line of a log as an end, if it explains one and nothing worked on after it."""
        said = self.explanation
        if said is None or self.ended or not said.is_sure or said.word == "hang" or said.ending.weight < CAUSE:
            return
        if self._failed and not said.denies_memory:
            return  # the failure is the finding
        if self.last.get("work", -inf) <= (inf if said.time is None else said.time):
            self._take_end(Event("end", said.time, word="aborted", marked=said.marked), self.now or 0.0)

    def _take_words(self, event: Event, now: float) -> None:
        """Take a line that may explain an end: before it, or after its first line."""
        said = replace(event, time=now, word=event.word if event.word in ENDINGS else "unknown")
        self.last["words"] = now
        if self.explanation is None or said.explains_better(self.explanation):
            self.explanation = said
            if self.ended or any(now - at <= REPEAT_SECONDS for at in self._failed.values()):
                self.end_explanation = said

    def _take_transfer(self, event: Event, now: float) -> None:
        """Count once a request whose KV cache did not arrive, though every rank prints it.

        A warning that names no request may stand beside it.
        """
        self.explain_transfer(event, now)
        room, last = event.figures.get("room"), self.last.get("failed_transfers", -inf)
        if "attempt" in event.figures or self.is_repeated(event, now):
            return
        if now - last > REPEAT_SECONDS or (room is not None and not self._is_one_of_some):
            self.count("failed_transfers", now, event)
        self._is_one_of_some = room is None

    def explain_transfer(self, event: Event, now: float) -> None:
        """Note why a transfer failed; that of another rank is none."""
        known = self.transfer
        is_old = known is None or now - (known.time or now) > REPEAT_SECONDS
        if known is None or says_why(event.text) or (is_old and not says_why(known.text)):
            self.transfer = event

    def _take_arguments(self, event: Event) -> None:
        """Begin the facts of a start, and judge by its edition and role."""
        self._note_settings(event.arguments)
        self.facts = Facts(version=self.facts.version)
        self.facts.take_line(event)
        for scheduler in self.schedulers.values():
            scheduler.facts = self.facts
        self._choose_profile()

    def _take_start(self, event: Event, now: float) -> None:
        self.advance(now)
        self._stop(now)
        self.starts += 1
        self.count("server_starts", now, event)
        if self.stopping:
            self._after_a_stop.append(now)
        self.started_at.append(now)
        self.schedulers = {}
        self._take_arguments(event)
        self._failed.clear()
        self._sums.begin_start()
        self.starting, self.stopping, self.ended, self.explanation = True, False, "", None
        self.transfer = self.hicache = None

    @property
    def outage(self) -> Totals:
        """The failures since it last worked for long, or was ready."""
        worked = self.last.get("work", -inf)
        return Totals(
            {name: number for name, number in self._failures.items() if worked - self.last[name] < SURVIVED_SECONDS}
        )

    def _come_back(self, now: float) -> None:
        """Note that it answers after a start or an end."""
        self.last["back"] = now
        self._failures.clear()

    def _note_settings(self, arguments: Mapping[str, object]) -> None:
        """Note the arguments of the last start; other ones than those before begin a new row of starts."""
        if arguments and not are_same_settings(self._settings, arguments):
            while len(self.started_at) > 1:
                self.started_at.popleft()
        self._settings = arguments or self._settings

    def alike_starts(self, since: float) -> float:
        """Return how many starts in a row had the same arguments; one that somebody asked for alone is not counted."""
        recent = [at for at in self.started_at if at >= since]
        asked = sum(at in self._after_a_stop for at in recent[1:])
        return float(len(recent) - (asked == 1))

    def _stop(self, now: float, *, rest: bool = False) -> None:
        """Let no scheduler's figures hold any longer; `rest`: they are over, too."""
        for scheduler in self.schedulers.values():
            scheduler.stop(now, rest=rest)

    def _take_failed_check(self, event: Event, now: float) -> None:
        """Count a failed health check if pages show that nothing is sent, else once two have failed in a row.

        A long prefill fails checks, too, and passes: beside batch lines checks must fail for a minute.
        """
        at, since = now if event.time is None else event.time, self.progress.failing_since
        before = self.progress.failed_at
        self.progress.check(at, answered=False)
        if self.progress.failing_since != since:
            self._failing_beside = 0.0
        if "silent" not in event.figures or self.last.get("pause", -inf) > self.last.get("resume", -inf):
            return
        since = self.progress.failing_since or at
        running = max(self._failing_beside, sum(shown.running or 0.0 for shown in self._all_shown()))
        self._failing_beside = running
        if self._is_unanswered(event.figures["silent"], at, before) or (
            running and (self.page is not None or at - since >= STUCK_SECONDS)
        ):
            self.count("health_failures", now, event)
            begin = at - event.figures["silent"]  # the last token
            if self.page is not None:  # an idle server sends nothing either
                begin = min(max(begin, since - CHECK_GAP_SECONDS), since)
            self.hung(Hang(begin, at - begin, running, running), now)

    def _is_unanswered(self, silent: float, at: float, before: float) -> bool:
        """Whether two health checks in a row got no token, and no batch line shows work meanwhile.

        SGLang asks itself for a token, so an idle server answers. `before`: when the check before failed.
        """
        in_row = CHECK_APART_SECONDS <= at - before <= CHECK_GAP_SECONDS and silent > at - before + CHECK_SECONDS / 2
        return in_row and self.page is None and self.last.get("work", -inf) < before - CHECK_SECONDS

    # What is done with a line, by its kind. A kind that is in no table is about a start (`core/facts`).
    _LINES: ClassVar[Mapping[str, Callable[[Server, Event, float], None]]] = {
        "retraction": _take_retraction,
        "out_of_memory": _take_out_of_memory,
        "arguments": _take_logged_start,
        "end": _take_end,
        "words": _take_words,
        "draining": _take_draining,
        "hang": _take_watchdog,
        "transfer": _take_transfer,
        "rejected": _take_rejected,
        "pause": _take_pause,
        "resume": _take_pause,
        "server_error": _take_server_error,
        "refused": _take_refused,
        "too_long": _take_too_long,
        "health": _take_failed_check,
    }

    # Hangs

    def hangs_on(self, hang: Hang, now: float) -> None:
        """Lengthen the last hang: pages show that it goes on."""
        if self.hangs and self.hangs[-1].until >= hang.begin:
            self.hung(hang._replace(before=self.hangs[-1].before, after=self.hangs[-1].after), now)

    def hung(self, hang: Hang, now: float) -> None:
        """Note a hang; several schedulers have the same, and each failed health check shows it longer."""
        if self.hangs and self.hangs[-1].until >= hang.begin:
            last = self.hangs.pop()
            begin = min(last.begin, hang.begin)
            hang = Hang(begin, max(last.until, hang.until) - begin, last.before, hang.after)
        self.hangs.append(hang)
        self.bucket(now)["hangs"] += 1
        self.last["hangs"] = now


def _restore(sums: Totals, before: Totals) -> None:
    sums.clear()
    sums.update(before)


_ENDING = frozenset({"ends", "no_pool"})
_BATCHES = frozenset({"decode", "prefill"})
_ALIKE = ("requests", "aborted", "gained", "ratio_before", "ratio_after")
