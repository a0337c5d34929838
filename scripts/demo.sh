#!/usr/bin/env bash
# A real model through EStream, from an empty machine: scripts/demo.sh. Again: what is done is skipped.
# Makes .venv in the checkout (or $ESTREAM_VENV), and works in .demo there (or $ESTREAM_DEMO_DIR): about 0.9 GB.
# $PYTHON names the interpreter that creates the environment (default python3).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="${ESTREAM_DEMO_DIR:-$root/.demo}"
venv="${ESTREAM_VENV:-$root/.venv}"
prompt="The capital of France is"
started=$SECONDS

heading() { printf '\n== %s  [%d s]\n' "$1" "$((SECONDS - started))"; }

heading "1. Environment: $venv"
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "EStream needs Python 3.11 or newer")'
    "${PYTHON:-python3}" -m venv "$venv"
fi
venv="$(cd "$venv" && pwd)"
# A stamp is written after a complete install only. scripts/test.sh installs more than this, under its own stamp.
wanted="$root $(sha256sum < "$root/pyproject.toml")"
if [ "$(cat "$venv/estream-installed" 2>/dev/null || true)" != "$wanted" ] &&
    [ "$(cat "$venv/estream-demo-installed" 2>/dev/null || true)" != "$wanted" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[demo]"
    printf '%s\n' "$wanted" > "$venv/estream-demo-installed"
fi

mkdir -p "$work"
work="$(cd "$work" && pwd)"
checkpoint="$work/checkpoint"
package="$work/int8.estream"

heading "2. MoE derived from SmolLM2-135M: download (93 MB) and cut into 8 experts per layer"
"$venv/bin/python" "$root/scripts/derive_demo_model.py" --out "$checkpoint" --cache "$work/cache"

heading "3. Pack: int8 experts in one file, read from flash while the model runs"
# The stamp says which derivation the package was made from.
if [ -e "$package" ] && cmp -s "$checkpoint/derivation.json" "$work/int8.packed-from.json"; then
    echo "$package: up to date"
else
    rm -f "$work/int8.packed-from.json"
    "$venv/bin/estream" pack "$checkpoint" "$package" --experts int8 --force
    cp "$checkpoint/derivation.json" "$work/int8.packed-from.json"
fi

heading "4. Prefill, arena of 4 banks x 4 experts: the next token after \"$prompt\""
"$venv/bin/estream" prefill "$package" --prompt "$prompt" --group 4 --banks 4 --all-logits "$work/large-arena.npy"

heading "5. The same with a quarter of the arena: 2 banks x 2 experts"
"$venv/bin/estream" prefill "$package" --prompt "$prompt" --group 2 --banks 2 --all-logits "$work/small-arena.npy"

heading "6. Are all logits of the two runs the same, byte for byte?"
if ! cmp "$work/large-arena.npy" "$work/small-arena.npy"; then
    echo "No: the arena's size changed the result, which must never happen" >&2
    exit 1
fi
echo "Yes: $(wc -c < "$work/large-arena.npy") bytes are identical"
heading "7. On the NPU: contexts for a phone, checked and run in the HTP simulator"
# Sizes for a short prompt: the simulator computes every row of a block or tile, whether or not a token is in it.
contexts="$package/graphs/htp/sm8650/manifest.json"
# The stamp says which package and which graphs the contexts were compiled from.
stamp="$work/int8.compiled-from"
cat "$work/int8.packed-from.json" "$root"/qnn_graphs/*.py "$root"/qnn_graphs/htp/*.py | sha256sum > "$stamp.new"
if [ -e "$contexts" ] && cmp -s "$stamp.new" "$stamp"; then
    echo "$contexts: up to date"
else
    rm -f "$stamp"
    "$venv/bin/estream" compile "$package" --soc sm8650 --rows 32 --steps 1 --ladder 2x32
    mv "$stamp.new" "$stamp"
fi
"$venv/bin/estream" prefill "$package" --backend htp --prompt "$prompt"
printf '\nDone in %d s.\n' "$((SECONDS - started))"
