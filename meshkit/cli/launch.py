"""Starts a mesh, watches it until it is asked to stop, and stops it: the foreground launcher behind `up`."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Literal

from meshkit.address import TcpAddress
from meshkit.cli.child import Child, last_error_line
from meshkit.cli.compose import (
    MeshPlan,
    OpenedModel,
    gateway_config,
    model_references,
    plan_mesh,
    scheduler_config,
    worker_config,
)
from meshkit.cli.events import LaunchEvent, Report
from meshkit.cli.options import MeshOptions
from meshkit.cli.processes import POLL_S, record_process
from meshkit.cli.state import MeshRecord, ServiceKind, StateDir
from meshkit.cli.stopping import stop_services
from meshkit.errors import Cancelled, DeadlineExceeded, FailedPrecondition, Internal
from meshkit.modelstore import open_model
from meshkit.ports import LOOPBACK, reserve_port


class StopRequests:
    """Counts SIGINT and SIGTERM while it is entered: the first asks to stop, a second to hurry.

    Enter it on the main thread: only there signals are taken.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, object] = {}
        # A queue of this kind takes things from a signal handler, too; an Event would wait for itself.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._on_child_ended)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._news.put(None)

    def _on_child_ended(self, _number: int, _frame: FrameType | None) -> None:
        self._news.put(None)

    def wait_for_news(self) -> None:
        """Return when somebody has asked or a child has ended since the last time, or for nothing."""
        self._news.get()

    def asked(self) -> bool:
        """True once somebody asked to stop."""
        return self.count > 0

    def hurry(self) -> bool:
        """True once somebody asked twice."""
        return self.count > 1


class Launcher:
    """The processes of one mesh, from the first spawn to the last exit."""

    def __init__(self, plan: MeshPlan, *, state: StateDir, report: Report, stop: StopRequests) -> None:
        self._plan = plan
        self._state = state
        self._report = report
        self._stop = stop
        self._children: list[Child] = []
        self._deadline = time.monotonic() + plan.options.start_timeout_s

    def start(self) -> MeshRecord:
        """Scheduler and workers together, then the gateway; returns when all are ready.

        The workers' executors are what takes long. The gateway waits for the scheduler, so that where
        processors are few it is not in the way of the workers, which would be ready later.

        Raises:
            FailedPrecondition: a service ended while it started; its last words are in the text.
            DeadlineExceeded: not all were ready in time.
            Cancelled: a signal came meanwhile.
        """
        with reserve_port() as port, reserve_port() as traces_port:
            # Known before the scheduler is there; workers come to register long after.
            address = str(TcpAddress(LOOPBACK, port))
            self._point_traces(str(TcpAddress(LOOPBACK, traces_port)))
            scheduler = scheduler_config(self._plan, state=self._state)
            first = self._spawn("scheduler", "scheduler", {**scheduler, "listen": address})
            others = self._spawn_workers(scheduler_address=address)
            self._wait_ready([first])
            gateway = gateway_config(self._plan, state=self._state, scheduler_address=address)
            others.append(self._spawn("gateway", "gateway", gateway))
            self._wait_ready(others)
        record = _mesh_record("ready", self._plan.options, self._plan.model, self._children)
        self._state.write_mesh(record)
        self._report(LaunchEvent(kind="up", mesh=record))
        return record

    def watch(self) -> None:
        """Returns when a stop is asked for; reports services that end by themselves.

        Raises:
            FailedPrecondition: all of them have.
        """
        running = list(self._children)
        while running and not self._stop.asked():
            for child in [child for child in running if child.exit_code() is not None]:
                running.remove(child)
                self._report(LaunchEvent(kind="lost", service=child.name, message=_last_words(child)))
            if running:
                self._stop.wait_for_news()
        if not running:
            raise FailedPrecondition(
                f"all services have ended by themselves; their logs are in {self._state.launch_log.parent}"
            )

    def stop(self) -> None:
        """Ends what runs, in order."""
        stop_services(
            [child.record() for child in self._children], report=self._report, hurry=self._stop.hurry
        )
        for child in self._children:
            child.exit_code()  # Reaps it.

    def _point_traces(self, address: str) -> None:
        """Spans go to the gateway's page at `address`, unless they go elsewhere or nowhere."""
        options = self._plan.options
        if options.page_traces and options.otlp_endpoint is None:
            self._plan = replace(self._plan, traces_listen=address)

    def _spawn_workers(self, *, scheduler_address: str) -> list[Child]:
        return [
            self._spawn(
                worker.worker_id,
                "worker",
                worker_config(self._plan, worker, state=self._state, scheduler_address=scheduler_address),
            )
            for worker in self._plan.workers
        ]

    def _spawn(self, name: str, kind: ServiceKind, config: dict[str, Any]) -> Child:
        child = Child(name, kind, config=config, state=self._state)
        self._children.append(child)
        self._state.write_mesh(_mesh_record("starting", self._plan.options, self._plan.model, self._children))
        self._report(LaunchEvent(kind="started", service=name, pid=child.identity.pid))
        return child

    def _wait_ready(self, children: list[Child]) -> None:
        waiting = list(children)
        while waiting:
            time.sleep(POLL_S)
            for child in list(waiting):
                self._relay_progress(child)
                ready = child.read_ready()
                if ready is not None:
                    waiting.remove(child)
                    self._report(LaunchEvent(kind="ready", service=child.name, address=str(ready["address"])))
            self._refuse_to_wait_in_vain(waiting)

    def _relay_progress(self, child: Child) -> None:
        for stage, fraction in child.progress():
            self._report(LaunchEvent(kind="progress", service=child.name, stage=stage, fraction=fraction))

    def _refuse_to_wait_in_vain(self, waiting: list[Child]) -> None:
        for child in self._children:
            if child.exit_code() is not None:
                raise FailedPrecondition(
                    f"{child.name} did not start: {_last_words(child)} (log: {child.log})",
                    reason="SERVICE_FAILED",
                )
        if self._stop.asked():
            raise Cancelled("stopped before the mesh was up")
        if waiting and time.monotonic() > self._deadline:
            late = ", ".join(child.name for child in waiting)
            raise DeadlineExceeded(
                f"{late} not ready after {self._plan.options.start_timeout_s:.0f} s; see the logs in "
                f"{waiting[0].log.parent}, or give more time with --start-timeout"
            )


