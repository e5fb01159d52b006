"""Shows a launch to a person: bars on a terminal, plain lines elsewhere, both on stderr; then a summary."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from meshkit.cli.events import LaunchEvent
from meshkit.cli.state import MeshRecord, ServiceRecord, StateDir, environment_prefix, reachable
from meshkit.cli.terminal import own_command

PLAIN_STEP = 0.25


class LaunchDisplay:
    """Reports events while it is entered; `close` ends the bars, so that lines after them stand alone."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._plain_told: dict[tuple[str, str], float] = {}

    def __enter__(self) -> LaunchDisplay:
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓[/]"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bars; later events are plain lines."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def report(self, event: LaunchEvent) -> None:
        """Shows one event."""
        status = _status(event)
        if event.kind in ("started", "progress", "ready") and self._progress is not None:
            self._show_bar(self._progress, event, status)
        elif status and self._is_news(event):
            self._console.print(f"{event.service}: {status}", markup=False, soft_wrap=True)

    def _show_bar(self, progress: Progress, event: LaunchEvent, status: str) -> None:
        if event.service not in self._tasks:
            self._tasks[event.service] = progress.add_task(event.service, total=1.0, status="")
        done = 1.0 if event.kind == "ready" else event.fraction
        progress.update(self._tasks[event.service], completed=done, status=status)

    def _is_news(self, event: LaunchEvent) -> bool:
        """On a plain stream a stage is told when it begins, at each quarter, and at its end."""
        if event.kind != "progress":
            return True
        key = (event.service, event.stage)
        told = self._plain_told.get(key)
        if told is None or event.fraction >= told + PLAIN_STEP or (event.fraction >= 1.0 > told):
            self._plain_told[key] = event.fraction
            return True
        return False


def _status(event: LaunchEvent) -> str:
    """One event in words; empty where there is nothing to say."""
    words = {
        "started": f"starting (pid {event.pid})",
        "progress": f"{event.stage} {event.fraction:.0%}",
        "ready": f"ready at {event.address}",
        "lost": f"ended by itself: {event.message}",
        "stopping": "stopping",
        "stopped": f"stopped {f'({event.message})' if event.message else ''}".rstrip(),
    }
    return words.get(event.kind, "")


def describe_mesh(mesh: MeshRecord, state: StateDir) -> dict[str, object]:
    """What `up --json` prints: every process with its pid, endpoints and log, and a ready command."""
    return {
        "model": mesh.model,
        "state_dir": str(state.root),
        "launcher": {"pid": mesh.launcher.pid},
        "gateway": _describe_service(mesh.of_kind("gateway")[0]),
        "scheduler": _describe_service(mesh.of_kind("scheduler")[0]),
        "workers": [_describe_service(worker) for worker in mesh.of_kind("worker")],
        "page": page_url(mesh),
        "command": generate_command(mesh),
    }


def _describe_service(service: ServiceRecord) -> dict[str, object]:
    return {
        "name": service.name,
        "pid": service.process.pid,
        "address": reachable(str(service.address)),
        "http_address": reachable(str(service.http_address)),
        "log": str(service.log),
        **{name: _detail(name, value) for name, value in service.details.items()},
    }


def _detail(name: str, value: object) -> object:
    return reachable(str(value)) if name == "openai_address" else value


def page_url(mesh: MeshRecord) -> str | None:
    """Where a browser finds the mesh; None where its gateway has no page."""
    details = mesh.of_kind("gateway")[0].details
    return f"http://{reachable(str(details['openai_address']))}/" if details.get("page") else None


def generate_command(mesh: MeshRecord) -> str:
    """A command that works from any folder and with any state folder."""
    endpoint = reachable(str(mesh.of_kind("gateway")[0].address))
    return f'{own_command()} generate "Why is the sky blue?" --endpoint {endpoint}'


def print_summary(mesh: MeshRecord, state: StateDir, *, detached: bool) -> None:
    """What was started, where, and how to use and stop it, on stdout."""
    workers = len(mesh.of_kind("worker"))
    lines = [f"chipmesh is up: model {mesh.model}, {workers} worker{'s' if workers > 1 else ''}"]
    lines += [f"  {_service_line(service)}" for service in mesh.services]
    lines += _openai_lines(mesh)
    lines += [f"  logs: {mesh.services[0].log.parent}", "try it:", f"  {generate_command(mesh)}"]
    down = f"{environment_prefix(state)}{own_command()} down"
    lines += ["stop it:", f"  {down}" if detached else f"  Ctrl-C, or {down}"]
    print("\n".join(lines), flush=True)


def _openai_lines(mesh: MeshRecord) -> list[str]:
    address = mesh.of_kind("gateway")[0].details.get("openai_address")
    if not address:
        return []
    page = page_url(mesh)
    lines = [f"  page: {page}"] if page else []
    return [*lines, f"  OpenAI clients: base_url http://{reachable(str(address))}/v1"]


def _service_line(service: ServiceRecord) -> str:
    http = f"http://{reachable(str(service.http_address))}"
    return f"{service.name:<10} gRPC {service.address}  {http}  pid {service.process.pid}"
