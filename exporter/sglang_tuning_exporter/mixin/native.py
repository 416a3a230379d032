"""Alert rules over SGLang's own series, for servers without the exporter: the guide's limits in plain PromQL, and the
flag of each.

Each rule is the `native` field of a diagnosis.
"""

from __future__ import annotations

import json

from sglang_tuning_exporter.core.diagnoses import Diagnosis
from sglang_tuning_exporter.core.diagnoses.native import Native
from sglang_tuning_exporter.core.runbooks import MOST_SEVERE_FIRST
from sglang_tuning_exporter.mixin._rendering import filled, render
from sglang_tuning_exporter.mixin.wishes import Wishes

FILE = "alerts/rules-without-exporter/sglang-native.rules.yml"


def texts(row: Diagnosis, native: Native) -> dict[str, str]:
    """Return the texts of an alert: what has happened, what was seen, and which flag it is about."""
    flag, words = row.remedy.flag, filled(row.remedy.words)
    advice = f"{row.remedy.direction} {flag}" if flag else words
    return {
        "summary": filled(row.summary),
        "description": (
            f"{{{{ $labels.instance }}}}: {native.seen.replace('{value}', f'{{{{ $value | {native.form} }}}}')}."
        ),
        "advice": (
            f"{advice}{f', {native.also}' if native.also else ''}"
            + ("; for the value, add the exporter." if flag else "; for the cause and the flag, add the exporter.")
        ),
    }


def text(wishes: Wishes) -> str:
    """Return the rule file, the most urgent alerts first."""
    made = ((row.native, row) for row in MOST_SEVERE_FIRST if row.native is not None)
    return render(
        "native.yml.j2",
        rules=[(native, row, texts(row, native)) for native, row in made if not wishes.is_off(native.alert)],
        labels=lambda native, row: json.dumps(wishes.labels_of(native.alert, row.severity)),
    )
