# SPDX-License-Identifier: Apache-2.0
"""Bootstraps, with which the ranks of a group find each other, and the opening of a context.

An *exchange* is a function (rank, mine: bytes) that returns a list with the bytes of every rank, in
the order of ranks.
"""

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.options import check_int, encode_text

Exchange = Callable[[int, bytes], list[bytes]]
ETIMEOUT, EPEER = 4, 8
WORLD = "world"  # the value of native= that means MPI_COMM_WORLD
LEAST_ADDRESS = 4096  # a smaller number cannot be the address of a communicator


@dataclass(frozen=True)
class Tcp:
    """A bootstrap over TCP: rank 0 listens, and the other ranks connect.

    Attributes:
        address: IP address or host name of rank 0.
        port: Port of rank 0, 1 to 65535. If epic.jax.open opens several groups along a mesh axis,
            the i-th group, from 0, uses port + i.
        secret: A text, equal on all ranks, with which the ranks prove that they belong together.
            None: rank 0 listens on the loopback interface only.
    """

    address: str = "127.0.0.1"
    port: int = 29507
    secret: str | None = None

    def __post_init__(self) -> None:
        encode_text("address", self.address)
        if self.secret is not None:
            encode_text("secret", self.secret)
        if not 1 <= check_int("port", self.port) <= 65535:
            raise EpicArgumentError(f"port is {self.port}: must be from 1 to 65535")


@dataclass(frozen=True)
class Nccl:
    """A bootstrap over an NCCL communicator of your program.

    The group has the ranks of the communicator. Opening the group counts as a collective on the
    communicator: all ranks must open it at the same place among your own collectives, and meanwhile
    no other thread may use the communicator. EPIC calls only ncclAllGather, for a few kilobytes.
    Later it does not use the communicator, and never destroys it. The device of the communicator
    must be the group's device, or for a CPU group the current CUDA device.

    EPIC calls the NCCL that the process has loaded. If it has loaded several, set the environment
    variable EPIC_NCCL to the path of the one that made the communicator.

    Attributes:
        comm: The ncclComm_t as an int or as a ctypes.c_void_p. For example, the attribute `comm` of
            CuPy's NcclCommunicator.
    """

    comm: Any

    def __post_init__(self) -> None:
        given = self.comm
        address = given.value if isinstance(given, ctypes.c_void_p) else given
        if type(address) is not int or address < LEAST_ADDRESS:
            raise EpicArgumentError(
                f"comm is {given!r}: must be an initialized ncclComm_t, as an int or a "
                "ctypes.c_void_p"
            )
        object.__setattr__(self, "comm", address)


class Bootstrap:
    """The bootstrap of one rank.

    Args:
        struct: The epic_bootstrap.
        *keep_alive: Objects that must live as long as the bootstrap.
    """

    def __init__(self, struct: ctypes.Structure, *keep_alive: Any) -> None:
        self.struct = struct
        self.keep_alive = keep_alive
        self.error: Exception | None = None
        # A function that another thread calls to end the wait of the bootstrap early.
        self.leave: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.is_taken = False

    def take(self) -> None:
        """Raise an error if the bootstrap was used before; it is for one rank and one opening."""
        with self.lock:
            if self.is_taken:
                raise EpicArgumentError(
                    f"bootstrap of rank {self.struct.rank} is already used: must be a different "
                    "one for each rank and each group that opens; epic.torch.threads(n) makes n of "
                    "them"
                )
            self.is_taken = True

    def close(self) -> None:
        """Release the bootstrap's resources."""
        _native.core().epic_bootstrap_close(ctypes.addressof(self.struct))


def check_bootstrap(bootstrap: Any) -> None:
    """Raise an error if a caller passed an invalid bootstrap."""
    if not isinstance(bootstrap, Tcp | Bootstrap) and not callable(bootstrap):
        raise EpicArgumentError(
            f"bootstrap is {bootstrap!r}: must be a Tcp(address, port, secret), or a function "
            "(rank, bytes) that returns the bytes of all ranks"
        )


def by_threads(num_ranks: int, timeout_ms: int) -> list[Bootstrap]:
    """Return the bootstraps of ranks that are all in this process."""
    array = (_native.Bootstrap * num_ranks)()
    _native.check(_native.core().epic_bootstrap_threads(array, num_ranks, timeout_ms))
    return [Bootstrap(array[rank], array) for rank in range(num_ranks)]


def by_tcp(tcp: Tcp, group: int, rank: int, num_ranks: int, timeout_ms: int) -> Bootstrap:
    """Return a bootstrap over TCP; wait until all ranks have connected.

    group: number of the group among those that open together. It is added to the port.
    """
    struct = _native.Bootstrap()
    secret = tcp.secret.encode() if tcp.secret else None
    wanted = _native.Tcp(
        tcp.address.encode(), secret, rank, num_ranks, tcp.port + group, timeout_ms
    )
    _native.check(
        _native.core().epic_bootstrap_tcp_v1(ctypes.addressof(struct), *_native.sized(wanted))
    )
    return Bootstrap(struct)


