"""How many requests clients should send at once: what the server can run, and what may wait. Pure.

As many run as fit into the KV cache, and as many may wait as SGLang starts within the allowed wait (Little's law).
"""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.evidence import Past

# Share of the longest wait that the mean wait may take, because some requests wait longer.
ALLOWED_SHARE = 0.5


def advise_more(past: Past) -> str:
    """Return how many requests keep the batches full and the queue in its range; empty if not known.

    As many run as fit at the profile's token usage, at most the running limit; no more wait than `--max-queued-
    requests`.
    """
    running, lowest, fit = past.total("running"), past.profile.queue_lower, most_running_requests(past)
    if not running or fit is None or lowest is None:
        return ""
    running *= past.facts.micro_batches
    waiting = past.serving_ranks * lowest
    most = past.facts.arg("max_queued_requests")
    if most is not None:
        waiting = min(waiting, past.serving_ranks * most)
    fit, now = _rounded_down(fit), round(running + (past.total("queued") or 0.0))
    wanted = fit + round(waiting)
    if wanted <= now:
        return ""
    return (
        f"send about {wanted:,} requests at once (now {now:,}): about {fit:,} can run,"
        f" {waiting:,.0f} more keep the queue filled"
    )


def _rounded_down(requests: float) -> int:
    """Return two significant digits, rounded down: more would change with every scrape."""
    digit = 10.0 ** max(len(f"{requests:.0f}") - 2, 0)
    return int(requests // digit * digit)


def most_running_requests(past: Past) -> float | None:
    """Return how many requests can run at once, at the profile's token usage and within the running limit."""
    running, usage, facts = past.total("running"), past.recent.mean("usage"), past.facts
    if not running or not usage:
        return None
    running *= facts.micro_batches
    fit = max(running, running * past.profile.token_usage_target / usage)
    limit = max(filter(None, map(facts.running_limit, facts.running_limits)), default=None)
    return fit if limit is None else min(fit, past.serving_ranks * facts.micro_batches * limit)


def advise_fewer(past: Past) -> str:
    """Return how many requests wait no longer than the profile allows; empty if not known."""
    running, queued, profile = past.total("running"), past.total("queued"), past.profile
    started = past.started_requests
    if running is None or not queued or past.served_seconds <= 0:
        return ""
    if profile.queue_wait_seconds is None:
        waiting, because = past.serving_ranks * profile.queue_upper, f"the queue limit is {profile.queue_upper:,.0f}"
    elif not started:
        return ""
    else:
        rate = started / past.served_seconds
        longest = profile.queue_wait_seconds
        wait = ALLOWED_SHARE * min(longest, profile.time_to_first_token_seconds or longest)
        waiting = rate * wait
        because = f"SGLang starts about {rate:.2g} requests/s, and none should wait longer than {wait:g} s"
    running *= past.facts.micro_batches
    # While requests wait, the batch is whole; the mean is below it by the moments between an end and the next start.
    wanted, now = _rounded_down(round(running)) + int(waiting), round(running + queued)
    if not 0 < wanted < now:
        return ""
    s = "s" if wanted > 1 else ""
    return f"send at most {wanted:,} request{s} at once (now about {now:,}), or add a replica: {because}"
