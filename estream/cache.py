"""The user's cache folder: device profiles, and contexts of packages that have none of their own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$ESTREAM_CACHE, else $XDG_CACHE_HOME/estream, else ~/.cache/estream. It need not exist."""
    own = os.environ.get("ESTREAM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "estream"
