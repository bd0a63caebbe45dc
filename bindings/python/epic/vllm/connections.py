# SPDX-License-Identifier: Apache-2.0
"""TCP connections between workers of different hosts, by which a worker notices the end of another.

MPI does not report that a process of another host has ended. But when a process ends, Linux closes
its connections. After a connection is open, it carries one byte, which a worker sends if it ends in
order.
"""

import logging
import secrets
import socket
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from epic.torch.groups import store_of

logger = logging.getLogger("vllm.epic")

SECONDS = 10.0  # time limit for each connection
STRANGER_SECONDS = 1.0  # time limit for the token of a connection
TOKEN_BYTES = 16
RANK_BYTES = 4
LEFT = b"0"  # what leave() sends
ACCEPTED = b"1"  # what a listening rank sends when it has checked the token


class Listener(NamedTuple):
    """The address at which a rank accepts connections.

    Attributes:
        address: The IP address of the rank's host; "" if it is not known.
        port: The TCP port.
        token: A secret that a connecting rank must send.
    """

    address: str
    port: int
    token: bytes


def own_address(process_group: Any) -> str:
    """Return the address of this host in the network of the process group's TCP store.

    The result is "" if the process group has no TCP store, or if this host has no route to it.
    """
    store = store_of(process_group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            store.host, store.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address; "": of all IPv4 addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    server.settimeout(SECONDS)
    return server


def call_rank(listener: Listener, rank: int) -> socket.socket:
    """Connect to another rank, and send the number of this rank.

    Args:
        listener: The address of the other rank.
        rank: This rank.
    """
    if not listener.address:
        raise OSError("the address of its host is not known")
    made = socket.create_connection((listener.address, listener.port), SECONDS)
    made.sendall(listener.token + rank.to_bytes(RANK_BYTES, "big"))
    if made.recv(1) != ACCEPTED:
        made.close()
        raise OSError(f"port {listener.port} of {listener.address} has closed the connection")
    return made


def accept_rank(server: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    """Return the next rank that connects, and its connection.

    Close connections that do not send the token, because any program can connect.
    """
    while True:
        made, _ = server.accept()
        made.settimeout(STRANGER_SECONDS)
        with suppress(OSError):  # a stranger may send nothing, or close the connection
            sent = made.recv(TOKEN_BYTES + RANK_BYTES, socket.MSG_WAITALL)
            if secrets.compare_digest(sent[:TOKEN_BYTES], token):
                made.sendall(ACCEPTED)
                return int.from_bytes(sent[TOKEN_BYTES:], "big"), made
        made.close()


def leave(connection: socket.socket) -> None:
    """Send the other rank the sign that this rank ends in order."""
    with suppress(OSError):
        connection.sendall(LEFT)


def has_left(connection: socket.socket) -> bool:
    """Return whether the other rank has called leave(). Call it when there is something to read."""
    with suppress(OSError):
        return connection.recv(1) == LEFT
    return False


def connect_hosts(rank: int, hosts: list[str], process_group: Any) -> dict[int, socket.socket]:
    """Connect this rank with all ranks of other hosts. Collective.

    Args:
        rank: This rank.
        hosts: The host of each rank.
        process_group: The process group of the ranks.

    Returns:
        The connections by rank; empty if all ranks are on one host. If a connection fails, it and
        all later ones are missing, and the log has a warning.
    """
    found: dict[int, socket.socket] = {}
    if len(set(hosts)) == 1:
        return found
    address = own_address(process_group)
    with listen(address) as server:
        own = Listener(address, server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        listeners = [own] * len(hosts)
        dist.all_gather_object(listeners, own, group=process_group)
        peers = [peer for peer, host in enumerate(hosts) if host != hosts[rank]]
        try:
            for peer in (p for p in peers if p < rank):
                found[peer] = call_rank(listeners[peer], rank)
            for _ in (p for p in peers if p > rank):
                peer, made = accept_rank(server, own.token)
                found[peer] = made
        except OSError as error:
            logger.warning(
                "EPIC: rank %d has no TCP connection with some ranks of other hosts (%s), so it "
                "notices their end only after timeout_ms.",
                rank,
                error,
            )
    return found
