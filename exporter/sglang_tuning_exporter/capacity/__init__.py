"""How fast one server computes: step time over the batch, prefill speed, and what both predict. Pure; imports only `state` and `sglang`.

`/v1/loads` gives cumulative counters for each scheduler (`readings`), the log gives single decode lines; both become
moments (`moments`), of which `step_time` makes a line with intervals, or says why not. `prefill` does the same for prompts,
`model` puts them together with what the KV cache and the running limit allow, and `prediction` asks what another batch would do.
"""
