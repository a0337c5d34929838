"""How well a package predicts a text, and how near it is to its reference lowering. Run-time part: numpy only."""

from __future__ import annotations

from estream.quality.measure import Agreement, Quality, agreement, perplexity, perplexity_of, split_windows

__all__ = ["Agreement", "Quality", "agreement", "perplexity", "perplexity_of", "split_windows"]
