"""How fast a server computes: step time by batch, prefill speed, and what both predict. Pure.

Counters of `/v1/loads` or decode lines become sums over steps. `step_time` fits a line with intervals, or gives the reason against it;
`readings` keeps what the schedulers counted.
"""
