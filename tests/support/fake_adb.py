"""An `adb` that plays a folder as the phone: `FakePhone` writes the state that this program, run as a process, obeys.

Paths of the phone in commands are those of the folder; its sh is this machine's. Faults are used up one by one:
{"match": regex of the command line, "how": gone | closed | cut | full | damage | hang | kill, "bytes": where}.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

_MAPPED = re.compile(
    r"(?<![\w.])/(?=data/local/tmp|vendor/|odm/|sdcard|dsp/|proc/(?:meminfo|swaps|self)|sys/class|dev/(?:fastrpc|adsprpc))"
)
_APPEND = 'exec cat >> "$1"'


class Phone:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.state: dict[str, Any] = json.loads((folder / "state.json").read_text())

    def fault(self, command: str) -> dict[str, Any] | None:
        """The first one that matches, which is used up."""
        for fault in self.state["faults"]:
            if re.search(fault["match"], command, re.DOTALL):
                self.state["faults"].remove(fault)
                (self.folder / "state.json").write_text(json.dumps(self.state))
                return dict(fault)
        return None

    def mapped(self, text: str) -> str:
        return _MAPPED.sub(lambda _: f"{self.root}/", text)

    def shell(self, command: str) -> int:
        fault = self.fault(command)
        how = fault["how"] if fault else None
        if how == "gone":
            print(f"error: device '{self.state['serial']}' not found", file=sys.stderr)
            return 1
        if how == "closed":
            print("error: closed", file=sys.stderr)
            return 1
        limit = None
        if fault and how == "full":
            broken = f'head -c {fault["bytes"]} >> "$1"; echo "cat: write error: No space left on device" >&2; exit 1'
            command = command.replace(_APPEND, broken)
        elif how == "damage":
            command = command.replace(_APPEND, 'exec tr "\\001" "\\002" >> "$1"')
        elif how == "hang":
            command = "exec sleep 600"
        elif fault and how in ("cut", "kill"):
            limit = int(fault["bytes"])
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            ["/bin/sh", "-c", self.mapped(command)],
            env={"PATH": path, "PHONE": str(self.root)},
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if limit is None else subprocess.DEVNULL,
        )
        assert process.stdin and process.stdout
        pumps = [
            threading.Thread(target=self._pump, args=pipes)
            for pipes in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
            if pipes[0] is not None
        ]
        for pump in pumps:
            pump.start()
        feed = threading.Thread(target=self._feed, args=(process, limit, command.startswith("sh -s")), daemon=True)
        feed.start()
        if limit is not None:
            feed.join()
            process.wait()
            os._exit(255)  # as the client ends when the connection breaks: without a word
        status = process.wait()
        for pump in pumps:
            pump.join()
        sys.stdout.flush()
        os._exit(status)  # the feeder may still wait for our stdin

    def _feed(self, process: subprocess.Popen[bytes], limit: int | None, script: bool) -> None:
        """stdin to the phone; scripts have the phone's paths in them."""
        pipe = process.stdin
        assert pipe
        try:
            if script:
                pipe.write(self.mapped(sys.stdin.buffer.read().decode()).encode())
            else:
                left = limit
                while data := os.read(0, 65536 if left is None else min(65536, left)):
                    pipe.write(data)
                    pipe.flush()
                    if left is not None:
                        left -= len(data)
                        if not left:
                            break
            pipe.close()
        except OSError:
            pass

    def _pump(self, source: BinaryIO, sink: BinaryIO) -> None:
        root = os.fsencode(self.root)
        try:
            for line in source:
                if b"\0" in line and sink is sys.stdout.buffer:
                    sink.write(line)
                else:
                    sink.write(line.replace(root, b""))
                sink.flush()
        except OSError:
            pass

    def copy(self, verb: str, source: str, target: str) -> int:
        fault = self.fault(f"{verb} {source} {target}")
        if fault and fault["how"] == "gone":
            print(f"adb: error: failed to get feature set: device '{self.state['serial']}' not found", file=sys.stderr)
            return 1
        if fault and fault["how"] == "cut":
            if verb == "pull":
                Path(target).write_bytes(Path(self.mapped(source)).read_bytes()[: fault["bytes"]])
            print("adb: error: unexpected EOF", file=sys.stderr)
            return 1
        try:
            if verb == "push":
                shutil.copyfile(source, self.mapped(target))
            else:
                shutil.copyfile(self.mapped(source), target)
        except OSError as error:
            print(f"adb: error: failed to copy '{source}' to '{target}': {error.strerror}", file=sys.stderr)
            return 1
        print(f"{source}: 1 file {verb}ed, 0 skipped.")
        return 0


def main() -> int:
    phone = Phone(Path(sys.argv[1]))
    arguments = sys.argv[2:]
    with open(phone.folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[0] == "start-server":
        print("* daemon not running; starting now at tcp:5037\n* daemon started successfully", file=sys.stderr)
        if phone.state["server_error"]:
            print(phone.state["server_error"], file=sys.stderr)
            return 1
        return 0
    if arguments[0] == "devices":
        print(f"* daemon started successfully\nList of devices attached\n{phone.state['devices']}\n")
        return 0
    assert arguments[:2] == ["-s", phone.state["serial"]], arguments
    if phone.state["noise"]:
        print("* daemon not running; starting now at tcp:5037", file=sys.stderr, flush=True)
    if arguments[2] == "shell":
        return phone.shell(arguments[3])
    return phone.copy(*arguments[2:5])


if __name__ == "__main__":
    raise SystemExit(main())
