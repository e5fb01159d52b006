"""`python -m worker_svc --config FILE`."""

from __future__ import annotations

import argparse
import sys

from worker_svc.app import main


def _parse() -> str:
    parser = argparse.ArgumentParser(prog="python -m worker_svc", description="chipmesh worker")
    parser.add_argument("--config", required=True, metavar="FILE", help="WorkerConfig as JSON")
    path: str = parser.parse_args().config
    return path


if __name__ == "__main__":
    sys.exit(main(_parse()))
