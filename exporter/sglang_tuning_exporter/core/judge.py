"""What limits a server over a stretch of time, and what to change. A pipeline, read top down:

measure every row -> leave out what another row explains -> rank -> advise -> word. Nothing downstream measures again. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from sglang_tuning_exporter.config.profiles import Profile
from sglang_tuning_exporter.core import measures, suspects
from sglang_tuning_exporter.core.advice import (
    advise,
    by_sglang,
    figures_of,
    fill,
    typed_settings,
    way_of,
)
from sglang_tuning_exporter.core.endings import CAUSE, CLASSES, Explanation, quoted, shortened
from sglang_tuning_exporter.core.findings import (
    URGENCY,
    Change,
    Confidence,
    Figure,
    Finding,
    Judgement,
    Severity,
    Unit,
)
from sglang_tuning_exporter.core.rows import (
    BY_ID,
    KILLS,
    OUT_OF_MEMORY,
    RETRACTING,
    ROWS,
    STATE_WORDS,
    WHY_REQUESTS_WAIT,
    Row,
)
from sglang_tuning_exporter.core.server import BUCKET_SECONDS, WAITS, Server, Totals
from sglang_tuning_exporter.core.text import amount
from sglang_tuning_exporter.core.view import View, explained
from sglang_tuning_exporter.sglang.args.refusals import objection

NO_LIMIT, IDLE, NOT_ENOUGH, STARTING = "no_limit_in_log", "idle", "not_enough_data", "starting"
HEALTHY, UNEXPLAINED, STOPPED = "healthy", "unexplained", "stopped"
SENTENCES = {
    HEALTHY: "Nothing limits this server: requests end with their answers, and none waits longer than it should.",
    UNEXPLAINED: "Most requests are given up by their clients; the cause is not known.",
    NO_LIMIT: "Nothing limits this server as far as its log shows; whether clients got their answers is not in a log.",
    IDLE: "The server is idle: no request comes.",
    STARTING: "The server is starting.",
    STOPPED: "The server was stopped: its log says that it was asked to end.",
}
BUT_MUTED = "Nothing limits this server but what is muted."
SURVIVED_SECONDS = 60.0  # of work after a failure: it did not end by it
PAST_SECONDS = 120.0  # what was not seen for so long is over
HIGH, MEDIUM = 120.0, 60.0  # seconds of serving time for this confidence
NEARLY_ALL_GIVEN_UP = 0.5  # of the requests that ended
RECOMMENDS = "sglang_recommends"
MOST_QUOTED = 2  # decisions of SGLang's, in one finding


def _is_enough(row: Row, view: View) -> bool:
    """Whether so much was seen that a row can be judged; where a flag switches graphs off, a few batches are enough."""
    if row.any_load or view.has_enough_load:
        return True
    off = row.id == "cuda_graph_off" and view.facts.without_graph == "disabled" and view.facts.knows_arguments
    return off and view.served > 0 and view.totals["lines"] >= view.profile.enough_observations


def measure(row: Row, view: View) -> Figure | None:
    """Return the figure that decides a row; None where the log does not show it, or too little was seen."""
    when = row.when
    if (row.profiles and view.profile.name not in row.profiles) or not _is_enough(row, view):
        return None
    value, limit = when.measure(view), when.bound(view)
    return None if value is None or limit is None else Figure(when.name, value, when.unit, limit, when.side)


@dataclass(frozen=True, slots=True)
class Measured:
    """Every row that holds over a view, causes first, without those that another one explains."""

    view: View
    figures: Mapping[str, Figure]  # of all rows that were measured
    holding: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The diagnosis that limits the server, or the word for why there is none."""
        limits = [row for row in self.holding if is_limit(row, self)]
        if limits:
            return min(limits, key=self.place)
        view = self.view
        if view.starting:
            return STARTING
        if view.stopped:
            return STOPPED
        if view.has_enough_load:
            if not view.scraped:
                return NO_LIMIT
            return HEALTHY if is_served(view) else NOT_ENOUGH if view.hung else UNEXPLAINED
        idle = view.idle > 0 and view.idle >= view.served and not view.busy
        return IDLE if idle and view.served < view.profile.enough_serving_seconds else NOT_ENOUGH

    @property
    def checks(self) -> Mapping[str, Figure | None]:
        """Every row of the profile with its figure; None where it was not measured."""
        name = self.view.profile.name
        return {row.id: self.figures.get(row.id) for row in ROWS if not row.profiles or name in row.profiles}

    def causes(self, row: Row) -> tuple[str, ...]:
        """Return the rows that this one can follow from, here: no failure ends a server that is only feared, or that it survived."""
        return tuple(each for each in row.causes if not (row.id in DEATHS and self._is_harmless(each, row.id)))

    def _is_harmless(self, failure: str, death: str) -> bool:
        last, counts = self.view.last, BY_ID[failure].when.counts
        if failure == "graph_memory_short":
            return not self.view.totals[counts[0]]
        failed = max((last[name] for name in counts if name in last), default=inf)
        worked = last.get({"crashed": "work before the end", "server_down": "work"}.get(death, ""), -inf)
        return failure in KILLS and worked - failed >= SURVIVED_SECONDS

    def place(self, row: str) -> tuple[bool, int, int]:
        """Return what rows are ranked by: a server that is down has its end first, beside what is not known to have ended it."""
        death = "server_down" if "server_down" in self.holding else "crashed" if self.view.has_ended else ""
        unproven = death in self.holding and row in KILLS and row not in self.causes(BY_ID[death])
        return unproven, -URGENCY[BY_ID[row].severity], _ORDER[row]


