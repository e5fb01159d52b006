"""Who may look and steer: this host's own user without a key, an operator's key, and nobody else's page."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from gateway.api_keys import ApiKey, KeyRing, digest_of
from gateway.config import ApiKeyConfig
from gateway.openai_http.call import Call
from gateway.web_page.guard import PageGuard
from meshkit.errors import InvalidArgument
from meshkit.rpc.policy import Role
from tests.contract.web_page.page_mesh import PageMesh, page_mesh
from tests.support.certificates import Pki

PLAIN, OPERATOR = "cmk_a-plain-clients-key", "cmk_an-operators-own-key"
CALLS = [
    ("GET", "live"), ("GET", "traces"), ("GET", "traces/0"), ("POST", "traffic"), ("POST", "swap"),
    ("POST", "drain"), ("POST", "flush"),
]  # fmt: skip


def keys() -> dict[str, Any]:
    return {
        "api_keys": [
            {"name": "client", "sha256": hashlib.sha256(PLAIN.encode()).hexdigest()},
            {"name": "boss", "sha256": hashlib.sha256(OPERATOR.encode()).hexdigest(), "operator": True},
        ]
    }


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def ask(http: httpx.AsyncClient, verb: str, path: str) -> httpx.Response:
    if verb == "GET":
        return await http.get(f"/page/api/{path}")
    return await http.post(f"/page/api/{path}", json={"weights": {"g": 5}})


async def test_where_keys_are_configured_only_an_operators_shows_and_steers(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, **keys()) as page:
        for headers, expected in (
            ({}, (401, "invalid_api_key")),
            ({"authorization": "Bearer cmk_nobodys-key-at-all"}, (401, "invalid_api_key")),
            ({"authorization": f"Bearer {PLAIN}"}, (403, "operator_required")),
        ):
            async with page.http(**headers) as http:
                for verb, path in CALLS:
                    assert refusal(await ask(http, verb, path)) == expected, (verb, path)
                assert (await http.get("/")).status_code == 200, "the files tell nothing, and need no key"
        bearer = {"authorization": f"Bearer {OPERATOR}"}
        assert (await page.post("traffic", {"weights": {"g": 5}}, **bearer)).status_code == 200
        async with page.live(**bearer) as view:
            last = await view.until(lambda last: last.get("mesh", {}).get("status") == "live", "a mesh")
            assert last["hello"]["needs_key"] is True


async def test_keys_do_not_open_the_page_to_those_who_may_call_without_one(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, **keys(), allow_anonymous=True) as page, page.http() as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert refusal(await http.get("/page/api/traces")) == (403, "operator_required")


async def test_another_sites_page_can_change_nothing_and_a_strange_name_shows_nothing(page: PageMesh) -> None:
    weights = {"weights": {"g": 5}}
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert refusal(await page.post("traffic", weights, **headers)) == (403, "cross_origin"), headers
    own = {"origin": page.url, "sec-fetch-site": "same-origin"}
    assert (await page.post("traffic", weights, **own)).status_code == 200
    async with page.http(host="evil.example:80") as http:
        assert refusal(await http.get("/page/api/traces")) == (403, "host_not_local")
    async with page.http() as http:
        # A browser sends this type for a stranger's page without asking.
        response = await http.post(
            "/page/api/traffic", content=b'{"weights": {"g": 1}}', headers={"content-type": "text/plain"}
        )
        assert refusal(response) == (415, "content_type_unsupported")
        assert (await http.get("/page/api/traffic")).status_code == 405


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True), ("localhost", True), ("LOCALHOST:1", True), ("[::1]:80", True),
        ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("10.0.0.1", False),
        ("", False), ("[bad", False),
    ],
)  # fmt: skip
async def test_without_a_key_the_page_answers_to_this_hosts_names(host: str, allowed: bool) -> None:
    async with guarded(is_public=False) as http:
        response = await http.get("/", headers={"host": host})
        assert (response.status_code == 200) is allowed, response.text


async def test_beyond_this_host_an_operators_key_is_needed_even_where_none_are_configured() -> None:
    async with guarded(is_public=True) as http:
        assert refusal(await http.get("/")) == (403, "operator_required")
    ring = KeyRing(checks_keys=True)
    config = ApiKeyConfig.model_validate({"name": "boss", "sha256": "0" * 64, "operator": True})
    ring.replace([ApiKey(config, (digest_of(OPERATOR),))])
    async with guarded(ring, is_public=True) as http:
        answer = await http.get("/", headers={"host": "mesh.example", "authorization": f"Bearer {OPERATOR}"})
        assert answer.status_code == 200


def guarded(ring: KeyRing | None = None, *, is_public: bool) -> httpx.AsyncClient:
    """A client of one guarded route."""

    async def show(call: Call) -> None:
        await call.answer(200, {})

    guard = PageGuard(
        ring or KeyRing(checks_keys=False),
        has_keys=ring is not None,
        is_public=is_public,
        over_tcp=True,
        on_refused=lambda: None,
    )
    transport = httpx.ASGITransport(app=Starlette(routes=[Route("/", guard.guard(show), methods=["GET"])]))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_where_services_have_certificates_the_page_asks_with_an_operators_or_says_what_it_lacks(
    tmp_path: Path, pki: Pki
) -> None:
    def files(role: Role, name: str) -> dict[str, str]:
        tls = pki.good(role, name)
        return {"certificate": str(tls.certificate), "key": str(tls.key), "authority": str(tls.authority)}

    gateway = await asyncio.to_thread(files, Role.GATEWAY, "front")
    operator = await asyncio.to_thread(files, Role.OPERATOR, "page")
    scheduler = await asyncio.to_thread(files, Role.SCHEDULER, "one")
    async with page_mesh(tmp_path, scheduler={"tls": scheduler}, tls=gateway) as page:
        async with page.live() as view:
            last = await view.until(lambda last: last.get("mesh", {}).get("status") == "away", "no right")
            assert "page.operator_tls" in last["mesh"]["problem"]
        refused = await page.post("traffic", {"weights": {"g": 5}})
        assert refusal(refused) == (400, "no_operator_certificate")
    own = {"page": {"operator_tls": operator}}
    async with page_mesh(tmp_path, scheduler={"tls": scheduler}, tls=gateway, **own) as page:
        async with page.live() as view:
            await view.until(lambda last: last.get("mesh", {}).get("status") == "live", "a mesh")
        assert (await page.post("traffic", {"weights": {"g": 5}})).status_code == 200
    with pytest.raises(InvalidArgument, match=r"page\.operator_tls"):
        async with page_mesh(tmp_path, tls=gateway, page={"operator_tls": gateway}):
            pass
