# SPDX-License-Identifier: Apache-2.0
"""Tests four devices in several processes: correct results, and errors if a process ends."""

import os
import signal
import time
from pathlib import Path

import pytest

from forked import Process, server
from ports import free_port

WORKER = Path(__file__).with_name("worker.py")
LIMIT = 240
# extra time, as in the fault tests
NOTICED = 1 + int(os.environ.get("EPIC_TEST_SLACK_MS", "0")) / 1000


def start(what: str, processes: int) -> list[Process]:
    """Start the processes."""
    devices = 4 // processes
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    port = str(free_port())
    return [
        server("epic.jax", "layers").start(str(WORKER), what, str(i), str(processes), port, env=env)
        for i in range(processes)
    ]


def run(what: str, processes: int) -> list[str]:
    """Return the output of each process."""
    running = start(what, processes)
    said = []
    try:
        for process in running:
            out, err = process.communicate(timeout=LIMIT)
            said.append(out if process.returncode in (0, -9) else out + err)
    finally:
        for process in running:
            process.kill()
    return said


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.night)])
def test_layers(processes: int) -> None:
    """Check EP 1, 2 and 4 over processes with one device or two devices."""
    for said in run("layers", processes):
        assert said.endswith("right\n"), said[-3000:]


def test_invariance() -> None:
    """check_invariance compares tokens on the devices of several processes."""
    for said in run("invariance", 2):
        assert said.endswith("right\n"), said[-3000:]


@pytest.mark.night
def test_independent_layers() -> None:
    """Many layers in one program, in four processes, give equal results every time."""
    for said in run("independent", 4):
        assert said.endswith("right\n"), said[-3000:]


ENDS = {
    "kill": "rank 3",
    "kill_tcp": "rank 3",
    "raise": "its process ends with RuntimeError: no more data",
    "with": "its process ends with RuntimeError: no more data",
    "exit": "rank 3",
}


@pytest.mark.parametrize(("what", "wanted"), ENDS.items(), ids=ENDS.keys())
def test_the_end_of_a_process(what: str, wanted: str) -> None:
    """However a process ends, every other one gets an exception that names it, within a second.
    JAX's own shutdown, which waits for the others, comes later."""
    said = run(what, 4)
    gone = float(said[3].split("gone ")[1].split()[0])
    for text in said[:3]:
        lines = [line for line in text.splitlines() if line.startswith("error")]
        assert lines, text[-3000:]
        _, when, sentence = lines[0].split(" ", 2)
        assert sentence.startswith("UNAVAILABLE: epic.jax.sum") and "rank 3" in sentence, sentence
        assert wanted in sentence, sentence
        assert float(when) - gone < NOTICED


def test_losses_without_a_mesh() -> None:
    """The losses contain the tokens of all ranks, also of fewer ranks after one has left.

    The ranks that are left also find the first row that is not finite.
    """
    wanted = ("right\n", "found\nright\n", "found\nright\n")
    for text, said in zip(wanted, run("losses", 3), strict=True):
        assert said.endswith(text), said[-3000:]


@pytest.mark.parametrize("what", ["interrupt", "interrupt_open"])
def test_an_interrupt_lands(what: str) -> None:
    """Ctrl-C ends a process that waits for a peer immediately, not at the deadline of a minute."""
    waiting, late = start(what, 2)
    try:
        for process in (waiting, late):
            process.wait_for_line("waits", LIMIT)
        time.sleep(1)  # until the process waits
        assert waiting.poll() is None
        begin = time.monotonic()
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=LIMIT)
        assert time.monotonic() - begin < 10 * NOTICED
        assert waiting.returncode != 0
        assert "KeyboardInterrupt" in said or "interrupted (SIGINT)" in said, said[-3000:]
    finally:
        for process in (waiting, late):
            process.kill()
            process.communicate()


def test_a_late_process() -> None:
    """A bootstrap without one process names it; the next bootstrap works."""
    said = run("late", 4)
    for process, text in enumerate(said):
        assert "sum 4" in text, text[-3000:]
        if process != 2:
            assert "EPIC_ETIMEOUT" in text and "rank 2" in text, text