def _mesh_record(
    phase: Literal["starting", "ready"], options: MeshOptions, model: str, children: Sequence[Child] = ()
) -> MeshRecord:
    launcher = record_process(os.getpid())
    if launcher is None:
        raise Internal(
            "the launcher finds no record of itself in /proc; chipmesh needs Linux with /proc mounted"
        )
    return MeshRecord(
        phase=phase,
        launcher=launcher,
        model=model,
        otlp_endpoint=options.otlp_endpoint,
        services=tuple(child.record() for child in children),
    )


def _last_words(child: Child) -> str:
    return f"{last_error_line(child.log)} [exit code {child.exit_code()}]"


def run_mesh(options: MeshOptions, *, state: StateDir, report: Report) -> None:
    """Starts the mesh, serves until SIGINT or SIGTERM, stops it. Whatever happens, nothing is left running.

    Raises:
        MeshError: the model cannot be opened, the folder has a mesh already, or a service did not start.
    """
    with StopRequests() as stop, state.locked():
        # Before the first process: `down` must find a launcher that is still converting a model.
        state.write_mesh(_mesh_record("starting", options, options.model_path))
        try:
            plan = _plan(options, report=report)
            launcher = Launcher(plan, state=state, report=report, stop=stop)
            try:
                launcher.start()
                launcher.watch()
            finally:
                launcher.stop()
        finally:
            state.forget_mesh()


def _plan(options: MeshOptions, *, report: Report) -> MeshPlan:
    """Opens the models before any process starts: a bad path is told at once, a header converted once."""

    def tell(stage: str, share: float) -> None:
        report(LaunchEvent(kind="progress", service="model", stage=stage, fraction=share))

    models: dict[str, OpenedModel] = {}
    for reference, need_weights in model_references(options).items():
        model = open_model(reference, cache_dir=options.cache_dir, need_weights=need_weights, progress=tell)
        models[reference] = OpenedModel(model.name, model.source.absolute(), model.context_length)
    return plan_mesh(options, models)
