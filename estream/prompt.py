"""What may be prefilled: checks of token ids and of the longest prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from estream.errors import PromptError, UsageError
from estream.models.base import Architecture

DEFAULT_MAX_TOKENS = 4096


def check_prompt(ids: Sequence[int] | np.ndarray, arch: Architecture, max_tokens: int) -> np.ndarray:
    """ids as int64 [N]. Raises PromptError: empty, not whole numbers, out of the vocabulary, too long."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise PromptError("token ids must be a flat list of whole numbers", next_step=str(error)) from error
    if array.size == 0:
        raise PromptError("the prompt is empty", asked="0 tokens", next_step="Give at least one token")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PromptError("token ids must be a flat list of whole numbers", asked=f"{array.dtype}{list(array.shape)}")
    bad = np.flatnonzero((array < 0) | (array >= arch.vocab))
    if bad.size:
        raise PromptError(
            f"token id at position {bad[0]} is outside the vocabulary",
            asked=int(array[bad[0]]),
            had=f"0 to {arch.vocab - 1}",
            next_step="Check that the prompt was tokenised with this model's tokenizer",
        )
    if len(array) > max_tokens:
        longer = f"open the engine with max_tokens up to {arch.context}" if max_tokens < arch.context else "shorten it"
        raise PromptError(
            "the prompt is too long",
            asked=f"{len(array)} tokens",
            had=f"room for {max_tokens}",
            next_step=longer[0].upper() + longer[1:],
        )
    return array.astype(np.int64)


def check_prompts(
    prompts: Sequence[Sequence[int] | np.ndarray], arch: Architecture, max_tokens: int
) -> list[np.ndarray]:
    """`check_prompt` of each. Raises PromptError also for no prompt, and for more than max_tokens tokens together."""
    if not len(prompts):
        raise PromptError("the batch is empty", asked="0 prompts", next_step="Give at least one prompt")
    checked = [check_prompt(ids, arch, max_tokens) for ids in prompts]
    total = sum(map(len, checked))
    if total > max_tokens:
        raise PromptError(
            f"the {len(checked)} prompts of the batch are too long together",
            asked=f"{total} tokens",
            had=f"room for {max_tokens}",
            next_step="Split the batch, or open the engine with a larger max_tokens",
        )
    return checked


def longest_prompt(asked: int | None, context: int, called: str = "max_tokens") -> int:
    """Room for a prompt, in tokens. called: the option that `asked` is of. Raises UsageError when more than the model's
    context is asked for."""
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, context)
    if type(asked) is not int or not 1 <= asked <= context:
        raise UsageError(f"{called} must lie within the model's context", asked=repr(asked), had=f"1 to {context}")
    return asked
