# SPDX-License-Identifier: Apache-2.0
"""Ports on which processes of a test bootstrap."""

import socket

_held: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """One on which the first process that asks may listen.  It is held meanwhile: a port that is
    merely free is given to the next connection that anybody makes."""
    holder = socket.socket()
    _held.append(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a second one listen
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]
