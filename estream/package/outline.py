"""A package that is not on disk: what follows from a public model's shape. Nothing of it can be opened.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from pathlib import Path

from estream.errors import UsageError
from estream.models import family as find_family
from estream.package.layout import ALIGNMENT, default_dense, default_panel_width
from estream.package.manifest import Manifest, check_panel
from estream.package.presets import preset_config
from estream.package.reader import Package
from estream.version import __version__


def outline(preset: str, *, experts: str = "int4", dense: str | None = None) -> Package:
    """The layout that `synth` would write. Raises UsageError for an unknown preset or a scheme that
    cannot hold its hidden size."""
    config = preset_config(preset)
    family = find_family(config["model_type"]).from_config(config)
    arch = family.architecture()
    width = default_panel_width(arch.hidden, arch.expert_intermediate or arch.dense_intermediate, experts)
    manifest = Manifest(
        family=family,
        experts=experts,
        dense=dense or default_dense(experts),
        width=width,
        pool_offset=ALIGNMENT,
        dense_offset=ALIGNMENT,
        files={},
        source={"kind": "synth", "preset": preset, "seed": 0},
        estream=__version__,
    )
    check_panel(manifest.panel, arch, UsageError, "--experts")
    return Package(Path(preset), manifest)
