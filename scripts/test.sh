#!/usr/bin/env bash
# Runs the tests, from any directory: scripts/test.sh [pytest arguments].
# Uses the checkout's .venv (or $ESTREAM_VENV), which it creates, and installs into it when pyproject.toml has changed.
# $PYTHON names the interpreter that creates it (default python3).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${ESTREAM_VENV:-$root/.venv}"

if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "EStream needs Python 3.11 or newer")'
    "${PYTHON:-python3}" -m venv "$venv"
fi
venv="$(cd "$venv" && pwd)"

# The stamp is written after a complete install only; it names the checkout, which an editable install points to.
stamp="$venv/estream-installed"
wanted="$root $(sha256sum < "$root/pyproject.toml")"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[test,demo]"
    printf '%s\n' "$wanted" > "$stamp"
fi

cd "$root"
exec "$venv/bin/python" -m pytest "$@"
