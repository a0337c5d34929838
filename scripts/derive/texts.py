"""The two fixed texts: one to calibrate the split with, another to evaluate on.

calibration.txt was sampled from SmolLM2-135M itself (temperature 0.9, top-p 0.95), which is data of the kind that it
knows; evaluation.txt was written for this project. What calibration.txt claims is often untrue.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

EVALUATION_TOKENS = 256
_FOLDER = Path(__file__).parent


def calibration(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each paragraph: short sequences, to see many first tokens, which activate unlike all others."""
    text = (_FOLDER / "calibration.txt").read_text(encoding="utf-8")
    return [tokenizer.encode(paragraph.strip()).ids for paragraph in text.split("\n\n") if paragraph.strip()]


def evaluation(tokenizer: Tokenizer) -> list[int]:
    """The first EVALUATION_TOKENS ids of evaluation.txt. Raises ValueError if the text is shorter."""
    ids = tokenizer.encode((_FOLDER / "evaluation.txt").read_text(encoding="utf-8")).ids
    if len(ids) < EVALUATION_TOKENS:
        raise ValueError(f"evaluation.txt has {len(ids)} tokens, {EVALUATION_TOKENS} are needed")
    return list(ids[:EVALUATION_TOKENS])
