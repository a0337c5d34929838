"""Reads Hugging Face checkpoints; nothing else knows their quirks."""

from estream.checkpoint.checkpoint import Checkpoint
from estream.checkpoint.tokenizer import Tokenizer

__all__ = ["Checkpoint", "Tokenizer"]
