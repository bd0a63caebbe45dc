# SPDX-License-Identifier: Apache-2.0
"""Groups: the devices that share the experts of a layer, and their contexts in the core."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from epic import _native, bootstrapping, endings
from epic.bootstrapping import Bootstrap, Exchange, Tcp
from epic.errors import EpicArgumentError, EpicError, EpicUnsupportedError
from epic.jax import cuda, meshes
from epic.jax.arrays import as_axes, check_kind
from epic.jax.bootstrapping import JaxStore, distributed_store
from epic.jax.library import load_handlers
from epic.jax.members import read_all, regroup_all
from epic.members import Members, group_flags, only_call
from epic.options import INT64_MAX, Layer, backend_for, check_int, encode_text
from epic.store import StoreExchange
from epic.waits import Waits, read_waits

DEFAULT_TIMEOUT_MS = 300_000


@dataclass(frozen=True)
class Group:
    """A group of devices, as the calls of a program refer to it.

    `epic.jax.open` returns it.  It is hashable, and equal in all processes, so it may be a static
    argument of jitted functions.  When a program runs, the handlers find the context of a device by
    the group's `name`.  A Group is a context manager that closes the group.

    Attributes:
        name: the name, at most 63 bytes.
        axes: the mesh axes along which a group extends; empty without a mesh.
        num_ranks: the number of ranks of one group.
        max_tokens: the largest number of tokens that a device passes to one call.
        max_row_bytes: the largest size of a row in bytes.
        platform: "cpu" or "gpu".
        command_buffers: whether XLA may put the calls into CUDA graphs.
        devices: the device ids of each group by rank; empty without a mesh.
        max_top_k: the largest top_k of the group's layers; 0: 64.
        mesh: the mesh; None without a mesh.
        token_axes: how the tokens of calls on global arrays are sharded: a tuple of axes or a
            PartitionSpec.  None: only their first dimension is sharded, over all axes.

    """

    name: str
    axes: tuple[str, ...]
    num_ranks: int
    max_tokens: int
    max_row_bytes: int
    platform: str = "cpu"
    command_buffers: bool = True
    devices: meshes.DeviceRows = ()
    max_top_k: int = 0
    mesh: jax.sharding.Mesh | None = None
    token_axes: tuple[str, ...] | jax.sharding.PartitionSpec | None = None

    def config(self) -> ctypes.Structure:
        """Return the core's epic_config for size queries."""
        return _native.Config(
            max_tokens=self.max_tokens,
            max_row_bytes=self.max_row_bytes,
            num_ranks=self.num_ranks,
        )

    def plan_bytes(self, layer: Layer) -> int:
        """Return the size of a plan in bytes."""
        return self.query("epic_plan_bytes_v1", layer)

    def capacity_bound(self, layer: Layer) -> int:
        """Return the number of slots of a rank that suffices for any routing."""
        return self.query("epic_capacity_bound_v1", layer)

    def query(self, name: str, layer: Layer) -> int:
        """Return the result of a size query of the core for this group's sizes and the layer."""
        return _native.size(name, self.config(), layer)

    def local_experts(self, layer: Layer) -> int:
        """Return the largest number of experts of a rank, without rank_of_expert."""
        return -(-layer.num_experts // self.num_ranks)

    def check_width(self, name: str, rows: Any) -> None:
        """Raise an error for rows that are wider than max_row_bytes."""
        width = rows.shape[-1] * rows.dtype.itemsize
        if width > self.max_row_bytes:
            raise EpicArgumentError(
                f"{name} has rows of {width} bytes: must be at most {self.max_row_bytes}, the "
                f"max_row_bytes of group {self.name!r}; open a group with more"
            )

    def waits(self) -> list[Waits]:
        """Return how long each rank of this process has waited for each other rank.

        The times count from `epic.jax.open`.  Use them to find a slow rank.
        `epic.format_prometheus(group.waits())` returns them as text for Prometheus.

        Returns:
            The waits of each rank.  If a mesh has several groups, `Waits.group` ends with "/" and
            the number of the group.

        Raises:
            EpicError: the group is not open, or its times could not be copied from the GPU.

        """
        return [
            read_waits(
                context,
                f"{self.name}/{member.index}" if len(self.devices) > 1 else self.name,
                member.rank,
                self.num_ranks,
            )
            for member, context in find_open(self).contexts.items()
        ]

    @property
    def members(self) -> list[Members]:
        """The members of each group that has ranks in this process, in the order of the groups.

        Only a mesh can have several groups.
        """
        return read_all(find_open(self).contexts)

    def shrink(
        self,
        step: int = 0,
        *,
        patience_ms: int = 0,
        min_members: int = 0,
        only: Iterable[int] | None = None,
        authority: int = 0,
    ) -> list[Members]:
        """Continue in the same group after an error that broke it.

        Backends "shm" and "threads" support this.  Backend "p2p" supports it with at most 32 ranks,
        if the group was opened with can_shrink=True.

        All processes that live make this call, once for all their ranks.  The call first waits for
        the arrays that are alive.  Afterwards the group works again.  Its ranks keep their numbers,
        and its sizes stay the same, so compiled programs stay valid.

        Without a mesh the other ranks can go on without ranks that have died, hang or leave.  Place
        all experts on members (rank_of_expert= or logical_of_expert=).  With a mesh a program runs
        on all its devices.  So shrink then repairs a group whose ranks all live, for example after
        a rank was late.

        Args:
            step: the last step that this process has finished, or any other number.
            patience_ms: how long to wait for ranks that may live and do not make the call, in ms.
                Then they are left out, if more than half of the members have made the call.  0:
                timeout_ms of the group.
            min_members: raise an error if fewer members would remain; 0: 1.
            only: the ranks that remain, if a program outside of the group decides on them.  All of
                them must make the call.
            authority: the number of the decision of that program; each decision has a higher one.

        Returns:
            The members of each group that has ranks in this process.  All of them have finished
            step `least_step`.

        Raises:
            EpicArgumentError: an argument is invalid, or a call of this process is still running.
            EpicError: too few members made the call (EPIC_EPEER, EPIC_ETIMEOUT); call it again.  Or
                the others have gone on without this rank (EPIC_EEVICTED); close the group.

        Example:
            >>> import epic.jax
            >>> with epic.jax.open(max_tokens=4, max_row_bytes=64, backend="threads") as group:
            ...     (members,) = group.shrink(step=7)
            >>> members.ranks, members.least_step
            ((0,), 7)

        """
        state = find_open(self)
        wait_for_live_arrays()
        with only_call(state.regrouping):
            find_open(self)
            return regroup_all(
                state.contexts,
                self.num_ranks,
                step=check_int("step", step, least=-INT64_MAX, most=INT64_MAX),
                patience_ms=check_int("patience_ms", patience_ms),
                min_members=check_int("min_members", min_members),
                only=list(only) if isinstance(only, Iterable) else only,
                authority=check_int("authority", authority, most=INT64_MAX),
            )

    def leave(self, step: int = 0, *, patience_ms: int = 0) -> None:
        """Leave the group while other processes call `shrink`, and close it in this process.

        All ranks of this process leave.  The calls of the other ranks do not fail.

        Args:
            step: as for `shrink`.
            patience_ms: as for `shrink`.

        Raises:
            EpicUnsupportedError: the group has a mesh, whose programs run on all its devices.
            EpicArgumentError: an argument is invalid, or a call of this process is still running.
            EpicError: too few members made the call; call it again, or close the group.

        """
        if self.mesh is not None:
            raise EpicUnsupportedError(
                f"group {self.name!r} has a mesh: not supported, because its programs run on all "
                "devices of the mesh; close() the group, or open it without a mesh, with ranks= "
                "and num_ranks="
            )
        state = find_open(self)
        wait_for_live_arrays()
        with only_call(state.regrouping):
            find_open(self)
            regroup_all(
                state.contexts,
                self.num_ranks,
                step=check_int("step", step, least=-INT64_MAX, most=INT64_MAX),
                patience_ms=check_int("patience_ms", patience_ms),
                leaving=True,
            )
        self.close()

    def close(self) -> None:
        """Close the group; see `epic.jax.close`."""
        close(self)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.name in open_groups:
            abort_groups(endings.why(error), [self.name])
        self.close()


@dataclass(frozen=True)
class Member:
    """A device of this process in one of the groups that share a name.

    Attributes:
        is_gpu: whether the device is a GPU.
        ordinal: the number of the device with which XLA's handlers identify it.
        index: the number of the group among the groups of this name.
        rank: the rank in that group.

    """

    is_gpu: bool
    ordinal: int
    index: int
    rank: int


@dataclass
class OpenGroup:
    """An open group of this process.

    Attributes:
        group: the group.
        contexts: the context of the core for each member.
        exchanges: the exchanges over JAX's store, whose keys close() deletes.
        regrouping: held by shrink, leave and close.

    """

    group: Group
    contexts: dict[Member, int]
    exchanges: list[StoreExchange]
    regrouping: threading.Lock = field(default_factory=threading.Lock)


open_groups: dict[str, OpenGroup] = {}
lock = threading.Lock()


# ------------------------------------------------------------------------ members ----


def member_of(device: Any, index: int, rank: int) -> Member:
    """Return the member of a device.

    On CPUs a handler gets the global id of a device, on GPUs the number that CUDA has for it.
    """
    if device.platform == "gpu":
        return Member(True, device.local_hardware_id, index, rank)
    return Member(False, device.id, index, rank)


def local_members(groups: list[list[Any]]) -> list[Member]:
    """Return the members of this process."""
    here = groups[0][0].client.process_index()
    return [
        member_of(device, index, rank)
        for index, group in enumerate(groups)
        for rank, device in enumerate(group)
        if device.process_index == here
    ]


# -------------------------------------------------------------------------- bootstrap ----


def choose_bootstrap(
    bootstrap: Tcp | Exchange | Bootstrap | None,
    group: str,
    members: list[Member],
    num_ranks: int,
    timeout_ms: int,
) -> tuple[Callable[[Member], Bootstrap], list[StoreExchange]]:
    """Return a function that returns the bootstrap of a member, and the exchanges that it uses.

    Args:
        bootstrap: the bootstrap that the caller passed, or None.
        group: the name of the group.
        members: the members of this process.
        num_ranks: the number of ranks of a group.
        timeout_ms: the time limit of the bootstrap in ms.

    """
    indices = {member.index for member in members}
    local = all(sum(s.index == i for s in members) == num_ranks for i in indices)
    if isinstance(bootstrap, Bootstrap):
        only = bootstrap
        return lambda _: only, []
    if isinstance(bootstrap, Tcp):
        return lambda s: bootstrapping.by_tcp(bootstrap, s.index, s.rank, num_ranks, timeout_ms), []
    if bootstrap is not None:
        bootstrapping.check_bootstrap(bootstrap)
        return lambda s: bootstrapping.by_exchange(bootstrap, s.rank, num_ranks), []
    if local:
        threads = {i: bootstrapping.by_threads(num_ranks, timeout_ms) for i in indices}
        return lambda s: threads[s.index][s.rank], []
    client = distributed_store()
    if client is None:
        raise EpicArgumentError(
            "the ranks are in several processes and jax.distributed is not initialized: call "
            "jax.distributed.initialize, or pass bootstrap=epic.jax.Tcp(...) or an exchange"
        )
    found = JaxStore(client)
    exchanges = {
        s: StoreExchange(found, f"epic/{group}/{s.index}", num_ranks, timeout_ms) for s in members
    }
    return (
        lambda s: bootstrapping.by_exchange(exchanges[s], s.rank, num_ranks),
        list(exchanges.values()),
    )


def bootstrap_over_mpi(
    native: Any, has_mesh: bool, bootstrap: Any, timeout_ms: int
) -> Bootstrap | None:
    """Return the bootstrap of an MPI communicator, if the communicator defines the ranks.

    It does not define them with a mesh or with another bootstrap. Then the function returns None,
    and only initializes MPI if native is "world". The backend mpi makes its own communicators.
    """
    alone = not has_mesh and bootstrap is None
    if native is None or (not alone and bootstrapping.address_of(native) is not None):
        return None
    world = bootstrapping.run_in_thread(
        partial(bootstrapping.by_mpi, bootstrapping.address_of(native), timeout_ms)
    )
    if alone:
        return world
    world.close()
    return None


def members_without_mesh(
    devices: list[Any], ranks: Sequence[int] | None, num_ranks: int | None, world: Bootstrap | None
) -> tuple[list[Member], int]:
    """Return the members of this process and the number of ranks of a group without a mesh."""
    mine, count = [0], 1 if num_ranks is None else check_int("num_ranks", num_ranks, 1)
    if world is not None:
        mine, count = [world.struct.rank], world.struct.num_ranks
        if list(ranks or mine) != mine or (num_ranks or count) != count:
            raise EpicArgumentError(
                f"ranks is {ranks} and num_ranks is {num_ranks}: must be rank {mine[0]} of "
                f"{count}, as in the communicator that native names; leave both out, or split the "
                "communicator"
            )
    if isinstance(ranks, int):
        raise EpicArgumentError(f"ranks is {ranks}: must be a list with a rank for each device")
    taken = list(ranks if ranks is not None else mine)
    if len({check_int("ranks", r) for r in taken}) < len(taken) or max(taken, default=0) >= count:
        raise EpicArgumentError(
            f"ranks is {taken}: must be different numbers from 0 to {count - 1} (num_ranks - 1)"
        )
    if len(taken) > len(devices):
        raise EpicArgumentError(
            f"ranks is {taken}: must have at most {len(devices)} ranks, one for each device of "
            "this process"
        )
    return [member_of(d, 0, r) for d, r in zip(devices, taken, strict=False)], count


def open_member(bootstrap_of: Callable[[Member], Bootstrap], config: Any, member: Member) -> int:
    """Open the context of one member; wait until its peers open theirs."""
    bootstrap = bootstrap_of(member)
    with cuda.use_gpu(member.ordinal) if member.is_gpu else contextlib.nullcontext():
        return bootstrapping.open_context(bootstrap, config)


# ------------------------------------------------------------------- open and close ----


def choose_backend(platform: str, requested: str | None) -> str | None:
    """Return the name of the backend for devices of a platform; None: the core chooses."""
    if platform not in ("cpu", "gpu"):
        raise EpicArgumentError(
            f"platform of the devices is {platform!r}: must be 'cpu', or 'gpu' with CUDA"
        )
    return backend_for(platform == "gpu", requested)


def choose_sizes(
    mesh: Any, like: Any, token_axes: Any, max_tokens: int | None, max_row_bytes: int | None
) -> tuple[int, int]:
    """Return max_tokens and max_row_bytes: those of the caller, else those of `like`."""
    if like is None:
        for name, value in (("max_tokens", max_tokens), ("max_row_bytes", max_row_bytes)):
            if value is None:
                raise EpicArgumentError(
                    f"{name} is None: pass a number, or pass the activations as like="
                )
        return check_int("max_tokens", max_tokens), check_int("max_row_bytes", max_row_bytes)
    tokens, row_bytes = meshes.token_sizes(mesh, like, token_axes)
    return (
        check_int("max_tokens", max_tokens) if max_tokens is not None else tokens,
        check_int("max_row_bytes", max_row_bytes) if max_row_bytes is not None else row_bytes,
    )


def open(
    mesh: jax.sharding.Mesh | None = None,
    axis: str | tuple[str, ...] = "ep",
    *,
    max_tokens: int | None = None,
    max_row_bytes: int | None = None,
    like: Any = None,
    token_axes: Any = None,
    name: str = "epic",
    ranks: Sequence[int] | None = None,
    num_ranks: int | None = None,
    bootstrap: Tcp | Exchange | None = None,
    native: Any = None,
    timeout_ms: int = 0,
    staging_bytes: int = 0,
    backend: str | None = None,
    max_sms: int = 0,
    max_top_k: int = 0,
    can_shrink: bool = False,
    command_buffers: bool = True,
) -> Group:
    """Open the groups of a mesh.

    Devices form one group along `axis` if all their other mesh coordinates are equal.  For example,
    a mesh (dp, ep) with axis="ep" has dp groups.  All processes of the mesh must make this call,
    and it waits until they do.

    Without a mesh each process runs its own program.  Pass num_ranks, and the ranks of this
    process's local devices.

    Args:
        mesh: the mesh whose devices form the groups; None: a group without a mesh.
        axis: the name of a mesh axis, or a tuple of names.
        max_tokens: the largest number of tokens that one device passes to one call.
        max_row_bytes: the size of the widest row in bytes, hidden * itemsize.
        like: activations [B, ..., hidden] of all devices, or their `jax.ShapeDtypeStruct`.
            max_tokens and max_row_bytes are derived from it if they are not passed.
        token_axes: how the tokens of `like`, and of global arrays in calls outside of a shard_map,
            are sharded; see `epic.jax.sharded.moe`.
        name: the name by which compiled programs find the group, at most 63 bytes.  Groups that are
            open at the same time need different names.
        ranks: only without a mesh: the ranks of this process's local devices.
        num_ranks: only without a mesh: the number of ranks.
        bootstrap: how processes find each other: `Tcp(...)`, or a function (rank, bytes) that
            returns the bytes of all ranks.  None: threads if all ranks are in this process, else
            JAX's key-value store.
        native: in processes that mpirun started: "world", a communicator of mpi4py, or the address
            of an MPI_Comm.  The backend mpi sends over this communicator.  Without a mesh and
            without bootstrap=, its ranks are the ranks of the group, one for each process.
        timeout_ms: the time limit of every wait for another rank in ms; 0: 300,000.
        staging_bytes: the largest size of a rank's staging memory; 0: the size for full speed.
        backend: on GPUs "p2p" (one host or one NVLink domain), "hosts" (several), or "gpu" (p2p if
            it can join all ranks, else hosts); None: the environment variable EPIC_BACKEND if it
            names a backend for GPUs, else "gpu".  On CPUs None: the core chooses.
        max_sms: the largest number of SMs that a call uses on a GPU; 0: the core chooses.
        max_top_k: the largest top_k of the group's layers; 0: 64.  A smaller value saves
            memory, above all on GPUs.
        can_shrink: whether the groups can continue without a rank (`Group.shrink`, `Group.leave`);
            equal in all processes, which must be on one host.  On CPUs, groups of "shm" and
            "threads" always can.  On GPUs, True needs backend "p2p", at most 32 ranks, and
            libepic_cuda_regroup.so, and calls on few tokens take about 1.6 % more time.
        command_buffers: whether XLA may put the calls into its CUDA graphs.

    Returns:
        Group: a static value that identifies the group, equal in all processes.

    Raises:
        EpicArgumentError: an argument is wrong.
        EpicError: the group could not be opened.  `code` is the reason, for example EPIC_ETIMEOUT
            if a process did not join.

    Example:
        >>> import jax
        >>> import epic.jax
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", max_tokens=64, max_row_bytes=4 * 16) as group:
        ...     group.num_ranks == jax.device_count()
        True

    """
    if mesh is not None and (ranks is not None or num_ranks is not None):
        raise EpicArgumentError(
            f"ranks is {ranks} and num_ranks is {num_ranks}: must be None with a mesh, which "
            "defines both"
        )
    if mesh is not None:
        check_kind("mesh", mesh, jax.sharding.Mesh)
    axes = (axis,) if isinstance(axis, str) else as_axes("axis", axis)
    groups, count = (
        meshes.devices_by_rank(mesh, axes) if mesh is not None else ([jax.local_devices()], 0)
    )
    platform = groups[0][0].platform
    max_tokens, max_row_bytes = choose_sizes(mesh, like, token_axes, max_tokens, max_row_bytes)
    backend = choose_backend(platform, backend)
    world = bootstrap_over_mpi(
        native, mesh is not None, bootstrap, timeout_ms or DEFAULT_TIMEOUT_MS
    )
    if mesh is not None:
        devices_of, members = meshes.device_ids(groups), local_members(groups)
    else:
        axes, devices_of = (), ()
        members, count = members_without_mesh(groups[0], ranks, num_ranks, world)
    command_buffers |= platform == "cpu"
    group = Group(
        name,
        axes,
        count,
        max_tokens,
        max_row_bytes,
        platform,
        command_buffers,
        devices_of,
        check_int("max_top_k", max_top_k, 0, 64),
        mesh,
        meshes.as_token_axes(mesh, token_axes),
    )
    config = group.config()
    config.timeout_ms = check_int("timeout_ms", timeout_ms)
    config.staging_bytes = check_int("staging_bytes", staging_bytes, most=INT64_MAX)
    config.max_sms, config.max_top_k = check_int("max_sms", max_sms), group.max_top_k
    config.flags = group_flags(can_shrink)
    config.name = encode_text("name", name)
    config.backend = encode_text("backend", backend) if backend else None
    config.native = None if native is None else bootstrapping.address_of(native)
    with lock:
        if name in open_groups:
            raise EpicArgumentError(
                f"group {name!r} is already open: close it first, or choose another name="
            )
        open_groups[name] = OpenGroup(group, {}, [])
    try:
        open_members(group, members, world or bootstrap, config)
    except BaseException:
        with lock:
            open_groups.pop(name, None)
        raise
    return group


def open_members(
    group: Group, members: list[Member], bootstrap: Tcp | Exchange | Bootstrap | None, config: Any
) -> None:
    """Open all members of this process at the same time, and register them with the handlers."""
    if not members:
        return
    timeout_ms = config.timeout_ms or DEFAULT_TIMEOUT_MS
    bootstrap_of, exchanges = choose_bootstrap(
        bootstrap, group.name, members, group.num_ranks, timeout_ms
    )
    endings.begin("epic.jax", load_handlers(), abort_groups, close_all)
    openers = {
        member: bootstrapping.Opener(partial(open_member, bootstrap_of, config, member))
        for member in members
    }
    try:
        bootstrapping.wait_for(openers.values())
    except BaseException:
        for exchange in exchanges:
            exchange.leave()
        raise
    contexts = {member: opener.context for member, opener in openers.items() if opener.context}
    errors = [opener.error for opener in openers.values() if opener.error]
    if errors:
        bootstrapping.end(contexts.values())
        raise errors[0]
    open_groups[group.name] = OpenGroup(group, contexts, exchanges)
    devices = meshes.describe_devices(group.devices, group.num_ranks).encode()
    for member, context in contexts.items():
        where = (member.is_gpu, member.ordinal, devices, member.rank)
        if load_handlers().epic_jax_member_add(group.name.encode(), *where, context):
            close(group)
            raise EpicArgumentError(f"name is {group.name!r}: must have at most 63 bytes")


def close(group: Group) -> None:
    """Close the group in this process, after its operations in flight.  Closing twice is allowed.

    You may open a group again under this name, and run programs that were compiled before.  On
    GPUs with command buffers JAX then compiles all programs again, because XLA's graphs refer to
    memory of the closed context.

    First wait for the results of the last program (`jax.block_until_ready`).  close() itself waits
    only for arrays that are alive.  If a device no longer finds its context while another device
    waits in a collective of XLA, XLA ends the process.

    Args:
        group: the group.

    Example:
        >>> import epic.jax
        >>> group = epic.jax.open(max_tokens=4, max_row_bytes=64)  # one rank
        >>> epic.jax.close(group)

    """
    check_kind("group", group, Group)
    with lock:
        state = open_groups.get(group.name)
    if state is None:
        return
    wait_for_live_arrays()
    with lock:
        open_groups.pop(group.name, None)
    for member in state.contexts:
        load_handlers().epic_jax_member_remove(group.name.encode(), member.is_gpu, member.ordinal)
    if group.platform == "gpu" and group.command_buffers:
        jax.clear_caches()  # cached graphs refer to the memory of this context
    with state.regrouping:
        bootstrapping.end(state.contexts.values())
    for exchange in state.exchanges:
        with contextlib.suppress(Exception):  # the store may be closed already
            exchange.forget()


def close_all() -> None:
    """Close the groups that this process left open."""
    for state in list(open_groups.values()):
        if not state.regrouping.locked():  # else the call may last longer than the process should
            close(state.group)


def abort_groups(why: str, names: Sequence[str] | None = None) -> None:
    """Report to the peers that this process makes no more calls.

    Args:
        why: the reason, for the peers' error texts.
        names: the names of the groups; None: all groups.

    """
    with lock:
        for name in open_groups if names is None else names:
            for context in open_groups[name].contexts.values():
                _native.core().epic_abort(context, 0, why.encode())


def wait_for_live_arrays() -> None:
    """Wait for all arrays that are alive; ignore errors, which users of the arrays get."""
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()


def check(group: Group) -> None:
    """Raise the error that broke the group, if there is one.

    On GPUs it also raises an error in the data, such as an expert id out of range, of an operation
    that has finished since the last check.  It raises such an error once, on every rank.

    Args:
        group: the group.

    Raises:
        EpicError: the error; `code` is its name.

    Example:
        >>> import epic.jax
        >>> with epic.jax.open(max_tokens=4, max_row_bytes=64) as group:
        ...     epic.jax.check(group)  # no error

    """
    check_kind("group", group, Group)
    errors = []
    for context in list(contexts_of(group)):
        try:
            _native.check(_native.core().epic_check(context), context)
        except EpicError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def find_open(group: Group) -> OpenGroup:
    """Return the state of an open group; raise an error if it is not open in this process."""
    state = open_groups.get(group.name)
    if state is None:
        raise EpicError(
            "EPIC_ECLOSED",
            f"group {group.name!r} is not open in this process: open it with epic.jax.open",
        )
    return state


def contexts_of(group: Group) -> Iterator[int]:
    """Yield the contexts of a group in this process; raise an error if it is not open."""
    yield from find_open(group).contexts.values()
