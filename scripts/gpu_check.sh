#!/usr/bin/env bash
# For a rented GPU, with what is installed there (torch, lightning, triton, numba and pytest, but no
# DALI and no nuScenes devkit): tests, operators and training steps on the card, in under 8 minutes.
# Writes gpu_check.json into the current directory. Wheels of what is missing (hydra-core, omegaconf,
# antlr4-python3-runtime, torchao) are taken from $WHEELS, or from .whl or wheels beside this project.
# Words after it go to bench: bash scripts/gpu_check.sh bench.models=[bevformer_tiny]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
site="$(mktemp -d)"
log="$(mktemp)"
trap 'rm -rf "$site" "$log"' EXIT

for folder in "${WHEELS:-}" "$root/.whl" "$root/wheels"; do
    if [[ -n "$folder" ]] && compgen -G "$folder/*.whl" >/dev/null; then
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
            --no-compile --target "$site" "$folder"/*.whl
        break
    fi
done
export PYTHONPATH="$root:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! "$python" -c "import hydra, omegaconf, torch, lightning" 2>/dev/null; then
    echo "gpu_check: $python lacks torch, lightning, hydra-core or omegaconf; set PYTHON, or put the wheels of the latter two into $root/.whl" >&2
    exit 2
fi

"$python" -m bev_lightning.bench bench=gpu "$@" | tee "$log"
run="$(sed -n 's/^Results: //p' "$log" | tail -n 1)"
cp "$run/bench.json" gpu_check.json
echo "Written:     gpu_check.json"
