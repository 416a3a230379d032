"""Rows about better settings for this model, and about late answers. They are no faults, so they have no alert."""

from __future__ import annotations

from functools import partial

from sglang_tuning_exporter.diagnosis import clients, interruption, profile_settings
from sglang_tuning_exporter.diagnosis.conditions import suitability
from sglang_tuning_exporter.diagnosis.conditions.latency import ObjectiveMissed
from sglang_tuning_exporter.diagnosis.conditions.suitability import Suitability
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy
from sglang_tuning_exporter.diagnosis.rows.scheduling import WHY_REQUESTS_WAIT
from sglang_tuning_exporter.diagnosis.sizing import admission, advised_value, layout, limits, memory, prefill
from sglang_tuning_exporter.diagnosis.suspects import suspects_evidence

_BURN_RATE_ALERTS = "the burn-rate alerts of the latency objectives notify; this row names the flag to change"

_ANSWERED_WITH_ERROR = "the server is well: SGLang answers each of these requests with an error, which its client sees"

_late = partial(Diagnosis, no_alert=_BURN_RATE_ALERTS)

LATENCY_DIAGNOSES: tuple[Diagnosis, ...] = (
    _late(
        id="latency_batch_too_large",
        condition=ObjectiveMissed("inter_token", "batch"),
        summary="Inter-token latency is too high: decode batches are large.",
        seen="{value} of the inter-token gaps are longer than the objective",
        guide="SGLang's tuning guide: where requests are slow, lower --max-running-requests",
        label="Slow because of large batches",
        remedy=Remedy(
            "max_running_requests",
            "lower",
            "about half of the running batch",
            "A decode step takes longer with a larger batch, and every request in the batch waits for the whole step.",
            "the batch is already small: then the model is too slow for this GPU",
            cost="Throughput falls, and requests may queue.",
        ),
        unless=("prefill_bound",),
        sizes=limits.smaller_batch,
        scale_out="replica",
    ),
    _late(
        id="latency_prefill_between",
        condition=ObjectiveMissed("inter_token", "prefill", times=interruption.SLOW_BURN_TIMES),
        summary="Inter-token latency is too high: prefill of long prompts interrupts decoding.",
        seen="{value} of the inter-token gaps are longer than the objective, the median is not, and long prompts are prefilled in between",
        guide="SGLang's tuning guide: where requests are slow, change --chunked-prefill-size or use prefill/decode disaggregation",
        label="Tokens late: prompts in between",
        remedy=Remedy(
            "chunked_prefill_size",
            "lower",
            "half of the present size, together with --enable-mixed-chunk",
            "With mixed chunks a running request waits for one chunk at most, and a smaller chunk takes less time.",
            "chunks are not mixed: SGLang then prefills all waiting prompts before it decodes again, whatever the chunk size",
            cost="Time to first token of long prompts rises, and prefill throughput falls.",
        ),
        unless=("prefill_bound", "retracting_too_often"),
        sizes=prefill.interleave_decode,
        scale_out="flag_first",
    ),
    _late(
        id="latency_queue",
        condition=ObjectiveMissed("time_to_first_token", "queue"),
        summary="Time to first token is too high: requests wait in the queue.",
        seen="{value} of the first tokens came later than the objective",
        guide="SGLang's tuning guide: where requests are slow, send fewer requests at once",
        label="First tokens late: queue",
        remedy=Remedy(
            "",
            "slow down",
            "send fewer requests at once, or add a replica",
            "Time to first token includes the time in the queue.",
            "another finding names why requests wait: change its flag first",
        ),
        causes=(*WHY_REQUESTS_WAIT, "queue_too_long"),
        uses_advice_of_causes=True,
        sizes=admission.to_clients(clients.advise_fewer),
        scale_out="replica",
    ),
    _late(
        id="latency_long_prompts",
        condition=ObjectiveMissed("time_to_first_token", "prompts"),
        summary="Time to first token is too high with an empty queue: prefill of long prompts takes the time.",
        seen="{value} of the first tokens came later than the objective",
        guide="SGLang's tuning guide: with long prompts raise --chunked-prefill-size or use piecewise CUDA graphs",
        label="Slow because of long prompts",
        remedy=Remedy(
            "chunked_prefill_size",
            "raise",
            "twice the present size, up to 16384",
            "SGLang prefills long prompts in chunks; fewer, larger chunks finish sooner.",
            "prompts already fit into one chunk",
            cost="Running requests pause longer for each chunk, and a chunk needs more memory.",
        ),
        causes=("prefill_bound",),
        sizes=prefill.long_prompts,
        scale_out="flag_first",
    ),
)

