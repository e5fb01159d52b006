"""The gateway's configuration: what it serves, where its scheduler is, and every bound with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from meshkit.address import is_local
from meshkit.config import FrozenConfig, ServiceConfig, TlsConfig
from meshkit.errors import InvalidArgument

MIB = 1024 * 1024


class ServedModelConfig(FrozenConfig):
    """One served model."""

    name: str = Field(min_length=1)
    """What requests call it, the same that its workers register with."""
    path: str | None = None
    """Folder, .gguf or name of a pulled model. Not set: a model of token ids alone (no text), whose
    `context_length` must then be given.
    """
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """As the workers have it; the gateway reads no weights, so every format opens alike here."""
    context_length: int | None = Field(default=None, ge=2)
    """Tokens, at most what the model has. Not set: what the model has."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Number of token ids, only for a model without a path."""

    @model_validator(mode="after")
    def _has_its_facts(self) -> ServedModelConfig:
        if self.path is None and self.context_length is None:
            raise ValueError(f"model {self.name!r} has no path, so it needs a context_length")
        if self.path is not None and self.vocab_size is not None:
            raise ValueError(f"model {self.name!r} has a path; leave vocab_size out, it is read from there")
        return self


class ApiKeyConfig(FrozenConfig):
    """One key of a client, and what its requests may use. Each gateway counts for itself."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """For budgets, metrics and whose requests are whose."""
    sha256: SecretStr | None = None
    """Of the key, in hexadecimal, as `chipmesh keys new` prints it. Either this or `file`."""
    file: Path | None = None
    """With the key, or with several, one a line, all good while a key is changed; read again when it
    changes.
    """
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Calls that make work (Generate, Tokenize). Not set: no limit."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output together. Not set: no limit."""
    max_live_requests: int | None = Field(default=None, ge=1)
    """At once. Not set: no limit."""
    max_priority: int = Field(default=1000, ge=-1000, le=1000)
    """The highest that its requests may ask for."""
    share_cache: bool = False
    """Whether cached prefixes are shared with all others who share; false: with nobody."""
    operator: bool = False
    """Whether it may also see and steer the mesh, by the gateway's page."""

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", value.get_secret_value()):
            raise ValueError("is no SHA-256, which has 64 hexadecimal digits; `chipmesh keys new` makes one")
        return value

    @model_validator(mode="after")
    def _has_one_source(self) -> ApiKeyConfig:
        if (self.sha256 is None) == (self.file is None):
            raise ValueError(f"key {self.name!r} needs either sha256 or file")
        return self


class ListenTlsConfig(FrozenConfig):
    """PEM files of the public listeners, read again on change."""

    certificate: Path
    """With its chain."""
    key: Path
    """Of that certificate, without a password."""


class PageConfig(FrozenConfig):
    """The page at the root of `openai_listen` (docs/page.md)."""

    serve: bool = True
    """Whether there is one."""
    operator_tls: TlsConfig | None = None
    """An operator's certificate, with which the gateway asks the scheduler; needed where services have
    certificates, as a gateway's own may not.
    """
    traces_listen: str | None = None
    """OTLP over gRPC, "HOST:PORT" of this host: the services' spans, for the page. Not set: none."""
    max_traces: int = Field(default=200, ge=1)
    """Kept of them; the oldest go first."""
    max_spans: int = Field(default=20_000, ge=1)
    """Kept of all of them together."""


class SglangGrpcConfig(FrozenConfig):
    """The interface of routers on `listen` (docs/router.md)."""

    serve: bool = True
    """Whether there is one."""
    model: str | None = None
    """Which of the served ones it is about. Not set: the only one."""


