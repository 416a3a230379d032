"""How fast a server computes: step time by batch, prefill speed, and what both predict. Pure; imports only `state` and `sglang`.

Counters of `/v1/loads` (`readings`, with the prefill speed) or decode lines become sums over steps. `step_time` fits a line with intervals,
or gives the reason against it; `model` adds what the KV cache and the running limit allow; `prediction` asks for other batches.
"""
