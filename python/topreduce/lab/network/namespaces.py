"""Network namespaces without names, each kept by a process of ours: when that ends, for whatever
reason, the kernel takes the namespace and all interfaces in it away. Nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # not on everybody's path
_CLONE_NEWNET = 0x40000000


class ClusterError(RuntimeError):
    """The emulated network cannot be built here, or is not what was asked for."""


class Helper:
    """A process that says when it is ready, and ends when its input does: at the latest with us."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which knows what to end first
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if not self._process.stdout.readline():
            reason = self._process.stderr.read().decode().strip()
            self.close()
            raise ClusterError(reason)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Namespace(Helper):
    """An empty network of its own, until `close`."""

    def __init__(self) -> None:
        super().__init__([tool("unshare"), "--net", "sh", "-c", "echo here && exec cat >/dev/null"])

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/ns/net"

    def inside(self) -> list[str]:
        """What to put before a command to run it inside."""
        return [tool("nsenter"), f"--net={self.path}"]

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Runs a batch of `ip` or `tc` commands inside."""
        done = subprocess.run(
            [*self.inside(), tool(program), "-batch", "-"],
            input="\n".join(lines),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ClusterError(f"{program}: {done.stderr.strip() or done.stdout.strip()}")

    def run(self, action: Callable[[], T]) -> T:
        """Calls `action` on a thread inside: the sockets that it makes stay there."""
        results: list[T] = []

        def body() -> None:
            enter(self.path)
            results.append(action())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return results[0]


def enter(path: str) -> None:
    """Moves this thread, and threads that it starts from now on, into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(file)


def bytes_through(interface: str) -> tuple[int, int]:
    """Bytes that this thread's namespace sent and received at an interface since it exists."""
    with open("/proc/thread-self/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                counters = numbers.split()
                return int(counters[8]), int(counters[0])
    raise ClusterError(f"there is no interface {interface}")


def tool(name: str) -> str:
    """Where this program is; ClusterError with the package if it is not there."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")
    if path is None:
        raise ClusterError(f"{name} is missing: apt-get install {TOOLS[name]}")
    return path
