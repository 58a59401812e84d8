"""Linear regression on several machines, NumPy only: mpirun -n 4 python examples/numpy_mpi.py

Every rank has data of its own; they share 5 % of the gradient's entries per step.
"""

import numpy as np

import topreduce

comm = topreduce.mpi.Communicator()
truth = np.random.default_rng(0).normal(size=200).astype(np.float32)
rng = np.random.default_rng(comm.rank + 1)
inputs = rng.normal(size=(500, truth.size)).astype(np.float32)
targets = inputs @ truth

weights = np.zeros_like(truth)
layout = topreduce.Layout([("weights", list(weights.shape))])
reducer = topreduce.Reducer(layout, "ok_topk", density=0.05, warmup_steps=10, ramp_steps=100)
for step in range(400):
    gradient = inputs.T @ (inputs @ weights - targets) / len(targets)
    reducer.average(comm, gradient)  # gradient is now the mean
    weights -= 0.05 * gradient
    if comm.rank == 0 and step % 100 == 99:
        print(f"step {step + 1}: error {np.abs(weights - truth).max():.4f}", flush=True)
