"""What the launcher sleeps on while its mesh serves: signals, and children that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from meshkit.cli.launch import StopRequests


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_and_a_second_one_asks_to_hurry(number: signal.Signals) -> None:
    with StopRequests() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        stop.wait_for_news()
        assert stop.asked()
        assert not stop.hurry()
        os.kill(os.getpid(), number)
        stop.wait_for_news()
        assert stop.hurry()


@pytest.mark.timeout(20)
def test_a_signal_that_comes_while_it_waits_wakes_it() -> None:
    words = [sys.executable, "-c", f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM)"]
    with StopRequests() as stop, subprocess.Popen(words) as child:
        while not stop.asked():
            stop.wait_for_news()
        assert child.wait() == 0


@pytest.mark.timeout(20)
def test_a_child_that_ends_wakes_it_and_asks_for_nothing() -> None:
    with StopRequests() as stop, subprocess.Popen(["true"]) as child:
        stop.wait_for_news()
        assert child.wait() == 0
        assert not stop.asked()


@pytest.mark.timeout(20)
def test_waiting_takes_no_processor_time() -> None:
    with StopRequests() as stop, subprocess.Popen(["sleep", "0.5"]) as child:
        before = time.process_time()
        stop.wait_for_news()
        assert time.process_time() - before < 0.1
        assert child.wait() == 0
