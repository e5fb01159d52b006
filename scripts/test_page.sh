#!/usr/bin/env bash
# The gateway's page in a real browser: Chromium driven by Playwright, a mesh of real processes. Arguments go to pytest.
# Installs both where they are missing: Chromium by apt as root (about 300 MB), Playwright into .venv.
# With --screenshots: makes the pictures in docs/images instead of testing (the small real model, about a minute).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
PLAYWRIGHT=1.65.2

if ! command -v chromium >/dev/null; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "page: chromium is missing; install it (Debian: apt-get install chromium)" >&2
        exit 1
    fi
    echo "page: installing chromium"
    apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
if ! .venv/bin/python -c 'import playwright' 2>/dev/null; then
    echo "page: installing playwright $PLAYWRIGHT"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt "playwright==$PLAYWRIGHT"
fi

if [ "${1:-}" = "--screenshots" ]; then
    .venv/bin/chipmesh pull smollm2-135m
    exec .venv/bin/python -m tests.browser.screenshots
fi
exec .venv/bin/python -m pytest -m nightly tests/browser "$@"
