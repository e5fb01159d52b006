"""What a worker's supervisor exports: its executor's state, its replacements, how long ago it worked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chipmesh.device.v1alpha1.execution_pb2 import OperatorDecision
from meshkit.telemetry.metrics import Metrics
from worker_svc.config import WorkerConfig
from worker_svc.registration import ExecutorState
from worker_svc.supervisor import Supervisor

_LABELS = ("group", "worker", "chip")
_STATES = {
    ExecutorState.EXECUTOR_STATE_STARTING: "starting",
    ExecutorState.EXECUTOR_STATE_READY: "ready",
    ExecutorState.EXECUTOR_STATE_DEAD: "dead",
    ExecutorState.EXECUTOR_STATE_DRAINING: "draining",
}


def state_word(state: ExecutorState.ValueType) -> str:
    """A state for people and labels."""
    return _STATES.get(state, "unknown")


class WorkerMetrics:
    """Gauges that `refresh` sets from the supervisor."""

    def __init__(self, metrics: Metrics, config: WorkerConfig) -> None:
        self.registry = metrics.registry
        self._config = config
        self._chip = ""
        self._state = metrics.gauge(
            "executor_state", "1 for the state that the executor is in", labels=(*_LABELS, "state")
        )
        self._restarts = metrics.gauge(
            "executor_restarts", "Executors started in place of a lost one", labels=_LABELS
        )
        self._idle = metrics.gauge(
            "executor_since_last_step_seconds", "Time since the device ended a piece of work", labels=_LABELS
        )

        self._calls = metrics.gauge(
            "operator_calls",
            "Operator calls of a forward pass by how the execution plan runs them",
            labels=(*_LABELS, "operator", "choice"),
        )

    def refresh(self, supervisor: Supervisor, *, chip: str) -> None:
        """Take over the present values. Those of another chip, before a swap, are dropped."""
        if chip != self._chip:
            self._chip = chip
            for gauge in (self._state, self._restarts, self._idle):
                gauge.clear()
        labels = (self._config.group, self._config.worker_id, chip)
        for state, word in _STATES.items():
            self._state.labels(*labels, word).set(1.0 if state == supervisor.status.state else 0.0)
        self._restarts.labels(*labels).set(supervisor.status.restarts)
        if supervisor.status.since_last_step_s is not None:
            self._idle.labels(*labels).set(supervisor.status.since_last_step_s)
        self._show_plan(supervisor.ready.model.operators, labels)

    def _show_plan(self, decisions: Iterable[OperatorDecision], labels: tuple[str, str, str]) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        for decision in decisions:
            counts[decision.name, decision.choice] += decision.calls
        self._calls.clear()
        for key, calls in counts.items():
            self._calls.labels(*labels, *key).set(calls)
