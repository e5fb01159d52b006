"""`python -m gateway --config FILE` runs one gateway."""

from __future__ import annotations

import argparse
import sys

from gateway.app import main


def run() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Run one gateway.")
    parser.add_argument("--config", required=True, metavar="FILE", help="GatewayConfig as JSON")
    return main(parser.parse_args().config)


if __name__ == "__main__":
    sys.exit(run())
