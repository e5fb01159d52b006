"""A tenant: its budgets, its refusals, and the cache that is its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway.config import ApiKeyConfig
from gateway.models import ServedModel
from gateway.tenant import Tenant
from gateway.validation import RESERVED_SALT_PREFIX, read_options
from meshkit.errors import InvalidArgument, ResourceExhausted


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def config_of(name: str = "team-a", **fields: Any) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=SecretStr("0" * 64), **fields)


def tenant_of(clock: Clock, **fields: Any) -> Tenant:
    return Tenant(config_of(**fields), clock=clock)


def refusal(tenant: Tenant, *, live: int = 0) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught:
        tenant.admit(live=live)
    return caught.value


def test_without_limits_everything_is_admitted_and_counted() -> None:
    tenant = tenant_of(Clock())
    for _ in range(1000):
        tenant.admit(live=10**6)
        tenant.spend(10**9)
    tenant.count_accepted(7)
    tenant.count_output(3)
    assert (tenant.tally.requests, tenant.tally.prompt_tokens, tenant.tally.generation_tokens) == (1, 7, 3)


def test_requests_per_minute_are_refused_with_the_limit_and_when_there_is_room() -> None:
    clock = Clock()
    tenant = tenant_of(clock, requests_per_minute=2)
    tenant.admit(live=0)
    tenant.take_request()
    error = refusal(tenant)
    assert (error.reason, error.metadata) == (
        "BUDGET_EXHAUSTED",
        {"budget": "requests_per_minute", "limit": "2"},
    )
    assert error.message == "requests_per_minute of this key is 2, and is used up; there is room in 30 s"
    assert error.retry_after_s == pytest.approx(30.0)
    with pytest.raises(ResourceExhausted):
        tenant.take_request()
    clock.now += 30.0
    tenant.admit(live=0)
    assert tenant.tally.refused == {"requests_per_minute": 2}


def test_output_goes_below_zero_and_the_next_request_waits_it_out() -> None:
    clock = Clock()
    tenant = tenant_of(clock, tokens_per_minute=600)
    tenant.admit(live=0)
    tenant.spend(500)
    tenant.check_tokens()
    tenant.count_output(1299)
    error = refusal(tenant)
    assert error.metadata["budget"] == "tokens_per_minute"
    assert error.retry_after_s == pytest.approx(120.0)
    clock.now += 119.0
    refusal(tenant)
    clock.now += 1.0
    tenant.admit(live=0)


def test_a_request_that_a_token_budget_refuses_does_not_count_as_one() -> None:
    tenant = tenant_of(Clock(), requests_per_minute=1, tokens_per_minute=10)
    tenant.spend(20)
    refusal(tenant)
    tenant.spend(-20)
    tenant.admit(live=0)


def test_live_requests_have_a_limit() -> None:
    clock = Clock()
    tenant = tenant_of(clock, max_live_requests=2)
    for _ in range(2):
        tenant.admit(live=0)
        clock.now += 3.0
        tenant.count_ended()
    tenant.admit(live=1)
    error = refusal(tenant, live=2)
    assert "max_live_requests of this key is 2" in error.message
    assert error.retry_after_s == pytest.approx(3.0)  # As long as its requests took so far.


def test_a_key_may_not_ask_for_more_priority_than_it_was_given() -> None:
    tenant = tenant_of(Clock(), max_priority=5)
    tenant.check_priority(5)
    with pytest.raises(InvalidArgument, match="at most 5") as refused:
        tenant.check_priority(6)
    assert refused.value.field == "scheduling.priority"
    tenant_of(Clock()).check_priority(1000)
    Tenant().check_priority(1000)


def test_other_limits_count_at_once_and_what_was_spent_stays_spent() -> None:
    tenant = tenant_of(Clock(), requests_per_minute=1)
    tenant.admit(live=0)
    refusal(tenant)
    tenant.configure(config_of(requests_per_minute=2))
    tenant.admit(live=0)
    refusal(tenant)
    tenant.configure(config_of())
    tenant.admit(live=0)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,6}", fullmatch=True)
SALTS = st.text(alphabet="ab1:-", max_size=8)


@given(one=NAMES, other=NAMES, salt=SALTS, other_salt=SALTS)
def test_two_tenants_never_have_one_salt(one: str, other: str, salt: str, other_salt: str) -> None:
    salts = [Tenant(config_of(name)).salt(own) for name, own in ((one, salt), (other, other_salt))]
    assert (salts[0] == salts[1]) == ((one, salt) == (other, other_salt))


def test_who_shares_the_cache_or_has_no_key_keeps_the_plain_salt() -> None:
    for tenant in (Tenant(config_of(share_cache=True)), Tenant()):
        assert [tenant.salt(own) for own in ("", "mine")] == ["", "mine"]


def test_no_client_can_name_the_salt_of_a_key(tiny: ServedModel) -> None:
    stolen = Tenant(config_of()).salt("")
    assert stolen.startswith(RESERVED_SALT_PREFIX)
    request = pb.GenerateRequest(scheduling=pb.SchedulingOptions(cache_salt=stolen))
    with pytest.raises(InvalidArgument, match="reserved") as caught:
        read_options(request, tiny, draw_seed=lambda: 1, max_resume_window_s=60.0)
    assert caught.value.field == "scheduling.cache_salt"
