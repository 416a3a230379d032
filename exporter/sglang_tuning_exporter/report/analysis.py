"""A server as its past log shows it: the live state, driven by the times of the lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from sglang_tuning_exporter.sglang.events import ENDS, DecodeBatch, Event, Liveness, PrefillBatch, ServerArgs
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.arguments import is_whole
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.server import ServerState

# Seconds without a batch line that may be a pause.
QUIET_SECONDS = 2.0
PASS_SECONDS = 10.0  # as often as a window keeps its totals
# The processes of several nodes print their arguments one after the other.
_SAME_START_SECONDS = 600.0


class Analysis:
    """The state of a server from the events of its log in time order. Times never run backwards."""

    def __init__(self, profile: Profile) -> None:
        self.state = ServerState(profile, 0.0)
        self.now = 0.0
        self._begun = False  # whether a time was printed
        self._last_batch = self._pass_due = -inf
        self._started: tuple[Mapping[str, object], float] | None = None  # a start that is not over: arguments and time
        self._node_ranks: set[object] = set()

    def take(self, moment: float, event: Event | BatchRun | None) -> None:
        """Take an event printed at `moment` (-inf: not known yet); without an event only time passes."""
        if moment > self.now or (not self._begun and moment != -inf):
            self._pass(moment, lightly=event is None or isinstance(event, BatchRun))
        if event is None or (isinstance(event, ServerArgs) and is_whole(event) and self._is_another_node(event.args)):
            return
        is_counted = self.state.observe(event, self.now)
        if isinstance(event, BatchRun) or (is_counted and isinstance(event, (DecodeBatch, PrefillBatch))):
            self._last_batch = self.now
        if isinstance(event, Liveness) and event.what in {"ready", "draining", *ENDS}:
            self._started = None

    def wait(self, moment: float) -> None:
        """Let time pass without a line, so that the state at `moment` can be read."""
        if self._begun and moment > self.now:
            self.state.advance(moment)

    def _pass(self, moment: float, *, lightly: bool) -> None:
        """Let time pass for all ranks at once, so that seconds in which any of them served can be counted.

        `lightly`: a run lets time pass for its own rank, which is enough for a while under the load of one rank.
        """
        self._begun = True
        if not (lightly and moment < self._pass_due and moment - self._last_batch <= QUIET_SECONDS):
            self.state.advance(moment)
            self._pass_due = moment + PASS_SECONDS if self.state.is_steady else -inf
        self.now = moment

    def _is_another_node(self, args: Mapping[str, object]) -> bool:
        """Whether these arguments are of the present start, printed by another of its nodes."""
        nodes, rank, started = args.get("nnodes"), args.get("node_rank"), self._started
        if started is not None and isinstance(nodes, int) and nodes > 1 and rank not in self._node_ranks:
            of_start, since = started
            if self.now - since <= _SAME_START_SECONDS and args.get("model_path") == of_start.get("model_path"):
                self._node_ranks.add(rank)
                return True
        self._started, self._node_ranks = (args, self.now), {rank}
        return False
