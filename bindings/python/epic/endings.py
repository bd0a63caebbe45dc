# SPDX-License-Identifier: Apache-2.0
"""How the other ranks learn at once that this process ends or is interrupted.

At exit JAX waits for the other processes, which would wait for this one until their time limit, so
the groups are closed first. A main thread that waits inside of XLA or of an operator gets no
KeyboardInterrupt, so a watcher thread aborts the calls that it waits for.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

GRACE = 0.25  # seconds in which the main thread may handle an interrupt itself
STEP = 0.01

Abort = Callable[[str], None]


def why(error: BaseException) -> str:
    """Return the sentence that the peers get when this process ends with an error."""
    text = str(error).splitlines()
    kind = type(error).__name__
    return f"its process ends with {kind}: {text[0]}" if text else f"its process ends with {kind}"


def main_is_alive(library: ctypes.CDLL) -> bool:
    """Return whether the main thread runs Python, or does so within GRACE."""
    flag = ctypes.c_int()
    call = ctypes.cast(library.epic_main_is_alive, ctypes.c_void_p)
    kept.append(flag)  # Python may make the pending call after GRACE, so keep its argument
    if ctypes.pythonapi.Py_AddPendingCall(call, ctypes.byref(flag)):
        return True
    end = time.monotonic() + GRACE
    while not flag.value and time.monotonic() < end:
        time.sleep(STEP)
    return bool(flag.value)


kept: list[ctypes.c_int] = []


def watch(library: ctypes.CDLL, pipe: int, abort: Abort) -> None:
    """Abort the groups at an interrupt that the main thread cannot take.

    A program that handles SIGINT in its own way is left alone.
    """
    while os.read(pipe, 1):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            continue
        if not main_is_alive(library):
            abort("its process was interrupted (SIGINT)")


def start_watch(library: ctypes.CDLL, abort: Abort) -> None:
    """Start the watcher thread if Python handles SIGINT."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    if library.epic_watch_interrupts(write_end):
        os.close(read_end)
        os.close(write_end)
        return
    threading.Thread(target=watch, args=(library, read_end, abort), daemon=True).start()


def at_exit(owner: int, abort: Abort, close: Callable[[], None]) -> None:
    """Abort the groups if an exception ends the process. Otherwise close them.

    Closing waits until the calls in flight have ended.
    """
    if os.getpid() != owner:
        return  # a forked child: the groups belong to its parent
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        abort(why(error))
        return
    with contextlib.suppress(Exception):
        close()


begun: set[str] = set()
lock = threading.Lock()


def begin(framework: str, library: ctypes.CDLL, abort: Abort, close: Callable[[], None]) -> None:
    """Register the exit handler of a framework, once, when its first group opens.

    Python runs the handler that was registered last first.
    """
    with lock:
        if framework in begun:
            return
        begun.add(framework)
    atexit.register(at_exit, os.getpid(), abort, close)
    start_watch(library, abort)
