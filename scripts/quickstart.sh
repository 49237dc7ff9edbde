#!/usr/bin/env bash
# Installs once, trains the default configuration and prints where the results are.
# Words after it go to train: bash scripts/quickstart.sh trainer.max_steps=100 seed=2
set -euo pipefail

# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
PYTHONUNBUFFERED=1 "$python" -m bev_lightning.train "$@" | tee "$log"

run="$(sed -n 's/^Results: //p' "$log" | tail -n 1)"
if [[ -z "$run" ]]; then
    exit 0 # --help, --cfg job: nothing was trained
fi
if [[ -f "$run/score.json" ]]; then
    "$python" - "$run/score.json" <<'SCORE'
import json
import sys

score = json.load(open(sys.argv[1]))
if "mAP" in score:
    print(f"\nScore:       mAP {score['mAP']:.3f}, NDS {score['NDS']:.3f} on the validation scenes")
SCORE
fi
echo "Results:     $run"
echo "TensorBoard: $root/.venv/bin/tensorboard --logdir $run"
