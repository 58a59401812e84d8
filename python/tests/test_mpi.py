"""Ranks as processes of an MPI job, started by mpiexec."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ["mpiexec", "--oversubscribe", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1"]

# Uneven and empty parts; then the same bits of a step on every rank.
SUITE = """
import numpy as np, topreduce, topreduce.mpi
comm = topreduce.mpi.Communicator()
def part(source, target):
    return np.full((source * 5 + target * 3) % 4 * 11, source * 16 + target, np.uint8)
parts = [part(comm.rank, r) for r in range(comm.size)]
received, counts = comm.all_to_all(np.concatenate(parts), [p.size for p in parts])
expected = [part(r, comm.rank) for r in range(comm.size)]
assert counts == [p.size for p in expected], counts
assert np.array_equal(received, np.concatenate(expected))
received, counts = comm.all_gather(np.full(comm.rank * 7, comm.rank, np.uint8))
assert counts == [7 * r for r in range(comm.size)], counts
assert np.array_equal(received, np.repeat(np.arange(comm.size), counts))
comm.barrier()
for method in ("dense", "topk", "ok_topk", "arc_topk"):
    reducer = topreduce.Reducer(topreduce.Layout([("w", [20, 10])]), method)
    gradient = np.random.default_rng(comm.rank).normal(size=200).astype(np.float32)
    reducer.begin(comm)
    reducer.add([0], gradient)
    reducer.finish()
    everyone, _ = comm.all_gather(gradient.view(np.uint8))
    assert np.array_equal(everyone, np.tile(gradient.view(np.uint8), comm.size)), method
if comm.rank == 0:
    print("all", comm.size, "ranks agree")
"""


def run(*program: str) -> str:
    command = [*LAUNCH, "-n", "3", sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_communicator_over_mpi4py_moves_what_it_should() -> None:
    assert "all 3 ranks agree" in run("-c", SUITE)


def test_the_numpy_example_learns() -> None:
    errors = [
        float(word) for word in re.findall(r"error ([0-9.]+)", run(str(EXAMPLES / "numpy_mpi.py")))
    ]
    assert len(errors) == 4
    assert errors[-1] < 0.05 < errors[0]