def is_served(view: View) -> bool:
    """Whether clients get their answers: requests end without being given up, or tokens are delivered while requests run."""
    share = view.given_up_share
    if view.silent_seconds or (share is not None and share > NEARLY_ALL_GIVEN_UP and not view.cancels):
        return False
    counted = "finished_requests" in view.totals
    return (
        view.totals["finished_requests"] > view.totals["aborted_requests"] or view.totals["decoded"] > 0 or not counted
    )


_ORDER = {row.id: place for place, row in enumerate(ROWS)}
DEATHS = frozenset({"crashed", "server_down", "often_down", "restart_loop"})


def weigh(view: View) -> Measured:
    """Measure every row and leave out what another one explains: all that the passing of time needs."""
    view = suspects.explained(explained(view))
    figures = {row.id: figure for row in ROWS if (figure := measure(row, view)) is not None}
    holds = {name for name, figure in figures.items() if figure.holds}
    if view.explanation is not None and view.explanation.denies_memory and "crashed" in holds:
        holds -= {*OUT_OF_MEMORY} - {"graph_memory_short"}
    if view.stopped:  # it was asked to end: everything is over
        return Measured(view, figures, ())
    left = tuple(row.id for row in ROWS if row.id in holds - view.profile.accepts and holds.isdisjoint(row.unless))
    measured = Measured(view, figures, left)
    return (
        measured
        if _is_worth_saying(measured)
        else replace(measured, holding=tuple(each for each in left if each != RECOMMENDS))
    )


def _is_worth_saying(measured: Measured) -> bool:
    """Whether what SGLang recommends at its start matters: under a load that nothing limits, it does not."""
    view, others = measured.view, [each for each in measured.holding if each != RECOMMENDS]
    if not view.has_enough_load or len(others) == len(measured.holding):
        return True
    return any(
        is_limit(each, measured) or (BY_ID[each].remedy.arg and view.facts.recommended(BY_ID[each].remedy.arg))
        for each in others
    )


def is_limit(name: str, measured: Measured) -> bool:
    """Whether a finding can be the verdict: a full KV cache only where its queue is not what the profile calls good."""
    row, view = BY_ID[name], measured.view
    waits = view.waited_share > view.profile.frequent_share
    if name == "flags_away_from_defaults":  # a flag that figures show to be the cause
        return waits and bool(suspects.proven(view))
    if name == "shared_prefixes_unused":  # prefixes are computed again and again because the cache loses them
        fine = (view.share("queue", "in_range") or 0.0) > view.profile.frequent_share
        return waits and not fine and (view.share("admission", "pool_full") or 0.0) > view.profile.frequent_share
    if row.chance:
        return False
    if name == "running_far_below_limit":
        named = bool(suspects.explaining("running_far_below_limit", view))
        below = (view.share("queue", "below_range") or 0.0) > view.profile.frequent_share
        elsewhere = (
            view.totals["elsewhere"] > view.profile.frequent_share * view.known["queue"]
        )  # of the other side of a pair
        unknown = view.known["queue"] == 0  # how long they wait is not in a log of decode lines alone
        retracts = view.totals["retractions"] > 1 and view.profile.queue_lower is None
        return named or elsewhere or unknown or retracts or (below and view.profile.queue_lower is not None)
    return True


