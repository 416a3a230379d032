"""Requests from a number of clients, each of which sends the next one when it is
answered; the same for the same seed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp

_GENERATED = re.compile(rb'"completion_tokens": ?(\d+)')
_ABORTED = re.compile(rb'"type": ?"abort"')
_FIRST_WORD, _WORDS = 3, 512  # the tiny model's vocabulary without its special tokens
_RETRY_SECONDS = 0.5  # so that a server that is away does not get a thousand requests a second
STOPPED = "stopped by its client"
REFUSED = "aborted by the server"


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a load.

    `prompt_tokens`: lengths to draw from, without the shared prefix; `new_tokens`: each request's own max_new_tokens to
    draw from, in place of `most_new_tokens`.

    With `families` each prompt begins with one of as many prefixes of `prefix_tokens`, in an order drawn by chance.
    `ignore_eos` is false because SGLang keeps all of max_new_tokens free for a request that sets it, and so never
    retracts one. `streamed` is the share of requests that stream; of these, `stopped` is the share whose client closes
    the connection in the middle of the answer. `sampling` are further sampling parameters (`n`, `json_schema`, …), of
    several answers the longest is counted, and `body` further fields of a request (`routed_dp_rank`). A client pauses
    for one of `pause_seconds` after each answer, gives up a request after `timeout_seconds`, and after the end of the
    load waits `grace_seconds` for its answer.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    clients: int
    seconds: float = 60.0
    seed: int = 1
    prompt_tokens: tuple[int, ...] = (24,)
    most_new_tokens: int = 600
    new_tokens: tuple[int, ...] = ()
    families: int = 0
    prefix_tokens: int = 0
    ignore_eos: bool = False
    streamed: float = 1.0
    stopped: float = 0.0
    pause_seconds: tuple[float, ...] = (0.0,)
    priorities: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 900.0
    grace_seconds: float = 0.0

    def request(self, number: int) -> dict[str, Any]:
        """Return the body of a request, which depends on `number` and `seed` only."""
        drawn = random.Random(f"{self.seed}/{number}")
        prompt: list[int] = []
        if self.families:
            family = drawn.randrange(self.families)
            prompt = _words(random.Random(f"{self.seed}/family {family}"), self.prefix_tokens)
        prompt += _words(drawn, drawn.choice(self.prompt_tokens))
        sampling: dict[str, Any] = {
            "max_new_tokens": drawn.choice(self.new_tokens) if self.new_tokens else self.most_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": 0.8,
        }
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {**sampling, **self.sampling},
            "stream": True,
            **self.body,
        }
        if self.streamed < 1.0:
            body["stream"] = drawn.random() < self.streamed
        if self.priorities:
            body["priority"] = drawn.choice(self.priorities)
        return body

    def stops_after(self, number: int) -> int | None:
        """Return the tokens after which the client of that request closes the connection; None where it reads to the
        end.
        """
        drawn = random.Random(f"{self.seed}/{number} stop")
        return drawn.randint(2, max(3, self.most_new_tokens // 2)) if drawn.random() < self.stopped else None

    def pause_after(self, number: int) -> float:
        """Return how long the client of that request waits before its next one."""
        return random.Random(f"{self.seed}/{number} pause").choice(self.pause_seconds)


@dataclass(slots=True)
class Record:
    """One request as its client saw it; times are unix seconds.

    `arrivals`: (time, tokens) of each chunk of the answer.
    """

    number: int
    prompt_tokens: int
    sent: float
    first: float | None = None
    ended: float | None = None  # None: not answered to its end when the load was over
    status: int | None = None
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer came."""
        return self.ended is not None and self.status == 200 and not self.error


def run(load: Load, url: str) -> list[Record]:
    """Send the load and return every request; unanswered ones are given up at the end."""
    return asyncio.run(drive(load, url))


async def drive(load: Load, url: str, records: list[Record] | None = None) -> list[Record]:
    """Send the load from a running event loop. `records`, where given, fills while the load runs."""
    seen = [] if records is None else records
    until = time.monotonic() + load.seconds
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, read_bufsize=1 << 20, trust_env=False) as session:

        async def client() -> None:
            while time.monotonic() < until:
                number = len(seen)
                body = load.request(number)
                record = Record(number, len(body["input_ids"]), time.time())
                seen.append(record)
                await _ask(session, url, body, record, load)
                refused = record.status != 200 or record.error not in {"", STOPPED}
                await asyncio.sleep(max(load.pause_after(number), _RETRY_SECONDS if refused else 0.0))

        asking = [asyncio.create_task(client()) for _ in range(load.clients)]
        if asking:
            await asyncio.wait(asking, timeout=load.seconds + load.grace_seconds)
        else:
            await asyncio.sleep(load.seconds)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return seen


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], record: Record, load: Load) -> None:
    received, timeout = 0, aiohttp.ClientTimeout(total=load.timeout_seconds)
    stops_after = load.stops_after(record.number) if body["stream"] else None
    try:
        async with session.post(f"{url}/generate", json=body, timeout=timeout) as answer:
            record.status = answer.status
            async for line in answer.content:
                found = _GENERATED.search(line)
                if found is None:
                    continue
                if _ABORTED.search(line):
                    record.error = REFUSED
                now, count = time.time(), int(found[1])
                record.first = record.first or now
                if count > received:
                    record.arrivals.append((now, count - received))
                    received = count
                if stops_after is not None and received >= stops_after:
                    record.error = STOPPED
                    break
            record.ended = time.time()
            if record.error == STOPPED:
                answer.close()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        record.error, record.ended = repr(error)[:100], time.time()


def _words(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(_FIRST_WORD, _WORDS) for _ in range(count)]
