# SPDX-License-Identifier: Apache-2.0
"""Groups: the processes (or threads) that share the experts of a layer, each with a context."""

import contextlib
import ctypes
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epic import _native, bootstrapping, endings, store
from epic.bootstrapping import Bootstrap, Exchange, Nccl, Tcp
from epic.errors import EpicArgumentError, EpicError
from epic.members import Members, group_flags, only_call, read_members, regroup
from epic.options import (
    INT64_MAX,
    ON_GPUS,
    Layer,
    backend_for,
    check_int,
    encode_text,
    intern_options,
    options_by_key,
)
from epic.torch.arguments import assume_constant_result
from epic.torch.ops import KEPT_LAYERS, LIBRARY, pack_layer
from epic.waits import Waits, read_waits

DEFAULT_TIMEOUT_MS = 300_000
LAST_CALLS_MS = 2000  # when the process ends, time for other threads to complete their calls
LAST_RETURN_S = 0.5  # after that, time for threads to return from the calls that were aborted
CPU, CUDA = 0, 1  # numbers of device types in torch

assume_constant_result(intern_options)  # so that compiled functions can make options

open_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()
lock = threading.Lock()


# -------------------------------------------------------------------------- bootstrap ----


class TorchStore:
    """A store of torch.distributed with the operations of epic.store.Store."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        self.store.set(key, value)

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; return the value that it has then."""
        return self.store.compare_set(key, "", value.decode())

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        return self.store.check([key])

    def get(self, key: str) -> bytes:
        """Return the value of a key that has one."""
        return self.store.get(key)

    def remove(self, key: str) -> None:
        """Delete a key. If the store has no delete_key, the key stays."""
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(key)


class StoreExchange(store.StoreExchange):
    """The exchange of one rank over a store of torch.distributed.

    Args:
        torch_store: The store.
        prefix: Prefix of the keys; equal on all ranks of a group, and different between groups.
        num_ranks: Number of ranks.
        timeout_ms: Time limit of each round in ms.
    """

    def __init__(self, torch_store: Any, prefix: str, num_ranks: int, timeout_ms: int) -> None:
        super().__init__(TorchStore(torch_store), prefix, num_ranks, timeout_ms)


def threads(num_ranks: int, timeout_ms: int = 0) -> list[Bootstrap]:
    """Make the bootstraps of ranks that are threads of this process.

    Args:
        num_ranks: How many threads open a group together.
        timeout_ms: Time limit of the bootstrap in ms. 0: 300,000.

    Returns:
        One bootstrap for each rank. Each thread passes another one as Group(bootstrap=).

    Example:
        >>> from threading import Thread
        >>> import epic.torch
        >>> def rank_main(bootstrap):
        ...     with epic.torch.Group(bootstrap=bootstrap, max_tokens=8, max_row_bytes=64) as group:
        ...         print(group.num_ranks)
        >>> threads = [Thread(target=rank_main, args=(b,)) for b in epic.torch.threads(2)]
        >>> for thread in threads: thread.start()
        >>> for thread in threads: thread.join()
        2
        2
    """
    return bootstrapping.by_threads(num_ranks, timeout_ms or DEFAULT_TIMEOUT_MS)


def store_of(process_group: Any) -> Any:
    """Return the store of a process group; None if torch.distributed did not make the group."""
    try:
        dist.get_process_group_ranks(process_group)  # KeyError: torch.distributed did not make it
        return process_group.get_group_store()
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None


def gather_bytes(process_group: Any, device: torch.device, _: int, mine: bytes) -> list[bytes]:
    """Exchange bytes by the process group's own all-gather, on the device of the group."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(sent) for _ in range(process_group.size())]
    # The all-gather of a process group in Python may need the options.
    options = dist.distributed_c10d.AllgatherOptions()
    process_group.allgather([parts], [sent], options).wait()
    return [bytes(part.tolist()) for part in parts]


def bootstrap_of_processes(
    process_group: Any, timeout_ms: int, device: torch.device
) -> tuple[Bootstrap, int, int]:
    """Return a bootstrap over a process group, this process's rank, and the number of ranks."""
    if store_of(process_group) is None:
        rank, num_ranks = process_group.rank(), process_group.size()
        exchange = partial(gather_bytes, process_group, device)
        return bootstrapping.by_exchange(exchange, rank, num_ranks), rank, num_ranks
    rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    ranks = "-".join(map(str, dist.get_process_group_ranks(process_group)))
    # The key contains the ranks, not the name of the process group, because torch may give the name
    # of a destroyed process group to a process group of other ranks.
    name = ranks if num_ranks <= 16 else hashlib.sha256(ranks.encode()).hexdigest()[:16]
    over = StoreExchange(store_of(process_group), f"epic/{name}", num_ranks, timeout_ms)
    return bootstrapping.by_exchange(over, rank, num_ranks), rank, num_ranks


