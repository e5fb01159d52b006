"""What the launcher reads from a service's log: progress while it starts, and its last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshkit.cli.child import LogTail, last_error_line


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntw")
    tail = LogTail(log)
    assert tail.new_lines() == ["one"]
    assert tail.new_lines() == []
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert tail.new_lines() == ["two", "three"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            '{"level": "info", "event": "starts"}\nworker: device: 7 is no device\n\n',
            "worker: device: 7 is no device",
        ),
        ('{"level": "error", "event": "no bind"}\n{"level": "info", "event": "bye"}\n', "no bind"),
        (
            '{"level": "error", "event": "service failed", "exception": "Traceback\\n  x\\nOSError: full"}\n',
            "service failed: OSError: full",
        ),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("{ not json\n", "{ not json"),
        (
            "gateway: port taken\nI1129 17:05:55.440620   26460 fork_posix.cc:71] Other threads\n",
            "gateway: port taken",
        ),
    ],
)
def test_the_last_words_are_the_line_that_says_why(log: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert last_error_line(file) == expected


def test_a_service_that_said_nothing_is_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"level": "info", "event": "starts"}\n')
    assert "said nothing" in last_error_line(log)
