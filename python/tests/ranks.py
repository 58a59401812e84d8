"""Runs scripts as torchrun would, from one process that has imported what they need.

    scripts = Scripts("torch", "lightning")
    outcomes = scripts.run(2, "examples/lightning_strategy.py", "--epochs", "1")

Importing torch or a framework takes longer than such a script, so the ranks fork from a process
that did it once. They end as any Python program does.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

SECONDS = 240  # for a script
PRELOADED = ["torch._dynamo", "torch.nn.parallel"]


class Outcome(NamedTuple):
    """How a rank ended."""

    code: int
    output: str
    errors: str


class Scripts:
    """A process that waits for scripts, with some modules imported."""

    def __init__(self, *modules: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One thread, as torchrun does; and lines of several processes come whole.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        )

    def run(self, ranks: int, script: str, *options: str, **environment: str) -> list[Outcome]:
        """Runs it to the end of all ranks; if one fails the others are killed."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(
            json.dumps([environment, ranks, script, *options]), file=self._server.stdin, flush=True
        )
        return [Outcome(*each) for each in json.loads(self._server.stdout.readline())]


@functools.cache
def scripts(*modules: str) -> Scripts:
    """One for all tests of this process; it ends with it."""
    return Scripts(*modules)


# ---- in the process that forks --------------------------------------------------------------


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Lightning looks for MPI by starting it, which takes a second and may fail on a busy machine.
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    for name in [*PRELOADED, *sys.argv[1:]]:
        importlib.import_module(name)
    gc.freeze()  # ranks need not look at all of this when they end
    while line := sys.stdin.readline():
        environment, ranks, script, *options = json.loads(line)
        folder = Path(tempfile.mkdtemp())  # no context manager: ranks leave through here too
        codes = serve(environment, ranks, script, options, folder)
        texts = [
            [(folder / f"{kind}{rank}").read_text() for kind in ("output", "errors")]
            for rank in range(ranks)
        ]
        shutil.rmtree(folder)
        outcomes = [[code, *text] for code, text in zip(codes, texts, strict=True)]
        print(json.dumps(outcomes), file=answers, flush=True)


def serve(
    environment: dict[str, str], ranks: int, script: str, options: list[str], folder: Path
) -> list[int]:
    everyone = {
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    children: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(everyone, RANK=str(rank), LOCAL_RANK=str(rank))
            sys.exit(run(rank, script, options, folder))
        children[child] = rank
    codes = [0] * ranks
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if status != 0:
            for other in children:  # they would wait for it
                os.kill(other, signal.SIGKILL)
    return codes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(rank: int, script: str, options: list[str], folder: Path) -> int:
    for number, kind in enumerate(("output", "errors"), start=1):
        file = os.open(folder / f"{kind}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.alarm(SECONDS)
    sys.argv = [script, *options]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
