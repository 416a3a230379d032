"""A model of SGLang's scheduler: clients, a pool, a running limit, the new-token ratio, and the time that prefill and
decode take.

Made after release 0.5.23: admission reserves what running requests may still make, at a ratio that falls with each step
and jumps at a retraction; once something does not fit, it is not tried again before a request leaves.
`cases/simulated.yaml` has flags, speeds and loads.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from random import Random
from time import gmtime, strftime
from types import SimpleNamespace
from typing import Any, TypeAlias

from truth import lines
from truth.cases import data

Given: TypeAlias = Mapping[str, Any]
SETTINGS: Any = data("simulated.yaml")
READY = 1_790_000_060.0  # clients come
QUIET_SECONDS = 20.0  # how long it is watched after its load
_MOST_RESERVED, _LOG_STEPS, _PAGE_SECONDS, _LPM_MOST, _HANDED_RESERVED = 4096, 40, 5.0, 128, 512
_ANSWERED = '[%Y-%m-%d %H:%M:%S] INFO:     10.0.0.7:51234 - "POST /generate HTTP/1.1" '


class Run:
    """What a simulated server printed and counted, and what it did for each load."""

    def __init__(self, server: SimpleNamespace, spans: list[tuple[float, float]], bounds: Mapping[str, Any]) -> None:
        self.server, self.spans, self.bounds = server, spans, bounds
        self.log: list[tuple[float, bytes]] = []
        self.pages: list[tuple[float, dict[str, float]]] = []
        self.figures: Counter[Any] = Counter()  # a page's series, with the label that tells, or a histogram's bound
        self.did: list[Counter[Any]] = [Counter() for _ in [*spans, None]]  # the last one: after all loads

    def count(self, at: float, name: str, number: int) -> None:
        """Count what is done for the load of this moment."""
        self.did[sum(at >= end for _, end in self.spans)][name] += number
        self.figures[name] += number

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add to a histogram."""
        self.figures[f"{name}_sum"] += value * times  # type: ignore[assignment]
        self.figures[f"{name}_count"] += times
        if self.bounds:
            self.figures.update({f"{name} {bound}": times for bound in self.bounds[name] if value <= bound})

    def print(self, at: float, line: Callable[..., str], **figures: Any) -> None:
        """Print a line."""
        if self.bounds:
            self.log.append((at, line(at, self.server.release, **figures).encode() + b"\n"))

    def answer(self, at: float, status: str = "200 OK") -> None:
        """Answer a request."""
        self.figures[f"http_responses_total {status[:3]}"] += 1
        self.print(at, lambda *_: strftime(_ANSWERED + status, gmtime(at)))


@dataclass(slots=True, eq=False)
class _Request:
    load: int
    arrived: float
    prompt: int
    answer: int
    sent: SimpleNamespace
    family: tuple[int, int]
    queued: float
    out: int = 0  # tokens made; while it runs, less the steps of its rank
    filled: int = 0  # tokens of its own in the pool when it joined, and at which step that was
    joined: int = 0
    first: float = 0.0
    locks: int = 0  # tokens of the prefix that it holds in the cache


class _Clients:
    """Who sends what, and when."""

    def __init__(self, loads: Sequence[SimpleNamespace], seed: int) -> None:
        self.loads, self.lengths, self.chance = loads, Random(seed), Random(seed + 1)
        self.spans = list(pairwise(accumulate((load.seconds for load in loads), initial=READY)))
        self.events: list[tuple[float, int, int]] = []
        self.open = [0] * len(loads)
        for index, load in enumerate(loads):
            for time in self._times(load, *self.spans[index]):
                self._push(time, index)

    def _times(self, load: SimpleNamespace, at: float, end: float) -> Iterator[float]:
        if load.kind in {"clients", "waves"}:
            yield from (at + load.ramp * n / load.size for n in range(load.size))
        elif load.kind == "bursts":
            for burst in range(math.ceil((end - at) / load.every)):
                yield from (at + burst * load.every + self.chance.random() * load.tailed for _ in range(load.size))
        else:
            number = passed = 0.0
            while at + passed < end:
                yield at + passed
                number += self.chance.expovariate(1.0) if load.tailed else 1.0
                passed = math.sqrt(2 * number * (end - at) / load.size) if load.ramp else number / load.size

    def _push(self, at: float, index: int) -> None:
        if at < self.spans[index][1]:
            heappush(self.events, (at, index, self.open[index]))
            self.open[index] += 1

    def next(self) -> _Request:
        at, index, _ = heappop(self.events)
        load, draw = self.loads[index], self.lengths
        factors = [draw.lognormvariate(-0.25, 0.7) if load.tailed else draw.uniform(0.85, 1.15) for _ in "12"]
        prompt, answer = (max(1, round(mean * factors.pop())) for mean in (load.prompt, load.answer))
        answer, family = load.most if load.ignore_eos else min(answer, load.most), draw.randrange(load.families)
        return _Request(index, at, load.shared + prompt, answer, load, (index, family), at)

    def ended(self, index: int, at: float) -> None:
        load = self.loads[index]
        self.open[index] -= 1
        if load.kind == "clients" or (load.kind == "waves" and not self.open[index]):
            for _ in range(1 if load.kind == "clients" else load.size):
                self._push(at + load.think, index)


