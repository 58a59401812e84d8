"""torchft: its quorum says who trains, and topreduce averages between them.

    pip install torchft
    python examples/torchft_quorum.py

Three replicas train, one is killed and started again. A change of the quorum rebuilds our exchange;
a step is committed only if torchft's should_commit() is true, here and before anything has changed.
"""

import multiprocessing
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupDummy, create_store_client

import topreduce.torch
from topreduce.torch import CommError, Ranks

KILL_AT, START_AT, MORE = 60, 100, 60  # steps
PATIENCE = timedelta(seconds=20)


class Quorum(ProcessGroupDummy):
    """Is told by torchft whenever the quorum changes, and moves no data itself."""

    ranks: Ranks | None = None  # of a quorum that we have not seen yet

    def __init__(self) -> None:
        super().__init__(0, 1)

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *others: Any
    ) -> None:
        store = create_store_client(f"{store_addr}/topreduce", timeout=PATIENCE)
        self.ranks = Ranks(store, rank, world_size)


def train(name: str, lighthouse: str, board_port: int) -> None:
    """One replica, from its start to the end of the run."""
    torch.set_num_threads(1)
    board = dist.TCPStore("127.0.0.1", board_port, is_master=False)  # what the launcher looks at
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    quorum = Quorum()
    manager = Manager(
        pg=quorum,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,  # the quorum stands before the forward pass
        timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    asked = False

    def should_commit() -> bool:
        nonlocal asked
        asked = True
        return bool(manager.should_commit())

    sync = topreduce.torch.attach(
        model, "topk", density=0.01, group=Ranks.alone(), timeout=PATIENCE, commit_if=should_commit
    )
    while not board.check(["last"]) or manager.current_step() < int(board.get("last")):
        manager.start_quorum()  # and gets parameters and optimizer state, if this replica is behind
        asked = False
        try:
            if quorum.ranks is not None:
                ranks, quorum.ranks = quorum.ranks, None
                rebuilt = sync.rebuild(ranks, optimizer=optimizer)
                if ranks.rank() == 0:
                    print(f"{rebuilt.ranks} replicas go on from step {rebuilt.step}", flush=True)
            inputs = torch.randn(32, 64)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
            loss.backward()  # exchange, vote, should_commit(), and only then our commit
            optimizer.step()
        except CommError as error:
            if not asked:
                manager.report_error(error)
                manager.should_commit()  # false; the next quorum is another one
            continue
        board.set(f"step/{name}", str(manager.current_step()))
        if sync.step % 40 == 0 and manager.participating_rank() == 0:
            print(f"step {sync.step}: loss {loss.item():.3f}", flush=True)
    digest = sum(float(each.detach().double().sum()) for each in model.parameters())
    board.set(f"end/{name}", f"{sync.step} {digest!r}")
    time.sleep(1.0)  # others may still have to hear our last word
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    board = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchft", "topreduce.torch"])

    def start(name: str) -> BaseProcess:
        arguments = (name, lighthouse.address(), board.port)
        process = context.Process(target=train, args=arguments, daemon=True)
        process.start()
        return process

    def wait_until(name: str, step: int) -> None:
        while not board.check([f"step/{name}"]) or int(board.get(f"step/{name}")) < step:
            time.sleep(0.02)

    replicas = {name: start(name) for name in ("replica_0", "replica_1", "replica_2")}
    wait_until("replica_0", KILL_AT)
    print("replica_1 is killed", flush=True)
    replicas["replica_1"].kill()
    wait_until("replica_0", START_AT)
    print("replica_1 is started again", flush=True)
    board.set("step/replica_1", "0")
    replicas["replica_1"] = start("replica_1")
    wait_until("replica_1", START_AT)
    board.set("last", str(int(board.get("step/replica_1")) + MORE))
    for process in replicas.values():
        process.join()
    ends = {name: board.get(f"end/{name}") for name in replicas}
    same = "the same" if len(set(ends.values())) == 1 else "different"
    print(f"{', '.join(ends)} have {same} parameters")
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
