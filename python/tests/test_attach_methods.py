"""Every method of the catalog trains the demo's GPT through attach(), in real processes."""

import os
from statistics import mean

from models import digest, flat
from processes import Rank, group
from tiers import each_method_in_one_granularity

from topreduce.lab.experiments.methods import OURS, Method
from topreduce.lab.experiments.replica import Replica
from topreduce.lab.tasks.models import Workload

STEPS = 16


def train(rank: Rank, spec: str) -> tuple[list[float], str, int, int]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where the replica reads its bytes
    workload = Workload(model="gpt:0.6m", context=16)
    replica = Replica(rank.rank, workload, Method(spec, spec))
    steps = [replica.step() for _ in range(STEPS)]
    replica.close()
    weights = flat(replica.task.model, lambda parameter: parameter.detach())
    sent = max(step.stats["bytes_sent"] for step in steps)
    return [step.loss for step in steps], digest(weights), sent, 4 * weights.numel()


@each_method_in_one_granularity
def test_every_method_trains(method: str, granularity: str) -> None:
    share = "" if method == "dense" else ",density=0.05"
    spec = f"{OURS}{method}:granularity={granularity}{share}"
    first, second = group(2).run(train, spec, seconds=180)
    losses, weights, sent, dense = first
    assert weights == second[1], "the replicas are the same, bit for bit"
    assert losses != second[0], "each rank reads its own batches"
    assert mean(losses[-3:]) < mean(losses[:3]) - 0.1
    assert 0 < sent < dense * (1.01 if method == "dense" else 0.6)
