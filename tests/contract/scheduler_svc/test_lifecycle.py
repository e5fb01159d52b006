"""Starting, draining, stopping: every request gets a last event; a real process ends with 0 on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from meshkit.errors import FailedPrecondition, Internal
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.errors import IdentityViolated
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import until

ROOT = Path(__file__).resolve().parents[3]


async def test_a_stopping_scheduler_serves_on_until_nothing_runs(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.hold_after(3)
        running = await gateway.submit([1, 2], 30)
        await running.has_tokens(2)
        stopping = asyncio.create_task(m.service.stop(20))
        await until(lambda: m.service.stopping, "it stops")
        late = await gateway.submit([3], 5)
        executor.release()
        await running.end()
        await late.end()
        await stopping
        assert running.tokens == expected_tokens([1, 2], 30)
        assert late.tokens == expected_tokens([3], 5)
        assert gateway.end is None, "the session ended well"


async def test_what_does_not_end_in_time_is_the_next_schedulers(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        live = [await gateway.submit([1, 2], 30), await gateway.submit([3], 30)]
        await until(lambda: live[0].placed and live[1].queued, "one runs, one waits")
        await m.service.stop(0.05)
        await asyncio.wait_for(gateway.reading, 10)
        assert gateway.end is None, "the session ended well"
        assert [(seen.failed, seen.finished) for seen in live] == [(None, None)] * 2


async def test_a_scheduler_whose_sessions_have_ended_takes_no_other(mesh: Any) -> None:
    async with mesh() as m:
        sessions = m.service.sessions
        await sessions.close_all(timeout_s=1.0)
        with pytest.raises(grpc.aio.AioRpcError, match="the next one takes the session") as refused:
            await m.gateway()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_in_use_is_a_clear_error(mesh: Any) -> None:
    async with mesh() as m:
        second = SchedulerService(SchedulerConfig(listen=m.address))
        with pytest.raises(FailedPrecondition, match="listen"):
            await second.start()
        third = SchedulerService(SchedulerConfig(http_listen=m.http_address))
        with pytest.raises(FailedPrecondition, match="http_listen"):
            await third.start()


async def _spawn(config: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", "--config", str(config), cwd=ROOT, env=environment,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_process_says_when_it_is_ready_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    ready, config = tmp_path / "ready.json", tmp_path / "config.json"
    await asyncio.to_thread(config.write_text, json.dumps({"ready_file": str(ready)}))
    process = await _spawn(config)
    try:
        await until(
            lambda: os.path.exists(ready) or process.returncode is not None, "the ready file is there"
        )
        payload = json.loads(await asyncio.to_thread(ready.read_text))
        assert payload["service"] == "scheduler"
        assert payload["pid"] == process.pid
        async with grpc.aio.insecure_channel(payload["address"]) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_bad_configuration_ends_the_process_with_2_and_names_the_field(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    await asyncio.to_thread(config.write_text, json.dumps({"lease_duration_s": -1}))
    process = await _spawn(config)
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"lease_duration_s" in stderr


async def test_an_idle_replica_whose_pages_do_not_add_up_is_counted_and_fails_a_strict_scheduler(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Batcher) -> None:
        raise IdentityViolated("page 3 has two owners")

    monkeypatch.setattr(Batcher, "check_identity", broken)

    async def serve_until_checked() -> None:
        async with mesh() as m:
            await m.worker()
            await (await (await m.gateway()).submit([1], 2)).end()
            await until(lambda: m.service.engine.violations, "the idle check ran")
            async with httpx2.AsyncClient(base_url=f"http://{m.http_address}") as http:
                text = (await http.get("/metrics")).text
            assert "chipmesh_page_identity_violations_total 1.0" in text

    with pytest.raises(Internal, match="page 3 has two owners"):
        await serve_until_checked()
