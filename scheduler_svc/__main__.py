"""`python -m scheduler_svc --config FILE`."""

from __future__ import annotations

import argparse
import sys

from scheduler_svc.app import main


def _parse() -> str:
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc", description="chipmesh scheduler")
    parser.add_argument("--config", required=True, metavar="FILE", help="SchedulerConfig as JSON")
    path: str = parser.parse_args().config
    return path


if __name__ == "__main__":
    sys.exit(main(_parse()))
