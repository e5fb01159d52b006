"""The gateway's configuration: what it serves, where its scheduler is, and every bound with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from meshkit.address import is_local
from meshkit.config import FrozenConfig, ServiceConfig
from meshkit.errors import InvalidArgument

MIB = 1024 * 1024


class ServedModelConfig(FrozenConfig):
    """One served model.

    name: what requests call it, the same that its workers register with.
    path: folder, .gguf or name of a pulled model; None: a model of token ids alone (no text), whose
        context_length must then be given.
    load_format: as the workers have it; the gateway reads no weights, so every format opens alike here.
    context_length: tokens, at most what the model has; None: what the model has.
    vocab_size: number of token ids, only for a model without a path.
    """

    name: str = Field(min_length=1)
    path: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    context_length: int | None = Field(default=None, ge=2)
    vocab_size: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_its_facts(self) -> ServedModelConfig:
        if self.path is None and self.context_length is None:
            raise ValueError(f"model {self.name!r} has no path, so it needs a context_length")
        if self.path is not None and self.vocab_size is not None:
            raise ValueError(f"model {self.name!r} has a path; leave vocab_size out, it is read from there")
        return self


class ApiKeyConfig(FrozenConfig):
    """One key of a client, and what its requests may use.

    name: of the key, for budgets, metrics and whose requests are whose.
    sha256: SHA-256 of the key in hexadecimal, as `chipmesh keys new` prints it. file: path of a file with the
        key, or with several, one a line, all good while a key is changed; read again when it changes. One of
        the two.
    requests_per_minute: calls that make work (Generate, Tokenize). tokens_per_minute: prompt and output
        together. max_live_requests: at once. None: no limit. Each gateway counts for itself.
    share_cache: whether cached prefixes are shared with all others who share; False: with nobody.
    """

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    sha256: SecretStr | None = None
    file: Path | None = None
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_live_requests: int | None = Field(default=None, ge=1)
    share_cache: bool = False

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
    """PEM files of the public listener: its certificate with the chain, and its key; read again on change."""

    certificate: Path
    key: Path


class GatewayConfig(ServiceConfig):
    """What one gateway process needs.

    scheduler_address: "HOST:PORT" or "unix:PATH" of the scheduler.
    cache_dir: where pulled models and descriptions lie; None: the user's default.
    max_live_requests: more are refused with RESOURCE_EXHAUSTED.
    tokenizer_threads, max_waiting_texts: the pool that tokenises, and how many texts may wait for it.
    message_interval_s: between two messages of one stream; tokens that come sooner travel together, as a
    message costs the same whatever it holds. The first and the last never wait. 0: each step's token alone.
    max_messages_per_s: what all streams together send at most; beyond it tokens are gathered, so that each
        stream's messages get fewer and larger. 8,000 take about a third of a core.
    max_message_bytes: largest message of a client and of the session. max_prompt_bytes: of one prompt.
    keep_finished_s: how long an ended request can still be resumed.
    resume_window_s: how long a request whose client is gone goes on, waiting for it to come back. 0: it is
        cancelled at once, since a cancel and a lost connection look alike here. max_resume_window_s: the most
        that a request may ask for itself.
    accept_timeout_s: how long a new request waits for the scheduler to take it.
    outage_limit_s: how long accepted requests wait for a scheduler that is gone before they fail.
    drain_grace_s: how long live requests may go on after SIGTERM; runtimes of containers wait 10 s.
    reflection: default on where `listen` is on loopback or a Unix socket, else off.
    api_keys: who may call. api_keys_file: JSON with a list of more of them, looked at every
        api_keys_interval_s seconds, as the files of keys are. Without either everybody may, on loopback or a
        Unix socket only.
    allow_anonymous: calls without a key are served, too, also from beyond this host.
    openai_listen: OpenAI's interface over HTTP, "HOST:PORT" (0: a free one) or "unix:PATH"; None: none.
    listen_tls: certificate of `listen` and `openai_listen`; None: plain text.
    """

    scheduler_address: str
    models: list[ServedModelConfig] = Field(min_length=1)
    cache_dir: Path | None = None
    max_live_requests: int = Field(default=4096, ge=1)
    tokenizer_threads: int = Field(default=1, ge=1)
    max_waiting_texts: int = Field(default=256, ge=0)
    message_interval_s: float = Field(default=0.025, ge=0.0, le=1.0)
    max_messages_per_s: int = Field(default=8000, ge=1)
    max_message_bytes: int = Field(default=64 * MIB, ge=64 * 1024)
    max_prompt_bytes: int = Field(default=16 * MIB, ge=1)
    keep_finished_s: float = Field(default=30.0, ge=0.0)
    resume_window_s: float = Field(default=0.0, ge=0.0)
    max_resume_window_s: float = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    accept_timeout_s: float = Field(default=10.0, gt=0.0)
    outage_limit_s: float = Field(default=60.0, gt=0.0)
    drain_grace_s: float = Field(default=8.0, ge=0.0)
    api_keys: list[ApiKeyConfig] = Field(default_factory=list)
    api_keys_file: Path | None = None
    api_keys_interval_s: float = Field(default=1.0, gt=0.0)
    allow_anonymous: bool = False
    openai_listen: str | None = None
    listen_tls: ListenTlsConfig | None = None

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
