# SPDX-License-Identifier: Apache-2.0
"""TCP connections between workers of different hosts, which close when a worker ends.

MPI does not report that a process of another host has ended. After a connection is open, it carries
nothing.
"""

import logging
import secrets
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from epic.torch.groups import store_of

logger = logging.getLogger("vllm.epic")

SECONDS = 10.0  # time limit for each connection
TOKEN_BYTES = 16
RANK_BYTES = 4


class Listener(NamedTuple):
    """Where a rank listens.

    Attributes:
        address: The address of its host; "" if it is not known.
        port: The port.
        token: A secret that a connecting rank must send.
    """

    address: str
    port: int
    token: bytes


def own_address(process_group: Any) -> str:
    """Return the address of this host in the network in which the ranks have found each other.

    The result is "" if the process group has no TCP store, or if its host cannot be reached.
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
    """Return a socket that listens on a free port of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    server.settimeout(SECONDS)
    return server


def call_rank(listener: Listener, rank: int) -> socket.socket:
    """Connect this rank with a rank that listens."""
    if not listener.address:
        raise OSError("the address of its host is not known")
    made = socket.create_connection((listener.address, listener.port), SECONDS)
    made.sendall(listener.token + rank.to_bytes(RANK_BYTES, "big"))
    return made


def accept_rank(server: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    """Return the next rank that connects, and its connection. Close connections of others."""
    while True:
        made, _ = server.accept()
        made.settimeout(SECONDS)
        sent = made.recv(TOKEN_BYTES + RANK_BYTES, socket.MSG_WAITALL)
        if secrets.compare_digest(sent[:TOKEN_BYTES], token):
            return int.from_bytes(sent[TOKEN_BYTES:], "big"), made
        made.close()


def connect_hosts(rank: int, hosts: list[str], process_group: Any) -> dict[int, socket.socket]:
    """Connect this rank with all ranks of other hosts. Collective.

    Args:
        rank: This rank.
        hosts: The host of each rank.
        process_group: The process group of the ranks.

    Returns:
        The connections by rank. If a connection fails, some are missing, and the log has a warning.
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
