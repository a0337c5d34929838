"""The phones that graphs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from estream.errors import UsageError


@dataclass(frozen=True)
class Soc:
    """A Snapdragon SoC as the QNN provider wants it named: option values `soc_model` and `htp_arch`."""

    name: str
    model: int
    arch: int

    @property
    def provider_options(self) -> dict[str, str]:
        return {"soc_model": str(self.model), "htp_arch": str(self.arch)}


SOCS: dict[str, Soc] = {
    soc.name: soc
    for soc in (Soc("sm8550", 43, 73), Soc("sm8650", 57, 75), Soc("sm8750", 69, 79), Soc("sm8850", 87, 81))
}
DEFAULT_SOC = "sm8650"


def find_soc(name: str) -> Soc:
    """The SoC of this name, in any case. Raises UsageError naming the known ones."""
    try:
        return SOCS[name.lower()]
    except KeyError:
        raise UsageError(f"unknown SoC {name!r}", had=", ".join(SOCS), next_step="Name one of these") from None
