"""What the supervisor sets before an executor's interpreter starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import Unavailable
from worker_svc import executor_set
from worker_svc.config import WorkerConfig
from worker_svc.executor_set import SPIN_COUNT
from worker_svc.supervisor import Supervisor


class Silent:
    """A registrar that nobody hears."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


async def environment_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **executor: Any) -> dict[str, str]:
    """What an executor of this configuration would be started with."""
    given: dict[str, str] = {}

    async def spawn(*_: Any, environment: dict[str, str], **__: Any) -> None:
        given.update(environment)
        raise Unavailable("seen enough")

    monkeypatch.setattr(executor_set, "spawn_executor", spawn)
    config = WorkerConfig.model_validate({
        "worker_id": "w0", "model": "m", "scheduler_address": "127.0.0.1:1", "cache_dir": tmp_path,
        "executor": executor,
    })  # fmt: skip
    with pytest.raises(Unavailable):
        await Supervisor(config, Silent()).start()  # type: ignore[arg-type]
    return given


async def test_waiting_threads_soon_leave_their_processors_to_another_executor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (await environment_of(monkeypatch, tmp_path))["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


async def test_what_the_configuration_sets_goes_over_what_is_chosen_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "3"}
    given = await environment_of(monkeypatch, tmp_path, threads=2, environment=own)
    assert own.items() <= given.items()
    assert (await environment_of(monkeypatch, tmp_path, threads=2))["OMP_NUM_THREADS"] == "2"
