#!/usr/bin/env bash
# A mesh over several hosts: network namespaces on one switch, in a network of this script's own, which ends with it.
# As root, with iproute2 and util-linux. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for program in ip unshare nsenter; do
    command -v "$program" >/dev/null || {
        echo "hosts: $program is missing; install it (Debian, Ubuntu: apt-get install iproute2 util-linux)" >&2
        exit 1
    }
done
export CHIPMESH_HOSTS_TEST=1
# Mounts of its own, too: a test has another /etc/hosts.
exec unshare --net --mount .venv/bin/python -m pytest tests/hosts "$@"
