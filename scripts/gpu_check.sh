#!/usr/bin/env bash
# Runs GPU tests, operator benchmarks and training steps in under 8 minutes; writes gpu_check.json.
# Needs torch, lightning, triton, numba and pytest, but neither DALI nor the nuScenes devkit. Missing
# hydra-core, omegaconf, antlr4-python3-runtime and torchao are installed to a temporary folder from
# the wheels in $WHEELS, .whl or wheels.
# Arguments are overrides of bench=gpu: bash scripts/gpu_check.sh bench.models=[bevformer_tiny]
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
    echo "gpu_check: $python lacks torch, lightning, hydra-core or omegaconf; set PYTHON to another interpreter, or put their wheels into $root/.whl" >&2
    exit 2
fi

"$python" -m bev_lightning.bench bench=gpu "$@" | tee "$log"
run="$(sed -n 's/^Results: //p' "$log" | tail -n 1)"
cp "$run/bench.json" gpu_check.json
echo "Written:     gpu_check.json"
