"""Sockets between the ranks of a group, one for each pair.

Every rank listens, and leaves in the store where; it connects to the ranks below it, and is called
by those above. Who calls shows a secret that is known from the store, so that nobody else is taken
for a rank.
"""

import contextlib
import errno
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from topreduce import CommError
from topreduce.torch.meeting import attempt, legible

_SECRET = 16  # bytes
_GREETING = struct.Struct(f"<{_SECRET}sI")  # the secret, and a rank
_WELCOME = b"\x01"
_STRANGERS = 5.0  # seconds that a caller gets to say who it is
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_INTERFACE = "GLOO_SOCKET_IFNAME"  # as torch.distributed calls it
_ADVICE = f"set {_INTERFACE} to the network interface that reaches the other machines"


def connect(store: Store, rank: int, ranks: int, names: list[int], timeout: timedelta) -> list[int]:
    """File descriptors by rank, -1 for this one, which the caller owns. Collective."""
    try:
        return _connect(store, rank, ranks, names, timeout)
    except OSError as error:
        why = error.strerror or str(error)
        raise CommError(
            f"rank {names[rank]}: a peer left while the ranks connected: {why}"
        ) from None


def _connect(
    store: Store, rank: int, ranks: int, names: list[int], timeout: timedelta
) -> list[int]:
    deadline = time.monotonic() + timeout.total_seconds()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(ranks))
        if rank == 0:
            store.set("secret", secrets.token_hex(_SECRET))
        _tell_where(store, rank, listener.getsockname()[1])
        _, failure = attempt(lambda: store.wait(["secret"], timeout))
        if failure:
            raise CommError(f"rank {names[rank]}: rank {names[0]} did not answer: {failure}")
        secret = bytes.fromhex(legible(store.get("secret")))
        sockets: dict[int, socket.socket] = {}
        for peer in range(rank):
            sockets[peer] = stack.enter_context(_call(store, peer, names, rank, timeout))
            sockets[peer].sendall(_GREETING.pack(secret, rank))
        while len(sockets) < ranks - 1:
            absent = [names[each] for each in range(rank + 1, ranks) if each not in sockets]
            caller, peer = _answer(listener, secret, deadline, names[rank], absent)
            if rank < peer < ranks and peer not in sockets:
                caller.sendall(_WELCOME)
                sockets[peer] = stack.enter_context(caller)
            else:
                caller.close()
        for peer in range(rank):
            _expect_welcome(sockets[peer], deadline, names[rank], names[peer])
        taken = [-1] * ranks
        for peer, each in sockets.items():
            taken[peer] = each.detach()
        return taken


def _listen(ranks: int) -> socket.socket:
    """On all addresses; callers are asked for the secret."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=ranks, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=ranks)


def _tell_where(store: Store, rank: int, port: int) -> None:
    where = {"hosts": own_hosts(store), "port": port}
    where |= {"name": socket.gethostname(), "network": _network()}
    store.set(f"address {rank}", json.dumps(where))


def _network() -> str:
    """Who shares a loopback interface with us says the same."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def own_hosts(store: Store) -> list[str]:
    """Addresses at which peers may reach this machine, the best first."""
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
    if interface:
        return [_address_of(interface)]
    return list(dict.fromkeys(_guesses(store)))


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
        except OSError as error:
            raise ValueError(
                f"{_INTERFACE}={interface!r}: there is no such network interface with an IPv4 "
                f"address ({os.strerror(error.errno or errno.ENODEV)})"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _guesses(store: Store) -> Iterator[str]:
    """The way to the machine that all have reached already; then what the host's name means."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    masters = [store.host if isinstance(store, TCPStore) else "", os.environ.get("MASTER_ADDR")]
    for master in filter(None, masters):
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(address)  # sends nothing
                yield str(way.getsockname()[0])
    with contextlib.suppress(OSError):
        for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(found[4][0])
    yield "127.0.0.1"


def _call(
    store: Store, peer: int, names: list[int], rank: int, timeout: timedelta
) -> socket.socket:
    _, failure = attempt(lambda: store.wait([f"address {peer}"], timeout))
    if failure:
        raise CommError(
            f"rank {names[rank]}: rank {names[peer]} does not say where it is: {failure}"
        )
    where = json.loads(legible(store.get(f"address {peer}")))
    failures = []
    hosts = where["hosts"]
    if where["network"] != _network():
        hosts = [host for host in hosts if not _is_loopback(host)]
        if not hosts:
            raise CommError(
                f"rank {names[rank]}: rank {names[peer]} knows no address of its machine "
                f"{where['name']} that others can reach, only {', '.join(where['hosts'])} "
                f"(its name may stand for one of these in /etc/hosts); there, {_ADVICE}"
            )
    for host in hosts:
        try:
            patience = min(timeout.total_seconds(), 10.0)
            return socket.create_connection((host, where["port"]), timeout=patience)
        except OSError as error:
            failures.append(f"{host} port {where['port']}: {error.strerror or error}")
    tried = "; ".join(failures)
    raise CommError(f"rank {names[rank]}: no connection to rank {names[peer]} ({tried}); {_ADVICE}")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    return False


def _answer(
    listener: socket.socket, secret: bytes, deadline: float, name: int, absent: list[int]
) -> tuple[socket.socket, int]:
    """The next caller that knows the secret, and its rank."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            ranks = ", ".join(map(str, absent))
            raise CommError(f"rank {name}: no connection from rank {ranks} in time; {_ADVICE}")
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            caller, _ = listener.accept()
            caller.settimeout(min(left, _STRANGERS))
            greeting = _read(caller, _GREETING.size)
            if greeting is not None:
                shown, peer = _GREETING.unpack(greeting)
                if secrets.compare_digest(shown, secret):
                    return caller, peer
            caller.close()


def _expect_welcome(called: socket.socket, deadline: float, name: int, peer: int) -> None:
    called.settimeout(max(0.001, deadline - time.monotonic()))
    if _read(called, len(_WELCOME)) != _WELCOME:
        raise CommError(
            f"rank {name}: what answers in place of rank {peer} is another program; {_ADVICE}"
        )


def _read(connection: socket.socket, size: int) -> bytes | None:
    """So many bytes, or None if they do not come."""
    found = b""
    while len(found) < size:
        try:
            more = connection.recv(size - len(found))
        except OSError:
            return None
        if not more:
            return None
        found += more
    return found
