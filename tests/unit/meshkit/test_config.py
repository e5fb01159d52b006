"""Configuration files: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from meshkit.config import FrozenConfig, ServiceConfig, describe, load_config
from meshkit.errors import InvalidArgument


class Limits(FrozenConfig):
    requests: int = 8


class ExampleConfig(ServiceConfig):
    limits: Limits = Limits()
    api_key: SecretStr | None = None


def written(folder: Path, content: Any) -> Path:
    path = folder / "service.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(folder: Path, content: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        load_config(ExampleConfig, written(folder, content))
    assert str(folder / "service.json") in caught.value.message
    return caught.value


def test_an_empty_object_gives_the_defaults(tmp_path: Path) -> None:
    config = load_config(ExampleConfig, written(tmp_path, {}))
    assert (config.listen, config.http_listen, config.advertise) == ("127.0.0.1:0", "127.0.0.1:0", None)
    assert (config.tracing.exporter, config.log_level, config.reflection) == ("none", "info", False)


def test_what_the_file_says_is_what_the_service_gets(tmp_path: Path) -> None:
    config = load_config(
        ExampleConfig, written(tmp_path, {"limits": {"requests": 3}, "ready_file": "/tmp/ready"})
    )
    assert config.limits.requests == 3
    assert config.ready_file == Path("/tmp/ready")


def test_an_unknown_field_is_named_with_the_fields_that_are_known_there(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"tracing": {"exportr": "otlp"}})
    assert error.field == "tracing.exportr"
    assert "known here: endpoint, exporter, max_traces_per_s, sampling_ratio" in error.message


def test_a_word_outside_the_allowed_ones_is_shown_with_all_of_them(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"log_level": "loud"})
    assert error.field == "log_level"
    for word in ("'debug'", "'info'", "'warning'", "'error'", "not 'loud'"):
        assert word in error.message


def test_a_number_out_of_range_is_shown_with_the_limit(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"tracing": {"sampling_ratio": 1.5}})
    assert error.field == "tracing.sampling_ratio"
    assert "less than or equal to 1" in error.message
    assert "not 1.5" in error.message


def test_every_wrong_field_is_told_at_once(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"log_level": "loud", "limits": {"requests": "many"}})
    assert "'log_level'" in error.message
    assert "'limits.requests'" in error.message


@pytest.mark.parametrize("listen", ["8080", "host:port", "host:70000"])
def test_an_address_of_no_known_form_is_refused_where_it_stands(tmp_path: Path, listen: str) -> None:
    error = refusal(tmp_path, {"http_listen": listen})
    assert error.field == "http_listen"
    assert listen in error.message
    assert "unix:PATH" in error.message


def test_otlp_without_an_endpoint_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"tracing": {"exporter": "otlp"}})
    assert error.field == "tracing"
    assert "endpoint" in error.message


def test_text_that_is_no_json_is_refused_with_its_place(tmp_path: Path) -> None:
    assert "line 2 column 3" in refusal(tmp_path, '{\n  listen: "x"}').message


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    assert "the whole file" in refusal(tmp_path, [1, 2]).message


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no-such-file"):
        load_config(ExampleConfig, tmp_path / "no-such-file.json")


def test_secrets_are_masked_in_the_description_and_absent_from_refusals(tmp_path: Path) -> None:
    config = load_config(ExampleConfig, written(tmp_path, {"api_key": "hunter2"}))
    assert "hunter2" not in describe(config)
    assert json.loads(describe(config))["api_key"] == "**********"
    error = refusal(tmp_path, {"api_key": ["hunter2"]})
    assert "hunter2" not in error.message
    assert "api_key" in error.message


def test_a_configuration_cannot_be_changed_after_it_was_read() -> None:
    with pytest.raises(ValidationError):
        ServiceConfig().listen = "127.0.0.1:1"


def test_the_files_of_a_folder_are_merged_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "20-chip.json").write_text('{"limits": {"requests": 3}, "listen": "127.0.0.1:2"}')
    (tmp_path / "10-service.json").write_text('{"listen": "127.0.0.1:1", "tracing": {"sampling_ratio": 0.5}}')
    (tmp_path / "30-tracing.json").write_text(
        '{"tracing": {"exporter": "otlp", "endpoint": "http://127.0.0.1:4317"}}'
    )
    (tmp_path / "notes.txt").write_text("not read")
    config = load_config(ExampleConfig, tmp_path)
    assert (config.listen, config.limits.requests) == ("127.0.0.1:2", 3)
    assert (config.tracing.exporter, config.tracing.sampling_ratio) == ("otlp", 0.5)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no *.json file"),
        ({"a.json": "[1]"}, "a.json: a file of a folder must hold a JSON object"),
        ({"a.json": "{}", "b.json": "{,}"}, "b.json: no JSON at line 1 column 2"),
        ({"a.json": '{"colour": 1}'}, "field 'colour' is unknown"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_and_the_cause_is_named(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        load_config(ExampleConfig, tmp_path)
    assert str(tmp_path) in caught.value.message
    assert says in caught.value.message
