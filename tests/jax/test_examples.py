# SPDX-License-Identifier: Apache-2.0
"""Tests the training example: whether its check finds errors, and how it ends."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/common"))
import training

pytest.importorskip("optax")
LIMIT = 240  # seconds, including compilation in the first step
PROGRAM = ROOT / "examples/jax/train_text.py"


def test_a_wrong_curve_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that one loss of a hundred that is off by two tolerances is found, and a failed
    process."""
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(training, "ROOT", tmp_path)
    wrong, code = 1 + 2 * training.TOLERANCE, 0

    def launch(_: str, words: list[str], count: int) -> int:
        values = [3.0] * 99 + [3.0 * (wrong if count > 1 else 1)]
        Path(words[-1]).write_text("".join(f"{v}\n" for v in values))
        return code

    monkeypatch.setattr(training, "launch", launch)
    assert training.check(str(PROGRAM), [], 4) == 1
    wrong = 1.0
    assert training.check(str(PROGRAM), [], 4) == 0
    code = 3
    assert training.check(str(PROGRAM), [], 4) == 3


def test_picture(tmp_path: Path) -> None:
    """Check that the picture is a PNG of the right size with all its pixels."""
    import numpy as np

    training.write_picture(tmp_path / "x.png", np.ones((10, 2, 8), np.int32))
    data = (tmp_path / "x.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    size = struct.unpack(">I", data[33:37])[0]
    pixels = zlib.decompress(data[41 : 41 + size])
    assert len(pixels) == height * (3 * width + 1)
    assert pixels[1:4] == bytes([245, 160, 60])  # the color of an even share


SLEEPER = "import pathlib, sys, time; pathlib.Path(*sys.argv[1:]).touch(); time.sleep(600)"


def test_a_killed_process_ends_all(tmp_path: Path) -> None:
    """The launcher ends the others when one process is gone, and does not return 0."""
    before = set(children(os.getpid()))
    begun = [tmp_path / str(i) for i in range(3)]

    def kill_one() -> None:
        while not all(path.exists() for path in begun):
            time.sleep(0.01)
        started.update(set(children(os.getpid())) - before)
        os.kill(max(started), signal.SIGKILL)

    started: set[int] = set()
    killer = threading.Thread(target=kill_one)
    killer.start()
    assert training.watch([sys.executable, "-S", "-c", SLEEPER, str(tmp_path)], 3) != 0
    killer.join()
    assert len(started) == 3 and not any(Path(f"/proc/{process}").exists() for process in started)


def start(tmp_path: Path) -> Any:
    """Start the example with two processes and many steps; return after its first step."""
    words = ["--steps", "100000", "--processes", "2", "--picture", str(tmp_path / "x.png")]
    (tmp_path / "text.txt").write_text("it is what it is, it was what it was. " * 500)
    # In the background of a script Ctrl-C is ignored, and child processes inherit this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path / "text.txt"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    signal.signal(signal.SIGINT, before)
    limit = threading.Timer(LIMIT, os.killpg, (running.pid, signal.SIGKILL))
    limit.start()
    assert running.stdout
    trains = any("steps/s" in line for line in running.stdout)
    limit.cancel()
    assert trains, running.communicate()
    return running


def children(process: int) -> list[int]:
    """Return the ids of processes that a process started."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.night
@pytest.mark.parametrize("how", ["ctrl_c", "killed"])
def test_how_it_ends(how: str, tmp_path: Path) -> None:
    """Check that Ctrl-C, and the death of one process, end every process with a status other than
    0."""
    running = start(tmp_path)
    started = children(running.pid)
    assert len(started) == 2
    if how == "ctrl_c":
        os.killpg(running.pid, signal.SIGINT)
    else:
        os.kill(started[1], signal.SIGKILL)
    try:
        assert running.wait(timeout=LIMIT) != 0
        assert not any(Path(f"/proc/{process}").exists() for process in started)
    finally:
        for process in started:
            if Path(f"/proc/{process}").exists():
                os.kill(process, signal.SIGKILL)
        running.kill()
        running.communicate()
