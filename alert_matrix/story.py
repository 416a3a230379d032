"""A run as the series that Prometheus stores: the page at each scrape, with what disturbs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from alert_matrix.columns import LOADING, PLACES, RESTART, SEES_AGAIN, Run
from alert_matrix.series import Age, Counter, Gauge, Key, Page, Series, growing, key, labelled, shown
from alert_matrix.server import ABSENT, AGES, OF_RANKS, OF_THE_START, Shares, healthy, seconds
from alert_matrix.troubles import MINUTE, Trouble
from sglang_tuning_exporter.state.signals import STATES, UNKNOWN, Signal

UP: Key = ("up", ())


@dataclass(frozen=True)
class Shown:
    """One series under its labels, and when the page has it."""

    name: str
    labels: Mapping[str, str]
    series: Series | None  # None: `up`, which Prometheus writes
    begin: float = 0.0
    end: float = inf


def page(run: Run, instance: str) -> list[Shown]:
    """Give every series of a run's server under this name, the missed scrapes apart."""
    case = run.case
    own = healthy(case.profile, case.always.shares)
    for name, value in case.always.gauges.items():
        own[name] = shown(value)
    ranks = _split(own, case.ranks, case.always) if case.ranks else own
    trouble = {"present": case.present, "below": case.below}.get(run.level)
    if trouble is not None:
        _trouble(ranks, run, trouble)
    if run.restart is not None:
        _restart(ranks, run.restart)
    if run.column.disturbance == "exporter restarts":
        _begin_anew(ranks, (run.pending + RESTART, run.late + RESTART))
    return list(_labels(run, instance, ranks))


def _split(own: Page, count: int, always: Trouble) -> Page:
    """Give each rank its series, as its own part of the time says."""
    split: Page = {}
    for (name, labels), series in own.items():
        if name not in OF_RANKS:
            split[name, labels] = series
            continue
        for rank in range(count):
            split[_ranked((name, labels), rank)] = series
    for rank, signals in always.on_rank.items():
        for signal, shares in signals.items():
            for counted, share in _times(signal, shares):
                split[_ranked(counted, rank)] = growing(share, is_whole=False)
    return split


def _ranked(name: Key, rank: int) -> Key:
    return name[0], tuple(sorted([*name[1], ("dp_rank", str(rank))]))


def _trouble(own: Page, run: Run, trouble: Trouble) -> None:
    begin, end = run.begin, run.end
    spent = [(name, share) for signal, shares in trouble.shares.items() for name, share in _times(signal, shares)]
    of_ranks = [
        (_ranked(name, rank), share)
        for rank, signals in trouble.on_rank.items()
        for signal, shares in signals.items()
        for name, share in _times(signal, shares)
    ]
    for counted, share in [(each, share) for name, share in spent for each in _all(own, name)] + of_ranks:
        own[counted] = _counter(own, counted).during(begin, end, share)
    for name, rate in trouble.rates.items():
        if not _is_absent(own, name):
            own[name] = _counter(own, name).during(begin, end, rate / MINUTE)
    for name, after in trouble.jumps.items():
        moments = [begin + each for each in after if begin + each < end]
        own[name] = _counter(own, name).jumping(moments)
        if name[0] in AGES:
            own[AGES[name[0]][0], name[1]] = Age(tuple(moments))
    for name, (value, lasts, every) in trouble.again.items():
        at = begin
        while at < end:
            own[name] = _gauge(own, name).during(at, at + lasts, value)
            at += every
    active = key("diagnosis_active", diagnosis=run.case.row.id)
    # The exporter may say so just below as well: the rule has its own limit.
    for name, value in (*trouble.gauges.items(), *(((active, 1.0),) if active in own else ())):
        own[name] = _gauge(own, name).during(begin, end, value)


def _times(signal: Signal, shares: Shares) -> list[tuple[Key, float]]:
    """Give every state's counter and how fast it grows."""
    return [(seconds(signal, state), shares.get(state, 0.0)) for state in STATES[signal]]


def _all(own: Page, name: Key) -> list[Key]:
    """Give the series of this name and these labels, of one scheduler or of each rank."""
    if name in own:
        return [name]
    return [other for other in own if other[0] == name[0] and set(name[1]) < set(other[1])]


def _is_absent(own: Page, name: Key) -> bool:
    series = own.get(name)
    return isinstance(series, Gauge) and series.constant is None


def _counter(own: Page, name: Key) -> Counter:
    series = own[name]
    assert isinstance(series, Counter), name
    return series


def _gauge(own: Page, name: Key) -> Gauge:
    if name not in own and name[0] in ABSENT:
        return shown(None)
    series = own[name]
    assert isinstance(series, Gauge), name
    return series


