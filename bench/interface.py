"""interface: the bytes that leave a host, counted by its network interface, beside our own count.

Every rank is a host of its own: a network namespace with one interface, on a bridge. Real processes
train through attach over Gloo. Needs root and the command ip; says so and does nothing without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

RANKS = 4
STEPS = 40
STEADY = {"density": 0.01, "warmup_steps": 0, "ramp_steps": 0}
RUNS = [
    ("topk", {**STEADY, "values": "bf16"}),
    ("topk", {**STEADY, "values": "int4"}),
    ("ok_topk", {**STEADY, "values": "bf16"}),
    ("ok_topk", {**STEADY, "values": "int4"}),
    ("dense", {}),
]
TAG = f"tpr{os.getpid() % 10000}"
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


# ---- on a host ----------------------------------------------------------------------------------


def work(rank: int) -> None:
    """Train with each of RUNS; the last line says what the interface and the books counted."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import topreduce.torch
    from topreduce.lab.gpt import GPT, preset
    from topreduce.lab.models import next_id_loss
    from topreduce.lab.text import load_text

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    text = load_text()
    config = preset("gpt:0.6m", vocabulary=len(text.characters))
    counts = []
    for method, settings in RUNS:
        ddp = DistributedDataParallel(GPT(config, seed=0))
        sync = topreduce.torch.attach(ddp, method, **settings)
        before = booked = 0
        for step in range(STEPS + 2):
            if step == 2:  # connections stand, the ranks agree, DDP has cut its buckets anew
                dist.barrier()
                before = int(COUNTER.read_text())
            inputs, targets = text.training_batch(4, config.context, seed=0, rank=rank, step=step)
            ddp.zero_grad()
            next_id_loss(ddp, inputs, targets).backward()
            if step >= 2:
                booked += sync.stats()["bytes_sent"]
        dist.barrier()
        counts.append((int(COUNTER.read_text()) - before, booked))
        sync.detach()
        del ddp
    dist.destroy_process_group()
    print(json.dumps(counts))


# ---- the network --------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def build() -> None:
    ip("link", "add", f"{TAG}br", "type", "bridge")
    ip("link", "set", f"{TAG}br", "up")
    for rank in range(RANKS):
        host, cable = f"{TAG}h{rank}", f"{TAG}c{rank}"
        ip("netns", "add", host)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("link", "set", cable, "master", f"{TAG}br", "up")
        ip("-n", host, "address", "add", f"10.91.7.{rank + 1}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", "eth0", "up")


def clear() -> None:
    for rank in range(RANKS):
        subprocess.run(["ip", "netns", "delete", f"{TAG}h{rank}"], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "delete", f"{TAG}br"], stderr=subprocess.DEVNULL)


def run_hosts() -> list[list[tuple[int, int]]]:
    environment = os.environ | {
        "MASTER_ADDR": "10.91.7.1",
        "MASTER_PORT": "29551",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    hosts = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{TAG}h{rank}", sys.executable, __file__, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [host.communicate(timeout=1200)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    if any(host.returncode for host in hosts):
        raise SystemExit("interface: a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> int:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("interface: needs root and the command ip (Debian: iproute2); skipped")
        return 0
    try:
        build()
        counts = run_hosts()
    except subprocess.CalledProcessError as error:
        print(f"interface: no network namespaces here ({error}); skipped")
        return 0
    finally:
        clear()
    print(f"{RANKS} hosts, {STEPS} steps: kB per host and step, mean over the hosts\n")
    print(f"{'method':10}{'values':8}{'interface':>11}{'our count':>11}{'more':>8}")
    for i, (method, settings) in enumerate(RUNS):
        seen = sum(host[i][0] for host in counts) / RANKS / STEPS / 1e3
        booked = sum(host[i][1] for host in counts) / RANKS / STEPS / 1e3
        values = settings.get("values", "fp32")
        print(f"{method:10}{values:8}{seen:>11.1f}{booked:>11.1f}{seen / booked - 1:>8.1%}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        work(int(sys.argv[1]))
    else:
        raise SystemExit(main())