class GatewayConfig(ServiceConfig):
    """What one gateway process needs."""

    scheduler_address: str
    """"HOST:PORT" or "unix:PATH" of the scheduler."""
    models: list[ServedModelConfig] = Field(min_length=1)
    """Those that are served."""
    cache_dir: Path | None = None
    """Where pulled models and descriptions lie. Not set: `CHIPMESH_CACHE_DIR`, `XDG_CACHE_HOME`/chipmesh,
    ~/.cache/chipmesh.
    """
    max_live_requests: int = Field(default=4096, ge=1)
    """At once; more are refused with RESOURCE_EXHAUSTED, save of keys that use less than an even share, up
    to twice.
    """
    max_live_prompt_tokens: int = Field(default=16 * 1024 * 1024, ge=1)
    """The same of tokens that the mesh has to read for them."""
    tokenizer_threads: int = Field(default=1, ge=1)
    """Of the pool that tokenises."""
    max_waiting_texts: int = Field(default=256, ge=0)
    """Texts that may wait for a thread of it."""
    max_waiting_text_bytes: int = Field(default=256 * MIB, ge=1)
    """And how much of them."""
    message_interval_s: float = Field(default=0.025, ge=0.0, le=1.0)
    """Between two messages of one stream; tokens that come sooner travel together, as a message costs the
    same whatever it holds. The first and the last never wait. 0: each step's token alone.
    """
    max_messages_per_s: int = Field(default=8000, ge=1)
    """What all streams together send at most; beyond it tokens are gathered, so that each stream's
    messages get fewer and larger. 8,000 take about a third of a core.
    """
    max_message_bytes: int = Field(default=64 * MIB, ge=64 * 1024)
    """Largest message of a client and of the session."""
    max_prompt_bytes: int = Field(default=16 * MIB, ge=1)
    """Of one prompt."""
    keep_finished_s: float = Field(default=30.0, ge=0.0)
    """How long an ended request can still be resumed."""
    resume_window_s: float = Field(default=0.0, ge=0.0)
    """How long a request whose client is gone goes on, waiting for it to come back. 0: it is cancelled at
    once, since a cancel and a lost connection look alike here.
    """
    max_resume_window_s: float = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """The most that a request may ask for itself, by `scheduling.resume_window_ms`."""
    accept_timeout_s: float = Field(default=10.0, gt=0.0)
    """How long a new request waits for the scheduler to take it."""
    outage_limit_s: float = Field(default=60.0, gt=0.0)
    """How long accepted requests wait for a scheduler that is gone before they fail."""
    drain_grace_s: float = Field(default=8.0, ge=0.0)
    """How long live requests may go on after SIGTERM; runtimes of containers wait 10 s."""
    api_keys: list[ApiKeyConfig] = Field(default_factory=list)
    """Who may call (docs/security.md). Without any, everybody may, on loopback or a Unix socket only."""
    api_keys_file: Path | None = None
    """JSON with a list of more of them, followed as it changes."""
    api_keys_interval_s: float = Field(default=1.0, gt=0.0)
    """How often the files of keys are looked at."""
    allow_anonymous: bool = False
    """Calls without a key are served, too, also from beyond this host."""
    openai_listen: str | None = None
    """OpenAI's interface over HTTP (docs/openai.md), "HOST:PORT" (0: a free one) or "unix:PATH". Not set:
    none.
    """
    listen_tls: ListenTlsConfig | None = None
    """Certificate of `listen` and `openai_listen`. Not set: plain text."""
    page: PageConfig = PageConfig()
    """The page at the root of `openai_listen`."""
    sglang_grpc: SglangGrpcConfig = SglangGrpcConfig()
    """What routers call, on `listen`."""

    @property
    def checks_keys(self) -> bool:
        """Whether keys are configured: without any there is nothing to check."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def watches_keys(self) -> bool:
        """Whether keys lie in files, which may change."""
        return self.api_keys_file is not None or any(key.file is not None for key in self.api_keys)

    def check_listener(self) -> None:
        """Whether the listeners of clients are open to no more than was said.

        Raises:
            InvalidArgument: one is reached from beyond this host, and nobody said who may call.
        """
        if self.checks_keys or self.allow_anonymous:
            return
        for field, address in (("listen", self.listen), ("openai_listen", self.openai_listen)):
            if address is not None and not is_local(address):
                raise InvalidArgument(
                    f"{field} is {address!r}, which is reached from beyond this host, and there are no "
                    "api_keys; add some (`chipmesh keys new NAME` makes one), or say allow_anonymous: true "
                    "to serve everybody",
                    field=field,
                    reason="LISTENER_WITHOUT_KEYS",
                )

    @field_validator("models")
    @classmethod
    def _names_are_unique(cls, models: list[ServedModelConfig]) -> list[ServedModelConfig]:
        names = [model.name for model in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"each model needs a name of its own; used twice: {', '.join(twice)}")
        return models

    @model_validator(mode="after")
    def _router_model_is_served(self) -> GatewayConfig:
        served, model = [each.name for each in self.models], self.sglang_grpc.model
        if model is not None and model not in served:
            raise ValueError(f"sglang_grpc.model is {model!r}; served are: {', '.join(served)}")
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> GatewayConfig:
        if self.resume_window_s > self.max_resume_window_s:
            raise ValueError(
                f"resume_window_s is {self.resume_window_s:g}, more than max_resume_window_s, which is "
                f"{self.max_resume_window_s:g}; lower the one or raise the other"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _reflect_on_loopback(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "reflection" not in raw:
            listen = raw.get("listen", cls.model_fields["listen"].default)
            return {**raw, "reflection": isinstance(listen, str) and is_local(listen)}
        return raw
