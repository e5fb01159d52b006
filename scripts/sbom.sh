#!/usr/bin/env bash
# Bill of materials of an environment as CycloneDX JSON, and docs/licenses.md of ours.
#
#   bash scripts/sbom.sh [PYTHON [OUTPUT]]     by default .venv/bin/python and dist/sbom.cdx.json
#
# PYTHON may be of any environment that has chipmesh, an image's too; the licence list is always of .venv.
# The tool checks its output against the schema. It lives in an environment of its own, made on first use, as the
# proto compiler does: what it needs is no dependency of ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${1:-.venv/bin/python}"
OUTPUT="${2:-dist/sbom.cdx.json}"
TOOLS=.venv-sbom
TOOL=cyclonedx-bom==7.5.0

if [ "$("$TOOLS/bin/python" -m pip freeze 2>/dev/null | grep -i '^cyclonedx-bom==')" != "$TOOL" ]; then
    echo "sbom: installing $TOOL into $TOOLS"
    rm -rf "$TOOLS"
    python3 -m venv "$TOOLS"
    "$TOOLS/bin/python" -m pip install -qq --disable-pip-version-check "$TOOL"
fi

mkdir -p "$(dirname "$OUTPUT")"
# Reproducible: the same environment gives the same file.
"$TOOLS/bin/cyclonedx-py" environment --pyproject pyproject.toml --mc-type application --spec-version 1.6 \
    --output-format JSON --output-reproducible --output-file "$OUTPUT" "$PYTHON"
echo "sbom: $OUTPUT ($(grep -c '"bom-ref"' "$OUTPUT") components)"
.venv/bin/python scripts/licenses.py
