"""Hours of a server on eight GPUs, written line by line and scrape by scrape as SGLang 0.5.23 does, as input for the boards.

The start-up lines are those of tests/data/logs/0.5.23.log. The rest is invented, in the release's own formats: a
healthy hour, an hour with many retractions, an hour with too few clients, a server that dies. The exporter that reads it is real.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from hours import Moment

STARTED = (Path(__file__).parent / "data" / "logs" / "0.5.23.log").read_bytes().splitlines(keepends=True)[:18]
MODEL = 'engine_type="unified",model_name="meta-llama/Llama-3.1-70B-Instruct"'
RANK = f'{MODEL},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
POOL = 1_040_384
# The bounds of 0.5.23 (srt/metrics): first tokens, gaps between tokens, whole requests, time in the queue.
FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
BETWEEN = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
WHOLE = (*FIRST, 600.0, 1200.0, 1800.0, 2400.0)
QUEUED = (
    0.0,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    3.0,
    4.0,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
)


@dataclass(frozen=True)
class Load:
    """What a server is under: requests running and waiting, tokens and seconds."""

    running: float
    queued: float
    usage: float  # 0-1
    generated: float  # tokens per second
    arriving: float  # requests per second
    first: float  # seconds, typical
    between: float  # seconds, typical
    waited: float = 0.0  # seconds in the queue, typical
    cached: float = 0.35  # share of prompt tokens
    retractions: float = 0.0  # events per minute
    rejected: float = 0.0  # requests per second
    ratio: float = 0.42  # new-token ratio


HEALTHY = Load(running=214, queued=0.2, usage=0.86, generated=8900, arriving=18, first=0.35, between=0.023)
STORM = Load(
    running=330, queued=120, usage=0.985, generated=6100, arriving=13, first=5.5, between=0.052, waited=4.2,
    retractions=3.4, rejected=0.3, ratio=0.61,
)  # fmt: skip
CLIENTS = Load(running=9, queued=0, usage=0.04, generated=610, arriving=1.2, first=0.12, between=0.014)


def healthy(_minute: float) -> Load | None:
    """An hour of the same healthy load."""
    return HEALTHY


def storm(minute: float) -> Load | None:
    """Healthy for 25 minutes; then longer answers fill the KV cache, and requests are retracted until the end."""
    if minute < 25:
        return HEALTHY
    share = min(1.0, (minute - 25) / 6)
    return replace(
        STORM,
        running=HEALTHY.running + share * (STORM.running - HEALTHY.running),
        queued=HEALTHY.queued + share * (STORM.queued - HEALTHY.queued),
        usage=HEALTHY.usage + min(1.0, 3 * share) * (STORM.usage - HEALTHY.usage),
        generated=HEALTHY.generated + share * (STORM.generated - HEALTHY.generated),
        first=HEALTHY.first + share * (STORM.first - HEALTHY.first),
        between=HEALTHY.between + share * (STORM.between - HEALTHY.between),
        retractions=share * STORM.retractions,
        rejected=share * STORM.rejected if minute > 40 else 0.0,
    )


def few_clients(_minute: float) -> Load | None:
    """A server that could do fifteen times the work."""
    return CLIENTS


def dead(minute: float) -> Load | None:
    """Healthy until minute 46; then the server does not answer and logs nothing."""
    return HEALTHY if minute < 46 else None


class Server:
    """Counters and histograms of one invented server, and the lines it prints."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.buckets: dict[str, tuple[tuple[float, ...], defaultdict[float, float], list[float]]] = {
            "time_to_first_token_seconds": (FIRST, defaultdict(float), [0.0, 0.0]),
            "inter_token_latency_seconds": (BETWEEN, defaultdict(float), [0.0, 0.0]),
            "e2e_request_latency_seconds": (WHOLE, defaultdict(float), [0.0, 0.0]),
            "queue_time_seconds": (QUEUED, defaultdict(float), [0.0, 0.0]),
        }
        self.owed = 0.0

    def _see(self, name: str, typical: float, spread: float, count: float) -> None:
        bounds, filled, ends = self.buckets[name]
        whole = round(count)
        drawn = min(whole, 60)
        for place in range(drawn):
            value = typical * self.chance.lognormvariate(0, spread)
            bound = next((bound for bound in bounds if value <= bound), float("inf"))
            weight = whole // drawn + (place < whole % drawn)
            filled[bound] += weight
            ends[0] += weight
            ends[1] += value * weight

    def live(self, load: Load, seconds: float, at: float) -> bytes:
        """Let time pass under this load; what was printed meanwhile."""
        wobble = self.chance.gauss
        requests = max(0.0, load.arriving * seconds * wobble(1, 0.08))
        tokens = load.generated * seconds * wobble(1, 0.04)
        prompt = requests * 900
        passed = {
            "num_requests": requests,
            "prompt_tokens": prompt,
            "generation_tokens": tokens,
            "cached_tokens": prompt * load.cached,
            "decode_passes": seconds / load.between,
            "prefill_passes": requests / 4,
        }
        for name, count in passed.items():
            self.counts[name] += count
        self._see("time_to_first_token_seconds", load.first, 0.55, requests)
        self._see("inter_token_latency_seconds", load.between, 0.3, tokens)
        self._see("e2e_request_latency_seconds", load.first + 480 * load.between, 0.5, requests)
        self._see("queue_time_seconds", load.waited or 0.004, 0.8, requests)
        return self._lines(load, seconds, requests, prompt, at)

    def _lines(self, load: Load, seconds: float, requests: float, prompt: float, at: float) -> bytes:
        wobble = self.chance.gauss
        lines: list[tuple[float, str]] = []
        self.owed += load.retractions * seconds / 60 * self.chance.uniform(0.2, 1.8)
        while self.owed >= 1:
            self.owed -= 1
            thrown = self.chance.randint(2, 6)
            self.counts["num_retracted_requests"] += thrown
            text = (
                "KV cache pool is full. Retract requests. "
                f"#retracted_reqs: {thrown}, #new_tokens_gained: {1790 * thrown}, "
                f"#new_token_ratio: {load.ratio - 0.2:.4f} -> {load.ratio:.4f}\n"
            )
            lines += [(at - seconds / 2, f"TP{rank}] {text}") for rank in range(8)]
        for part in (0.3, 0.8):
            self.queued = max(0, round(load.queued * wobble(1, 0.15)))
            self.running = max(0, round(load.running * wobble(1, 0.03)))
            self.usage = min(0.999, load.usage * wobble(1, 0.006 if load.usage > 0.9 else 0.03))
            new = round(requests / 2)
            if new:
                lines.append(
                    (
                        at - seconds * (1.02 - part),
                        (
                            f"TP0] Prefill batch, #new-seq: {new}, #new-token: {round(prompt / 2 * (1 - load.cached))}, "
                            f"#cached-token: {round(prompt / 2 * load.cached)}, token usage: {self.usage:.2f}, "
                            f"#running-req: {self.running}, #queue-req: {self.queued}, #pending-token: {900 * self.queued}, "
                            "cuda graph: False, input throughput (token/s): 12000.00\n"
                        ),
                    )
                )
            lines.append(
                (
                    at - seconds * (1 - part),
                    (
                        f"TP0] Decode batch, #running-req: {self.running}, #token: {round(POOL * self.usage)}, "
                        f"token usage: {self.usage:.2f}, cuda graph: True, "
                        f"gen throughput (token/s): {load.generated * wobble(1, 0.03):.2f}, #queue-req: {self.queued}\n"
                    ),
                )
            )
        for _ in range(round(load.rejected * seconds)):
            port = self.chance.randint(30000, 60000)
            line = f'] INFO:     10.0.0.7:{port} - "POST /v1/chat/completions HTTP/1.1" 503 Service Unavailable\n'
            lines.append((at - seconds / 3, line))
        printed = []
        for moment, line in sorted(lines, key=lambda entry: entry[0]):
            stamp = datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            printed.append(f"[{stamp}{'' if line.startswith(']') else ' '}{line}")
        return "".join(printed).encode()

    def page(self, load: Load) -> str:
        """Give `/metrics` of this moment."""
        gauges = {
            "num_running_reqs": self.running, "num_queue_reqs": self.queued, "token_usage": self.usage,
            "full_token_usage": self.usage, "swa_token_usage": 0.0, "mamba_usage": 0.0, "gen_throughput": load.generated,
            "new_token_ratio": load.ratio, "max_total_num_tokens": POOL, "num_grammar_queue_reqs": 0,
            "num_used_tokens": round(POOL * self.usage), "startup_available_gpu_memory_gb": 9.87,
            "weight_memory_usage_gb": 16.46, "kv_cache_memory_usage_gb": 39.68,
        }  # fmt: skip
        lines = [f"sglang:{name}{{{RANK}}} {value!r}" for name, value in gauges.items()]
        for mode, name in (("decode_cuda_graph", "decode_passes"), ("prefill_none", "prefill_passes")):
            lines.append(f'sglang:cuda_graph_passes_total{{{RANK},mode="{mode}"}} {self.counts[name]:.0f}')
        lines.append(f"sglang:num_retracted_requests_total{{{RANK}}} {self.counts['num_retracted_requests']}")
        lines.append(f"sglang:num_aborted_requests_total{{{MODEL}}} {self.counts['num_aborted_requests']}")
        counted = ("num_requests", "prompt_tokens", "generation_tokens", "cached_tokens")
        lines.extend(f"sglang:{name}_total{{{MODEL}}} {self.counts[name]:.0f}" for name in counted)
        for mode, name in (("decode", "generation_tokens"), ("prefill_cache", "cached_tokens")):
            lines.append(f'sglang:realtime_tokens_total{{{RANK},mode="{mode}"}} {self.counts[name]:.0f}')
        computed = self.counts["prompt_tokens"] - self.counts["cached_tokens"]
        lines.append(f'sglang:realtime_tokens_total{{{RANK},mode="prefill_compute"}} {computed:.0f}')
        for name, (bounds, filled, ends) in self.buckets.items():
            sum_ = 0.0
            for bound in (*bounds, float("inf")):
                sum_ += filled[bound]
                le = "+Inf" if bound == float("inf") else repr(bound)
                lines.append(f'sglang:{name}_bucket{{{MODEL},le="{le}"}} {sum_:.3f}')
            lines.append(f"sglang:{name}_count{{{MODEL}}} {ends[0]:.3f}")
            lines.append(f"sglang:{name}_sum{{{MODEL}}} {ends[1]:.3f}")
        return "\n".join(lines) + "\n"


def hour(
    plan: Callable[[float], Load | None], *, end: float, minutes: float = 60.0, every: float = 5.0, seed: int = 1
) -> Iterator[Moment]:
    """Run through a plan (minute -> load, None: down) that ends at `end`, a scrape every so many seconds."""
    server = Server(seed)
    steps = int(minutes * 60 / every)
    for step in range(steps + 1):
        at = end - (steps - step) * every
        load = plan(step * every / 60)
        if load is None:
            yield Moment(at, b"", None)
            continue
        lines = b"".join(STARTED) if step == 0 else b""
        lines += server.live(load, every, at)
        yield Moment(at, lines, server.page(load))
