"""Where things lie on the phone, and the environment of a program there."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/data/local/tmp/estream"  # the one place that adb may write to and run programs from


@dataclass(frozen=True)
class PhoneLayout:
    """Folders under `root`; all paths are POSIX strings."""

    root: str = ROOT

    @property
    def python(self) -> str:
        """Python's prefix: bin/, lib/ (Termux's packages)."""
        return f"{self.root}/python"

    @property
    def libraries(self) -> str:
        """ONNX Runtime, the QNN plugin, QAIRT."""
        return f"{self.root}/lib"

    @property
    def app(self) -> str:
        """estream_phone.py and the run-time part of estream/."""
        return f"{self.root}/app"

    @property
    def models(self) -> str:
        """NAME.estream folders."""
        return f"{self.root}/models"

    @property
    def runs(self) -> str:
        """One folder per run: what it leaves to be pulled."""
        return f"{self.root}/runs"

    @property
    def bytecode(self) -> str:
        """Where Python keeps what it compiled: beside the pushed files, which stay as they were verified."""
        return f"{self.root}/bytecode"

    @property
    def manifest(self) -> str:
        """The bundle's bundle.json."""
        return f"{self.root}/bundle.json"

    @property
    def environment(self) -> dict[str, str]:
        """libcdsprpc.so comes from the phone itself; the DSP's loader separates folders by semicolons and would take a
        colon as part of a name."""
        return {
            "LD_LIBRARY_PATH": f"{self.libraries}:{self.python}/lib:/vendor/lib64",
            "ADSP_LIBRARY_PATH": f"{self.libraries};/vendor/dsp/cdsp",
            "PYTHONHOME": self.python,
            "PYTHONPATH": self.app,
            "PYTHONPYCACHEPREFIX": self.bytecode,
            "HOME": self.root,
            "TMPDIR": self.root,
        }

    @property
    def fresh_environment(self) -> dict[str, str]:
        """The same, but nothing that Python has compiled before is read, and nothing is left."""
        environment = {name: value for name, value in self.environment.items() if name != "PYTHONPYCACHEPREFIX"}
        return {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
