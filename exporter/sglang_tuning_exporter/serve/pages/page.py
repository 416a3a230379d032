"""The landing page: what limits the server now, in words; needs no Prometheus, no script, no asset from elsewhere."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.findings import Judgement
from sglang_tuning_exporter.diagnosis.json_findings import command_document, shares
from sglang_tuning_exporter.diagnosis.wording import VerdictText, check_text, state_shares, verdict_text
from sglang_tuning_exporter.serve.pages.figures import figures, past_only, ranks
from sglang_tuning_exporter.serve.pages.rendering import environment

REFRESH_SECONDS = 10
_ENVIRONMENT = environment()


def text_of(sidecar: Sidecar, judgement: Judgement, now: float) -> VerdictText:
    """Return the judgement of `now` in words."""
    command = command_document(judgement, sidecar.state.facts)
    return verdict_text(judgement, command, lambda finding: sidecar.unix(now - (finding.ago or 0.0)))


def render(sidecar: Sidecar, *, still: bool = False) -> str:
    """Return the page as HTML. The browser reloads it unless it is `still`. Every word from outside is escaped."""
    with sidecar.view() as now:
        judgement = sidecar.judge(now)
        text = text_of(sidecar, judgement, now)
        tiles, rows = figures(sidecar.state, judgement.past, sidecar.history, now), ranks(sidecar.state)
    checks = [check for check in judgement.checks if not check.diagnosis.is_chance]
    not_judged: dict[str, list[str]] = {}
    for row in (check.diagnosis for check in checks if check.passed is None and check.diagnosis.alert):
        not_judged.setdefault(row.condition.needs, []).append(row.headline)
    # Figures of a server that has ended are of before, and not judged.
    is_down = any(finding.diagnosis.condition.is_end for finding in judgement.findings)
    return _ENVIRONMENT.get_template("index.html").render(
        text=text,
        refresh=None if still else REFRESH_SECONDS,
        clock=datetime.fromtimestamp(time.time(), timezone.utc),
        is_down=is_down,
        passed=[(each.diagnosis.headline, check_text(each)) for each in checks if each.passed and not is_down],
        not_judged=not_judged,
        shares=[] if is_down else state_shares(shares(judgement.past.recent)),
        figures=past_only(tiles) if is_down else tiles,
        ranks=rows,
        sidecar=sidecar,
        served=judgement.past.served_seconds,
        version=__version__,
    )
