#!/usr/bin/env bash
# Prometheus' own tool, for tests/e2e/test_observed_names.py: it checks the alert rules and plays them on made-up series.
#
#   bash scripts/promtool.sh     downloads Debian's package and unpacks the one program; nothing is installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOOLS=.venv-promtool
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .)
mkdir -p "$TOOLS"
install -m 755 "$work/usr/bin/promtool" "$TOOLS/promtool"
"$TOOLS/promtool" --version | head -1
