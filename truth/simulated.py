"""Simulated servers: what limits each is found by changing its flags in the model.

A third of the sets are drawn at each run.

`python -m truth.simulated [FAMILY …]` draws the others again and keeps them, with what is right, in
`cases/simulated.yaml`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, chain, product
from random import Random
from typing import Any

from truth import lines
from truth.cases import SILENT, WAYS, Answer, Case, Checks
from truth.recording import REFUSES, ROOT, Page, Recording, timed
from truth.simulator import QUIET_SECONDS, READY, SETTINGS, Given, simulate

SEED = int(os.environ.get("TRUTH_SEED") or Random().randrange(10**6))
_CHANGES, _BEGIN = SETTINGS["changes"], READY - 60.0
_MEMORY = {"--max-total-tokens up", "--mem-fraction-static up"}
_TENTH, _CLEAR, _LATE, _TRIES = 0.1, 0.7, 2.0, 60  # a gain that counts; what part of the best is right; a late token
_SEEN, _FREQUENT = (
    600.0,
    2.0,
)  # seconds that a live answer speaks of; retractions a minute that the guide calls frequent


def _specs() -> Iterator[tuple[str, Given, int]]:
    """Give each set's name, what it is drawn from, and its number: of three, one is drawn at the run; the first is
    asked by each way.
    """
    for family, spec in SETTINGS["families"].items():
        yield from ((f"{family}/{number}", spec, number) for number in range(1, spec.get("sets", 10) + 1))
    for answer, prompt, most in product((50, 100, 200, 400), (100, 400, 1200), (512, 1024, 2048, 4096, 0)):
        sent = {"answer": answer, "prompt": prompt, "most": most or answer, "ignore_eos": not most}
        name = f"early-ends/a{answer}-p{prompt}-{f'm{most}' if most else 'full'}"
        spec = {**SETTINGS["early-ends"], "load": {**SETTINGS["early-ends"]["load"], **sent}}
        yield name, spec, 1 if answer == 200 and prompt == 400 else 2


def _draw(given: Given, chance: Random, known: Given) -> dict[str, Any]:
    """Draw the figures of a server or load; `known` are those drawn before."""
    drawn = {**known}
    for name, value in given.items():
        drawn[name], digits = value, 2 if name == "size" and given.get("kind") == "rate" else None
        if isinstance(value, list):
            figure = value[0] * (value[1] / value[0]) ** chance.random() if value[0] else value[1] * chance.random()
            drawn[name] = round(figure, 2 if isinstance(value[1], float) else None)
        elif isinstance(value, dict):
            drawn[name] = chance.choice(value["any"])
        elif found := re.fullmatch(r"x([\d.]+?)(?:\.\.([\d.]+))? (\w+)", str(value)):
            drawn[name] = round(drawn[found[3]] * chance.uniform(float(found[1]), float(found[2] or found[1])), digits)
    return {name: drawn[name] for name in given}


def _try(change: Given, server: Given, loads: Sequence[Given], seed: int, what: str) -> list[float]:
    """Return how well it goes for each load after a change, more is better; nothing where it is none, or goes the other
    way.
    """
    new = {**SETTINGS["server"], **server}
    for name, value in change.get("server", {}).items():
        old, way = new[name], change["flags"][0].rpartition(" ")[2]
        new[name] = int(new["pool"] / (loads[0]["prompt"] + loads[0]["most"])) if value == "fit" else value
        new[name] = int(old * float(value[1:])) if str(value).startswith("x") else new[name]
        if new[name] == old or (way == "up" and new[name] < old) or (way == "down" and new[name] > old):
            return []
    sent = [{**load, "size": type(load["size"])(load["size"] * change.get("size", 1))} for load in loads]
    run = simulate(new, sent, seed)
    went = list(zip(run.did, run.spans, strict=False))
    if what == "first":
        return [1 / (0.5 + did["waits"] / max(1, did["firsts"])) for did, _ in went]
    if what == "retractions":
        return [1 / (10 + 60 * did["num_retracted_requests_total"] / (end - at)) for did, (at, end) in went]
    return [max(1.0, did["tokens"]) / (end - at) for did, (at, end) in went]


def _truth(spec: Given, server: Given, loads: Sequence[Given], seed: int) -> dict[str, Any] | None:
    """Try each change; return what is right for each load, or nothing where the family's own changes are not those that
    help.
    """
    what = spec.get("measure") or ("first" if spec.get("profile") == "online" else "tokens")
    base, gains, by = _try({}, server, loads, seed, what), [dict[str, float]() for _ in loads], spec.get("by") or []
    for name in sorted(_CHANGES, key=lambda name: name not in by):
        if by and name not in by and not any(gain >= _TENTH for gained in gains for gain in gained.values()):
            return None
        for gained, old, new in zip(gains, base, _try(_CHANGES[name], server, loads, seed, what), strict=False):
            gained[name] = round(new / old - 1, 3)
    dear = {name for name, each in _CHANGES.items() if each.get("costs")} - {"pool" if server.get("capped") else ""}
    accept, right = list[list[str]](), list[set[str]]()
    for gained in gains:
        free = {name: gain for name, gain in gained.items() if name not in dear}
        counted = free if max(free.values()) >= _TENTH else gained
        best = max(counted.values())
        right.append({name for name, gain in counted.items() if gain >= max(_TENTH, _CLEAR * best)})
        near = {n for n, gain in free.items() if gain >= _TENTH / 2 and (best < 2 * _TENTH or counted is gained)}
        named = {verdict for name in right[-1] | near for verdict in _CHANGES[name]["verdicts"]}
        accept.append(sorted(named | (set(spec.get("also", [])) if right[-1] else SILENT | {"healthy"})))
    late = [what != "first" or well < 1 / (0.5 + _LATE) for well in base]
    troubles = sum(bool(each & set(by)) and bad for each, bad in zip(right, late, strict=True))
    alike = spec.get("troubles", 1) > 1 and set.intersection(*map(set, accept))
    if "by" in spec and (alike or troubles < spec.get("troubles", bool(by)) or (not by and any(right))):
        return None
    flags = [(flag, gain) for gained in gains for name, gain in gained.items() for flag in _CHANGES[name]["flags"]]
    never = {flag for flag, _ in flags} - {flag for flag, gain in flags if gain >= _TENTH / 5} - {*spec.get("open", [])}
    cures = sorted({flag for flag, gain in flags if gain >= _TENTH})
    return {"accept": accept, "never": sorted(never) if any(right) else [], "cures": cures, "gains": gains}


def _found(name: str, spec: Given, number: int, seed: int) -> dict[str, Any]:
    """Draw a set until its family's own change is among those that help most; the odd ones nearly even, the even ones
    by chance.
    """
    for attempt in range(_TRIES):
        dice = Random(f"{seed} {name} {attempt}")
        server = _draw(spec["server"], dice, {})
        given = spec.get("loads") or [spec["load"]]
        loads = [_draw({"tailed": number % 2 == 0, **load}, dice, server) for load in given]
        if truth := _truth(spec, server, loads, attempt):
            return {"server": server, "loads": loads, "seed": attempt, **truth}
    raise RuntimeError(f"{name}: none of {_TRIES} sets is limited by {spec['by']}")


@cache
def _set(name: str) -> dict[str, Any]:  # kept, or drawn now and printed
    found: dict[str, Any] = SETTINGS["fixed"].get(name)
    if not found:
        spec, number = next((spec, number) for each, spec, number in _specs() if each == name)
        found = _found(name, spec, number, SEED)
        sys.stdout.write(f"TRUTH_SEED={SEED} {name}: {json.dumps(found)}\n")
    return found


@cache
def _page() -> tuple[str, dict[str, list[float]]]:  # with names in place of figures, and the bounds of its histograms
    text, bounds = (ROOT / "truth" / "cases" / "simulated.prom").read_text(encoding="utf-8"), dict[str, list[float]]()
    for name, bound in re.findall(r"_bucket\{.*%\((\w+) (\S+)\)s", text):
        bounds.setdefault(name, []).append(float(bound))
    return text, bounds


_did: dict[
    str, tuple[float, float]
] = {}  # of each set that was run: the mean queue under load, retracted requests a minute


def _recording(name: str, cut: float) -> Recording:
    """Run a set and keep what it prints; `cut` seconds of the load, and the start, are not in the log."""
    found = _set(name)
    run = simulate(found["server"], found["loads"], found["seed"], _page()[1])
    flags, usual = run.server, SETTINGS["server"]
    away = {arg: getattr(flags, key) for key, arg in SETTINGS["arguments"].items() if getattr(flags, key) != usual[key]}
    start = lines.start(
        _BEGIN, flags.release, tp_size=1, max_total_num_tokens=flags.pool, available_gpu_mem=flags.free_gb,
        running_limit=flags.limit,
        max_running_requests=flags.limit * flags.ranks if flags.limit != usual["limit"] else None,
        disable_radix_cache=not flags.radix,
        max_total_tokens=flags.pool if flags.capped else None,
        disaggregation_mode="decode" if flags.decode_side else "null", **away,
    )  # fmt: skip
    queues = [now["waiting"] for at, now in run.pages if any(begin <= at < end for begin, end in run.spans)]
    loaded = sum(end - begin for begin, end in run.spans)
    _did[name] = sum(queues) / len(queues), 60 * run.figures["num_retracted_requests_total"] / loaded
    log = [*timed("\n".join([*start, ""]).encode(), _BEGIN), *sorted(run.log)]
    info = ast.literal_eval(next(line for line in start if "server_args=" in line).partition("server_args=")[2])
    states = [{"effective_max_running_requests_per_dp": flags.limit}]  # as real servers answer from 0.5.8 on
    text = json.dumps({**info, "version": flags.release, "max_total_num_tokens": flags.pool, "internal_states": states})
    pages = [Page(_BEGIN, "/metrics", REFUSES), *(Page(READY - 6, f"/health{end}", 200) for end in ("", "_generate"))]
    pages += [Page(READY - 6, path, 200, text) for path in ("/server_info", "/get_server_info")]
    for at, now in run.pages:
        now |= {"used": flags.pool - now["free"], "usage": 1 - now["free"] / flags.pool,
            "pages": flags.pool // flags.page,
                "handed": now["waiting"] * flags.decode_side, "active": now["running"] + now["waiting"]}  # fmt: skip
        figures = Counter({**vars(flags), **now, "queued": now["waiting"] - now["handed"]})
        pages.append(Page(at, "/metrics", 200, _page()[0] % figures))
    begin = READY + cut if cut else _BEGIN
    log = [line for line in log if line[0] >= begin]
    return Recording(tuple(log), tuple(pages), begin, READY - 6, run.spans[-1][1] + QUIET_SECONDS, tuple(run.spans))


def _check(name: str, profile: str, way: str, answers: Sequence[Answer]) -> Checks:
    """Compare with what the model shows: a report of the whole, live what is said at the end of each load of those just
    before it.
    """
    found = _set(name)
    seconds = (load.get("seconds", SETTINGS["load"]["seconds"]) for load in found["loads"])
    spoken_of = list(zip(found["accept"], [*accumulate(seconds, initial=READY)][1:], strict=True))
    several = len(spoken_of) > 1
    faults: dict[str, list[str]] = {"both named" if several else "verdict": [], "nothing false": []}
    for own, end in spoken_of:
        answer = next((each for each in reversed(answers) if each.at <= end), answers[-1])
        accepted = [accept for accept, to in spoken_of if way == "report" or end - _SEEN < to <= end]
        wrong, false = _faults(name, profile, accepted, answer)
        named = SILENT & {*own} or {answer.verdict, *(each.diagnosis for each in answer.findings)} & {*own}
        unnamed = "" if named else f"nothing of {own}"
        for check, fault in zip(faults, (unnamed if several else wrong, false), strict=True):
            faults[check].append(fault)
    return {check: "; ".join(dict.fromkeys(filter(None, each))) for check, each in faults.items()}


def _faults(name: str, profile: str, accepted: Sequence[Sequence[str]], answer: Answer) -> tuple[str, str]:
    """Return what is wrong with a verdict, and what is false: a verdict that is no silence, or under a trouble a change
    that helps nothing.
    """
    found, (queue, retracted) = _set(name), _did[name]
    heard = {answer.verdict, *(each.diagnosis for each in answer.findings)}
    right, never = {*chain(*accepted)}, () if all(SILENT & {*each} for each in accepted) else found["never"]
    # Where nothing but memory helps and the queue is within the guide's range, the guide calls it good, and memory is a
    # chance.
    if (
        {*found["cures"]} <= _MEMORY
        and profile == "offline"
        and 100 <= queue <= 2000
        and "running_far_below_limit" in heard & right
    ):
        right |= {"healthy", "no_limit_in_log"}
    # The guide: about one retraction a minute is fine, and more of them ask for a higher conservativeness, whatever it
    # brings here.
    if retracted > _FREQUENT:
        right |= {"retracting_too_often"}
    elif right <= {"retracting_too_often"} and retracted <= 1:
        right |= {"healthy", "no_limit_in_log"} | (
            {"running_far_below_limit"} if {*found["cures"]} >= _MEMORY else set()
        )
    wrong = "" if answer.verdict in right else f"{answer.verdict}, not {' or '.join(sorted(right))}"
    first = next((f"{c.flag} {c.direction}" for each in answer.findings[:1] for c in each.changes[:1]), "")
    allowed = SILENT | set(SETTINGS["families"].get(name.rpartition("/")[0], {}).get("beside", []))
    if first in never and not (retracted > _FREQUENT and first == "--schedule-conservativeness up"):
        return wrong, f"{first}: {found['gains']}"
    return wrong, "" if answer.verdict in allowed else wrong


def cases() -> Iterator[Case]:
    """Give each set, those that are drawn at the run under `drawn/`; the first one of a family by each way in."""
    for name, spec, number in _specs():
        ways = WAYS if number == 1 and "cut" not in spec and "ranks" not in spec["server"] else ("report",)
        profile = spec.get("profile", "offline")
        recording = partial(_recording, name, spec.get("cut", 0.0))
        shown = name if name in SETTINGS["fixed"] else f"drawn/{name}"
        yield Case(shown, recording, partial(_check, name, profile), ways, profile)


def main() -> None:
    """Draw and keep the sets of the named families, or of all."""
    path = ROOT / "truth" / "cases" / "simulated.yaml"
    for name, spec, number in _specs():
        if number % 3 and name.startswith(tuple(sys.argv[1:]) or ""):
            SETTINGS["fixed"][name] = _found(name, spec, number, 0)
            sys.stdout.write(f"{name}: {SETTINGS['fixed'][name]['accept']}\n")
            head = path.read_text(encoding="utf-8").partition("\nfixed:")[0]
            kept = ((each, SETTINGS["fixed"].get(each)) for each, *_ in _specs())
            rows = "".join(f"  {each}: {json.dumps(found)}\n" for each, found in kept if found)
            path.write_text(f"{head}\nfixed:\n{rows}", encoding="utf-8")


if __name__ == "__main__":
    main()
