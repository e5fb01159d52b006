"""The only file that loads a device plugin, through the SDK's registry; and picks what runs models on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import FailedPrecondition, MeshError
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.registry import describe_plugin_failure, load_backend
from plugins.sdk.runner import ModelRunner


@dataclass(frozen=True)
class LoadedPlugin:
    """A backend and the runner that goes with it."""

    backend: Backend
    runner: ModelRunner


def load_plugin(
    name: str, options: Mapping[str, str], *, device: int = 0, cache_dir: str = ""
) -> LoadedPlugin:
    """Load a backend by name and make its runner; call it on the thread that owns the device.

    Raises:
        MeshError: as plugins.sdk.registry.load_backend and the plugin.
        FailedPrecondition: BACKEND_FAILED: it makes no runner and brings no operators for the framework's.
    """
    backend = load_backend(name, options)
    runner = _own_runner(name, backend, RunnerContext(device=device, cache_dir=cache_dir))
    return LoadedPlugin(backend, runner if runner is not None else _framework_runner(name, backend))


def _own_runner(name: str, backend: Backend, context: RunnerContext) -> ModelRunner | None:
    try:
        return backend.create_runner(context)
    except MeshError:
        raise
    except Exception as error:
        raise describe_plugin_failure(name, "make its runner", error) from error


def _framework_runner(name: str, backend: Backend) -> ModelRunner:
    if backend.operators is None:
        raise FailedPrecondition(
            f"backend {name!r} brings neither a runner nor operators: nothing can run a model on it",
            field="backend",
            reason="BACKEND_FAILED",
        )
    # Only here, since it imports the tensor framework: a plugin with a runner of its own needs none.
    from worker_svc.model_runner import OperatorModelRunner  # noqa: PLC0415

    return OperatorModelRunner(backend)
