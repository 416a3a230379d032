"""Wrong advice that the loops showed, and what was changed for it; written on the page. Data."""

from __future__ import annotations

MENDED: tuple[tuple[str, str], ...] = (
    (
        "The advice to send more or fewer requests had no number.",
        "It now has one: what fits into the KV cache plus the smallest healthy queue, or what starts within the allowed wait.",
    ),
    (
        "One command line raised admission and lowered the running limit.",
        (
            "With steps longer than the objective and free KV cache, `--schedule-conservativeness` 0.3 and a lower `--max-running-requests` were"
            " advised together. Conservativeness is no longer lowered while the running requests make steps too long."
        ),
    ),
    (
        "The advice on conservativeness went in a circle.",
        (
            "At 1.3, with free KV cache and a queue, 0.3 was advised; at 0.3 a burst of retractions led to 1.3 again, which is faster where requests"
            " use most of their max_new_tokens. How much they ask for and use is now computed from the balance at which SGLang stops admitting, and 0.3"
            " is advised only where answers end early."
        ),
    ),
    (
        "Larger chunks were advised for prompts of 24 tokens.",
        (
            "Late first tokens at the end of a queue were attributed to long prompts. Larger chunks are no longer advised where hardly a prompt"
            " fills a chunk."
        ),
    ),
    (
        "Fewer requests at once were advised for three retractions in 750 requests a minute.",
        (
            "`--max-running-requests` 9 instead of 13 running requests lowered throughput from 434 to 370 tokens per CPU second. It is now advised only"
            " where at least every second request is retracted; otherwise a larger KV cache is."
        ),
    ),
    (
        "Fewer requests at once were advised for four retractions per request.",
        (
            "8 instead of 11 lowered retractions from 365 to 39 a minute, but throughput from 1,866 to 1,682 tokens per CPU second; p99 latency rose"
            " from 17 to 23 s, time to first token from 2.6 to 6.7 s. Prompts of 24 tokens are cheap to compute again. Now a larger KV cache is advised,"
            " first by `--max-total-tokens` where that flag limits it, and fewer requests at once only for long prompts."
        ),
    ),
    (
        "An alert fired with the advice to change nothing.",
        (
            "A server at conservativeness 1.3 with three retractions in 750 requests had a finding and an alert. With fewer than one retraction in"
            " twenty requests and the flag where the guide wants it, there is no finding now."
        ),
    ),
    (
        "A server killed before its first token was reported as loading its model.",
        (
            "A 0.4.9 server was still compiling its first batch, so its log showed neither ready nor a token, and no alert fired. It had answered by"
            " then, and its port opens only after the model is loaded. A server that has answered now counts as started."
        ),
    ),
    (
        "The advice went in a circle: 0.3 for free KV cache, 1.3 for the retractions that followed, 0.3 again.",
        (
            "What requests ask for was estimated from the present new-token ratio with usage and batch of ten minutes: after a start it was three times"
            " too large. All three are now means of the same time. And where 0.3 was set on advice, which mentions a few retractions, fewer than one"
            " retraction in twenty requests is no reason to raise it: 0.3 gave 1,136 tokens per CPU second with 2.7 retractions a minute, 1.3 gave"
            " 1,088 with none."
        ),
    ),
    (
        "The advice to ask for fewer max_new_tokens had no number.",
        (
            "SGLang's histogram of answer lengths shows what 99 % of them need. The number is given once the longest answers had time to end; clients that"
            " ask for little more get no advice."
        ),
    ),
    (
        "A log that was copied and truncated lost one line in three hundred.",
        "Lines between the last read and the truncation are in the copy only. The copy is now found by its text and read to its end.",
    ),
    (
        "Larger chunks were advised to a server that may start one request at a time.",
        (
            "With `--prefill-max-requests 1` and `--prefill-decode-interval 16`, 4 of 32 requests ran in an almost empty KV cache. Short prompts that"
            " nearly filled a small chunk counted as full batches; after the larger chunk, clients were asked to send less. A batch now counts as full"
            " only if its token limit ended it, and where requests wait with free KV cache, both flags come first."
        ),
    ),
    (
        "Clients were asked to send fewer requests and more requests at once.",
        (
            "Bursts were rejected by `--max-queued-requests 6` while nothing else waited. Now only the queue limit is advised, clients are not called slow"
            " while they are rejected, and are asked for no more than may wait."
        ),
    ),
    (
        "A flag without a default was advised without a value.",
        "The advice to start without `--prefill-max-requests` showed the flag alone. It is now removed from the command line.",
    ),
    (
        "The advice on conservativeness went in a circle through another rule.",
        (
            "1.3 was advised against retractions, then named as a flag away from its default because requests waited, and at 1.0 requests were retracted"
            " again. It is now named only above the guide's 1.3, and only without retractions. Requests waited for `--max-total-tokens 5000`: 1,380 tokens"
            " per CPU second with it, 2,265 without. That flag is now named also where the KV cache that seems free is reserved for requests that will"
            " use it."
        ),
    ),
    (
        "A server at its running limit got no advice while a third of its KV cache was empty space in pages.",
        "`--page-size` is now named where usage prevents a higher running limit.",
    ),
    (
        "A server that held requests back was called healthy: 28 to 37 queued at a token usage of 0.3 to 0.5.",
        (
            "Whether SGLang could be reserving the free KV cache was judged by means over ten minutes, quiet ones included, and as if it admitted at"
            " every step. The means are now those of the time in which requests were held back, and SGLang admits only when a running request has ended:"
            " up to two requests' room is free then."
        ),
    ),
    (
        "An idle server with health checks had no capacity ratio.",
        "Half a second of prefill without decoding made the ratio unknown, and a fleet scaler stopped. It is 0 now.",
    ),
)
