"""Configuration: small frozen models read once, from a JSON file or a folder of them; errors say where and
what is allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshkit.address import parse_listen
from meshkit.errors import InvalidArgument, MeshError

LogLevel = Literal["debug", "info", "warning", "error"]


class FrozenConfig(BaseModel):
    """Base of every configuration model: immutable, and a field that nobody knows is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TracingConfig(FrozenConfig):
    """Where spans go."""

    exporter: Literal["none", "otlp"] = "none"
    """otlp: to `endpoint`."""
    endpoint: str | None = None
    """OTLP over gRPC, for instance http://127.0.0.1:4317; needed with otlp."""
    sampling_ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of new traces that is kept. A caller's choice is followed."""
    max_traces_per_s: float | None = Field(default=None, gt=0.0)
    """Of those, the most that begin in a second; a gateway counts those of its callers, too. Not set: all."""

    @model_validator(mode="after")
    def _otlp_has_an_endpoint(self) -> TracingConfig:
        if self.exporter == "otlp" and not self.endpoint:
            raise ValueError("exporter 'otlp' needs an endpoint, for instance http://127.0.0.1:4317")
        return self


class TlsConfig(FrozenConfig):
    """Who a service is to the others: PEM files, read again for each new connection."""

    certificate: Path
    """It names the service's role."""
    key: Path
    """Of that certificate, without a password."""
    authority: Path
    """Those that are trusted to say who somebody is; a bundle while one takes another's place."""
    scheduler: str | None = Field(default=None, min_length=1)
    """Name that a scheduler's certificate must have, for gateways and workers. Not set: any name."""


class ServiceConfig(FrozenConfig):
    """What every service has; a service's own model extends it."""

    listen: str = "127.0.0.1:0"
    """gRPC: "HOST:PORT" (port 0: a free one) or "unix:PATH". A worker serves only health here."""
    advertise: str | None = None
    """Address that others are told, where it differs from the bound one."""
    http_listen: str = "127.0.0.1:0"
    """`/health`, `/live` and `/metrics`; as `listen`."""
    ready_file: Path | None = None
    """Written as JSON when the service is ready, see `meshkit.service.write_ready`."""
    tracing: TracingConfig = TracingConfig()
    """Where its spans go."""
    log_level: LogLevel = "info"
    """Of the log, one JSON object a line on stderr."""
    reflection: bool = False
    """gRPC's server reflection. A gateway's default: on where `listen` is of this host."""
    tls: TlsConfig | None = None
    """Towards the other services, both ways. Without it they must all be on one host, unless
    `insecure_network`.
    """
    insecure_network: bool = False
    """Plain text beyond this host; the gauge `chipmesh_insecure_network` and a warning tell of it."""

    @field_validator("listen", "http_listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            parse_listen(value)
        except MeshError as error:
            raise ValueError(error.message) from error
        return value


Config = TypeVar("Config", bound=BaseModel)

# Kinds of errors whose input is a plain word or number; the input of any other kind might be a secret.
_SHOWABLE = frozenset({
    "literal_error", "enum", "greater_than", "greater_than_equal", "less_than", "less_than_equal",
    "int_parsing", "int_type", "int_from_float", "float_parsing", "float_type", "bool_parsing", "bool_type",
})  # fmt: skip


def load_config(cls: type[Config], path: Path) -> Config:
    """Read `path` as `cls`: a JSON object, or a folder of them (`*.json`), merged in the order of names.

    In a folder a later file goes over an earlier one; objects merge field by field, all else is replaced. So
    a deployment mounts one file for the service and one for each thing that it adds.

    Raises:
        InvalidArgument: the file is missing, is no JSON, or a field is wrong. The text names the file or
            folder, each field's path, the value and what is allowed; `field` is the first one at fault.
    """
    return parse_config(cls, _read_folder(path) if path.is_dir() else _read_json(path), source=str(path))


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}", field="config") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidArgument(f"{path}: no JSON at {where}: {error.msg}", field="config") from error


def _read_folder(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidArgument(f"{folder}: the folder holds no *.json file", field="config")
    merged: dict[str, Any] = {}
    for file in files:
        content = _read_json(file)
        if not isinstance(content, dict):
            raise InvalidArgument(f"{file}: a file of a folder must hold a JSON object", field="config")
        merged = _merge(merged, content)
    return merged


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`; where both have an object, the two are merged."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = _merge(below[name], above[name])
    return merged


def parse_config(cls: type[Config], raw: object, *, source: str) -> Config:
    """Check `raw` (what JSON gives) as `cls`; `source` names its origin in errors.

    Raises:
        InvalidArgument: as `load_config`.
    """
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        # Inputs may be secrets, so the values shown come from `_explain`, which knows which are safe.
        problems = error.errors(include_url=False)
        text = "; ".join(_explain(cls, dict(problem)) for problem in problems)
        field = _path(problems[0]["loc"]) or "config"
        # `from None`: pydantic's own text repeats the input, and with it possibly a secret.
        raise InvalidArgument(f"{source}: {text}", field=field) from None


def describe(config: BaseModel) -> str:
    """The effective configuration as indented JSON; secrets (`SecretStr`) are masked."""
    return config.model_dump_json(indent=2)


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _explain(cls: type[BaseModel], problem: dict[str, Any]) -> str:
    """One sentence about one of pydantic's errors: field path, what is wrong, what is allowed."""
    loc = problem["loc"]
    path = _path(loc) or "the whole file"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(cls, loc[:-1])
        return f"field '{path}' is unknown" + (f" (known here: {', '.join(known)})" if known else "")
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = _shown(problem)
    return f"field '{path}': {message[:1].lower()}{message[1:]}{given}"


def _shown(problem: dict[str, Any]) -> str:
    """ ", not VALUE", or nothing where the value might be a secret."""
    if problem["type"] not in _SHOWABLE or not isinstance(problem["input"], (str, int, float)):
        return ""
    return f", not {problem['input']!r}"


def _fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model at `loc` below `cls`; empty where that is no plain nested model."""
    model: Any = cls
    for part in loc:
        field = model.model_fields.get(part)
        model = field.annotation if field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return sorted(model.model_fields)
