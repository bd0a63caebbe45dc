# SPDX-License-Identifier: Apache-2.0
"""Reports to the other ranks at once that this process ends or is interrupted.

At exit JAX waits for the other processes. These might wait for this process, until their time
limit. So an exit handler closes the groups first.

A main thread that waits inside of XLA or of an operator gets no KeyboardInterrupt. So a watcher
thread aborts the calls for which the main thread waits.
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
STEP = 0.01  # seconds between two looks at the main thread

Abort = Callable[[str], None]


def why(error: BaseException) -> str:
    """Return the text that the other ranks get if this process ends with an error."""
    text = str(error).splitlines()
    kind = type(error).__name__
    return f"its process ends with {kind}: {text[0]}" if text else f"its process ends with {kind}"


def main_is_alive(library: ctypes.CDLL) -> bool:
    """Return whether the main thread runs Python code now, or within GRACE seconds.

    It adds a pending call, which only a main thread that runs Python code makes.
    """
    flag = ctypes.c_int()
    call = ctypes.cast(library.epic_main_is_alive, ctypes.c_void_p)
    pending_flags.append(flag)  # Python may make the pending call after GRACE, so keep its argument
    if ctypes.pythonapi.Py_AddPendingCall(call, ctypes.byref(flag)):
        return True
    end = time.monotonic() + GRACE
    while not flag.value and time.monotonic() < end:
        time.sleep(STEP)
    return bool(flag.value)


pending_flags: list[ctypes.c_int] = []  # arguments of pending calls


def watch(library: ctypes.CDLL, pipe: int, abort: Abort) -> None:
    """Abort the groups if the main thread cannot handle an interrupt. A thread runs this function.

    If the program has its own handler for SIGINT, the function does nothing.

    Args:
        library: The library of the binding.
        pipe: Read end of a pipe, from which each interrupt can be read as one byte.
        abort: Aborts the groups for a reason.
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

    Args:
        owner: Id of the process that opened the groups.
        abort: Aborts the groups for a reason.
        close: Closes the groups, after the calls in flight have ended.
    """
    if os.getpid() != owner:
        return  # a forked child: the groups belong to its parent
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        abort(why(error))
        return
    with contextlib.suppress(Exception):
        close()


begun: set[str] = set()  # frameworks with an exit handler
lock = threading.Lock()


def begin(framework: str, library: ctypes.CDLL, abort: Abort, close: Callable[[], None]) -> None:
    """Register the exit handler of a framework, and start its watcher thread.

    Call it before each group opens; only the first call has an effect. Python runs exit handlers in
    reverse order of their registration.

    Args:
        framework: "epic.torch" or "epic.jax".
        library: The library of the binding.
        abort: Aborts the groups of the framework for a reason.
        close: Closes the groups of the framework.
    """
    with lock:
        if framework in begun:
            return
        begun.add(framework)
    atexit.register(at_exit, os.getpid(), abort, close)
    start_watch(library, abort)
