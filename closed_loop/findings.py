"""What the loops showed to be wrong in the diagnoses and their sizes, and what was changed for it: told on the page. Data."""

from __future__ import annotations

MENDED: tuple[tuple[str, str], ...] = (
    (
        "Clients were told to send more or fewer requests, not how many.",
        (
            "The finding now names a number: what fits into the pool and the queue's healthy least, or what is started within the wait"
            " that is allowed."
        ),
    ),
    (
        "One command line let more requests in and fewer run.",
        (
            "With steps longer than the objective and room in the pool, `--schedule-conservativeness` 0.3 and a lower"
            " `--max-running-requests` stood side by side. No more are let in now while those that run make each step too long."
        ),
    ),
    (
        "Conservativeness went round and round.",
        (
            "At 1.3, with room in the pool and a queue, 0.3 was advised; at 0.3 a burst of retractions, and 1.3 again, which is the"
            " faster of the two where requests use much of the max_new_tokens they ask for. What they ask for and use is now read off the"
            " balance at which SGLang stops admitting, and 0.3 is advised only where they end early."
        ),
    ),
    (
        "Larger chunks were advised for prompts of 24 tokens.",
        (
            "First tokens that came late behind the last of a queue were put down to long prompts. Where hardly a prompt fills a chunk,"
            " no larger one is advised any more."
        ),
    ),
    (
        "Fewer requests at once were advised for three retractions among 750 requests a minute.",
        (
            "`--max-running-requests` 9 in place of 13 that ran took the rate from 434 to 370 tokens a second of the scheduler's CPU. It is advised"
            " only where at least every second request is taken back; else a larger pool is."
        ),
    ),
    (
        "Fewer requests at once were advised for four retractions of each request.",
        (
            "8 in place of 11 took them from 365 to 39 a minute, and the rate from 1,866 to 1,682 tokens a second of the scheduler's CPU, the p99 latency"
            " from 17 to 23 s, the first token from 2.6 to 6.7 s: prompts of 24 tokens are cheap to compute again. Now the pool is enlarged, first by"
            " `--max-total-tokens` where that flag alone keeps it small, and fewer at once are advised for long prompts only."
        ),
    ),
    (
        "People were called to be told to leave it as it is.",
        (
            "A server at conservativeness 1.3 that took back three requests in 750 still had its finding and its alert, with the advice to leave it."
            " Below one request in twenty, with the flag where the guide wants it, there is no finding any more."
        ),
    ),
    (
        "A server that was killed before its first token was taken for one that loads its model.",
        (
            "A real 0.4.9 still compiled its first batch, so its log said neither ready nor a token: no alert for five minutes, and on. It had answered"
            " by then, and its port opens only when the model is loaded; a server that has answered counts as started now."
        ),
    ),
    (
        "The advice went round: 0.3 for want of room, 1.3 for the retractions that came with it, 0.3 again.",
        (
            "What requests ask for was estimated from the new-token ratio of the moment and from usage and batch of ten minutes: after a start it came"
            " out three times too large, and requests that used what they asked for seemed to end early. All three are means of the same time now."
            " And of those who lowered the flag on advice, which says that a few retractions may appear, fewer than one request in twenty is no"
            " reason to raise it: 0.3 served 1,136 tokens a second of the scheduler's CPU with 2.7 retractions a minute, 1.3 served 1,088 with none."
        ),
    ),
    (
        "Clients were told to ask for fewer max_new_tokens, and not for how many.",
        (
            "SGLang's histogram of answers says what 99 % of them need. It is told once the longest had time to end, and clients that ask for little"
            " more than that are left alone."
        ),
    ),
    (
        "A log that was copied and truncated lost one line in three hundred.",
        "What is written between the last look and the truncation is in the copy alone. It is found by its text, as after a restart, and read to its end.",
    ),
    (
        "Larger chunks were advised to a server that may start one request at a time.",
        (
            "With `--prefill-max-requests 1` and `--prefill-decode-interval 16` four of 32 requests ran in an almost empty KV cache. Short"
            " prompts that nearly filled a small chunk passed for full batches, and after the larger chunk clients were told to send less."
            " Such a batch counts as full only if tokens have ended it, and where requests wait beside room both flags come first."
        ),
    ),
    (
        "Clients were told to send fewer requests and more requests at once.",
        (
            "Bursts were refused for `--max-queued-requests 6` while nothing else waited. The queue's limit alone is advised now, clients are"
            " not called slow while they are refused, and are asked for no more than may wait."
        ),
    ),
    (
        "A flag without a default was to be typed without a value.",
        "The advice to start without `--prefill-max-requests` gave the flag alone to type. It is taken off the command line now.",
    ),
    (
        "Conservativeness went round again, by way of a suspect flag.",
        (
            "1.3 was advised against retractions, then named as a flag away from its default because requests waited, and at 1.0 they"
            " were retracted again. Above the guide's 1.3 it is a suspect now, and only where nothing is retracted. What requests waited for"
            " was `--max-total-tokens 5000`: 1,380 tokens a second of the scheduler's CPU with it, 2,265 without. It is named now also where"
            " the room that seems free is promised to requests that will use it."
        ),
    ),
    (
        "Nothing was left to say to a server at its running limit whose KV cache was a third empty space in pages.",
        "`--page-size` is named where usage keeps the running limit from being raised.",
    ),
)