def address_of(native: Any) -> int | None:
    """Return the address of an MPI_Comm of the caller; None for MPI_COMM_WORLD.

    native: "world", a communicator of mpi4py, or the address of an MPI_Comm. The caller must keep
    the communicator alive.
    """
    if native == WORLD:
        return None
    if isinstance(native, int) and native >= LEAST_ADDRESS:
        return native
    with contextlib.suppress(ImportError, TypeError):
        mpi = importlib.import_module("mpi4py.MPI")
        return int(mpi._addressof(native))
    raise EpicArgumentError(
        f"native is {native!r}: must be {WORLD!r}, a communicator of mpi4py, or the address of an "
        "MPI_Comm"
    )


def by_mpi(comm: int | None, timeout_ms: int) -> Bootstrap:
    """Return a bootstrap over an MPI communicator; wait until all its ranks make this call.

    comm: address of the communicator. None: MPI_COMM_WORLD; the call initializes MPI if necessary.
    """
    struct = _native.Bootstrap()
    _native.check(_native.core().epic_bootstrap_mpi(ctypes.addressof(struct), comm, timeout_ms))
    return Bootstrap(struct)


def by_nccl(nccl: Nccl, timeout_ms: int) -> Bootstrap:
    """Return a bootstrap over an NCCL communicator, whose device is the current one."""
    struct = _native.Bootstrap()
    core = _native.core()
    _native.check(core.epic_bootstrap_nccl(ctypes.addressof(struct), nccl.comm, timeout_ms))
    return Bootstrap(struct)


def by_exchange(exchange: Exchange, rank: int, num_ranks: int) -> Bootstrap:
    """Return a bootstrap that uses an exchange of the caller.

    If the exchange raises an error, open_context raises this error.
    """
    struct = _native.Bootstrap(rank=rank, num_ranks=num_ranks)
    bootstrap = Bootstrap(struct)

    def gather(_: int, mine: int, everyone: int, size: int) -> int:
        try:
            parts = joined(exchange(rank, ctypes.string_at(mine, size)), num_ranks, size)
        except Exception as error:
            bootstrap.error = error
            return EPEER
        ctypes.memmove(everyone, parts, size * num_ranks)
        return 0

    struct.gather = _native.GATHER(gather)
    bootstrap.keep_alive = (struct.gather,)
    bootstrap.leave = getattr(exchange, "leave", bootstrap.leave)
    return bootstrap


def joined(parts: list[bytes], num_ranks: int, size: int) -> bytes:
    """Return the result of an exchange, with `size` bytes of each rank, as one bytes object."""
    try:
        lengths, data = [len(part) for part in parts], b"".join(parts)
    except TypeError:
        raise EpicArgumentError(
            f"the bootstrap returned {repr(parts)[:60]}: must be a list with the bytes of all ranks"
        ) from None
    if lengths != [size] * num_ranks:
        raise EpicError(
            "EPIC_EMISMATCH",
            f"the bootstrap returned parts of {lengths} bytes: must be {num_ranks} parts of {size} "
            "bytes",
        )
    return data


# ----------------------------------------------------------------------------- opening ----


def open_context(bootstrap: Bootstrap, config: ctypes.Structure) -> int:
    """Open the context of this rank and return its address; wait until its peers open theirs.

    It closes the bootstrap in any case.
    """
    context = ctypes.c_void_p()
    try:
        code = _native.core().epic_open_v1(
            ctypes.byref(context), ctypes.addressof(bootstrap.struct), *_native.sized(config)
        )
        if code == 0 and isinstance(context.value, int):
            return context.value
        error = bootstrap.error or _native.failure(code, context.value)
        _native.core().epic_close(context)
        raise error
    finally:
        bootstrap.close()


class Opener:
    """A daemon thread that opens a context, so that an interrupt can end the wait for it.

    If the caller left because of an interrupt, the thread closes the context that it opens.

    Args:
        open_one: Opens and returns the context.
        close_one: Closes a context. None: epic_close.
    """

    def __init__(
        self, open_one: Callable[[], Any], close_one: Callable[[Any], None] | None = None
    ) -> None:
        self.context: Any = 0
        self.close_one = close_one or (lambda context: end([context]))
        self.error: BaseException | None = None
        self.left = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(open_one,), daemon=True)
        self.thread.start()

    def run(self, open_one: Callable[[], Any]) -> None:
        """Open the context; the thread runs this method."""
        try:
            self.context = open_one()
        except BaseException as error:
            self.error = error
        if self.left.is_set() and self.context:
            self.close_one(self.context)


def run_in_thread(make: Callable[[], Bootstrap]) -> Bootstrap:
    """Return the bootstrap that make() returns.

    Calls make() in a thread, so that an interrupt can end the wait for it.
    """
    opener = Opener(make, Bootstrap.close)
    wait_for([opener])
    if opener.error:
        raise opener.error
    return opener.context


def wait_for(openers: Iterable[Opener]) -> None:
    """Wait until all openers have ended, or until an interrupt."""
    openers = list(openers)
    try:
        for opener in openers:
            opener.thread.join()
    except BaseException:
        for opener in openers:
            opener.left.set()
        raise


def end(contexts: Iterable[int]) -> None:
    """Close contexts, each in its own thread, because closing them may wait for each other.

    While the interpreter exits, Python 3.12 starts no threads. Then the contexts are closed one
    after the other.
    """
    close = _native.core().epic_close
    threads = []
    for context in contexts:
        thread = threading.Thread(target=close, args=(context,))
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:
            close(context)
    for thread in threads:
        thread.join()
