"""python ranks.py <ranks> <module> <script> [options]: runs a script as torchrun would.

This process imports torch and the module, which takes longer than such a script, and the ranks fork
from it.
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

PRELOADED = ["torch._dynamo", "torch.nn.parallel"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(script: str, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def main() -> None:
    ranks, module, script = sys.argv[1:4]
    del sys.argv[:3]
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does; torch reads it when it is imported
    for name in [*PRELOADED, module]:
        importlib.import_module(name)
    everyone = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    children = set()
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            os._exit(run(script, {**everyone, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status != 0:
            for other in children:  # they would wait for it
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


main()
