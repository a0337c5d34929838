"""Memory and block-I/O limits through cgroups, version 1 and 2 alike. Needs root."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class CgroupError(RuntimeError):
    """The system has no such controller, or it may not be used."""


def _mounts() -> list[tuple[Path, str, str]]:
    rows = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [(Path(row[1]), row[2], row[3]) for row in rows if row[2] in ("cgroup", "cgroup2")]


def _hierarchy(controller: str) -> tuple[Path, int]:
    """(mount point, version) of the hierarchy that has the controller; `io` of version 2 is `blkio` of version 1."""
    for mount, kind, options in _mounts():
        names = {"io": "blkio"}.get(controller, controller)
        if kind == "cgroup" and names in options.split(","):
            return mount, 1
        if kind == "cgroup2" and controller in (mount / "cgroup.controllers").read_text().split():
            return mount, 2
    raise CgroupError(f"no cgroup hierarchy has the controller {controller}")


def device_of(path: Path) -> str:
    """major:minor of the whole disk that holds `path`: limits are set on disks, not on partitions."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (device / "partition").exists():
        device = device.parent
    if not (device / "dev").exists():
        raise CgroupError(f"{path} does not lie on a block device")
    return (device / "dev").read_text().strip()


class Cgroup:
    """A group of processes with limits; use as a context manager, then `enter()` from the process to be limited."""

    def __init__(self, name: str, *, memory: int | None = None, read_rate: int | None = None, path: Path | None = None):
        """memory: bytes, without swap. read_rate: bytes/s from the disk that holds `path`."""
        self._groups: list[Path] = []
        self._memory: tuple[Path, int] | None = None
        try:
            if memory is not None:
                group, version = self._make("memory", name)
                self._memory = (group, version)
                if version == 1:
                    self._write(group / "memory.limit_in_bytes", memory)
                    self._try(group / "memory.memsw.limit_in_bytes", memory)
                    self._try(group / "memory.swappiness", 0)
                else:
                    self._write(group / "memory.max", memory)
                    self._try(group / "memory.swap.max", 0)
            if read_rate is not None:
                if path is None:
                    raise CgroupError("a read limit needs the path whose disk is limited")
                group, version = self._make("io", name)
                device = device_of(path)
                if version == 1:
                    self._write(group / "blkio.throttle.read_bps_device", f"{device} {read_rate}")
                else:
                    self._write(group / "io.max", f"{device} rbps={read_rate}")
        except BaseException:
            self.close()
            raise

    def _make(self, controller: str, name: str) -> tuple[Path, int]:
        mount, version = _hierarchy(controller)
        if version == 2:
            self._try(mount / "cgroup.subtree_control", f"+{controller}")
        group = mount / f"{name}-{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
        except OSError as error:
            raise CgroupError(f"cannot make a {controller} group: {error}") from error
        if group not in self._groups:
            self._groups.append(group)
        return group, version

    @staticmethod
    def _write(file: Path, value: object) -> None:
        try:
            file.write_text(f"{value}\n")
        except OSError as error:
            raise CgroupError(f"cannot set {file.name} to {value}: {error}") from error

    @staticmethod
    def _try(file: Path, value: object) -> None:
        """For knobs that not every kernel has."""
        try:
            file.write_text(f"{value}\n")
        except OSError:
            return

    def enter(self, pid: int = 0) -> None:
        """Moves a process (0: the calling one) into the group."""
        for group in self._groups:
            self._write(group / "cgroup.procs", pid or os.getpid())

    def memory_peak(self) -> int | None:
        """Largest memory charged to the group so far, bytes; None where the kernel does not say."""
        if self._memory is None:
            return None
        group, version = self._memory
        file = group / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def close(self) -> None:
        """Moves what is left to the parent and removes the groups."""
        for group in self._groups:
            for pid in (group / "cgroup.procs").read_text().split() if group.exists() else ():
                self._try(group.parent / "cgroup.procs", pid)
            try:
                group.rmdir()
            except OSError:
                continue
        self._groups = []

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
