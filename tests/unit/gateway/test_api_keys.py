"""Keys: who is let in, where they are read from, and that they are told to nobody."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.api_keys import ApiKey, KeyRing, digest_of
from gateway.config import ApiKeyConfig, GatewayConfig
from gateway.key_files import KeyFiles, read_keys
from gateway.tenant import Tenant
from meshkit.config import describe, parse_config
from meshkit.errors import InvalidArgument, ResourceExhausted, Unauthenticated

KEYS = {name: f"cmk_the-key-of-{name}" for name in ("a", "b", "c")}


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, **fields: Any) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=SecretStr(hash_of(KEYS[name])), **fields)


def ring_of(*entries: ApiKeyConfig, allow_anonymous: bool = False) -> KeyRing:
    ring = KeyRing(checks_keys=True, allow_anonymous=allow_anonymous)
    ring.replace(read_keys(entries, None))
    return ring


def test_each_key_is_its_tenants() -> None:
    ring = ring_of(entry("a"), entry("b"))
    for name in ("a", "b"):
        assert ring.identify([f"Bearer {KEYS[name]}"]).name == name
        assert ring.identify([f"bEARER  {KEYS[name]} "]).name == name


@pytest.mark.parametrize(
    "authorization",
    [
        [], [""], ["Bearer"], ["Bearer "], ["Bearer wrong"], [KEYS["a"]], ["Basic " + KEYS["a"]],
        ["Bearer " + KEYS["a"] + "x"], ["Bearer " + KEYS["a"][:-1]], ["Bearer " + KEYS["c"]],
        ["Bearer " + hash_of(KEYS["a"])], ["Bearer " + KEYS["a"], "Bearer " + KEYS["a"]],
    ],
)  # fmt: skip
def test_whatever_is_wrong_the_answer_is_the_same(authorization: list[str]) -> None:
    ring = ring_of(entry("a"), entry("b"))
    with pytest.raises(Unauthenticated) as caught:
        ring.identify(authorization)
    with pytest.raises(Unauthenticated) as other:
        ring.identify(["Bearer something else"])
    assert vars(caught.value) == vars(other.value)
    assert "Bearer KEY" in caught.value.message


def test_every_key_is_compared_in_constant_time_whichever_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    in_constant_time = hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return in_constant_time(known, given)

    ring = ring_of(entry("a"), entry("b"), entry("c"))
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for name, key in KEYS.items():
        assert ring.identify([f"Bearer {key}"]).name == name
    with pytest.raises(Unauthenticated):
        ring.identify(["Bearer wrong"])
    assert compared == 4 * [digest_of(key) for key in KEYS.values()]


def test_without_any_keys_configured_everybody_is_anonymous() -> None:
    ring = KeyRing(checks_keys=False)
    for authorization in ([], ["Bearer whatever"]):
        assert ring.identify(authorization) is ring.anonymous


def test_anonymous_calls_beside_keys_have_to_be_allowed_and_a_bad_key_is_not_one() -> None:
    ring = ring_of(entry("a"), allow_anonymous=True)
    assert ring.identify([]) is ring.anonymous
    assert ring.identify(["Bearer " + KEYS["a"]]).name == "a"
    with pytest.raises(Unauthenticated):
        ring.identify(["Bearer wrong"])


def test_a_list_that_becomes_empty_lets_nobody_in() -> None:
    ring = ring_of(entry("a"))
    ring.replace(())
    for authorization in ([], ["Bearer " + KEYS["a"]]):
        with pytest.raises(Unauthenticated):
            ring.identify(authorization)


def test_a_tenant_stays_with_what_it_spent_when_its_key_changes() -> None:
    ring = ring_of(entry("a", requests_per_minute=1))
    tenant = ring.identify(["Bearer " + KEYS["a"]])
    tenant.admit(live=0)
    changed = ApiKeyConfig(name="a", sha256=SecretStr(hash_of(KEYS["b"])), requests_per_minute=1)
    ring.replace(read_keys([changed], None))
    with pytest.raises(Unauthenticated):
        ring.identify(["Bearer " + KEYS["a"]])
    again: Tenant = ring.identify(["Bearer " + KEYS["b"]])
    assert again is tenant
    with pytest.raises(ResourceExhausted):
        again.admit(live=0)


def test_a_file_may_hold_an_old_and_a_new_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"\n{KEYS['a']}\n  {KEYS['b']}\n\n")
    (key,) = read_keys([ApiKeyConfig(name="a", file=file)], None)
    assert key.digests == (digest_of(KEYS["a"]), digest_of(KEYS["b"]))


def test_keys_come_from_the_configuration_and_from_a_file_of_entries(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "b", "sha256": hash_of(KEYS["b"]), "tokens_per_minute": 5}]))
    keys = read_keys([entry("a")], file)
    assert [key.config.name for key in keys] == ["a", "b"]
    assert keys[1].config.tokens_per_minute == 5


SECRET = "cmk_nobody-may-read-this"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "holds no key"), ("short", "at least 16"), (SECRET + "ß", "printable ASCII"),
        (f"{SECRET}\n{SECRET[:5]}", "at least 16"), (b"\xff\xfe" + SECRET.encode(), "no text in UTF-8"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_of_a_key_that_cannot_be_used_is_named_without_what_it_holds(
    tmp_path: Path, content: str | bytes | None, part: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidArgument) as caught:
        read_keys([ApiKeyConfig(name="a", file=file)], None)
    assert caught.value.field == "api_keys"
    assert part in caught.value.message
    assert str(file) in caught.value.message
    assert SECRET[:12] not in caught.value.message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "no JSON at line 1"), ("{}", "list"),
        (f'[{{"name": "x", "key": "{SECRET}"}}]', "'0.key' is unknown"),
        (f'[{{"name": "x", "sha256": "{SECRET}"}}]', "64 hexadecimal digits"),
        ('[{"name": "x"}]', "either sha256 or file"), ('[{"name": "a b", "file": "f"}]', "name"),
        (f'[{{"name": "x", "file": "f", "sha256": "{hash_of("x")}"}}]', "either sha256 or file"),
        (f'[{{"name": "x", "sha256": "{hash_of("x")}", "requests_per_minute": 0}}]', "requests_per_minute"),
        (f'[{{"name": "a", "sha256": "{hash_of("x")}"}}]', "two have the name 'a'"),
        (f'[{{"name": "x", "sha256": "{hash_of(KEYS["a"])}"}}]', "'a' and 'x' have the same key"),
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_used_says_why_without_what_might_be_a_key(
    tmp_path: Path, content: str, part: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        read_keys([entry("a")], file)
    assert part in caught.value.message
    assert SECRET not in caught.value.message


def test_no_key_and_no_hash_is_in_what_a_configuration_shows() -> None:
    raw = {
        "scheduler_address": "127.0.0.1:1",
        "models": [{"name": "m", "context_length": 10}],
        "api_keys": [{"name": "a", "sha256": hash_of(KEYS["a"])}],
    }
    config = parse_config(GatewayConfig, raw, source="test")
    shown = [describe(config), repr(config), str(config.model_dump(mode="json"))]
    shown.append(repr(read_keys(config.api_keys, None)))
    for text in shown:
        assert hash_of(KEYS["a"]) not in text
        assert "'a'" in text or '"a"' in text


async def test_a_change_counts_without_a_restart_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ring = KeyRing(checks_keys=True)
    applied: list[tuple[ApiKey, ...]] = []
    errors: list[str] = []

    def apply(keys: tuple[ApiKey, ...]) -> None:
        applied.append(keys)
        ring.replace(keys)

    files = KeyFiles(
        partial(read_keys, (), file), apply, interval_s=1.0, on_error=lambda: errors.append(files.problem)
    )

    def write(*names: str) -> None:
        file.write_text(json.dumps([{"name": name, "sha256": hash_of(KEYS[name])} for name in names]))

    await asyncio.to_thread(write, "a")
    await files.load()
    await files.look()
    assert len(applied) == 1
    await asyncio.to_thread(write, "a", "b")
    await files.look()
    assert ring.identify(["Bearer " + KEYS["b"]]).name == "b"
    await asyncio.to_thread(file.write_text, "[")
    await files.look()
    await files.look()
    assert len(errors) == 1
    assert "no JSON" in errors[0]
    assert ring.identify(["Bearer " + KEYS["b"]]).name == "b"
    await asyncio.to_thread(write, "b")
    await files.look()
    assert files.problem == ""
    with pytest.raises(Unauthenticated):
        ring.identify(["Bearer " + KEYS["a"]])
    assert len(applied) == 3


async def test_a_gateway_does_not_start_with_keys_that_cannot_be_read(tmp_path: Path) -> None:
    files = KeyFiles(
        partial(read_keys, (), tmp_path / "none"), lambda keys: None, interval_s=1.0, on_error=lambda: None
    )
    with pytest.raises(InvalidArgument, match="cannot be read"):
        await files.load()
