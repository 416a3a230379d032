"""How fast a server computes: step time by batch, prefill speed, and what both predict. Pure; imports only `state` and `sglang`.

Counters of `/v1/loads` (`readings`) or decode lines become sums over steps (`moments`). `step_time` fits a line with intervals, or gives
the reason against it; `prefill` does the same for prompts; `model` adds what the KV cache and the running limit allow; `prediction`
and `plan` ask for other batches.
"""
