"""A run that goes on when a machine does not: four ranks train, one is killed, a new one joins.

    python examples/torch_survive.py

Here a launcher watches the processes and says in a store who is there: a "generation" of ranks.
Yours may be anything that knows. What matters is the loop in `train`: the ranks that are left make
a new process group and hand it to sync.rebuild, and so does a rank that joins.
"""

import json
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.torch import CommError

STEPS, KILL_AT, JOIN_AT = 240, 80, 150


def train(name: str, port: int) -> None:
    """One rank, from its start to the end of the run."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    generation = join(store, name, 0)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    # Alone at first: the others, if there are any, are in the middle of their training.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = DistributedDataParallel(model, process_group=alone)
    sync = topreduce.torch.attach(ddp, "topk", density=0.01, verify_every=20)
    in_group = False

    while sync.step < STEPS:
        try:
            if not in_group:
                rebuilt = sync.rebuild(everyone(), optimizer=optimizer)
                in_group = True
                tell(rebuilt)
            inputs = torch.randn(32, 64)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), inputs[:, :10].argmax(1))
            loss.backward()
            optimizer.step()
            report(store, sync, loss.item())
            if int(store.get("newest")) > generation:
                raise CommError("a rank wants to join")
        except CommError as error:
            sync.leave(str(error))  # nobody shall wait for this rank
            generation, in_group = join(store, name, generation), False

    digest = sum(float(each.detach().double().sum()) for each in model.parameters())
    store.set(f"end/{name}", repr(digest))
    time.sleep(1.0)  # the others may still have to hear our last word
    dist.destroy_process_group()


def join(store: Any, name: str, generation: int) -> int:
    """Waits for the next generation of ranks, and makes their process group."""
    while int(store.get("newest")) <= generation:
        time.sleep(0.02)
    generation = int(store.get("newest"))
    names = json.loads(store.get(f"generation/{generation}"))
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"group/{generation}", store),
        rank=names.index(name),
        world_size=len(names),
        timeout=timedelta(seconds=30),
    )
    return generation


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tell(rebuilt: topreduce.torch.Rebuilt) -> None:
    if dist.get_rank() == 0:
        lost = f", {rebuilt.lost} lost (they owed about {rebuilt.lost_norm:.3g})"
        print(
            f"{rebuilt.ranks} ranks go on from step {rebuilt.step}: {len(rebuilt.late)} were late, "
            f"{len(rebuilt.joined)} joined{lost if rebuilt.lost else ''}",
            flush=True,
        )


def report(store: Any, sync: topreduce.torch.Sync, loss: float) -> None:
    if dist.get_rank() == 0:
        store.set("step", str(sync.step))
        if sync.step % 40 == 0:
            sent = sync.stats()["bytes_sent"]
            print(f"step {sync.step}: loss {loss:.3f}, {sent} bytes", flush=True)


class Launcher:
    """Starts ranks, notices who has gone, and tells all others."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set("step", "0")
        self.ranks: dict[str, BaseProcess] = {}
        self.generation = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch._dynamo", "topreduce.torch"])

    def start(self, *names: str) -> None:
        for name in names:
            process = self.context.Process(target=train, args=(name, self.store.port), daemon=True)
            process.start()
            self.ranks[name] = process
        self.announce()

    def announce(self) -> None:
        """A new generation: those that are alive."""
        self.ranks = {name: each for name, each in self.ranks.items() if each.is_alive()}
        self.generation += 1
        self.store.set(f"generation/{self.generation}", json.dumps(list(self.ranks)))
        self.store.set("newest", str(self.generation))

    def wait_until(self, step: int) -> None:
        while int(self.store.get("step")) < step:
            if any(process.exitcode for process in self.ranks.values()):
                self.announce()
            time.sleep(0.02)


def main() -> None:
    launcher = Launcher()
    launcher.start("one", "two", "three", "four")
    launcher.wait_until(KILL_AT)
    print("three is killed", flush=True)
    launcher.ranks["three"].kill()
    launcher.wait_until(JOIN_AT)
    print("five comes", flush=True)
    launcher.start("five")
    launcher.wait_until(STEPS)
    for process in launcher.ranks.values():
        process.join()
    ends = {name: launcher.store.get(f"end/{name}") for name in launcher.ranks}
    same = "the same" if len(set(ends.values())) == 1 else "different"
    print(f"{', '.join(ends)} have {same} parameters")


if __name__ == "__main__":
    main()
