#!/usr/bin/env bash
# Installs once, then runs every test but those marked gpu or slow. Words after it go to pytest.
set -euo pipefail

# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$root"
# One thread per process: the tests are tiny, and processes of one test would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m pytest "$@"