def judge(view: View) -> Judgement:
    """Return the findings of one stretch, and what limits the server in it."""
    measured = weigh(view)
    return judgement_of(measured, findings(measured))


def judgement_of(measured: Measured, found: tuple[Finding, ...]) -> Judgement:
    """Return the judgement with these findings."""
    profile, figures = measured.view.profile, measured.figures
    return Judgement(*_verdict(measured, found), found, measured.checks, muted(profile, figures))


def muted(profile: Profile, figures: Mapping[str, Figure]) -> tuple[str, ...]:
    """Say what the user accepts and why, and whether it is so."""
    return tuple(
        f"Muted: {BY_ID[name].summary} Why: {reason}."
        + (" It is so now." if name in figures and figures[name].holds else "")
        for name, reason in profile.accepted
    )


def _verdict(measured: Measured, found: tuple[Finding, ...]) -> tuple[str, str, Severity | Literal["none"]]:
    first = next((each for each in found if each.is_limit), None)
    if first is not None:
        return first.diagnosis, first.headline, first.severity
    verdict = replace(measured, holding=()).verdict
    if verdict in {HEALTHY, NO_LIMIT} and any(
        measured.figures[name].holds for name in measured.view.profile.accepts & measured.figures.keys()
    ):
        return verdict, BUT_MUTED, "none"
    view = measured.view
    mostly = f"The server was idle most of the time: requests ran for {view.served:.0f} s."
    sentence = mostly if verdict == IDLE and view.served >= 1 and not view.scraped else SENTENCES.get(verdict)
    return verdict, said_at_once(verdict, found) or sentence or short_load(view), "none"


def said_at_once(verdict: str, found: tuple[Finding, ...]) -> str:
    """Return the fact that heads what is said of too little load; empty where there is none."""
    facts = (each.headline for each in found if BY_ID[each.diagnosis].at_once)
    return next(facts, "") if verdict == NOT_ENOUGH else ""


def short_load(view: View) -> str:
    """Say what a load too short for a verdict showed."""
    queued, usage = view.totals["most_queued"], view.totals["most_usage"]
    if view.silent_seconds:
        return f"Requests run, and no token has been sent for {view.silent_seconds:.0f} s."
    if not view.served and view.scraped:
        return "There was no load in the last ten minutes."
    if not view.totals["decode_lines"] and not view.totals["prefill_lines"]:
        words = "There is no batch line in this log"
    elif not view.served and not view.now:
        words = "Its batches have no time, so their load cannot be judged"
    else:
        served = f"{view.served:.0f} s" if view.served >= 1 else "less than 1 s"
        words = f"The load of {served} was too short for a verdict"
        if queued:
            longest = view.wait
            words += f": {f'mean wait {longest:.1f} s, ' if longest else ''}queue up to {queued:,.0f}"
        if usage >= view.profile.token_usage_target:
            words += f"{', ' if queued else ': '}the KV cache up to {100 * usage:.0f} % full"
    if retracted := view.totals["retractions"]:
        words += ", and SGLang retracted running requests " + (f"{retracted:,.0f} times" if retracted > 1 else "once")
    return words + "."


