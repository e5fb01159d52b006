"""`--emulate` of the commands that look at a plugin: one name for one option of the plugin."""

from __future__ import annotations

import json

import pytest

from meshkit.cli.app import main

COMMANDS = {"conformance": ["-k", "capabilities/identity"], "verify": [], "collectives": ["--ranks", "2"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plugin_without_an_emulator_refuses_the_flag_by_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--backend", "hash", "--emulate", "--json", *COMMANDS[command]]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "--emulate"
    assert error["message"].startswith("--emulate: ")
    assert "hash" in error["message"]


@pytest.mark.parametrize("words", [["--emulate"], ["--option", "emulate=true"]])
def test_the_flag_and_the_option_are_the_same(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--backend", "kunlun", "--json", "-k", "capabilities/identity", *words]) == 0
    assert json.loads(capsys.readouterr().out)["emulated"] is True


def test_a_value_that_the_emulators_option_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--backend", "kunlun", "--json", "--option", "emulate=perhaps"]) == 2
    assert "perhaps" in json.loads(capsys.readouterr().out)["error"]["message"]
