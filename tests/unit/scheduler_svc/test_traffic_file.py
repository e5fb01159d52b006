"""Weights from a watched file: what can be used takes effect, what cannot changes nothing and is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshkit.errors import InvalidArgument
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.traffic_file import TrafficFile, Weights, read_weights


class Watched:
    """A core with two groups of one model and one of another, and the file."""

    def __init__(self, path: Path) -> None:
        self.core = MeshCore()
        for name, model in (("gpu", "m"), ("cpu", "m"), ("other", "n")):
            self.core.configure_group(name, model=model, weight=1.0)
        self.errors = 0
        self.path = path
        self.file = TrafficFile(path, self._apply, interval_s=0.5, on_error=self._count)

    def _count(self) -> None:
        self.errors += 1

    def _apply(self, weights: Weights) -> None:
        for model, groups in weights.items():
            self.core.check_weights(model, groups)
        for model, groups in weights.items():
            self.core.set_weights(model, groups)

    async def look(self, content: object) -> Mapping[str, float]:
        """Weights by group after one look at a new content."""
        text = content if isinstance(content, str) else json.dumps(content)
        self.path.write_text(text)
        await self.file.look()
        return {group.name: group.weight for group in self.core.snapshot().groups}


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "traffic.json")


async def test_weights_of_the_file_take_effect_and_change_with_it(watched: Watched) -> None:
    assert await watched.look({"m": {"gpu": 80, "cpu": 20}}) == {"gpu": 80, "cpu": 20, "other": 1}
    assert await watched.look({"m": {"gpu": 50}}) == {"gpu": 50, "cpu": 0, "other": 1}
    assert (watched.errors, watched.file.problem) == (0, "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"m": {"gpu": 80, "cp', "line 1, column"),
        ([1], "object"),
        ({"m": 3}, "model 'm'"),
        ({"m": {"gpu": -1}}, "'gpu'"),
        ({"m": {"gpu": "much"}}, "'much'"),
        ({"m": {"gpu": True}}, "True"),
        ({"m": {"gpu": 0, "cpu": 0}}, "all weights of model 'm'"),
        ({"m": {"gpu": 5}, "n": {"missing": 1}}, "no group missing"),
    ],
)
async def test_a_content_that_cannot_be_used_changes_nothing_and_is_named_once(
    watched: Watched, content: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = await watched.look({"m": {"gpu": 70, "cpu": 30}})
    with caplog.at_level(logging.ERROR):
        assert await watched.look(content) == before
        await watched.file.look()
    assert said in watched.file.problem
    assert watched.errors == 1
    assert caplog.text.count("traffic file not in effect") == 1
    assert (await watched.look({"m": {"gpu": 1, "cpu": 9}}))["cpu"] == 9
    assert watched.file.problem == ""


async def test_a_file_that_is_not_there_yet_is_waited_for(watched: Watched) -> None:
    await watched.file.look()
    assert "cannot be read" in watched.file.problem
    assert (await watched.look({"m": {"gpu": 3, "cpu": 1}}))["gpu"] == 3


async def test_weights_of_a_group_that_comes_later_take_effect_then(watched: Watched) -> None:
    content = {"m": {"gpu": 1, "late": 9}}
    assert (await watched.look(content))["gpu"] == 1.0
    watched.core.configure_group("late", model="m", weight=1.0)
    assert (await watched.look(content))["late"] == 9


def test_the_error_of_a_wrong_file_names_the_setting() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_weights("{")
    assert caught.value.field == "traffic_file"
