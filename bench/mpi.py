"""mpi: a step under mpirun against MPI_Allreduce of the same vector, by topreduce_bench.

First 8 ranks in shared memory, where no link is slow; then, as root, 4 hosts at 1 Gb/s in network
namespaces. Options go to topreduce_bench, e.g. --entries 64M --json; --help shows them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from topreduce.lab.network.cluster import INTERFACE, Host, cluster, obstacle
from topreduce.lab.network.namespaces import tool

BENCH = Path("build/bench/bench/mpi/topreduce_bench").resolve()
# Ranks share cores, so a rank that waits must let others run.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
SHARED = ["--entries", "1M,4M,16M", "--density", "0.001,0.01", "--steps", "10"]
SLOW = ["--entries", "1M,16M", "--density", "0.001,0.01", "--steps", "20"]


def inside(host: Host, command: str) -> list[str]:
    """Run a shell command on a host, which MPI tells from the others by its name."""
    named = f"hostname {host.address} && {command}"
    enter = [tool("nsenter"), f"--net={host.namespace.path}", tool("unshare"), "--uts"]
    return [*enter, "sh", "-c", named]


def over_hosts(hosts: Sequence[Host], program: Sequence[str]) -> int:
    """Run one rank on each host, by TCP through its link only."""
    with tempfile.TemporaryDirectory() as folder:
        # What mpirun calls instead of ssh: agent <address> <command ...>
        agent = Path(folder) / "agent"
        cases = "".join(
            f'{host.address}) exec {shlex.join(inside(host, ""))}"$*" ;;\n' for host in hosts
        )
        agent.write_text(f"#!/bin/sh\naddress=$1\nshift\ncase $address in\n{cases}esac\nexit 1\n")
        agent.chmod(0o755)
        settings = {
            "plm_rsh_agent": str(agent),
            "pml": "ob1",
            "btl": "tcp,self",
            "btl_tcp_if_include": INTERFACE,
            "oob_tcp_if_include": INTERFACE,
        }
        command = [*MPIRUN, "--host", ",".join(f"{host.address}:1" for host in hosts)]
        for name, value in settings.items():
            command += ["--mca", name, value]
        return subprocess.run(inside(hosts[0], shlex.join([*command, *program]))).returncode


def main() -> int:
    asked = sys.argv[1:]
    if "--help" in asked or "-h" in asked:
        print(__doc__)
        return subprocess.run([*MPIRUN, "-n", "1", BENCH, "--help"]).returncode
    print("8 ranks, shared memory", file=sys.stderr)
    status = subprocess.run([*MPIRUN, "-n", "8", BENCH, *SHARED, *asked]).returncode
    reason = "it needs root" if os.geteuid() else obstacle()
    if reason:
        print(f"4 hosts at 1 Gb/s: left out, {reason}", file=sys.stderr)
        return status
    print("\n4 hosts, links of 1 Gb/s", file=sys.stderr)
    with cluster([1e9] * 4) as hosts:
        return over_hosts(hosts, [str(BENCH), *SLOW, *asked]) or status


if __name__ == "__main__":
    sys.exit(main())