def findings(measured: Measured, also: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Advise and word what holds: causes first, chances last, no flag set two ways. `also` held at other times, and protects as well."""
    holding = frozenset(measured.holding) | also
    ordered = sorted(
        measured.holding,
        key=lambda name: (
            BY_ID[name].chance,
            not is_limit(name, measured),
            measured.place(name),
        ),
    )
    changes: dict[str, tuple[Change, ...]] = {}
    advised: dict[str, object] = {}
    found: list[Finding] = []
    for name in sorted(ordered, key=lambda each: (BY_ID[each].chance, _ORDER[each])):
        changes[name] = _changes(BY_ID[name], measured, holding, changes, advised)
    for name in ordered:
        row = BY_ID[name]
        if not changes[name] and row.needs_advice:
            continue
        because = tuple(
            each
            for each in measured.causes(row)
            if changes.get(each) or (each in changes and not BY_ID[each].needs_advice)
        )
        found.append(_worded(row, measured, changes[name], because))
    return tuple(found)


def _changes(
    row: Row,
    measured: Measured,
    holding: frozenset[str],
    earlier: Mapping[str, tuple[Change, ...]],
    advised: dict[str, object],
) -> tuple[Change, ...]:
    """Return the changes of a row: of its causes where it borrows, else its own, without what others set or protect."""
    if row.id == "server_down":  # a flag that ended it comes before the restart
        named = (tuple(change for change in earlier.get(cause, ()) if change.flag) for cause in measured.causes(row))
        return (*next(filter(None, named), ()), *_own(row, measured, holding, advised))
    if row.borrows:
        given = [(cause, earlier[cause]) for cause in row.causes if earlier.get(cause) and not BY_ID[cause].chance]
        flagged = [
            (cause, each) for cause, changes in given if (each := tuple(change for change in changes if change.flag))
        ]
        cause, taken = next(iter(flagged or given), ("", ()))
        if taken:  # where memory is short, fewer requests help as well
            return (*taken, *_own(row, measured, holding, advised)) if cause == "running_far_below_limit" else taken
        reason = _reason_of_waits(measured.view)
        if reason is not None and reason.id not in holding:
            own = tuple(change for change in _own(reason, measured, holding, advised) if change.flag)
            if own:
                return own
    return _own(row, measured, holding, advised)


def _reason_of_waits(view: View) -> Row | None:
    """Return the row of the reason for most of the time in which requests waited, though they waited too seldom for a finding of its own."""
    seconds = {reason: view.totals[f"admission/{reason}"] for reason in WAITS}
    most, waited = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    if waited < LEAST_WAITED or seconds[most] <= view.profile.frequent_share * waited:
        return None
    return next((row for row in ROWS if row.when.counts == (f"admission/{most}",)), BY_ID.get(most))


def _own(row: Row, measured: Measured, holding: frozenset[str], advised: dict[str, object]) -> tuple[Change, ...]:
    view = measured.view
    proven = suspects.explaining(row.id, view)
    instead = any(change.arg in suspects.INSTEAD for change in proven)  # while it is set, nothing else helps
    offered = proven if instead else [*proven, *advise(row, view, holding)]
    if not row.any_load:
        offered = _after_sglang(row, view, offered)
    if row.id == "flags_away_from_defaults":
        offered = suspects.beside(view)
    kept: list[Change] = []
    for change in offered:
        if change.arg and any(each.arg == change.arg for each in kept):
            continue
        is_said_again = row.borrows or change.arg == row.remedy.arg  # by a finding whose own flag it is
        if change.arg and change.arg in advised and not (is_said_again and advised[change.arg] == change.to):
            continue
        if change.arg and (_is_protected(change, holding, row) or not _is_accepted_beside(change, advised, view)):
            continue
        kept.append(change)
    if offered and not kept and not row.needs_advice:
        kept = [Change("", "", None, None, _LATER)]
    if not row.chance:
        advised.update(
            {change.arg: change.to for change in kept if change.arg and (change.to is not None or change.removes)}
        )
    return tuple(kept)


def _after_sglang(row: Row, view: View, offered: list[Change]) -> list[Change]:
    """Put what SGLang itself recommends in its start about a row's flag before the row's own change, and leave out what it contradicts.

    Where it recommends the same, ours stands: it has a value.
    """
    arg, ways = row.remedy.arg, {change.direction for change in offered if change.arg == row.remedy.arg}
    about = [said for said in view.facts.recommended(arg) if arg and way_of(said, arg) not in ways]
    says = [change for said in about for change in by_sglang(row, view, said)]
    against = {
        (each.arg, _OTHER_WAY.get(each.direction))
        for said in view.facts.recommended()
        for each in by_sglang(row, view, said)
    }
    own = [change for change in offered if (change.arg, change.direction) not in against]
    return [*says, *(change for change in own if not says or change.arg != arg)]


_OTHER_WAY = {"raise": "lower", "lower": "raise", "add": "drop", "drop": "add"}


def _is_accepted_beside(change: Change, advised: Mapping[str, object], view: View) -> bool:
    release = view.facts.release
    if release is None or (change.to is None and not change.removes):
        return True
    return objection(release, typed_settings(view), {**advised, change.arg: change.to}) is None


LEAST_WAITED = 10.0  # seconds of waiting that show what requests wait for
_LATER = "change nothing for it yet: what another finding asks for comes first"
# What a change takes: memory, or room for more requests.
_TAKES: dict[str, tuple[str, str]] = {
    "mem_fraction_static": ("raise", "memory"), "max_total_tokens": ("raise", "memory"), "chunked_prefill_size": ("raise", "memory"),
    "max_prefill_tokens": ("raise", "memory"), "cuda_graph_max_bs": ("raise", "memory"), "cuda_graph_max_bs_decode": ("raise", "memory"),
    "disable_cuda_graph": ("drop", "memory"), "disable_decode_cuda_graph": ("drop", "memory"), "enable_torch_compile": ("add", "memory"),
    "max_running_requests": ("raise", "memory and requests"), "schedule_conservativeness": ("lower", "requests"),
}  # fmt: skip


def _is_protected(change: Change, holding: frozenset[str], row: Row) -> bool:
    """Whether a finding forbids the change: after an out-of-memory failure nothing takes memory, while requests are retracted none are added."""
    direction, takes = _TAKES.get(change.arg, ("", ""))
    if change.direction != direction:
        return False
    return any(BY_ID[name].protects in takes.split(" and ") for name in holding if name != row.id)


# Words


def confidence_of(view: View) -> Confidence:
    """Return the confidence in a judgement over so much serving time."""
    return "high" if view.served >= HIGH else "medium" if view.served >= MEDIUM else "low"


def _worded(row: Row, measured: Measured, changes: tuple[Change, ...], because: tuple[str, ...]) -> Finding:
    view, figure = measured.view, measured.figures[row.id]
    figures = figures_of(view)
    explained_by = explanation_of(row.id, measured)
    said = {"crashed": _how(view.ended), "server_down": view.down, **view.troubles}.get(row.id) or _said(row, view)
    value = said or amount(figure.value, "count" if figure.unit == "per_minute" else figure.unit)
    sentence = (
        fill(row.seen, figures).replace("{value}", value).replace("{s}", "" if value in {"1", "at least one"} else "s")
    )
    if row.id == "scheduler_stuck" and view.stuck is not None:
        sentence = view.stuck.sentence
    if row.id == "crashed" and explained_by is not None and explained_by.ending != "unknown":
        sentence = f"{CLASSES[explained_by.ending].what}{f' ({explained_by.where})' if explained_by.where else ''}"
    confidence = confidence_of(view)
    notes = list(_notes(row, view))
    if row.id == "admission_too_conservative" and view.facts.may_reserve_in_full:
        confidence = "low"
        notes.append(
            "It does nothing where requests set ignore_eos, which this release reserves in full: then more memory is the cure."
            if view.facts.release else
            "It does nothing where requests set ignore_eos and the release reserves those in full (0.5.22 on): then more memory is the cure."
        )  # fmt: skip
    if row.any_load and not row.chance:
        confidence = "high"
    contradicts = any(
        change.arg == row.remedy.arg and {change.direction, row.remedy.direction} == {"raise", "lower"}
        for change in changes
    )
    evidence = (replace(figure, name=fill(figure.name, figures)), *_supporting(row, view))
    return Finding(
        row.id, row.alert, row.severity, is_limit(row.id, measured), _in_its_words(row, _headline(row, view), explained_by), sentence,
        _guide(_OPPOSITE if contradicts else fill(row.guide, figures)), confidence, evidence, changes, because, notes=tuple(notes), explained_by=explained_by,
    )  # fmt: skip


def explanation_of(row: str, measured: Measured) -> Explanation | None:
    """Return the line of the log that explains a finding about an end; None where none does, or a failure beside it has it."""
    view, said = measured.view, measured.view.explanation
    if said is None or row not in {*DEATHS, *KILLS}:
        return None
    if row == "graph_memory_short" and not view.totals["out_of_memory.graph_capture"]:
        return None  # what is left is short, and the line is about another failure
    if row in KILLS:
        return said if said.ending == ("hang" if row == "scheduler_stuck" else "memory") else None
    if any(
        explanation_of(each, measured) is not None
        for each in KILLS
        if each in measured.causes(BY_ID[row]) and each in measured.holding
    ):
        return None
    if row == "server_down":
        return view.explains_now
    return said if view.has_ended or view.totals["ends"] else None


def _in_its_words(row: Row, headline: str, said: Explanation | None) -> str:
    """Add to the headline of an end the words of the line that explains it, if that is more than that it ended."""
    if said is None or row.id not in {"crashed", "server_down"} or CLASSES[said.ending].weight < CAUSE:
        return headline
    words = said.words if said.words.endswith(("?", "!")) else said.words.rstrip(".") + "."
    return f"{headline.rstrip('.')}: {words}"


def _headline(row: Row, view: View) -> str:
    """Return the summary of a row; a server that ended while it started did not start."""
    said = view.explanation
    served = view.facts.ready or view.scraped or view.down or "work" in view.last or view.totals["retractions"]
    begun = (
        view.starting
        or view.facts.memory
        or (said is not None and (said.is_of_a_start or _IN_START.search(said.place)))
    )
    return (
        "SGLang did not start." if row.id == "crashed" and begun and not served else fill(row.summary, figures_of(view))
    )


_IN_START = re.compile(r" in (?:__init__|initialize|_?init_\w+|load_\w+|_?launch_\w+|_wait_for_\w+|main)$")  # a frame


def _said(row: Row, view: View) -> str:
    """Return what was seen, where more than the figure is known."""
    facts, totals = view.facts, view.totals
    if row.id == "kv_transfer_failing":
        failed = view.failed_transfers
        why = shortened(quoted(view.transfer.text)).rstrip(".") if view.transfer is not None else ""
        side = f" on this {view.transfer.word} server" if view.transfer is not None and view.transfer.word else ""
        rate = amount(view.per_minute(failed), "per_minute")
        return (
            f"{failed:,.0f} request{'' if failed == 1 else 's'} failed{side}{f', with: {why}' if why else ''}; {rate}"
        )
    if row.id == "no_kv_cache" and facts.no_pool is not None:
        weights, left = facts.weights_gb, facts.beside_weights_gb
        words = f"SGLang computes a KV cache of {facts.no_pool:,.0f} tokens"
        beside = f", which leaves {left:.4g} GB" if left is not None else ""
        return words + (f": the weights take {weights:.5g} GB of each GPU{beside}" if weights is not None else "")
    if row.id == "speculation_rejected":
        drafts = facts.size("speculative_num_draft_tokens") or facts.size("speculative_num_steps")
        of = f" of {drafts:g} draft tokens" if drafts else ""
        return f"accept length {totals['accepted'] / totals['accepted:n']:.2f}{of}; a step without speculation gives 1"
    if row.id == "hicache_degraded" and view.hicache is not None:
        return shortened(quoted(view.hicache.text)).rstrip(".")
    if row.id == "costly_settings":
        return " and ".join(words for *_, words in measures.costly_settings(view))
    return ""


def _how(ended: str) -> str:
    """Say how a server ended; an error is said in its own words."""
    return ended if ": " in ended else f"that {ended or 'it ended'}"


_OPPOSITE = "not in SGLang's guide, which says the opposite: here SGLang's own error names the change"


def _guide(words: str) -> str:
    return words if words.startswith(("not in", "the guide has")) else f"SGLang's tuning guide, {words}"


def _supporting(row: Row, view: View) -> list[Figure]:
    """Return the figures beside the one that decided, also those that speak against it."""
    target, facts, totals = view.profile.token_usage_target, view.facts, view.totals
    shown: list[tuple[str, float | None, Unit, float | None]] = []
    usage: tuple[str, float | None, Unit, float | None] = ("mean token usage", view.mean("usage"), "ratio", target)
    if row.id in RETRACTING:
        known = totals["usage_before:n"]
        name = f"token usage just before retractions, mean of {known:.0f} of {totals['retractions']:.0f}"
        shown = [(name, totals["usage_before"] / known, "ratio", target) if known else usage]
    elif row.id in {*WHY_REQUESTS_WAIT, "queue_too_long", "unexplained", "requests_rejected"}:
        wait = view.profile.queue_wait_seconds
        shown = [
            ("requests waiting, mean", view.sum("queued"), "count", None),
            ("mean wait in the queue", view.wait, "seconds", wait),
            usage,
        ]
    if row.id == "running_at_limit":
        shown.append(
            ("running requests, mean", view.mean("running"), "count", facts.least_limit or totals["limit_seen"] or None)
        )
    return [Figure(name, value, unit, limit) for name, value, unit, limit in shown if value is not None]


def _notes(row: Row, view: View) -> list[str]:
    totals = view.totals
    notes = []
    if row.id in RETRACTING and totals["marked.retractions"]:
        notes.append(
            f"{totals['retractions']:.0f} retractions, {totals['marked.retractions']:.0f} of them beside text that clients can write."
        )
    is_assumed = row.id == "cuda_graph_off" or (
        row.id == "cuda_graph_not_covering" and not view.totals["replayed_most"]
    )
    if is_assumed and view.facts.largest_captured is None:
        notes.append(
            "The start is not in this log: that SGLang captured up to 160 to 256, as it does by itself, is an assumption."
        )
    decided = [said for arg in {row.remedy.arg} - {""} for said in view.facts.decided(arg)]
    notes += [f"SGLang decided at its start: “{said.text.rstrip('.')}”" for said in decided[:MOST_QUOTED]]
    if row.id == "unexplained":
        shares = [
            f"{100 * share:.0f} % {words}"
            for state, words in STATE_WORDS.items()
            if (share := view.share("admission", state) or 0.0) >= 0.1
        ]
        notes.append(f"Seen: {', '.join(shares)}." if shares else "No reason was seen for most of the time.")
    return notes


def seen(row: Row, server: Server, begin: float, end: float) -> tuple[float, float] | None:
    """Return when what a row is about was first and last seen in a stretch; None where it was not."""
    buckets = [each for each in server.buckets if begin - BUCKET_SECONDS <= each[0] <= end]
    if row.id == "scheduler_stuck":
        signs = [at for at, totals in buckets if totals["watchdogs"] or totals["health_failures"]]
        spans = [(max(at, begin), min(at + BUCKET_SECONDS, end)) for at in signs]
        spans += [(each.begin, until) for each in server.hangs if (until := each.begin + each.seconds) >= begin]
        if spans:  # a hang that lines name lasts until it works again
            worked = not signs or any(totals["lines"] for at, totals in buckets if at > signs[-1])
            return min(spans)[0], max(until for _, until in spans) if worked else end
    for names in (
        row.when.counts,
        ("lines",),
    ):  # of figures of the whole, and what was explained otherwise: while it served
        times = [at for at, totals in buckets if any(totals[name] > 0 for name in names)]
        if times:
            return max(times[0], begin), min(times[-1] + BUCKET_SECONDS, end)
    return None


def timed(finding: Finding, server: Server, begin: float, end: float, *, now: float, counts: Totals) -> Finding | None:
    """Return a finding with the times at which it was seen in a stretch; None where it was not.

    One that is over by `now` is said in the past tense; `counts` are those of the stretch.
    """
    row = BY_ID[finding.diagnosis]
    times = seen(row, server, begin, end)
    if times is None:
        return None
    since, until = times
    over = "{until}" in row.past and now - until > PAST_SECONDS
    headline = finding.headline
    if over:
        past = _past(row, until, sum(counts[name] for name in row.when.counts))
        headline = _in_its_words(row, past, finding.explained_by)
    return replace(finding, headline=headline, since=since, until=until, over=over)


def _past(row: Row, until: float, number: float) -> str:
    minutes = int(until // 60) % (24 * 60)
    times = f"{number:,.0f} times" if number != 1 else "once"
    return row.past.replace("{until}", f"{minutes // 60:02}:{minutes % 60:02}").replace("{times}", times)


def past_without_figures(row: Row) -> str:
    """Return the summary of a row that is over, without a time or a count."""
    words = row.past.replace(" {times}", "").replace(", the last time at {until}", "")
    return words.replace("{until}", "a few minutes ago")


def going_on_first(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return findings with those that go on before those that are over; what can only be better stays last."""
    return tuple(sorted(found, key=lambda each: (BY_ID[each.diagnosis].chance, not each.is_limit, each.over)))
