"""The table as Prometheus rules and as Alertmanager's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from jinja2 import Environment, PackageLoader, StrictUndefined

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.guide.diagnosis import (
    SERVING_SECONDS,
    Beside,
    BurnRate,
    Condition,
    Diagnosis,
    Failures,
    GraphMemory,
    Rejections,
    Reserve,
    RetractionRate,
    Share,
    Source,
    Spread,
    Starts,
    Stuck,
)
from sglang_tuning_exporter.guide.measurement import CONSERVATIVENESS_CEILING
from sglang_tuning_exporter.guide.profiles import DEFAULT_PROFILE, PROFILES
from sglang_tuning_exporter.guide.table import ALERTS, BY_ID

# Go templates own the curly braces, so ours are square.
_ENVIRONMENT = Environment(
    loader=PackageLoader("sglang_tuning_exporter.generate"),
    autoescape=False,  # noqa: S701 # nosec B701 # YAML, made from the table alone
    undefined=StrictUndefined,
    variable_start_string="[[",
    variable_end_string="]]",
    block_start_string="[%",
    block_end_string="%]",
    comment_start_string="[#",
    comment_end_string="#]",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?<![\w.])(\d+)([smh])(?![\w.])")
# The exporter that saw it serves its runbooks, so a notification's link needs no internet.
RUNBOOK_URL = "http://{{ $labels.instance }}/runbooks"
GRAFANA_URL = "http://localhost:3000"
BOARD = "sglang-tuning-server"
ON = "on (job, instance)"
# A switch is added or dropped, and a lookout is no flag: nothing to compute.
_SWITCHES = frozenset({"disable_cuda_graph"})
_CAPPED = f'sglang_tuning_server_arg{{arg="schedule_conservativeness"}} > {CONSERVATIVENESS_CEILING}'
# What is in force where an argument was left to its default.
_IN_FORCE = {"max_running_requests": "sglang_tuning_running_requests_limit"}


@dataclass(frozen=True, slots=True)
class Links:
    """Where notifications send people. `runbooks` holds the pages (`{alert}` in it is the alert's name, else that is added), `grafana` the boards.

    Both may hold Prometheus templates over the alert's labels.
    """

    runbooks: str = RUNBOOK_URL
    grafana: str = GRAFANA_URL

    def __post_init__(self) -> None:
        for key, url in (("--runbook-url", self.runbooks), ("--grafana-url", self.grafana)):
            if not url.startswith(("http://", "https://")) or not url.isprintable():
                raise UsageError(f"{key}={url}: give an address that begins with http:// or https://")

    def runbook(self, alert: str) -> str:
        """Give the address of an alert's page."""
        if "{alert}" in self.runbooks:
            return self.runbooks.replace("{alert}", alert)
        return f"{self.runbooks.rstrip('/')}/{alert}"

    @property
    def dashboard(self) -> str:
        """The address of the board of the server that the alert is about."""
        chosen = "var-job={{ $labels.job | urlquery }}&var-instance={{ $labels.instance | urlquery }}"
        return f"{self.grafana.rstrip('/')}/d/{BOARD}?{chosen}"


DEFAULT_LINKS = Links()


@dataclass(frozen=True)
class Rule:
    """One alert rule as the template needs it."""

    row: Diagnosis
    time_scale: float
    links: Links = DEFAULT_LINKS

    @cached_property
    def expression(self) -> str:
        """The PromQL, lines joined by newlines."""
        lines = [scaled(line, self.time_scale) for line in self._condition()]
        if self.row.profiles:
            lines.append(f"and {ON} sglang_tuning_server_info{{{_one_of('profile', self.row.profiles)}}}")
        if self.row.needs_advice:
            # Where the flag stands at its best value already, or a more urgent finding turns it, there is nothing to notify of.
            lines.append(f'unless {ON} sglang_tuning_diagnosis_active{{diagnosis="{self.row.id}"}} == 0')
        excuses = dict.fromkeys(self._excuse(BY_ID[other].condition) for other in self.row.unless)
        lines += [line for excuse in excuses for line in (f"unless {ON} (", *excuse, ")")]
        return "\n".join(lines)

    def _excuse(self, other: Condition) -> tuple[str, ...]:
        """Write as an expression that another row explains the same better."""
        if isinstance(other, RetractionRate) and isinstance(self.row.condition, RetractionRate):
            return (f"  {_CAPPED}",)
        if isinstance(other, RetractionRate):
            held = scaled("  max_over_time(instance:sglang_tuning_retractions:rate5m[10m])", self.time_scale)
            return (held, f"  > {ON} group_left () {_threshold('retractions_per_minute', 'upper')}")
        return tuple("  " + scaled(line, self.time_scale) for line in self._lines(other))

    def _condition(self) -> list[str]:
        return self._lines(self.row.condition)

    def _lines(self, condition: Condition) -> list[str]:  # noqa: PLR0911 - one case for each kind
        if isinstance(condition, Share):
            return self._share(condition)
        if isinstance(condition, RetractionRate):
            # Counted over the samples' intervals, one less than the window has, so about a fifth more than the limit is silent:
            # `RETRACTION_SLACK`, as findings have it.
            limit = _threshold("retractions_per_minute", "upper")
            return [
                f"instance:sglang_tuning_retractions:rate5m > {ON} group_left () {limit}",
                # Still going on. Not "> limit": at one and a half a minute every other two minutes hold two, and `for` would never end.
                f"and {ON} instance:sglang_tuning_retractions:rate2m > 0",
                *([f"and {ON} {_CAPPED}"] if condition.capped else []),
            ]
        if isinstance(condition, Rejections):
            limit = _threshold("rejections_per_minute", "upper")
            return [
                f'(instance:sglang_tuning_rejections:rate5m{{kind="rejected"}} > {ON} group_left () {limit}',
                f'or instance:sglang_tuning_rejections:rate5m{{kind="given_up"}} > {ON} group_left () {limit}',
                f"  and {ON} (instance:sglang_tuning_given_up:ratio10m > {ON} {_threshold('aborted_share', 'upper')})",
                f"  and {ON} (",
                *(f"    {reason}" for reason in _gave_reason(condition.times)),
                "  )",
                # Those who gave up on a server that hung had no other reason.
                f"  unless {ON} max by (job, instance) (max_over_time(sglang_tuning_stuck_stage[10m])) == 1)",
                # Still going on, as with retractions.
                "and instance:sglang_tuning_rejections:rate2m > 0",
            ]
        if isinstance(condition, Reserve):
            side, bound, least = (">", "upper", "max") if condition.side == "above" else ("<", "lower", "min")
            limit = _threshold("available_gpu_memory_bytes", bound)
            return [
                f"{least} without (dp_rank) (sglang_tuning_available_gpu_memory_bytes)",
                f"{side} {ON} group_left () {limit}",
            ]
        if isinstance(condition, GraphMemory):
            limit = _threshold("available_gpu_memory_bytes", "least")
            return [
                'sum without (phase) (increase(sglang_tuning_out_of_memory_total{phase="graph_capture"}[10m])) > 0',
                "or min without (dp_rank) (sglang_tuning_available_gpu_memory_bytes)",
                f"  < {ON} group_left () {limit}",
                # Without graphs they cannot be what took it.
                f'  unless {ON} sglang_tuning_server_arg{{arg="disable_cuda_graph"}} == 1',
            ]
        if isinstance(condition, Failures):
            phases = _one_of("phase", condition.phases)
            return [f"sum without (phase) (increase(sglang_tuning_out_of_memory_total{{{phases}}}[10m])) > 0"]
        if isinstance(condition, Stuck):
            return [
                # As last told: a scrape that was missed ends nothing.
                "max by (job, instance) (last_over_time(sglang_tuning_stuck_stage[2m])) == 1",
                'or sum by (job, instance) (increase(sglang_tuning_liveness_events_total{event="watchdog_timeout"}[10m])) > 0',
            ]
        if isinstance(condition, Starts):
            return [f"increase(sglang_tuning_server_starts_total[30m]) > {condition.at_least - 0.5:g}"]
        if isinstance(condition, Spread):
            waited, lately = "rank:sglang_tuning_waiting:share10m", "rank:sglang_tuning_waiting:share2m"
            least = f"{SERVING_SECONDS / self.time_scale:g}"
            return [
                f"max by (job, instance) ({waited}) > {ON} {_threshold('share', 'upper')}",
                f"and {ON} min by (job, instance) ({waited}) < {condition.hardly:g}",
                f"and {ON} max by (job, instance) ({lately}) > {ON} {_threshold('share', 'upper')}",
                f'and {ON} instance:sglang_tuning_serving_seconds:increase10m{{signal="queue"}} > {least}',
            ]
        assert isinstance(condition, (Source, BurnRate))
        return condition.expression.splitlines()

    def _share(self, condition: Share) -> list[str]:
        limit = _threshold("share", "upper")
        selector = f'signal="{condition.signal}", {_one_of("state", condition.states)}'
        long, short = (f"instance:sglang_tuning_state:share{window}{{{selector}}}" for window in ("10m", "2m"))
        if len(condition.states) > 1:
            long, short = (f"sum without (state) ({share})" for share in (long, short))
        return [
            f"{long} > {ON} group_left () {limit}",
            f'and {ON} instance:sglang_tuning_serving_seconds:increase10m{{signal="{condition.signal}"}} > {SERVING_SECONDS / self.time_scale:g}',
            f"and {ON} ({short} > {ON} group_left () {limit})",
            *(line for other in condition.unless for line in self._beside(other)),
        ]

    @staticmethod
    def _beside(other: Beside) -> list[str]:
        selector = f'signal="{other.signal}", {_one_of("state", other.states)}'
        return [
            f"unless {ON} (sum by (job, instance) (instance:sglang_tuning_state:share10m{{{selector}}}) > {other.above:g})"
        ]

    @property
    def runbook_url(self) -> str:
        """The address of this alert's page."""
        url = self.links.runbook(self.row.alert)
        own = "{{ $labels.instance }}"
        if self.row.id != "exporter_down" or own not in url:
            return url
        # That exporter serves nothing now; any other of its job has the same pages.
        living = 'printf "sglang_tuning_build_info{job=%q}" $labels.job | query'
        return url.replace(own, _with(living, '{{ . | first | label "instance" }}', own))

    @property
    def hold(self) -> str:
        """The rule's `for`."""
        return scaled(self.row.hold, self.time_scale)

    @property
    def keep_firing(self) -> str:
        """The rule's `keep_firing_for`, empty for none."""
        return scaled(self.row.keep_firing, self.time_scale)

    @property
    def description(self) -> str:
        """What is seen, with the figure of the moment."""
        value = "{{ $value }}"
        condition = self.row.condition
        if isinstance(condition, (Share, Spread, BurnRate)):
            value = "{{ $value | humanizePercentage }}"
        elif isinstance(condition, (RetractionRate, Rejections)):
            value = '{{ $value | printf "%.1f" }}'
        elif isinstance(condition, Reserve):
            value = "{{ $value | humanize1024 }}B"
        elif isinstance(condition, (Failures, Starts)):
            value = '{{ $value | printf "%.0f" }}'
        elif isinstance(condition, Stuck):
            stage = 'printf "sglang_tuning_stuck_stage{job=%q, instance=%q} == 1" $labels.job $labels.instance | query'
            hangs = (
                'the {{ . | first | label "stage" }} hangs: requests are there, and it has done nothing for a minute'
            )
            value = _with(stage, hangs, "a watchdog saw no progress for --watchdog-timeout seconds")
        elif isinstance(condition, Source):
            value = condition.words
        seen = self.row.sentence(value, PROFILES[DEFAULT_PROFILE])
        return f"{{{{ $labels.instance }}}}: {seen}."

    @property
    def flag(self) -> str:
        """The flag to turn, spelled as the running version wants it; empty when the advice is to people."""
        arg = self.row.turn.arg
        if not arg and not self.row.borrows:
            return ""
        plain = "--" + arg.replace("_", "-") if arg else ""
        if not self._computed:
            return plain
        typed = '--{{ . | first | label "arg" | reReplaceAll "_" "-" }}'
        return _with(self._recommended, typed, _with(self._worded, _of_flag(typed), plain))

    @property
    def current(self) -> str:
        """The flag's present value."""
        arg = self.row.turn.arg
        if not self._computed:
            return ""
        value = "{{ . | first | value }}"
        plain = _with(_query("sglang_tuning_server_arg", arg=arg), value, "not set") if arg else ""
        if arg in _IN_FORCE:
            plain = _with(
                _query("sglang_tuning_server_arg", arg=arg),
                value,
                _with(_query(_IN_FORCE[arg]), value + " (default)", "not set"),
            )
        # The recommended argument need not be the row's own: its value in force, not the row's.
        given = 'printf "sglang_tuning_server_arg{job=%q, instance=%q, arg=%q}" $labels.job $labels.instance (. | first | label "arg") | query'
        unset = "not set"
        for name, metric in _IN_FORCE.items():
            default = _with(_query(metric), value + " (default)", "not set")
            unset = f'{{{{ if eq (. | first | label "arg") "{name}" }}}}{default}{{{{ else }}}}{unset}{{{{ end }}}}'
        told = _query("sglang_tuning_recommended_arg_current", diagnosis=self.row.id)
        otherwise = _with(self._worded, _of_flag(plain), plain)
        return _with(told, value, _with(self._recommended, _with(given, value, unset), otherwise))

    @property
    def suggested(self) -> str:
        """The value to try: computed by the exporter while it sees the same, else the guide's words."""
        fallback = self.row.turn.fallback
        if not self._computed:
            return fallback
        words = _with(self._worded, '{{ . | first | label "value" }}', fallback)
        return _with(self._recommended, "{{ . | first | value }}", words)

    @property
    def _computed(self) -> bool:
        """Whether the exporter tells a value for the row's argument."""
        arg = self.row.turn.arg
        return (
            bool(arg or self.row.borrows)
            and arg not in _SWITCHES
            and not isinstance(self.row.condition, (Source, BurnRate))
        )

    @property
    def direction(self) -> str:
        """Which way to turn it; `set` when the exporter recommends another argument than the row's."""
        turn = self.row.turn
        if not self._computed:
            return turn.direction
        if not turn.arg:
            return _with(self._recommended, "set", turn.direction)
        same = f'match "^{turn.arg}" (. | first | label "arg")'
        chosen = f"{{{{ if {same} }}}}{turn.direction}{{{{ else }}}}set{{{{ end }}}}"
        return _with(self._recommended, chosen, turn.direction)

    @property
    def _recommended(self) -> str:
        return _query("sglang_tuning_recommended_arg", diagnosis=self.row.id)

    @property
    def _worded(self) -> str:
        """What the exporter says in words: of an argument that takes them, or to people where no flag would help."""
        return _query("sglang_tuning_recommended_setting_info", diagnosis=self.row.id)


def _one_of(label: str, values: tuple[str, ...]) -> str:
    """Write the matcher of a label: a pattern only where there is a choice."""
    return f'{label}="{values[0]}"' if len(values) == 1 else f'{label}=~"{"|".join(values)}"'


def _query(metric: str, **labels: str) -> str:
    fixed = "".join(f", {name}='{value}'" for name, value in labels.items())
    return f'printf "{metric}{{job=%q, instance=%q{fixed}}}" $labels.job $labels.instance | query'


def _with(query: str, found: str, otherwise: str) -> str:
    return f"{{{{ with {query} }}}}{found}{{{{ else }}}}{otherwise}{{{{ end }}}}"


def _of_flag(text: str) -> str:
    """`text` where the words are of an argument, nothing where they are to people."""
    return f'{{{{ if . | first | label "arg" }}}}{text}{{{{ end }}}}'


def _threshold(signal: str, bound: str) -> str:
    return f'sglang_tuning_threshold{{signal="{signal}", bound="{bound}"}}'


def scaled(text: str, time_scale: float) -> str:
    """`text` with every duration in it divided by `time_scale`, in whole milliseconds where seconds do not divide."""
    if time_scale == 1:
        return text

    def shorter(match: re.Match[str]) -> str:
        milliseconds = round(1000 * int(match[1]) * _UNITS[match[2]] / time_scale)
        return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"

    return _DURATION.sub(shorter, text)


def _gave_reason(times: float) -> list[str]:
    """Write why clients would give up: they waited (any wait, where the profile has no longest one), or first tokens came late."""
    waited = "instance:sglang_tuning_state:share10m"
    late = 'instance:sglang_tuning_latency_breaches:ratio10m{latency="time_to_first_token"}'
    often = f"> {ON} group_left () {_threshold('share', 'upper')}"
    return [
        f'{waited}{{signal="queue", state="above_range"}} {often}',
        f'or ((1 - {waited}{{signal="queue", state="empty"}}) {often} unless {ON} {_threshold("queue", "wait_seconds")})',
        f"or {late} {often}",
        f"or {late} > {ON} group_left () ({times:g} * (1 - {_threshold('latency', 'objective')}))",
    ]


def files(time_scale: float = 1.0, links: Links = DEFAULT_LINKS) -> dict[str, str]:
    """Rules, Alertmanager's configuration and notification templates: repository path → text."""
    rules = [Rule(row, time_scale, links) for row in ALERTS]
    values = {
        "rules": rules,
        "rows": ALERTS,
        "by_id": BY_ID,
        "scaled": lambda text: scaled(text, time_scale),
    }
    targets = {
        "alerts/rules/sglang-tuning.rules.yml": "rules.yml.j2",
        "alerts/alertmanager.yml": "alertmanager.yml.j2",
        "alerts/templates/sglang-tuning.tmpl": "notification.tmpl.j2",
    }
    return {path: _ENVIRONMENT.get_template(template).render(values) for path, template in targets.items()}
