"""Asks the service in this container for its own health; exit code 0: it serves, 1: it does not.

CHIPMESH_HEALTH_URL: where, by default port 8080 of loopback. It runs every few seconds: the standard library
only.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.0


def main() -> None:
    """Prints the service's answer, its parts, or why there is none."""
    url = os.environ.get("CHIPMESH_HEALTH_URL", "http://127.0.0.1:8080/health")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # It is never behind a proxy.
    try:
        with opener.open(url, timeout=TIMEOUT_S) as reply:
            sys.stdout.write(reply.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{url} does not answer: {error}")


if __name__ == "__main__":
    main()