CANDIDATE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="shared_prefixes_unused",
        condition=Suitability(suitability.shared_prefixes_unused, suitability.own_prefixes),
        summary="Waiting requests share prefixes, but --schedule-policy fcfs does not group them.",
        seen="{value} of the prompt tokens came from the prefix cache under fcfs",
        guide="SGLang's tuning guide: with many shared prefixes set --schedule-policy lpm (the default of early releases)",
        remedy=Remedy(
            "schedule_policy",
            "set",
            "lpm",
            "Longest prefix match (lpm) runs requests with the same prefix together while the prefix is cached.",
            "each client sends one prefix only, or the KV cache already holds all prefixes",
            cost="Scheduling overhead grows with the queue; requests without a common prefix wait longer.",
        ),
        sizes=admission.by_prefix,
    ),
    Diagnosis(
        id="prefix_policy_wasted",
        condition=Suitability(suitability.prefix_policy_wasted, suitability.own_prefixes),
        summary="--schedule-policy lpm orders requests by shared prefixes, but they share none.",
        seen="{value} of the prompt tokens came from the prefix cache under lpm",
        guide="SGLang's tuning guide, first edition: without shared prefixes fcfs costs less than lpm",
        remedy=Remedy(
            "schedule_policy",
            "set",
            "fcfs",
            "Searching the longest common prefix costs time for every waiting request.",
            "prefixes will be shared later in the day",
        ),
        sizes=advised_value.set_to("schedule_policy", "fcfs"),
    ),
    Diagnosis(
        id="flags_away_from_defaults",
        condition=Suitability(suspects_evidence),
        names_suspects=True,
        summary="Flags that differ from SGLang's defaults can delay requests.",
        seen="{value} flag{s} with a value other than the default that can cause this",
        guide="not in SGLang's guide: without another explanation, check the flags that differ from the defaults first",
        remedy=Remedy(
            "",
            "try",
            "restart without these flags, one flag at a time",
            "SGLang's defaults suit most loads. A flag that was set for another load or another release may limit this one.",
            "the flag is needed for what this server does",
        ),
    ),
    Diagnosis(
        id="data_parallel_would_fit",
        condition=Suitability(suitability.data_parallel_would_fit),
        summary="The weights fit on one GPU, but tensor parallelism splits them over several.",
        seen="the weights of the whole model take {value}",
        guide='SGLang\'s tuning guide, "Tune --dp-size and --tp-size": prefer data parallelism where memory allows, by the router rather than by --dp-size',
        remedy=Remedy(
            "tp_size",
            "lower",
            "1, with one server on each GPU behind a router",
            "Each replica then runs without exchanging the results of every layer, and throughput adds up.",
            "latency of a single request matters most, or a prompt is longer than the KV cache of one GPU",
            cost="Each GPU holds all weights, so each KV cache is smaller; single requests are slower.",
        ),
        sizes=layout.one_gpu,
    ),
    Diagnosis(
        id="prompts_beyond_kv_cache",
        condition=Suitability(suitability.prompts_beyond_kv_cache),
        no_alert=_ANSWERED_WITH_ERROR,
        summary="Prompts are longer than the whole KV cache: SGLang refuses or truncates them.",
        seen="{value} prompts were longer than the KV cache",
        guide="not in SGLang's guide: a prompt must fit into the KV cache, less 6 tokens, even if it is the only one",
        remedy=Remedy(
            "max_total_tokens",
            "raise",
            "larger than the longest prompt with its answer",
            "SGLang answers such a prompt with an error (status 400) at once, or cuts it off with --allow-auto-truncate. No other flag helps.",
            "the clients send such prompts by mistake: then nothing needs to change",
            cost="Less GPU memory stays free for peaks.",
        ),
        sizes=memory.hold_longest_prompts,
    ),
    Diagnosis(
        id="prompts_beyond_context",
        condition=Suitability(suitability.prompts_beyond_context),
        no_alert=_ANSWERED_WITH_ERROR,
        summary="Requests are longer than --context-length allows: SGLang refuses or truncates them.",
        seen="{value} requests were longer than --context-length allows",
        guide="not in SGLang's guide: --context-length limits prompt and answer together; without it, the model's own context does",
        remedy=Remedy(
            "context_length",
            "raise",
            "longer than the longest request, prompt and answer together",
            "SGLang answers such a request with an error, which a stream carries in an answer with status 200, or cuts it off with"
            " --allow-auto-truncate.",
            "the model's own context is not longer: SGLang then refuses to start; or the clients send such prompts by mistake",
            cost="Long requests hold more of the KV cache, so fewer run together.",
        ),
        sizes=memory.hold_longest_requests,
    ),
    Diagnosis(
        id="requests_refused",
        condition=Suitability(suitability.requests_refused),
        no_alert=_ANSWERED_WITH_ERROR,
        summary="SGLang answers many requests with an error, because it cannot do what they ask for.",
        seen="{value} of the requests were refused",
        guide="not in SGLang's guide: the scheduler ends such a request at once and prints why, with self.rid= at the end of the line",
        remedy=Remedy(
            "grammar_backend",
            "set",
            "xgrammar",
            "The clients ask for structured output (a JSON schema, regex or EBNF), and without a grammar backend SGLang refuses that.",
            "the package of the grammar backend is not installed",
            cost="Each new schema is compiled before its request can run.",
        ),
        sizes=admission.refusals,
    ),
    Diagnosis(
        id="router_candidate",
        condition=Suitability(suitability.router_candidate),
        summary="One server runs several replicas by --dp-size; SGLang's guide prefers a router in front of single servers.",
        seen="{value} replicas in one server",
        guide='SGLang\'s tuning guide, "Tune --dp-size and --tp-size": use the router (model gateway) for data parallelism rather than --dp-size',
        remedy=Remedy(
            "",
            "split",
            "one server on each GPU behind SGLang's router (model gateway)",
            "A router sends each request to a replica with its prefix cached and with free KV cache. One replica can fail or restart alone.",
            "the replicas are meant for DP attention, or nobody can run a router",
            cost="One more process to run, and a port for each server.",
        ),
        sizes=layout.behind_a_router,
    ),
    Diagnosis(
        id="prefill_graph_candidate",
        condition=Suitability(suitability.prefill_graph_candidate),
        summary="Time to first token is too high with an empty queue, and prefill runs without CUDA graphs.",
        seen="{value} of the first tokens came later than the objective",
        guide="SGLang's tuning guide: where prefill is slow, use piecewise CUDA graphs",
        remedy=Remedy(
            "enable_piecewise_cuda_graph",
            "add",
            "add it",
            "CUDA graphs save the time to launch prefill kernels one by one. With short prompts that is much of the time.",
            "prompts are long: then computing takes the time, and a larger chunk helps more",
            cost="CUDA graphs take GPU memory, and the start takes longer. Later releases enable them by default.",
        ),
        sizes=advised_value.switch_on("enable_piecewise_cuda_graph"),
    ),
    Diagnosis(
        id="profile_settings",
        condition=Suitability(profile_settings.differing_evidence),
        summary="SGLang's guide recommends other settings for this profile.",
        seen="{value} setting{s} other than what the guide recommends for this profile",
        guide="SGLang's tuning guide, newest edition: settings for online, offline, long-context and multi-turn servers",
        remedy=Remedy(
            "",
            "set",
            "what the guide recommends for this workload",
            "SGLang's guide recommends this for the workload of the exporter's --profile.",
            "the profile does not match the workload of this server: then start the exporter with another --profile",
        ),
        sizes=profile_settings.values,
    ),
    Diagnosis(
        id="torch_compile_candidate",
        condition=Suitability(suitability.torch_compile_candidate),
        summary="A small model runs in small batches: torch.compile may speed it up.",
        seen="at most {value} requests ran together 99 % of the time",
        guide='SGLang\'s tuning guide, "Try other options": --enable-torch-compile speeds up small models at small batches; keep its cache under'
        " TORCHINDUCTOR_CACHE_DIR",
        remedy=Remedy(
            "enable_torch_compile",
            "add",
            "1",
            "At small batches the GPU waits for kernel launches; compiled kernels need fewer.",
            "batches grow beyond --torch-compile-max-bs (default 32)",
            cost="Each start takes minutes longer until the cache is filled. Set TORCHINDUCTOR_CACHE_DIR to a persistent folder: servers with"
            " the same GPU and model can share it.",
        ),
        sizes=advised_value.switch_on("enable_torch_compile"),
    ),
    Diagnosis(
        id="quantization_candidate",
        condition=Suitability(suitability.quantization_candidate),
        summary="The KV cache is short of memory, and the weights are not quantized.",
        seen="the weights take {value} of each GPU's memory",
        guide='SGLang\'s tuning guide, "Try other options": where memory is short, use --quantization fp8',
        remedy=Remedy(
            "quantization",
            "set",
            "fp8",
            "8-bit weights take half the memory; the KV cache gets the other half.",
            "the GPU has no FP8 (Ada, Hopper and newer have it), or answers must not lose any accuracy",
            cost="A little accuracy.",
        ),
        sizes=advised_value.set_to("quantization", "fp8"),
    ),
    Diagnosis(
        id="expert_parallel_candidate",
        condition=Suitability(suitability.expert_parallel_candidate),
        summary="Tensor parallelism splits every expert of this mixture-of-experts model over all GPUs.",
        seen="{value} GPUs share every expert",
        guide='SGLang\'s tuning guide, "Try other options": use expert parallelism for mixture-of-experts models',
        remedy=Remedy(
            "ep_size",
            "raise",
            "the value of --tp-size",
            "With whole experts on each GPU the matrix multiplications are fewer and larger.",
            "batches are small, or some experts are used far more than others",
            cost="Requests wait for the GPU whose experts are used most.",
        ),
        sizes=layout.experts,
    ),
    Diagnosis(
        id="dp_attention_candidate",
        condition=Suitability(suitability.dp_attention_candidate),
        summary="A DeepSeek model stores the same KV cache on every GPU, and the KV cache fills up.",
        seen="the KV cache was full for {value} of the serving time",
        guide='SGLang\'s tuning guide, "Try other options": for DeepSeek models use DP attention (--enable-dp-attention --dp-size 8)',
        remedy=Remedy(
            "enable_dp_attention",
            "add",
            "1, with --dp-size set to the value of --tp-size",
            "The model's compressed KV cache cannot be split over GPUs: tensor parallelism stores it on each GPU, DP attention once.",
            "few requests run at once: then latency gets worse",
            cost="SGLang then multiplies --schedule-conservativeness by 0.3: divide the value you want by 0.3.",
        ),
        sizes=layout.dp_attention,
    ),
)
