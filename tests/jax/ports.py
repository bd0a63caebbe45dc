# SPDX-License-Identifier: Apache-2.0
"""Ports that the processes of a test use to find each other."""

import socket

_held: list[socket.socket] = []  # sockets that this process holds until it ends


def free_port() -> int:
    """Return a port on which the first process of a test can listen.

    This process holds the port until it ends. Otherwise the system could give the free port to any
    other connection.
    """
    holder = socket.socket()
    _held.append(holder)
    # lets the process of the test listen on the same port
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]
