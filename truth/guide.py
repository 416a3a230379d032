"""What SGLang's tuning guide says, statement by statement: figures of a load, and what a reader of the guide would
answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from random import Random
from typing import Any

from truth import lines
from truth.cases import Answer, Case, Checks, data
from truth.recording import ROOT, Page, Recording, read

BEGIN = 1_763_632_800.0  # 2025-11-20 10:00:00
FOLDER = ROOT / "truth" / "cases" / "guide"
NOT = {"not_verdict": "verdict", "no_finding": "finding", "never": "flag", "never_says": "says", "no_alert": "alert"}
OF_REPORT = {"says", "never_says", "status", "counts", "document"}
Given = Mapping[str, Any]


@lru_cache
def _table() -> Any:
    return data("guide.yaml")


def _merged(*parts: Given) -> dict[str, Any]:
    """Merge mappings, the later ones over the earlier, mappings within them too; a list or a word replaces."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            old = whole.get(name)
            whole[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return whole


def _moments(often: Given, minutes: float) -> list[float]:
    """Seconds of events, so many a minute: regular, at `random`, or with `gaps` between so many seconds."""
    random = Random(often.get("seed", 1))
    if gaps := often.get("gaps"):
        at = [random.uniform(*gaps) for _ in range(int(minutes) - 1)]
        return [sum(at[: n + 1]) for n in range(len(at))]
    count = round(often["a_minute"] * minutes)
    if often.get("random"):
        return sorted(random.uniform(0, minutes * 60) for _ in range(count))
    return [(n + 0.5) * minutes * 60 / count for n in range(count)]


def _traffic(at: float, release: str, rank: str, load: Given) -> Iterator[tuple[float, str]]:
    """Print decode lines of these figures and the prefill lines that replace what ends; for a share of each minute
    `part` holds.
    """
    every, prompt, chunk = load["every"], load["prompt"], load["chunk"]
    before, owed = 0, 0.0
    for step in range(int(load["minutes"] * 60 / every)):
        part = load.get("part", {"share": 0})
        now = {**load, **part} if step * every % 60 < part["share"] * 60 else load
        running, queue, throughput = now["running"], now["queue"], now.get("throughput", now["running"] * 40 / every)
        owed += throughput * every / load["answer"] + max(0, running - before)
        seqs, before = int(owed), running
        owed -= seqs
        new, cached = round(seqs * prompt * (1 - now["cached"])), round(seqs * prompt * now["cached"])
        count = now.get("batches") or -(-new // chunk)
        if now.get("batches"):  # full chunks, as many as fit between two decode lines
            new, seqs, cached = count * chunk, max(count, count * chunk // prompt), 0
        figures = {"release": release, "rank": rank, "usage": now["usage"], "queue": queue}
        for n in range(count if load["prefill"] else 0):
            mine = [whole * (n + 1) // count - whole * n // count for whole in (seqs, new, cached)]
            batch = {
                "new_seqs": max(1, mine[0]),
                "new_tokens": mine[1],
                "cached": mine[2],
                "pending_token": queue * prompt,
            }
            moment = at + every * (step + (n + 0.5) / count)
            yield moment, lines.prefill(moment, **batch, running=max(0, running - seqs), **figures)
        moment, tokens = at + every * (step + 0.99), round(now["usage"] * load["pool"])
        figures |= {"throughput": throughput, "graph": now["graph"], **now.get("fields", {})}
        yield moment, lines.decode(moment, running=running, tokens=tokens, **figures)


def recording(given: Given, release: str) -> Recording:
    """Print the server of an input."""
    if "log" in given:
        return read(FOLDER / given["log"])
    load, start, ends = dict(given["load"]), given["start"] or {}, given.get("out_of_memory", {})
    held = load["running"] * (load["prompt"] + load["answer"] / 2)
    load.setdefault("pool", round(held / max(0.01, load["usage"])))
    chunk = start.get("chunked_prefill_size", 8192)
    load.setdefault("chunk", chunk if chunk > 0 else 16384)
    serves, old = ends.get("phase") not in ("capture", "load"), release in ("0.3.0", "0.3.6", "0.4.3")
    printed: list[tuple[float, str]] = []
    if given["start"] is not False:
        first = lines.start(BEGIN, release, max_total_num_tokens=load["pool"], **start)
        begins = [n for n, line in enumerate(first) if re.search(f"{ends.get('phase')} .*begin", line, re.IGNORECASE)]
        printed = [(BEGIN, line) for line in (first if serves else first[: begins[0] + 1])]
    at, ranks, inner = BEGIN + 60, start.get("dp_size", 1), ["TP0"] * (start.get("tp_size", 1) > 1 or old)
    last = at + load["minutes"] * 60 if serves else BEGIN + 20
    for number in range(ranks if serves else 0):
        printed += _traffic(at, release, " ".join([f"DP{number}"] * (ranks > 1) + inner), load)
    often: Given = given.get("retractions") or {}
    for moment in _moments(often, load["minutes"]) if often else ():
        for rank in range(start.get("tp_size", 1)):
            name, figures = f"TP{rank}" if inner else "", {"requests": often.get("requests", 3), "ratio": 0.55}
            printed.append((at + moment, lines.retraction(at + moment, release, rank=name, **figures)))
    if ends:
        printed += [(last, line) for line in lines.out_of_memory(last, release, ends["phase"], "".join(inner))]
    for old_text, new_text in given.get("edit", {}).items():
        printed = [(moment, re.sub(old_text, new_text, line)) for moment, line in printed]
    chunks = tuple((moment, f"{line}\n".encode()) for moment, line in sorted(printed, key=lambda pair: pair[0]))
    pages = tuple(Page(BEGIN - 1, path, status) for path, status in given.get("pages", {}).items())
    return Recording(chunks, pages, BEGIN - 1, at, last + (20 if ends else 1))


def _accepts(wanted: Any, seen: Any) -> bool:
    """Tell whether a value is one of those, between `from` and `to`, or near a figure."""
    if isinstance(wanted, dict):
        return isinstance(seen, int | float) and wanted["from"] <= seen <= wanted["to"]
    if isinstance(wanted, list) and not isinstance(seen, list):
        return any(_accepts(each, seen) for each in wanted)
    if isinstance(wanted, float) and isinstance(seen, int | float):
        return abs(wanted - seen) <= max(0.005, abs(wanted) * 0.03)
    return bool(wanted == seen)


def _words(wanted: Any) -> set[str]:
    """Return the words that are right, with those that mean the same in another version of the product."""
    words = {wanted} if isinstance(wanted, str) else set(wanted)
    return words.union(*(group for group in _table()["same"] if words & set(group)))


def _spelled(flag: str, release: str, start: Any) -> set[str]:
    """Return a flag's name in that release, or all where its start, and so the release, is not in the log."""
    names: dict[str, str] = _table()["spelled"].get(flag, {})
    known = [name for since, name in names.items() if lines.RELEASES.index(since) <= lines.RELEASES.index(release)]
    return {flag, *names.values()} if start is False else {known[-1] if known else flag}


def _at(document: Any, path: str) -> Any:
    for name in path.split("."):
        steps = {str(n): each for n, each in enumerate(document)} if isinstance(document, list) else document or {}
        document = steps.get(name)
    return document


def check(expect: Given, release: str, start: Any, way: str, answers: Sequence[Answer]) -> Checks:
    """Compare the last answer with what is expected of it; what only `report` says is asked of it alone."""
    answer, text = answers[-1], re.sub(r"\s+", " ", answers[-1].text)
    alerts = {re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("SGLang")).lower() for name in answer.alerts}
    # live; an older version of the product has the second
    now = r'sglang_tuning_(?:alert|diagnosis_active)\{.*diagnosis="(\w+)"'
    alerts |= {match[1] for name, value in answer.metrics.items() if value == 1 and (match := re.match(now, name))}
    found = {finding.diagnosis for finding in answer.findings}
    sets = {"verdict": {answer.verdict}, "finding": found, "confidence": {answer.confidence}, "alert": alerts}

    def values(flag: str) -> Iterator[tuple[Any, str]]:
        yield from ((c.to, c.direction) for c in answer.changes if c.flag in _spelled(flag, release, start))

    def hits(kind: str, wanted: Any) -> list[bool]:
        if kind in sets:
            return [bool(sets[kind] & _words(wanted))]
        if kind == "flag":
            return [any(w in ("any", turn) or _accepts(w, to) for to, turn in values(f)) for f, w in wanted.items()]
        if kind == "says":
            return [bool(re.search(word, text, re.IGNORECASE)) for word in _words(wanted)]
        if kind == "status":
            return [_accepts(wanted, answer.status)]
        known = answer.counts.get if kind == "counts" else partial(_at, answer.document)
        return [_accepts(value, known(name)) for name, value in wanted.items()]

    seen = ", ".join(f"{f.diagnosis} {[(c.flag, c.now, c.to) for c in f.changes]}" for f in answer.findings)
    checks = {}
    for kind, wanted in expect.items():
        if wanted is not None and (way == "report" or kind not in OF_REPORT):
            right = not any(hits(NOT[kind], wanted)) if kind in NOT else all(hits(kind, wanted))
            checks[kind] = "" if right else f"wanted {wanted}, got {answer.verdict} ({answer.status}): {seen}"
    return checks


def cases() -> Iterator[Case]:
    """Yield a case for each input, profile and release of each statement."""
    table = _table()
    assert sorted([*table["statements"], *table["not_testable"]]) == list(range(1, 111)), "each statement, once"
    for number, statement in table["statements"].items():
        for each in statement["inputs"]:
            given = _merged(table["usual"], {k: v for k, v in statement.items() if k != "inputs"}, each)
            options = tuple(str(FOLDER / o) if o.endswith(".gz") else o for o in given.get("options", ()))
            for profile, release in product(given["profiles"], given["releases"]):
                name = f"{number} {given['name']}, {profile}, {release}"
                judge = partial(check, given["expect"], release, given["start"])
                ways = tuple(way for way in given["ways"] if way != "log" or release == given["releases"][-1])
                yield Case(name, partial(recording, given, release), judge, ways, profile, options)
