"""Canaries: shadows are compared and never served, guards take traffic, a parity gate keeps replicas out."""

from __future__ import annotations

from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.errors import InvalidArgument
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import registration, until

KEPT_OUT = admin_pb2.ReplicaStatus.STATE_KEPT_OUT
PROMPT = list(range(9))


def groups(**canary: Any) -> list[dict[str, Any]]:
    return [
        {"name": "main", "model": "m", "weight": 1.0},
        {"name": "canary", "model": "m", "weight": 0.0, **canary},
    ]


async def status(m: Any, name: str) -> admin_pb2.GroupStatus:
    mesh = (await m.admin.GetMesh(admin_pb2.GetMeshRequest())).mesh
    found: admin_pb2.GroupStatus = next(group for group in mesh.groups if group.name == name)
    return found


async def shadow(m: Any, share: float, *, source: str = "main", to: str = "canary") -> None:
    await m.call(
        m.admin.SetShadow, admin_pb2.SetShadowRequest(source_group=source, shadow_group=to, share=share)
    )


async def test_a_share_of_requests_runs_on_the_shadow_too_and_only_the_source_answers(mesh: Any) -> None:
    async with mesh(groups=groups()) as m:
        await m.worker("w0", group="main")
        other = await m.worker("w1", group="canary")
        await shadow(m, 0.5)
        gateway = await m.gateway()
        for _ in range(8):
            seen = await (await gateway.submit(PROMPT, 6)).end()
            assert seen.tokens == expected_tokens(PROMPT, 6)
            assert [placed.worker for placed in seen.placed] == ["w0"]
        await until(lambda: m.service.mirror.shadows["main"].count.compared == 4, "all were compared")
        seen_by = (await status(m, "main")).shadow
        assert (seen_by.shadow_group, seen_by.share, seen_by.mirrored) == ("canary", 0.5, 4)
        assert (seen_by.identical, seen_by.equal_tokens, seen_by.tokens) == (4, 24, 24)
        assert other.plans


async def test_a_shadow_that_answers_otherwise_is_counted_from_the_first_token_that_differs(
    mesh: Any,
) -> None:
    async with mesh(groups=groups()) as m:
        await m.worker("w0", group="main")
        await m.worker("w1", group="canary", skew_after=len(PROMPT) + 2)
        await shadow(m, 1.0)
        gateway = await m.gateway()
        seen = await (await gateway.submit(PROMPT, 6)).end()
        assert seen.tokens == expected_tokens(PROMPT, 6)
        await until(lambda: m.service.mirror.shadows["main"].count.compared == 1, "it was compared")
        count = m.service.mirror.shadows["main"].count
        assert (count.identical, count.equal_tokens, count.tokens) == (0, 2, 6)


async def test_a_copy_ends_with_its_original_and_leaves_nothing_behind(mesh: Any) -> None:
    async with mesh(groups=groups()) as m:
        await m.worker("w0", group="main")
        held = await m.worker("w1", group="canary")
        held.gate.clear()
        await shadow(m, 1.0)
        gateway = await m.gateway()
        seen = await gateway.submit(PROMPT, 500)
        await seen.has_tokens(3)
        await until(lambda: m.service.mirror._copies, "it is mirrored")
        await gateway.cancel(seen)
        await seen.end()
        await until(lambda: not m.service.mirror._copies, "the copy is forgotten")
        held.release()
        await until(lambda: m.service.engine.live_count == 0, "nothing runs")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"source_group": "none", "shadow_group": "canary", "share": 0.5}, "source_group"),
        ({"source_group": "main", "shadow_group": "none", "share": 0.5}, "shadow_group"),
        ({"source_group": "main", "shadow_group": "main", "share": 0.5}, "shadow_group"),
        ({"source_group": "main", "shadow_group": "canary", "share": 1.5}, "share"),
    ],
)
async def test_a_shadow_that_cannot_be_is_refused(mesh: Any, request_: dict[str, Any], field: str) -> None:
    async with mesh(groups=groups()) as m:
        with pytest.raises(InvalidArgument) as caught:
            await m.call(m.admin.SetShadow, admin_pb2.SetShadowRequest(**request_))
        assert caught.value.field == field


