"""Rows about the queue, the KV cache and admission."""

from __future__ import annotations

from functools import partial

from sglang_tuning_exporter.diagnosis import clients
from sglang_tuning_exporter.diagnosis.conditions.requests import Rejections, RetractionRate
from sglang_tuning_exporter.diagnosis.conditions.share import OtherCause, Share, Spread
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, Title
from sglang_tuning_exporter.diagnosis.sizing import admission, hybrid, layout, limits, memory, prefill

CONSERVATIVENESS = "schedule_conservativeness"
RUNNING_LIMIT = "max_running_requests"
_RETRACTING = ("conservativeness_ineffective", "retracting_too_often")

WHY_REQUESTS_WAIT = (
    *_RETRACTING,
    "hybrid_pool_full",
    "running_at_limit",
    "grammar_queue",
    "pd_queue",
    "dp_imbalanced",
    "admission_recovering",
    "prefill_bound",
    "admission_too_conservative",
)

_limit = partial(Diagnosis, severity="warning", keep_firing="5m", scale_out="flag_first")

SCHEDULING_DIAGNOSES: tuple[Diagnosis, ...] = (
    _limit(
        id="requests_rejected",
        alert="SGLangRequestsRejected",
        condition=Rejections(),
        summary="SGLang rejects requests, or clients abandon them after long waits.",
        summary_past="Until {until} SGLang rejected requests, or clients abandoned them after long waits.",
        seen="{value} requests/min rejected or abandoned",
        guide="not in SGLang's guide: rejected and abandoned requests mean too little capacity or too many requests",
        title=Title("requests lost,", "/min"),
        remedy=Remedy(
            "",
            "slow down",
            "send fewer requests at once, or add a replica",
            "SGLang answers 503 while its queue is full (--max-queued-requests), or after SGLANG_REQ_WAITING_TIMEOUT seconds of waiting."
            " Abandoned requests count only where requests waited too long or first tokens came late, so answers that a client stops on purpose do not count.",
            "clients retry rejected requests without a pause",
        ),
        causes=("scheduler_stuck", *WHY_REQUESTS_WAIT, "cuda_graph_not_covering", "cuda_graph_off"),
        notified_as_well=True,
        uses_advice_of_causes=True,
        scale_out="replica",
    ),
    _limit(
        id="conservativeness_ineffective",
        alert="SGLangConservativenessIneffective",
        condition=RetractionRate(capped=True),
        summary="SGLang keeps retracting requests, and a higher --schedule-conservativeness has no further effect.",
        summary_past="SGLang retracted running requests {times} until {until}; a higher --schedule-conservativeness has no further effect.",
        seen="{value} retractions/min with --schedule-conservativeness above 1.43",
        guide="not in SGLang's guide: the new-token ratio starts at min(0.7 x conservativeness, 1), so values above 1.43 change nothing",
        title=Title("retracting", "/min"),
        remedy=Remedy(
            RUNNING_LIMIT,
            "lower",
            "four fifths of the running batch where prompts are long, else enlarge the KV cache",
            "The KV cache is too small for the running requests. Enlarge it (--max-total-tokens where it is set, --mem-fraction-static, --kv-cache-dtype"
            " fp8_e4m3), or run fewer requests at once where prompts are long and costly to prefill again.",
            "a single request is longer than the KV cache: then lower --context-length",
            cost="Fewer requests run at once.",
        ),
        causes=("out_of_memory_prefill", "out_of_memory_decode", "out_of_memory_any"),
        sizes=admission.ineffective,
    ),
    _limit(
        id="retracting_too_often",
        alert="SGLangRetractingTooOften",
        condition=RetractionRate(),
        summary="SGLang keeps retracting running requests: the KV cache is full.",
        summary_past="SGLang retracted running requests {times} until {until}: the KV cache was full.",
        seen="{value} retractions/min",
        guide='SGLang\'s tuning guide, "Achieve a high token usage": with frequent retraction warnings raise --schedule-conservativeness to'
        " about 1.3; about one a minute is fine",
        title=Title("retracting", "/min"),
        remedy=Remedy(
            CONSERVATIVENESS,
            "raise",
            "1.3",
            "SGLang admits more requests than the KV cache can hold until they finish. It retracts some and computes them again. A higher value, or"
            " fewer requests at once, keeps more of the KV cache free for each. A first burst after the start ends by itself.",
            "the value is already above 1.43, where it has no further effect: then enlarge the KV cache (--mem-fraction-static) or lower"
            " --max-running-requests",
            cost="Above 1.0 SGLang admits fewer requests at once, and the queue may grow.",
        ),
        unless=("conservativeness_ineffective",),
        causes=("out_of_memory_prefill", "out_of_memory_decode", "out_of_memory_any"),
        sizes=admission.retracting,
    ),
    _limit(
        id="hybrid_pool_full",
        alert="SGLangHybridPoolFull",
        condition=Share("admission", ("hybrid_pool_full",)),
        summary="Requests wait because the sliding-window or mamba cache is full while the main KV cache has free space.",
        summary_past="Until {until} requests waited because the sliding-window or mamba cache was full while the main KV cache had free space.",
        seen="{value} of the serving time with a full sliding-window or mamba cache and requests waiting",
        guide="not in SGLang's guide: the cache that fills up first is the limit; token usage is that of the fullest cache",
        label="Second KV cache full",
        remedy=Remedy(
            "swa_full_tokens_ratio",
            "raise",
            "a larger share for the cache that is full",
            "Hybrid models have two caches. The one that fills up first limits how many requests run.",
            "both caches are full: then GPU memory is the limit",
            cost="The main KV cache gets smaller by as much as the other gains.",
        ),
        causes=(*_RETRACTING, "dp_imbalanced"),
        sizes=hybrid.fuller_second_cache,
    ),
    _limit(
        id="running_at_limit",
        alert="SGLangRunningAtLimit",
        # With a full KV cache a higher limit would let no more requests run.
        condition=Share("admission", ("running_limit",), unless=(OtherCause("token_usage", ("at_target",), 0.5),)),
        summary="Requests wait because SGLang runs as many as --max-running-requests allows.",
        summary_past="Until {until} requests waited because SGLang ran as many as --max-running-requests allows.",
        seen="{value} of the serving time at --max-running-requests with requests waiting",
        guide="SGLang's tuning guide: under load #running-req should be close to --max-running-requests; a queue at that limit is caused by the limit",
        title=Title("running limit reached", "of the time"),
        remedy=Remedy(
            RUNNING_LIMIT,
            "raise",
            "as far as token usage stays below {token_usage_target}, at most eight times the present value",
            "The limit makes requests wait while the KV cache has free space.",
            "token usage is {token_usage_target} or more: then the KV cache is the limit",
            cost="Inter-token latency rises as more requests run together.",
        ),
        causes=(*_RETRACTING, "dp_imbalanced"),
        sizes=limits.at_limit,
    ),
    _limit(
        id="grammar_queue",
        alert="SGLangGrammarQueue",
        condition=Share("admission", ("grammar_queue",)),
        summary="Requests wait for their grammar (JSON schema, regex, EBNF) to be compiled, not for the GPU.",
        summary_past="Until {until} requests waited for their grammar (JSON schema, regex, EBNF) to be compiled.",
        seen="{value} of the serving time with more requests waiting for a grammar than in the queue",
        guide="not in SGLang's guide: requests wait in the grammar queue while token usage is low",
        label="Grammars hold requests up",
        remedy=Remedy(
            "grammar_backend",
            "try",
            "another backend (xgrammar, llguidance), or fewer distinct schemas",
            "SGLang compiles each new schema on the CPU before its request can run, and caches the result.",
            "the CPU is busy: then give the server more cores",
        ),
        sizes=admission.grammar,
        scale_out="neither",
    ),
    _limit(
        id="pd_queue",
        alert="SGLangDisaggregationQueue",
        condition=Share("admission", ("pd_queue",)),
        summary="Requests wait for the other server of a prefill/decode pair, or for the KV cache transfer between them.",
        summary_past="Until {until} requests waited for the other server of a prefill/decode pair, or for the KV cache transfer between them.",
        seen="{value} of the serving time with most requests in a bootstrap, prealloc, transfer or inflight queue",
        guide="not in SGLang's guide: with disaggregation the other server or the transfer is the limit",
        label="The other side holds requests up",
        sizes=layout.other_side,
        remedy=Remedy(
            "",
            "balance",
            "add servers on the slower side, or make the transfer faster",
            "The bootstrap and inflight queues of a prefill server wait for decode servers. The prealloc and transfer queues of a decode server"
            " wait for free memory or for"
            " the KV cache to arrive.",
            "one of the servers is down: then restart it",
        ),
        scale_out="neither",
    ),
    _limit(
        id="dp_imbalanced",
        alert="SGLangDPImbalanced",
        condition=Spread(),
        summary="Requests wait on one DP rank while another has free capacity: the load is unbalanced.",
        seen="requests waited {value} of the time on the busiest DP rank, and almost never on the least busy one",
        guide="not in SGLang's guide: the cause is routing, not capacity",
        title=Title("DP ranks imbalanced"),
        remedy=Remedy(
            "load_balance_method",
            "set",
            "total_requests, or use a router that balances by load",
            "Round robin gives each rank the same number of requests, not the same amount of work.",
            "long prompts of one client must stay on the rank that has their prefix cached",
            cost="Requests with a common prefix may be spread over more ranks.",
        ),
        sizes=layout.balance,
        scale_out="neither",
    ),
    _limit(
        id="admission_recovering",
        alert="SGLangAdmissionRecovering",
        condition=Share("admission", ("recovering",)),
        summary="Requests still wait because of an earlier burst of retractions.",
        summary_past="Until {until} requests waited because of an earlier burst of retractions.",
        seen="{value} of the serving time with free KV cache, requests waiting, and a new-token ratio far above its initial value",
        guide="not in SGLang's guide: after a retraction the new-token ratio falls more slowly with a lower --schedule-conservativeness",
        remedy=Remedy(
            CONSERVATIVENESS,
            "raise",
            "1.0",
            "At 0.1 the new-token ratio takes ten times as long to fall as at 1.0, and SGLang admits few requests meanwhile. Return to 1.0"
            " before you try lower values.",
            "the value is already 1.0 or more: then the ratio falls by itself within minutes",
        ),
        unless=_RETRACTING,
        causes=_RETRACTING,
        sizes=admission.recovering,
    ),
    _limit(
        id="prefill_bound",
        alert="SGLangPrefillBound",
        condition=Share("admission", ("prefill_bound",)),
        summary="Requests wait while SGLang prefills long prompts: prefill is the limit.",
        summary_past="Until {until} requests waited while SGLang prefilled long prompts.",
        seen="{value} of the serving time in full prefill batches with requests waiting",
        guide="SGLang's tuning guide: with long prompts raise --chunked-prefill-size if memory allows, reuse more prefixes, or use"
        " prefill/decode disaggregation",
        remedy=Remedy(
            "chunked_prefill_size",
            "raise",
            "twice the present size, up to 16384",
            "With long prompts, small chunks use the GPU inefficiently.",
            "the GPU is already busy with prefill: then only prefix reuse, disaggregation or more replicas help",
            cost="Running requests pause longer for each chunk, and a chunk needs more memory.",
        ),
        causes=(*_RETRACTING, "dp_imbalanced"),
        sizes=prefill.chunks,
    ),
    _limit(
        id="admission_too_conservative",
        alert="SGLangAdmissionTooConservative",
        condition=Share("admission", ("held_back",)),
        summary="Requests wait although the KV cache has free space: SGLang reserves too much for running requests.",
        summary_past="Until {until} requests waited although the KV cache had free space.",
        seen="{value} of the serving time with requests waiting and token usage below {token_usage_target}",
        guide='SGLang\'s tuning guide, "Achieve a high token usage": with low token usage and frequent #queue-req above 0, lower'
        " --schedule-conservativeness to about 0.3",
        title=Title("requests wait beside free KV cache", "of the time"),
        remedy=Remedy(
            CONSERVATIVENESS,
            "lower",
            "0.3",
            "Requests set a large max_new_tokens and end early, so SGLang reserves KV cache that they never use.",
            "requests run to their max_new_tokens, prompts are very long, or retractions appear: then raise it towards 1.0",
            cost="The slowest requests may take longer, and a few retractions may appear.",
        ),
        unless=(*_RETRACTING, "scheduler_stuck", "dp_imbalanced"),
        causes=(*_RETRACTING, "running_at_limit"),
        sizes=admission.too_conservative,
    ),
    _limit(
        id="queue_too_long",
        alert="SGLangQueueTooLong",
        condition=Share("queue", ("above_range",)),
        summary="More requests wait than SGLang can start in time.",
        summary_past="Until {until} more requests waited than SGLang could start in time.",
        seen="{value} of the serving time with {queue_limit}",
        guide='SGLang\'s tuning guide, "Adjust the request submission speed": a healthy #queue-req is 100-2000 (50-500 in the first edition);'
        " above it send fewer requests at once, because scheduling overhead grows",
        remedy=Remedy(
            "",
            "slow down",
            "send fewer requests at once, or add a replica",
            "Requests arrive faster than SGLang finishes them. Slow the clients down, or add a replica behind the router.",
            "another alert of this server is firing: change its flag first",
        ),
        causes=WHY_REQUESTS_WAIT,
        uses_advice_of_causes=True,
        sizes=admission.to_clients(clients.advise_fewer),
        scale_out="replica",
    ),
    Diagnosis(
        id="running_far_below_limit",
        condition=Share("admission", ("pool_full",)),
        summary="The KV cache fills up long before --max-running-requests is reached: memory is the limit.",
        seen="{value} of the serving time with a full KV cache and requests waiting",
        guide="SGLang's tuning guide: under load #running-req should be close to --max-running-requests; find what limits it",
        remedy=Remedy(
            "kv_cache_dtype",
            "set",
            "fp8_e4m3, or more memory for the KV cache",
            "Each running request keeps its tokens in the KV cache. An FP8 KV cache holds twice as many in the same memory.",
            "answers must not lose any accuracy, or the GPU has no FP8",
            cost="A little accuracy.",
        ),
        kind="chance",
        no_alert="a full KV cache with a queue is normal for a well-loaded server; SGLangQueueTooLong fires when requests wait too long",
        sizes=memory.pool_short,
    ),
)

CLIENT_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="client_too_slow",
        alert="SGLangClientTooSlow",
        condition=Share(
            "queue",
            ("empty",),
            # At a limit more requests would only wait.
            unless=(
                OtherCause("admission", ("running_limit", "pool_full", "hybrid_pool_full", "prefill_bound"), 0.1),
                OtherCause("token_usage", ("at_target",), 0.5),
            ),
        ),
        summary="SGLang's queue is empty: the clients are the bottleneck, not the server.",
        summary_past="Until {until} SGLang's queue was empty: the clients were the bottleneck, not the server.",
        seen="{value} of the serving time with an empty queue",
        guide='SGLang\'s tuning guide, "Adjust the request submission speed": with #queue-req frequently 0 send requests faster; 100-2000 is'
        " healthy (50-500 in the first edition)",
        remedy=Remedy(
            "",
            "speed up",
            "send more requests at once",
            "With an empty queue SGLang cannot form full batches. Send more requests in parallel; no server flag helps.",
            "latency matters more than throughput: then use --profile online, which expects an empty queue",
        ),
        keep_firing="5m",
        profiles=("offline",),
        unless=("requests_rejected",),
        sizes=admission.to_clients(clients.advise_more),
        scale_out="neither",
    ),
)
