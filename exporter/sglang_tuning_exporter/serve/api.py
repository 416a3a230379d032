"""`/api/v1/findings`: what limits the server now, as JSON in the report's schema without the log's own part."""

from __future__ import annotations

import json
import time

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.json_findings import (
    SCHEMA_VERSION,
    Document,
    checks_document,
    command_document,
    finding_document,
    iso,
    number,
    plain,
    shares,
)
from sglang_tuning_exporter.sglang.clean import cleaned
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.state.history import added_up


def render(sidecar: Sidecar) -> bytes:
    """Return the document as JSON; every key is there, `null` where a value is not known."""
    return (json.dumps(cleaned(document(sidecar)), indent=2, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def document(sidecar: Sidecar) -> Document:
    """Return the document of this moment. `span` is the window of the findings."""
    with sidecar.view() as now:
        judgement = sidecar.judge(now)
        past = judgement.past
        state, clock = sidecar.state, time.time()
        totals, ranks = state.totals(), state.schedulers
        usages = [rank.usage for rank in ranks if rank.usage is not None]
        return {
            "schema_version": SCHEMA_VERSION,
            "profile": past.profile.name,
            "span": {
                "start": iso(clock - past.watched_seconds),
                "end": iso(clock),
                "seconds": number(round(past.watched_seconds, 3)),
                "serving_seconds": number(round(past.served_seconds, 3)),
            },
            "server": {"version": state.facts.version, "args": plain(state.facts.args)},
            "counts": {
                "lines": None if sidecar.log is None else sum(sidecar.log.lines.values()),
                "retraction_events": int(totals.counts["retraction_events"]),
                "retracted_requests": int(
                    totals.counts["native_retracted_requests" if sidecar.log is None else "retracted_requests"]
                ),
                "out_of_memory": {phase: state.out_of_memory.get(phase, 0) for phase in OUT_OF_MEMORY_PHASES},
                "server_starts": state.starts,
            },
            "last": {
                "running_requests": number(added_up(rank.running for rank in ranks)),
                "queued_requests": number(added_up(rank.queued for rank in ranks)),
                "token_usage": number(max(usages, default=None)),
                "cuda_graph": next((rank.graph for rank in ranks if rank.graph is not None), None),
            },
            "available_gpu_memory_gb": [
                gb for _, gb in sorted(state.facts.available_gb.items(), key=str) if not state.facts.is_cpu
            ],
            "shares": shares(past.recent),
            "verdict": judgement.verdict,
            "command": command_document(judgement, state.facts),
            "findings": [
                finding_document(
                    finding,
                    sidecar.found_since[finding.diagnosis.id],
                    max(sidecar.found_since[finding.diagnosis.id], sidecar.unix(now - (finding.ago or 0.0))),
                )
                for finding in judgement.findings
            ],
            "checks": checks_document(judgement),
        }