def _restart(own: Page, at: float) -> None:
    """Let the server end, start and load: it has no requests, and its state is unknown."""
    end = at + LOADING
    for name in list(own):
        metric, labels = name
        if metric == "sglang_tuning_state_seconds_total":
            own[name] = _counter(own, name).during(at, end, float(dict(labels)["state"] == UNKNOWN))
        elif metric in OF_THE_START:
            own[name] = _gauge(own, name).during(at, end, None)
        elif isinstance(own[name], Counter):
            own[name] = _counter(own, name).during(at, end, 0.0)
    own[key("up")] = _gauge(own, key("up")).during(at, end, 0.0)
    for reason, begin, until in (("connection_refused", at, at + 20.0), ("not_ready", at + 20.0, end)):
        name = key("scrape_error_info", reason=reason)
        own[name] = (_gauge(own, name) if name in own else shown(None)).during(begin, until, 1.0)
    starts = key("server_starts_total")
    own[starts] = _counter(own, starts).jumping([at + 20.0])


def _begin_anew(own: Page, moments: tuple[float, ...]) -> None:
    for name, series in own.items():
        if isinstance(series, (Counter, Age)):
            own[name] = series.anew(moments)
        elif name[0] in {
            "sglang_tuning_stuck_stage",
            "sglang_tuning_diagnosis_active",
            "sglang_tuning_log_silent_seconds",
        }:
            for at in moments:
                again = at + (MINUTE / 2 if name[0].endswith("active") else SEES_AGAIN)
                own[name] = _gauge(own, name).during(at, again, 0.0)


def _labels(run: Run, instance: str, own: Page) -> Iterator[Shown]:
    """Add the target's labels to each series, and let ranks and a new target label appear and disappear."""
    trouble = {"present": run.case.present, "below": run.case.below}.get(run.level)
    gone = trouble is not None and trouble.is_target_gone
    for name, labels, series, begin, last in _ranks(run, own):
        end = min(last, run.begin) if gone else last
        # A job of its own, so that nothing is added up over servers.
        target = {"job": instance, "instance": instance}
        if run.column.disturbance != "target relabelled":
            yield Shown(name, {**target, **labels}, series, begin, end)
            continue
        moments = (0.0, run.pending, run.late, inf)
        for pod, (since, until) in zip("abc", pairwise(moments), strict=True):
            yield Shown(name, {**target, **labels, "pod": pod}, series, max(begin, since), min(end, until))


def _ranks(run: Run, own: Page) -> Iterator[tuple[str, dict[str, str], Series | None, float, float]]:
    yield "up", {}, None, 0.0, inf
    come_and_go = run.column.disturbance == "DP ranks come and go"
    for (name, labels), series in own.items():
        named = dict(labels)
        if not come_and_go or name not in OF_RANKS:
            yield name, named, series, 0.0, inf
        elif "dp_rank" in named:
            is_last = int(named["dp_rank"]) == run.case.ranks - 1
            yield name, named, series, 0.0, run.pending if is_last else inf
            if is_last:
                yield name, named, series, run.pending + 3 * MINUTE, inf
        else:
            yield name, named, series, 0.0, run.pending
            anew = series.anew([run.pending]) if isinstance(series, Counter) else series
            yield name, {**named, "dp_rank": "0"}, anew, run.pending, inf
            # What is counted once happens on the first rank; both spend their time alike.
            other = growing(0) if "retract" in name else anew
            yield name, {**named, "dp_rank": "1"}, other, run.pending, run.late
            yield name, {**named, "dp_rank": "1"}, other, run.late + 5 * MINUTE, inf


def stored(run: Run, every: list[Shown]) -> Iterator[tuple[str, str]]:
    """Give each series as Prometheus stores it: its name with labels, and promtool's values at a fifth of the interval."""
    for (name, labels), parts in _joined(every).items():
        yield labelled(name, dict(labels)), _values(run, parts)


def _joined(every: list[Shown]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[Shown]]:
    joined: dict[tuple[str, tuple[tuple[str, str], ...]], list[Shown]] = {}
    for each in every:
        joined.setdefault((each.name, tuple(each.labels.items())), []).append(each)
    return joined


def _values(run: Run, parts: list[Shown]) -> str:
    tokens: list[str] = []
    was_there = False
    single = parts[0] if len(parts) == 1 and parts[0].begin <= 0 and parts[0].end == inf else None
    constant = None
    if single is not None and single.series is not None and single.series.constant is not None:
        constant = _number(single.series.constant)
    for at, ended in run.scrapes:
        if ended == "none":
            tokens.append("_")
            continue
        part = single or next((each for each in parts if each.begin <= at < each.end), None)
        if part is not None and part.series is None:
            token = "1" if ended == "read" else "0"
        elif part is None or ended == "failed" or part.series is None:
            token = ""
        elif constant is not None:
            token = constant
        else:
            value = part.series.at(at)
            token = "" if value is None else _number(value)
        tokens.append(token or ("stale" if was_there else "_"))
        was_there = bool(token)
    lead = f"_x{run.place} " if run.place else ""
    return lead + f" _x{PLACES - 1} ".join(tokens)


def _number(value: float) -> str:
    return f"{value:.2f}" if value != int(value) else str(int(value))