def bootstrap_of_environment(timeout_ms: int) -> tuple[Bootstrap, int, int]:
    """Return a bootstrap over torchrun's store, the rank, and the number of ranks.

    torchrun describes its store in environment variables.
    """
    wait = timedelta(milliseconds=timeout_ms)
    served, rank, num_ranks = next(dist.rendezvous("env://", timeout=wait))
    exchange = StoreExchange(served, "epic", num_ranks, timeout_ms)
    return bootstrapping.by_exchange(exchange, rank, num_ranks), rank, num_ranks


def choose_bootstrap(
    process_group: Any,
    bootstrap: Any,
    rank: int,
    num_ranks: int | None,
    timeout_ms: int,
    device: torch.device,
) -> tuple[Bootstrap, int, int]:
    """Return the bootstrap of this process, its rank, and the number of ranks.

    The arguments are those of `Group`, with process_group in place of ranks.
    """
    if isinstance(bootstrap, Nccl):
        if rank or num_ranks is not None:
            raise EpicArgumentError(
                f"rank is {rank} and num_ranks is {num_ranks} with bootstrap=Nccl(...): must be "
                "left out, because the communicator contains both"
            )
        with current_device(device):
            made = bootstrapping.by_nccl(bootstrap, timeout_ms)
        return made, made.struct.rank, made.struct.num_ranks
    if isinstance(bootstrap, Bootstrap):
        mine, count = bootstrap.struct.rank, bootstrap.struct.num_ranks
        if (rank or mine) != mine or (num_ranks or count) != count:
            raise EpicArgumentError(
                f"rank is {rank} and num_ranks is {num_ranks}: must be rank {mine} of {count}, as "
                "in bootstrap; leave both out"
            )
        return bootstrap, mine, count
    if bootstrap is not None:
        bootstrapping.check_bootstrap(bootstrap)
        if num_ranks is None:
            raise EpicArgumentError("num_ranks is None with bootstrap=: pass rank= and num_ranks=")
        rank, num_ranks = check_int("rank", rank), check_int("num_ranks", num_ranks, 1)
        if isinstance(bootstrap, Tcp):
            return bootstrapping.by_tcp(bootstrap, 0, rank, num_ranks, timeout_ms), rank, num_ranks
        return bootstrapping.by_exchange(bootstrap, rank, num_ranks), rank, num_ranks
    if num_ranks is not None:
        if num_ranks != 1 or rank != 0:
            raise EpicArgumentError(
                f"num_ranks is {num_ranks} without bootstrap=: pass bootstrap=epic.torch.Tcp(...) "
                "or an exchange function"
            )
        return Bootstrap(_native.Bootstrap(num_ranks=1)), 0, 1
    if rank:
        raise EpicArgumentError(
            f"rank is {rank} without bootstrap=: pass bootstrap= and num_ranks=, or leave rank out"
        )
    if process_group is not None:
        return bootstrap_of_processes(process_group, timeout_ms, device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return bootstrap_of_environment(timeout_ms)
    return Bootstrap(_native.Bootstrap(num_ranks=1)), 0, 1


# ----------------------------------------------------------------------------- where ----


def process_group_of(mesh: Any, dim: Any) -> Any:
    """Return the process group of a DeviceMesh's dimension; return a process group unchanged.

    mesh: a DeviceMesh, a ProcessGroup or None. dim: a dimension of the mesh, or None.
    """
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise EpicArgumentError("process_group does not contain this process: pass one that does")
    if hasattr(mesh, "get_group"):
        return mesh.get_group(dim) if dim is not None else mesh.get_group()
    if dim is not None:
        raise EpicArgumentError(f"dim is {dim!r}: must be None without a DeviceMesh")
    return mesh


def choose_device(
    requested: Any, mesh: Any, process_group: Any, bootstrap: Any = None
) -> torch.device:
    """Return the requested device, else that of the mesh or of the process group's backend.

    Without all of them the result is the CPU, or with an NCCL communicator the current GPU. "cuda"
    without an index is the current GPU.
    """
    kind = "cuda" if isinstance(bootstrap, Nccl) else getattr(mesh, "device_type", None)
    if requested is None and kind is None and process_group is not None:
        has_store = store_of(process_group) is not None
        backend = dist.get_backend(process_group) if has_store else process_group.name()
        kind = "cuda" if "nccl" in str(backend) else "cpu"
    device = torch.device(requested if requested is not None else kind or "cpu")
    if device.type not in ("cpu", "cuda"):
        raise EpicArgumentError(f"device is {str(device)!r}: must be cpu or cuda")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_backend(device: torch.device, requested: str | None) -> str | None:
    """Return the backend for tensors on a device, as backend_for does."""
    return backend_for(device.type == "cuda", requested)


def current_device(device: torch.device) -> Any:
    """Return a context manager that makes a GPU the current one; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def open_on(device: torch.device, bootstrap: Bootstrap, config: Any) -> int:
    """Open the context of this rank on its device."""
    with current_device(device):
        return bootstrapping.open_context(bootstrap, config)


# ------------------------------------------------------------------------------ group ----


class LayerFacts(NamedTuple):
    """The sizes and operator arguments that a layer on a group needs."""

    plan_bytes: int  # size of a plan without the counts
    capacity: int  # slots of a rank that always suffice
    num_local_experts: int  # largest number of experts of a rank, without rank_of_expert
    words: tuple[int, ...]  # the three numbers of pack_layer
    number: int  # number of the layer in the library; 0: the library does not have it
    owner: int  # number that the group had when these facts were computed


class Group:
    """An open group: the ranks that share the experts of one or more layers.

    Opening is collective: it returns when all ranks have opened the group. Close it with `close()`,
    or use it as a context manager. Layers of one model usually share one group.

    Args:
        ranks: A torch.distributed ProcessGroup, or a DeviceMesh (with `dim` if it has several
            dimensions). A ProcessGroup that torch.distributed did not make, such as a
            ProcessGroupNCCL of your program or a subclass in Python, exchanges bytes by its own
            `allgather` while the group opens. None: all processes of torch.distributed if it is
            initialized, else those that torchrun's environment variables describe, else only this
            process.
        dim: Dimension of the DeviceMesh, by name or number.
        max_tokens: Largest number of tokens that a rank passes to one call; equal on all ranks.
        max_row_bytes: Bytes of the widest row: hidden * bytes per element.
        device: torch.device or its name. None: the device of the mesh, the current GPU for a
            process group whose name contains "nccl" and for `Nccl`, else the CPU.
        bootstrap: How ranks find each other without torch.distributed. Either `Tcp(...)`, or a
            function (rank, bytes) that returns a list with the bytes of every rank; both need rank=
            and num_ranks=. Or `Nccl(comm)`, or one element of `threads(n)`.
        rank: Rank of this process; only with bootstrap=.
        num_ranks: Number of ranks; only with bootstrap=. Without bootstrap=, num_ranks=1 makes a
            group of this process only.
        name: Name of the group in error texts.
        backend: On GPUs "p2p" (one host or one NVLink domain), "hosts" (several), or "gpu", which
            selects "p2p" if it can join all ranks and else "hosts". On CPUs "self", "threads",
            "shm" or "mpi". None: the environment variable EPIC_BACKEND if it fits the device, else
            EPIC chooses.
        timeout_ms: Time limit of every wait for another rank, in ms. 0: 300,000.
        staging_bytes: Largest size in bytes of this rank's staging memory, into which peers write
            rows. 0: the size for full speed. -1: the smallest size that works; use it if most rows
            are stored into windows (`window`).
        max_in_flight: Largest number of calls, with different tags, that run at the same time. 0:
            EPIC chooses.
        max_sms: Largest number of SMs that a call uses on a GPU. 0: EPIC chooses.
        max_top_k: Largest top_k of the group's layers. 0: 64. A smaller value saves memory,
            above all on GPUs.
        can_shrink: Whether the group can continue without a rank (`shrink`, `leave`); equal on all
            ranks, which must be on one host. On CPUs, groups of "shm" and "threads" always can. On
            GPUs, True needs backend "p2p", at most 32 ranks, and libepic_cuda_regroup.so, and
            operations on few tokens take about 1.6 % more time.

    Raises:
        EpicArgumentError: An argument is invalid.
        EpicError: A rank did not join in time or passed other sizes. The text names the rank.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=8, top_k=2)
        >>> ids = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
        >>> x = torch.randn(2, 16)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=64) as group:
        ...     plan = epic.torch.plan(group, layer, ids)
        ...     rows, _ = epic.torch.dispatch(plan, x)
        ...     out = epic.torch.combine(plan, rows)  # each token twice, once for each expert
        >>> torch.equal(out, 2 * x)
        True
    """

    def __init__(
        self,
        ranks: Any = None,
        dim: Any = None,
        *,
        max_tokens: int,
        max_row_bytes: int,
        device: Any = None,
        bootstrap: Tcp | Nccl | Exchange | Bootstrap | None = None,
        rank: int = 0,
        num_ranks: int | None = None,
        name: str = "epic",
        backend: str | None = None,
        timeout_ms: int = 0,
        staging_bytes: int = 0,
        max_in_flight: int = 0,
        max_sms: int = 0,
        max_top_k: int = 0,
        can_shrink: bool = False,
    ) -> None:
        self.number = 0
        self.regrouping = threading.Lock()  # held by shrink, leave and close
        self.layers_made = 0  # by epic.torch.MoE, whose default seed it is
        self.specs: dict[Any, Any] = {}  # the PlanSpec for each (layer, tag, count_bytes)
        self.name = name
        self.max_tokens = check_int("max_tokens", max_tokens)
        self.max_row_bytes = check_int("max_row_bytes", max_row_bytes)
        process_group = process_group_of(ranks, dim)
        if ranks is None and bootstrap is None and num_ranks is None and dist.is_initialized():
            process_group = dist.group.WORLD
        over_processes = process_group is not None and bootstrap is None and num_ranks is None
        has_store = over_processes and store_of(process_group) is not None
        self.process_ranks = dist.get_process_group_ranks(process_group) if has_store else None
        self.device = choose_device(device, ranks, process_group, bootstrap)
        backend = choose_backend(self.device, backend)
        self.on_gpu = backend in ON_GPUS  # whether the core computes on the GPU
        wait = check_int("timeout_ms", timeout_ms) or DEFAULT_TIMEOUT_MS
        names = encode_text("name", name), encode_text("backend", backend) if backend else None
        bootstrap, self.rank, self.num_ranks = choose_bootstrap(
            process_group, bootstrap, rank, num_ranks, wait, self.device
        )
        config = self.config()
        config.timeout_ms = timeout_ms
        config.staging_bytes = check_int("staging_bytes", staging_bytes, least=-1, most=INT64_MAX)
        config.max_in_flight = check_int("max_in_flight", max_in_flight)
        config.max_sms, config.max_top_k = (
            check_int("max_sms", max_sms),
            check_int("max_top_k", max_top_k),
        )
        config.flags = group_flags(can_shrink)
        config.name, config.backend = names
        self.context = self.opened(bootstrap, config)
        # Each schema of an operator declares that it writes to one of these tensors. So
        # torch.compile keeps the order of the operators. A compiled forward saves the tensor that
        # its backward writes to, so forward and backward use different tensors.
        self.order_token, self.order_token_backward = (
            torch.zeros(1, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self.windows: list[torch.Tensor] = []  # keeps the memory of windows until close()
        self.cached: dict[Any, Any] = {}  # results of facts() and remember()
        self.layers: list[int] = []  # numbers of the layers that the library has for this group
        index = self.device.index or 0
        kind = CUDA if self.device.type == "cuda" else CPU
        self.number = LIBRARY.epic_torch_group_add(self.context, kind, index)
        with lock:
            open_groups.add(self)

    def opened(self, bootstrap: Bootstrap, config: Any) -> int:
        """Open the context in a thread, so that Ctrl-C can end the wait for other ranks."""
        bootstrap.take()
        endings.begin("epic.torch", LIBRARY, abort_all, close_all)
        opener = bootstrapping.Opener(partial(open_on, self.device, bootstrap, config))
        try:
            bootstrapping.wait_for([opener])
        except BaseException:
            bootstrap.leave()
            raise
        if opener.error is not None:
            raise opener.error
        return opener.context

    def config(self) -> ctypes.Structure:
        """Return the sizes of the group for the core's size queries."""
        return _native.Config(
            max_tokens=self.max_tokens,
            max_row_bytes=self.max_row_bytes,
            num_ranks=self.num_ranks,
        )

    @property
    def is_open(self) -> bool:
        """True until `close()` is called."""
        return self.number != 0

    @property
    def backend(self) -> str:
        """The core's backend: "self", "threads", "shm", "mpi", "p2p" or "hosts"."""
        self.must_be_open()
        return _native.core().epic_backend_name(self.context).decode()

    @property
    def num_hosts(self) -> int:
        """The number of hosts that the ranks are on."""
        self.must_be_open()
        return int(_native.core().epic_num_hosts(self.context))

    @property
    def net(self) -> str:
        """The network between hosts, for example "ucx 1.13.1, host memory, tcp/eth0 by messages".

        All backends except "hosts" have no network; there it is "".
        """
        self.must_be_open()
        return _native.core().epic_net_name(self.context).decode()

    def must_be_open(self) -> None:
        """Raise EpicError if the group was closed."""
        if self.number == 0:
            raise EpicError("EPIC_ECLOSED", f"group {self.name!r} was closed: open a new one")

    @assume_constant_result
    def facts(self, layer: str, count_bytes: int = 4) -> tuple[Any, ...]:
        """Return the LayerFacts of a layer as a tuple; compute them only in the first call.

        layer: key of the Layer in options_by_key. count_bytes: size of an element of expert_rows
        and expert_tokens, 4 or 8.
        """
        found = self.cached.get((layer, count_bytes))
        if found is None:
            config, options = self.config(), options_by_key[layer]
            size = -(-_native.size("epic_plan_bytes_v1", config, options) // 16) * 16
            bound = _native.size("epic_capacity_bound_v1", config, options)
            local = -(-options.num_experts // self.num_ranks)
            words = pack_layer(options.numbers())
            add, more = LIBRARY.epic_torch_layer_add, (bound, size, count_bytes == 8)
            number = add(self.number, *words, *more)
            if number == 0 and self.number != 0:
                raise EpicError(
                    "EPIC_ENOMEM",
                    f"group {self.name!r} has {len(self.layers)} layers: must have at most 65536; "
                    "open another group",
                )
            experts, logical = options.num_experts, options.num_logical
            KEPT_LAYERS[number] = (bound, size, local, experts, logical, count_bytes)
            self.layers.append(number)
            found = (size, bound, local, words, number, self.number)
            self.cached[layer, count_bytes] = found
        return found

    @assume_constant_result
    def remember(self, compute: Callable[..., tuple[Any, ...]], *key: Any) -> tuple[Any, ...]:
        """Return compute(group, *key); call compute only once for each key.

        torch.compile treats the result as a constant. This is a method, because torch.compile
        accepts a Group as `self` of a method, but not as an argument of a function.
        """
        entry = (compute, *key)
        found = self.cached.get(entry)
        if found is None:
            found = self.cached[entry] = compute(self, *key)
        return found

    def plan_bytes(self, layer: Layer) -> int:
        """Return the size of a plan of a layer in bytes, without the counts after it.

        Args:
            layer: The layer.

        Returns:
            The number of bytes, a multiple of 16.
        """
        return LayerFacts(*self.facts(layer.key)).plan_bytes

    def capacity_bound(self, layer: Layer) -> int:
        """Return the smallest capacity that suffices for any routing.

        Args:
            layer: The layer.

        Returns:
            The number of slots of a rank.
        """
        return LayerFacts(*self.facts(layer.key)).capacity

    def check(self) -> None:
        """Raise the error that broke the group, if there is one.

        On GPUs it also raises an error in the data of an operation that has finished since the last
        check, once on every rank. Calls on GPUs are asynchronous, so such errors are found here.

        Raises:
            EpicError: The error, with its code.
        """
        self.must_be_open()
        _native.check(_native.core().epic_check(self.context), self.context)

    def waits(self) -> Waits:
        """Return how long this rank has waited for each other rank since the group was opened.

        Use it to find a slow rank. On CPUs the call costs a few microseconds. On GPUs it copies the
        times from the device, without waiting for kernels, and short waits do not count.

        Returns:
            The waits. `Waits.prometheus()` returns them as text for Prometheus.

        Raises:
            EpicError: The group was closed, or its times could not be copied from the GPU.
        """
        self.must_be_open()
        return read_waits(self.context, self.name, self.rank, self.num_ranks)

    @property
    def members(self) -> Members:
        """The ranks that take part in the operations of the group."""
        self.must_be_open()
        return read_members(self.context)

    def shrink(
        self,
        step: int = 0,
        *,
        patience_ms: int = 0,
        min_members: int = 0,
        only: Iterable[int] | None = None,
        authority: int = 0,
    ) -> Members:
        """Continue without ranks that have died, hang or leave, on one host.

        Backends "shm" and "threads" support this. Backend "p2p" supports it with at most 32 ranks,
        if all ranks have opened the group with can_shrink=True. Captured CUDA graphs stay valid.

        Call it on all ranks that live, after an error that broke the group, or when a rank calls
        `leave`. The ranks agree on the members that continue. Then the group works again. Its ranks
        keep their numbers, and its sizes stay the same. Plans from before are refused. Place all
        experts on members (rank_of_expert=), or drop the choices of absent experts
        (`Layer(drop_absent=True)`).

        Args:
            step: Last step that this rank has finished, or any other integer.
            patience_ms: How long to wait for a rank that may live and has not made the call, in ms.
                Then it is left out, if more than half of the members have made the call. 0:
                timeout_ms of the group.
            min_members: Raise an error if fewer members would remain. 0: 1.
            only: The ranks that remain, if a program outside of the group decides on them. All of
                them must make the call.
            authority: Number of the decision of that program. A later decision needs a higher
                number.

        Returns:
            The members. All of them have finished step `least_step`.

        Raises:
            EpicArgumentError: An argument is invalid, or a call of this rank is still running.
            EpicError: Too few members made the call (EPIC_EPEER, EPIC_ETIMEOUT); call it again.
                Or the others continue without this rank (EPIC_EEVICTED); close the group.

        Example:
            >>> import epic.torch
            >>> (bootstrap,) = epic.torch.threads(1)
            >>> sizes = dict(max_tokens=2, max_row_bytes=64)
            >>> with epic.torch.Group(bootstrap=bootstrap, backend="threads", **sizes) as group:
            ...     members = group.shrink(step=7)
            >>> members.ranks, members.gone, members.least_step
            ((0,), (), 7)
        """
        with only_call(self.regrouping):
            self.must_be_open()
            return regroup(
                self.context,
                self.num_ranks,
                step=check_int("step", step, least=-INT64_MAX, most=INT64_MAX),
                patience_ms=check_int("patience_ms", patience_ms),
                min_members=check_int("min_members", min_members),
                only=only,
                authority=check_int("authority", authority, most=INT64_MAX),
            )

    def leave(self, step: int = 0, *, patience_ms: int = 0) -> None:
        """Leave the group, while the other ranks call `shrink`, and close it on this rank.

        The calls of the other ranks do not fail.

        Args:
            step: As for `shrink`.
            patience_ms: As for `shrink`.

        Raises:
            EpicArgumentError: An argument is invalid, or a call of this rank is still running.
            EpicError: Too few members made the call; call it again, or close the group.
        """
        with only_call(self.regrouping):
            self.must_be_open()
            regroup(
                self.context,
                self.num_ranks,
                step=check_int("step", step, least=-INT64_MAX, most=INT64_MAX),
                patience_ms=check_int("patience_ms", patience_ms),
                leaving=True,
            )
        self.close()

    def abort(self, why: str, tag: int = 0) -> None:
        """Report to the other ranks that this rank makes no more calls with a tag.

        Their calls with this tag then fail with EPIC_EPEER at once, instead of waiting until their
        time limit.

        Args:
            why: The reason, which appears in the error texts of the other ranks.
            tag: Tag of the calls.
        """
        self.must_be_open()
        _native.core().epic_abort(self.context, tag, why.encode())

    def close(self) -> None:
        """Wait for calls in flight, then close the group. Calling it again does nothing.

        It also waits for `shrink` and `leave` in other threads.
        """
        with lock:
            number, self.number = self.number, 0
            open_groups.discard(self)
        self.specs.clear()  # each of them refers to this group
        if number == 0:
            return
        for layer in self.layers:
            KEPT_LAYERS.pop(layer, None)
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # on a failed device nothing is in flight
                torch.cuda.synchronize(self.device)
        LIBRARY.epic_torch_group_remove(number)
        with self.regrouping:
            _native.core().epic_close(self.context)
        self.windows.clear()

    def __enter__(self) -> "Group":
        return self

    def __deepcopy__(self, _: Any) -> "Group":
        """Return the group itself: copies of a module share it."""
        return self

    def __reduce__(self) -> Any:
        raise EpicArgumentError(
            f"group {self.name!r} belongs to its process and cannot be pickled: save "
            "layer.state_dict(), and make the layer again in the other process, with a group of "
            "that process"
        )

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.is_open:
            self.abort(endings.why(error))
        self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"Group({self.name!r}, rank {self.rank} of {self.num_ranks}, {self.device}{state})"


# The groups of shared_group with their options. The key is the process group, not its name, because
# torch may give the name of a destroyed process group to a process group of other ranks.
shared_groups: "weakref.WeakKeyDictionary[Any, tuple[Group, dict[str, Any]]]" = (
    weakref.WeakKeyDictionary()
)


def shared_group(
    process_group: Any, *, max_tokens: int, max_row_bytes: int, **options: Any
) -> Group:
    """Return the group that the layers of a model share.

    The first call for a process group opens a group. Later calls return this group, or open another
    one if it was closed or is too small. Every rank must make the same calls.

    Args:
        process_group: ProcessGroup or DeviceMesh of the ranks.
        max_tokens: As for `Group`.
        max_row_bytes: As for `Group`.
        **options: Other arguments of `Group`, which must equal those of the open group.

    Returns:
        The open group.

    Raises:
        EpicArgumentError: The open group has other options.
    """
    process_group = process_group_of(process_group, None)
    found, had = shared_groups.get(process_group, (None, {}))
    good = found is not None and found.is_open and found.max_tokens >= max_tokens
    if found is not None and good and found.max_row_bytes >= max_row_bytes:
        for name, value in options.items():
            if name not in had or had[name] != value:
                rule = repr(had[name]) if name in had else "left out"
                raise EpicArgumentError(
                    f"{name} is {value!r}: must be {rule}, as in the open group that the layers of "
                    "this process group share; close() that group first"
                )
        return found
    group = Group(process_group, max_tokens=max_tokens, max_row_bytes=max_row_bytes, **options)
    shared_groups[process_group] = group, options
    return group


def abort_all(why: str) -> None:
    """Report to the peers of all open groups that this process ends."""
    for group in list(open_groups):
        if group.is_open:
            group.abort(why)


def close_all() -> None:
    """Close the groups that this process left open, when it ends.

    A thread of this process may be in a call that waits for a peer. The peer may be ending too, and
    wait for a call of this process with another tag. So this function aborts calls after
    LAST_CALLS_MS. Their threads then have LAST_RETURN_S to return to Python. A thread that is still
    in C++ code when the interpreter ends would abort the process.
    """
    num_ended = 0
    for group in list(open_groups):
        if group.regrouping.locked():
            continue  # the call may last longer than the process should
        num_inside = LIBRARY.epic_torch_group_drain(group.number, LAST_CALLS_MS)
        if num_inside:
            group.abort("its process ends while a thread of it is in a call")
        group.close()
        num_ended += num_inside
    if num_ended:
        time.sleep(LAST_RETURN_S)