async def test_a_canary_whose_answers_differ_loses_its_traffic_and_says_why(mesh: Any) -> None:
    guard = {"min_agreement": 0.9, "min_requests": 3}
    async with mesh(groups=groups(weight=1.0, guard=guard)) as m:
        await m.worker("w0", group="main")
        await m.worker("w1", group="canary", skew_after=len(PROMPT) + 1)
        await shadow(m, 1.0)
        gateway = await m.gateway()
        for _ in range(8):
            await (await gateway.submit(PROMPT, 6)).end()
        await until(lambda: m.service.guards.reasons, "the guard has spoken")
        canary = await status(m, "canary")
        assert canary.weight == 0
        assert "tokens" in canary.rolled_back
        await m.call(m.admin.SetTraffic, admin_pb2.SetTrafficRequest(weights={"main": 1, "canary": 1}))
        assert (await status(m, "canary")).rolled_back == ""


async def test_a_canary_whose_requests_fail_loses_its_traffic_and_the_others_go_on(mesh: Any) -> None:
    guard = {"max_error_share": 0.3, "min_requests": 4}
    async with mesh(groups=groups(weight=1.0, guard=guard)) as m:
        await m.worker("w0", group="main")
        bad = await m.worker("w1", group="canary")
        gateway = await m.gateway()
        for _ in range(12):
            bad.fail_slots = dict.fromkeys(range(bad.max_slots), "NON_FINITE_LOGITS")
            await (await gateway.submit(PROMPT, 3)).end()
        assert (await status(m, "canary")).weight == 0
        assert "failed" in (await status(m, "canary")).rolled_back
        seen = await (await gateway.submit(PROMPT, 3)).end()
        assert seen.placed[0].worker == "w0"


async def test_the_last_group_of_a_model_keeps_its_traffic_whatever_its_guard_says(mesh: Any) -> None:
    guard = {"max_error_share": 0.1, "min_requests": 2}
    async with mesh(groups=[{"name": "main", "model": "m", "guard": guard}]) as m:
        bad = await m.worker("w0", group="main")
        gateway = await m.gateway()
        for _ in range(4):
            bad.fail_slots = dict.fromkeys(range(bad.max_slots), "NON_FINITE_LOGITS")
            await (await gateway.submit(PROMPT, 3)).end()
        main = await status(m, "main")
        assert main.weight == 1.0
        assert "failed" in main.rolled_back


PARITY = {"prompts": [[1, 2, 3], [4, 5, 6, 7]], "max_logprob_gap": 0.05, "output_tokens": 4, "timeout_s": 5.0}


async def test_a_replica_of_another_class_that_answers_alike_joins(mesh: Any) -> None:
    async with mesh(groups=[{"name": "main", "model": "m", "parity": PARITY}]) as m:
        await m.worker("w0", group="main")
        joined = await m.worker("w1", group="main", numeric_class="other", logprob=-0.52)
        assert joined.plans
        gateway = await m.gateway()
        workers = set()
        for number in range(6):
            seen = await (await gateway.submit([50 + number, 9], 3)).end()
            workers.add(seen.placed[0].worker)
        assert workers <= {"w0", "w1"}


async def test_a_replica_past_the_bound_is_kept_out_with_the_prompt_and_the_gap(mesh: Any) -> None:
    async with mesh(groups=[{"name": "main", "model": "m", "parity": PARITY}]) as m:
        await m.worker("w0", group="main")
        executor = await m.executor(numeric_class="other", logprob=-0.9)
        supervisor = await m.supervisor("w1")
        await supervisor.register(registration(executor, "w1", group="main"))
        await until(lambda: m.service.pool.member("w1").kept_out, "the trial is over")
        replica = (await m.replicas())["w1"]
        assert replica.state == KEPT_OUT
        assert "parity prompt 0" in replica.message
        assert "0.4000" in replica.message
        gateway = await m.gateway()
        for number in range(4):
            seen = await (await gateway.submit([50 + number, 9], 3)).end()
            assert seen.placed[0].worker == "w0"


async def test_the_first_replica_and_one_of_a_class_that_serves_need_no_trial(mesh: Any) -> None:
    async with mesh(groups=[{"name": "main", "model": "m", "parity": PARITY}]) as m:
        for worker in ("w0", "w1"):
            executor = await m.worker(worker, group="main")
            assert not executor.plans
