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


class Namespace:
    """An empty network of its own, until `close`."""

    def __init__(self) -> None:
        # The keeper waits for the end of its input, which comes with the end of this process.
        self._keeper = subprocess.Popen(
            [tool("unshare"), "--net", "sh", "-c", "echo here && exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which knows what to end first
        )
        assert self._keeper.stdout is not None and self._keeper.stderr is not None
        if not self._keeper.stdout.readline():
            reason = self._keeper.stderr.read().decode().strip()
            self.close()
            raise ClusterError(reason)

    @property
    def pid(self) -> int:
        return self._keeper.pid

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/ns/net"

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Runs a batch of `ip` or `tc` commands inside."""
        done = subprocess.run(
            [tool("nsenter"), f"--net={self.path}", tool(program), "-batch", "-"],
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

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            if pipe is not None:
                pipe.close()


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
