#!/usr/bin/env bash
# Creates .venv and installs requirements.txt and setup.cfg; repeats it only when they have changed.
# Sourced by quickstart.sh and test.sh, which then run "$python". Set PYTHON to choose an interpreter.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
stamp="$root/.venv/bev_lightning.stamp"
supported='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.10 python3 python; do
        if "$candidate" -c "$supported" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python from 3.10 to 3.12 with venv was found; install python3.11 (and python3.11-venv), or set PYTHON=/path/to/python3.11" >&2
    return 1
}

install() {
    local found wanted
    wanted="$(cat "$root/requirements.txt" "$root/setup.cfg" "$root/pyproject.toml" | cksum)"
    if [[ -x "$python" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    if ! "$python" -c "$supported" >/dev/null 2>&1; then
        found="$(find_python)"
        echo "setup: making $root/.venv with $("$found" --version)"
        "$found" -m venv --clear "$root/.venv"
    fi
    echo "setup: installing (once; several GB with CUDA, minutes)"
    # Quiet unless it fails.
    "$python" -m pip install --quiet --disable-pip-version-check --editable "${root}[test]"
    echo "$wanted" >"$stamp"
}

install