class _Rank:
    """The scheduler of one rank."""

    def __init__(self, name: str, clients: _Clients, run: Run) -> None:
        self.name, self.clients, self.run, self.server = name, clients, run, run.server
        self.now = self.logged = self.ended = READY
        self.queue: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.chunked: _Request | None = None
        self.full, self.rate = False, 0.0
        self.steps = self.fixed = self.owed = self.due = self.left = self.made = self.turned = self.locked = 0
        self.families: dict[tuple[int, int], list[int]] = {}  # requests that hold a prefix, when it was last used
        self.initial = self.ratio = min(0.7 * self.server.conservativeness, 1.0)

    def free(self) -> int:
        page, own = int(self.server.page), self.fixed + len(self.running) * self.steps
        if page > 1:
            own = sum(-(-(r.filled + self.steps - r.joined) // page) for r in self.running) * page
        part = -(-self.chunked.filled // page) * page if self.chunked else 0
        return int(self.server.pool) - own - part - self.locked

    def take(self, request: _Request) -> None:
        self.now = self.now if self.running or self.queue or self.chunked else max(self.now, request.arrived)
        if 0 < self.server.queue_limit <= len(self.queue):
            self.run.answer(request.arrived, "503 Service Unavailable")
            self.clients.ended(request.load, request.arrived + 1.0)
        else:
            self.queue.append(request)

    def advance(self, until: float) -> None:
        """Do one prefill, or decode until something changes."""
        while self.queue and self.queue[0].arrived + self.queue[0].sent.patience < self.now:
            self._give_up()
        admitted = not (self.left and self.running) and self._admit()
        if self.running and not admitted:
            self._decode(until)
        elif self.queue and not admitted:  # it can never fit
            self._give_up()

    def _give_up(self) -> None:
        request = self.queue.popleft()
        self.run.figures["num_aborted_requests_total"] += 1
        self.first(request, self.now)
        self.clients.ended(request.load, self.now)

    def first(self, request: _Request, at: float) -> None:
        if not request.first:
            request.first = at
            self.run.did[request.load].update({"firsts": 1, "waits": at - request.arrived})
            self.run.observe("time_to_first_token_seconds", at - request.arrived)

    def _cached(self, request: _Request) -> int:
        """Tokens of its prefix that are in the cache: those that came since may have taken their place."""
        held, last = self.families.get(request.family, (0, -math.inf))
        return int(request.sent.shared) if self.server.radix and (held or self.turned - last <= self.free()) else 0

    def _lock(self, request: _Request) -> None:
        found = self.families.setdefault(request.family, [0, 0])
        request.locks = request.sent.shared
        self.locked += 0 if found[0] else request.locks
        found[0] += 1

    def _admit(self) -> bool:
        server, running, page, chunked = self.server, self.running, self.server.page, self.chunked
        if not chunked and (not self.queue or (self.full and running) or len(running) >= server.limit):
            return False
        self.now += server.per_waiting * len(self.queue)
        if server.policy == "lpm" and len(self.queue) <= _LPM_MOST:
            self._sort()
        batch, new, hits = list[_Request](), 0, 0
        most, chunk = (math.inf if server.decode_side or n <= 0 else n for n in (server.most_prefill, server.chunk))
        ratio, owed = 1.0 if self.clients.loads[0].ignore_eos else self.ratio, self.owed - len(running) * self.steps
        free = self.free() - (_HANDED_RESERVED * len(running) if server.decode_side else owed * ratio)
        while most > 0 and chunk >= page and (chunked or self.queue) and len(running) + len(batch) < server.limit:
            request = chunked or self.queue[0]
            rest = _HANDED_RESERVED if server.decode_side else min(request.sent.most - request.out, _MOST_RESERVED)
            cached = request.locks if chunked else self._cached(request)
            extend = request.prompt + request.out - request.filled - cached
            if not chunked:
                free -= 0 if self.families.get(request.family, (0,))[0] else cached
                if extend + rest + page >= free or (chunk == math.inf and batch and extend >= most):
                    self.full = bool(batch or running) and most > extend
                    break
                self.queue.popleft()
                self.run.observe("queue_time_seconds", self.now - request.queued)
                if cached:
                    self._lock(request)
                hits += cached
            self.chunked = chunked = None
            if extend > chunk:
                extend, self.chunked = int(chunk // page * page), request
            request.filled += extend
            batch.append(request)
            free -= -(-extend // page) * page + page + (0 if self.chunked else rest)
            most, chunk, new = most - extend, 0 if self.chunked else chunk - extend, new + extend
        if batch and not server.decode_side:
            self._prefill(len(batch), new, hits)
        self._join([request for request in batch if request is not self.chunked])
        return bool(batch)

    def _sort(self) -> None:
        """Longest cached prefix first; of those that share one that is not cached, one goes ahead."""
        first = {request.family: request for request in reversed(self.queue)}
        order = sorted(self.queue, key=lambda r: -self._cached(r) or r.sent.shared * (first[r.family] is not r))
        self.queue = deque(order)

    def _prefill(self, number: int, new: int, cached: int) -> None:
        run, seconds = self.run, self.server.prefill + self.server.per_token * new
        run.figures.update({"cuda_graph_passes_total prefill_none": 1, "prefilled": new, "cached_tokens_total": cached})
        pending = sum(r.prompt + r.out - self._cached(r) for r in self.queue) if run.bounds else 0
        pending += self.chunked.prompt - self.chunked.filled - self.chunked.locks if self.chunked else 0
        run.print(self.now + seconds, lines.prefill, rank=self.name, new_seqs=number, new_tokens=new, cached=cached,
                  usage=1 - self.free() / self.server.pool, running=len(self.running), queue=len(self.queue),
                  pending_token=pending, throughput=new / seconds)  # fmt: skip
        self.now, self.left = self.now + seconds, self.server.interval

    def _join(self, batch: list[_Request]) -> None:
        for request in batch:
            if self.server.radix and request.sent.shared and not request.locks:
                self._lock(request)
                request.filled -= request.locks
            request.out, request.joined = request.out + 1 - self.steps, self.steps
            self.fixed += request.filled - self.steps
            self.owed += request.sent.most - request.out
            self.due = min(self.due, request.answer - request.out) if self.running else request.answer - request.out
            self.running.append(request)
            self.first(request, self.now)
        self.run.count(self.now, "tokens", len(batch))
        self._finish()

    def _remove(self, request: _Request) -> None:
        self.running.remove(request)
        self.fixed -= request.filled - request.joined
        self.owed -= request.sent.most - request.out
        self.turned += request.filled + self.steps - request.joined
        request.out, request.filled, self.full = request.out + self.steps, 0, False
        if request.locks:
            found = self.families[request.family]
            found[:] = found[0] - 1, self.turned
            self.locked -= 0 if found[0] else request.locks
            request.locks = 0

    def _finish(self) -> None:
        for r in [r for r in self.running if r.out + self.steps >= r.answer] if self.steps >= self.due else []:
            self._remove(r)
            self.run.answer(self.now)
            self.run.observe("e2e_request_latency_seconds", self.now - r.arrived)
            for name, tokens in (("prompt", r.prompt), ("generation", r.answer)):
                self.run.observe(f"{name}_tokens_histogram", tokens)
            self.clients.ended(r.load, self.now)
        if self.steps >= self.due:
            self.due = min((r.answer - r.out for r in self.running), default=0)

    def _needed(self, running: Sequence[_Request]) -> int:
        page, steps = int(self.server.page), self.steps
        return page * (sum(not (r.filled + steps - r.joined) % page for r in running) if page > 1 else len(running))

    def _retract(self) -> None:
        order, gone, before = sorted(self.running, key=lambda r: (-r.out, r.prompt)), list[_Request](), self.free()
        while len(order) > 1 and (not gone or self._needed(order) > self.free()):
            gone.append(order.pop())
            self._remove(gone[-1])
            gone[-1].queued = self.now
        self.ratio = min(1.0, sum(r.out + self.steps + 20 for r in order) / (sum(r.sent.most for r in order) + 1))
        self.queue += gone
        self.run.count(self.now, "num_retracted_requests_total", len(gone))
        self.run.print(self.now, lines.retraction, rank=self.name, requests=len(gone), ratio=self.ratio,
                       gained=self.free() - before)  # fmt: skip

    def _decode(self, until: float) -> None:
        server, page, run = self.server, self.server.page, self.run
        if self._needed(self.running) > self.free():
            self._retract()
        free, batch = self.free(), len(self.running)
        steps = min(self.due - self.steps, _LOG_STEPS - self.steps % _LOG_STEPS)
        steps = min(steps, free // batch if page == 1 else free // (batch * page) * page)
        eager = batch > server.graph
        each = server.step + server.per_request * batch + server.per_kv * (server.pool - free) + server.eager * eager
        if self.left:
            steps = min(steps, self.left)
        elif not self.full and until < math.inf:
            steps = min(steps, math.ceil((until - self.now) / each))
        steps = max(1, min(steps, 10) if server.ranks > 1 else steps)
        gap, self.ended = self.now - self.ended, self.now + steps * each
        self.now = self.ended
        run.figures["cuda_graph_passes_total " + ("decode_none" if eager else "decode_cuda_graph")] += steps
        run.observe("inter_token_latency_seconds", each, batch * (steps - 1))
        run.observe("inter_token_latency_seconds", each + gap, batch)
        run.count(self.now, "tokens", batch * steps)
        self.steps, self.made, self.left = self.steps + steps, self.made + batch * steps, max(0, self.left - steps)
        self.ratio = max(self.ratio - steps * self.initial * 0.86 / 600, 0.14 * self.initial)
        if self.steps % _LOG_STEPS == 0:
            self.rate = self.made / (self.now - self.logged)
            self.logged, self.made, waits, free = self.now, 0, len(self.queue), self.free()
            handed = {"prealloc": waits, "transfer": 0, "retracted": 0} if server.decode_side else {}
            run.print(self.now, lines.decode, rank=self.name, running=batch, tokens=server.pool - free,
                usage=1 - free / server.pool,
                      queue=0 if handed else waits, graph=not eager, throughput=self.rate, **handed)  # fmt: skip
        self._finish()


def simulate(server: Given, loads: Sequence[Given], seed: int = 0, bounds: Given | None = None) -> Run:
    """Run a server under loads, one after the other; with the bounds of a page's
    histograms it prints lines and pages.
    """
    flags = SimpleNamespace(**{**SETTINGS["server"], **server})
    clients = _Clients([SimpleNamespace(**{**SETTINGS["load"], **load}) for load in loads], seed)
    run = Run(flags, clients.spans, bounds or {})
    ranks = [_Rank(f"DP{n}" if flags.ranks > 1 else "", clients, run) for n in range(flags.ranks)]
    stop, number, page = run.spans[-1][1] + QUIET_SECONDS, 0, READY - _PAGE_SECONDS
    while True:
        until = clients.events[0][0] if clients.events else math.inf
        rank = min((r for r in ranks if r.running or r.queue or r.chunked), key=lambda r: r.now, default=None)
        now = min(until, rank.now if rank else math.inf, stop)
        while page <= now:
            known = {"running": len(ranks[0].running), "waiting": len(ranks[0].queue), "free": ranks[0].free()}
            run.pages.append((page, {**run.figures, **known, "ratio": ranks[0].ratio, "rate": ranks[0].rate}))
            page += _PAGE_SECONDS
        if now >= stop:
            break
        if rank is None or until <= rank.now:
            number += 1
            ranks[0 if number % 100 < 100 * flags.skew else number % len(ranks)].take(clients.next())
        else:
            rank.advance(until)
    for each, request in [(rank, request) for rank in ranks for request in rank.queue]:
        each.first(request, max(request.arrived, run.spans[-1][1]))
    return run
