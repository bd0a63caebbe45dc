# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine. Each is a network namespace with its own address and host name."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ADDRESSES = ("10.83.0.1", "10.83.0.2")
NAMES = ("node0", "node1")
INTERFACE = "net"
# Environment of the programs on both hosts. Without EPIC_HOST, EPIC would find that they are on one
# machine, and would not use MPI.
ENVIRONMENT = {"EPIC_HOST": "%r", "GLOO_SOCKET_IFNAME": INTERFACE}
START = 10.0  # time limit for the start of a process in seconds


def space_of(pid: int) -> int:
    """Return a number that identifies the network namespace of a process."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


class Hosts:
    """The two hosts. The namespaces of a host exist as long as a sleeping process, its holder.

    Args:
        holders: The holder of each host.
        agent: A program that mpirun calls in place of ssh.
    """

    def __init__(self, holders: list[subprocess.Popen[bytes]], agent: Path) -> None:
        self.holders = holders
        self.agent = agent

    def enter(self, host: int, from_host: bool = False) -> list[str]:
        """Return the words that must precede a command, so that it runs on a host.

        Args:
            host: 0 or 1.
            from_host: Whether a program on one of the hosts calls the command. This program is
                already in the user namespace of the hosts.
        """
        words = ["nsenter", "--target", str(self.holders[host].pid), "--net", "--uts"]
        is_inside = from_host or os.geteuid() == 0
        return words if is_inside else [*words, "--user", "--preserve-credentials"]

    def mpirun(self) -> list[str]:
        """Return the words that must precede a command, so that mpirun starts it on both hosts.

        The two processes are two ranks of MPI.

        All messages of MPI use TCP. mpirun runs on the first host.
        """
        words = [
            "mpirun", "--allow-run-as-root", "--host", ",".join(ADDRESSES), "--bind-to", "none",
            "--mca", "plm_rsh_agent", str(self.agent), "--mca", "pml", "ob1",
            "--mca", "btl", "tcp,self",
        ]  # fmt: skip
        return [*self.enter(0), *words]

    def members(self) -> list[psutil.Process]:
        """Return the processes that run on the hosts, without the holders."""
        held = [holder.pid for holder in self.holders]
        spaces = {space_of(pid) for pid in held}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid not in held and space_of(process.pid) in spaces:
                    found.append(process)
        return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def hold(before: list[str]) -> subprocess.Popen[bytes]:
    """Return a process that sleeps in a new network namespace.

    Args:
        before: The result of Hosts.enter(), or an empty list.

    Raises:
        OSError: The namespace cannot be made.
    """
    user = [] if os.geteuid() == 0 or before else ["--user", "--map-root-user"]
    holder = subprocess.Popen(
        [*before, "unshare", *user, "--net", "--uts", "sleep", "infinity"], stderr=subprocess.PIPE
    )
    name = Path(f"/proc/{holder.pid}/comm")
    end = time.monotonic() + START
    while holder.poll() is None and time.monotonic() < end:
        if name.read_text().strip() == "sleep":  # unshare has made the namespaces
            return holder
        time.sleep(0.01)
    holder.kill()
    raise OSError(holder.communicate()[1].decode(errors="replace").strip() or "no namespace")


def connect(hosts: Hosts) -> None:
    """Connect the hosts by a pair of network interfaces, and set their names and addresses."""
    other = str(hosts.holders[1].pid)
    words = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE]
    commands = [(0, [*words, "netns", other])]
    for host, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
        commands += [
            (host, ["hostname", name]),
            (host, ["ip", "address", "add", f"{address}/24", "dev", INTERFACE]),
            (host, ["ip", "link", "set", INTERFACE, "up"]),
            (host, ["ip", "link", "set", "lo", "up"]),
        ]
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"  # other users do not have ip in their path
    for host, command in commands:
        run = subprocess.run(
            [*hosts.enter(host), *command], env=os.environ | {"PATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise OSError(f"{' '.join(command)}: {run.stderr.strip()}")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make two hosts, and remove them and all their processes at the end.

    Args:
        folder: A folder for the program that starts processes on another host.

    Raises:
        OSError: The hosts cannot be made.
    """
    for name in ("unshare", "nsenter", "hostname", "mpirun"):
        if shutil.which(name) is None:
            raise OSError(f"there is no program {name}")
    hosts = Hosts([], folder / "agent.sh")
    try:
        hosts.holders.append(hold([]))
        hosts.holders.append(hold(hosts.enter(0)))
        connect(hosts)
        # mpirun calls the agent with the address of the second host and a command for the shell.
        words = " ".join(hosts.enter(1, from_host=True))
        hosts.agent.write_text(f'#!/bin/sh\nshift\nexec {words} sh -c "$*"\n')
        hosts.agent.chmod(0o755)
        yield hosts
    finally:
        for process in hosts.members():
            with suppress(psutil.Error):
                process.kill()
        for holder in hosts.holders:
            holder.kill()
            holder.wait()
