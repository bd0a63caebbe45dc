# SPDX-License-Identifier: Apache-2.0
"""Cases that must fail with the expected text. Afterwards the group works, or a new one opens."""

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from gpu_world import (
    SIZES,
    LeftOutError,
    choices,
    failure,
    gpu_mesh,
    gpus,
    host_mesh,
    numbers,
    put,
    say,
    whole,
)
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import epic.jax
from reference import relative
from steps import ALL, EXPERTS, TOKENS, TOP_K, mapped, through, true_round


def good_step(mesh: Mesh, group: Any) -> None:
    """Check that the group is usable: run a step and compare its results."""
    rows = len(gpus()) * TOKENS
    x, w, ids = numbers(1, rows, 20), numbers(2, rows, TOP_K), choices(3, rows)
    got = mapped(mesh, through(group, True), 3)(*(put(mesh, v) for v in (x, w, ids)))
    assert relative(whole(got), true_round(x, w, ids, x)[0]) < 2e-6


def checked(group: Any) -> str:
    """Return the name of the result and the text of epic.jax.check."""
    try:
        epic.jax.check(group)
    except epic.jax.EpicError as error:
        return f"{error.code}: {error}"
    return ""


def case_arguments() -> None:
    """Check that errors that the host finds are raised at once and leave the group usable."""
    mesh = gpu_mesh(len(gpus()))
    rows = len(gpus()) * TOKENS
    for backend in ("shm", "threads"):
        try:
            epic.jax.open(mesh, "ep", backend=backend, **SIZES)
        except ValueError as error:
            assert "p2p" in str(error)
        else:
            raise AssertionError("a host backend was accepted")
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        wide = numbers(1, rows, 2000), numbers(2, rows, TOP_K), choices(3, rows)
        text = failure(mapped(mesh, through(group, True), 3), *(put(mesh, v) for v in wide))
        assert "must be at most" in text and "max_row_bytes of group" in text, text
        good_step(mesh, group)
        with epic.jax.open(host_mesh(1), "ep", name="host", **SIZES) as host:
            run = mapped(mesh, lambda x: epic.jax.sum(host, x), 1)
            text = failure(run, put(mesh, np.ones(len(gpus()), np.float32)))
            assert "'host'" in text and "mesh that the group was opened with" in text, text
        good_step(mesh, group)


def case_meshes() -> None:
    """Check meshes that do not fit the group, and a group opened again with other devices under a
    compiled program. The host refuses them without waiting for the GPU."""
    count = len(gpus())
    if count < 2:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    turned = Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    x = np.ones(count, np.float32)
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        run = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        assert whole(run(put(mesh, x))).tolist() == [count] * count
        text = failure(mapped(turned, lambda x: epic.jax.sum(group, x), 1), put(turned, x))
        assert "the mesh has devices" in text, text
        good_step(mesh, group)
    with epic.jax.open(turned, "ep", **SIZES) as group:
        text = failure(run, put(mesh, x))
        # a program that is traced again gets the error before it runs
        assert "was made for group" in text or "the mesh has devices" in text, text
        good_step(turned, group)
    with epic.jax.open(mesh, "ep", **SIZES) as group:  # `run` may be traced again, with this group
        assert whole(run(put(mesh, x))).tolist() == [count] * count


def case_data_errors() -> None:
    """Check invalid expert ids and too many slots. Results are zeros and no call fails. check()
    reports the error once on every rank, at once or some steps later, and the group stays usable.
    """
    mesh = gpu_mesh(len(gpus()))
    rows = len(gpus()) * TOKENS
    x, w, ids = numbers(1, rows, 20), numbers(2, rows, TOP_K), choices(3, rows, 0)
    bad = ids.copy()
    bad[rows - 1, 1] = EXPERTS + 5
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        run = mapped(mesh, through(group, True), 3)
        tight = mapped(mesh, through(group, True, capacity=4), 3)
        for step, chosen, word in ((run, bad, "EPIC_EINVAL"), (tight, ids, "EPIC_EOVERFLOW")):
            for later in (0, 3):
                out = step(*(put(mesh, v) for v in (x, w, chosen)))
                assert not np.any(whole(jax.block_until_ready(out)))
                for _ in range(later):
                    good_step(mesh, group)
                text = checked(group)
                assert text.startswith(word), text
                assert checked(group) == ""
                good_step(mesh, group)


def sync(name: str) -> None:
    """Wait for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def what_broke(group: Any, run: Any, x: Any) -> str:
    """Return the text of check(). A rank that found nothing itself gets it in its next
    operation."""
    for _ in range(2):
        text = checked(group)
        if text:
            return text
        jax.block_until_ready(run(x))
    return checked(group)


def case_missing_peer() -> None:
    """Check a rank that does not call: the others' error names it, then a new group opens."""
    count = len(gpus())
    if count == 1:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    x = put(mesh, np.ones(count, np.float32))
    wish = {**SIZES, "timeout_ms": 700, "name": "slow"}
    with epic.jax.open(mesh, "ep", **wish) as group:

        def step(x: Any) -> Any:
            late = jax.lax.axis_index("ep") == 1
            return jax.lax.cond(late, lambda v: v, lambda v: epic.jax.sum(group, v), x)

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        begin = time.monotonic()
        jax.block_until_ready(jax.jit(inner)(x))
        sync("after the deadline")
        total = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        text = what_broke(group, total, x)
        assert "EPIC_ETIMEOUT" in text and "rank 1" in text, text
        assert time.monotonic() - begin < 30
        text = failure(total, x)
        assert text.startswith("DEADLINE_EXCEEDED") and "rank 1" in text, text
    with epic.jax.open(mesh, "ep", **{**wish, "timeout_ms": 20000}) as group:
        good_step(mesh, group)


def case_different_calls() -> None:
    """Check ranks that make different calls: the error names both on all ranks."""
    count = len(gpus())
    if count == 1:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    x = put(mesh, np.ones(count * TOKENS * TOP_K, np.float32))
    with epic.jax.open(mesh, "ep", name="mixed", **SIZES) as group:

        def step(x: Any) -> Any:
            other = jax.lax.axis_index("ep") == 1
            return jax.lax.cond(
                other,
                lambda v: epic.jax.sum(group, v),
                lambda v: epic.jax.sum(group, v, tree=True),
                x,
            )

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        jax.block_until_ready(jax.jit(inner)(x))
        total = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        text = what_broke(group, total, x)
        assert "EPIC_EMISMATCH" in text, text
        text = failure(total, x)
        assert text.startswith("FAILED_PRECONDITION"), text
    with epic.jax.open(mesh, "ep", name="mixed", **SIZES) as group:
        good_step(mesh, group)


def case_killed() -> None:
    """Check that a killed process is named by the others at once. This case ends the program."""
    last = jax.process_count() - 1
    if last == 0:
        raise LeftOutError("one process")
    mesh = gpu_mesh(len(gpus()))
    x = put(mesh, np.ones(len(gpus()), np.float32))
    with epic.jax.open(mesh, "ep", name="killed", **SIZES) as group:
        run = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        for _ in range(5):
            jax.block_until_ready(run(x))
        sync("all are well")
        if jax.process_index() == last:
            say("right")
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        jax.block_until_ready(run(x))
        took, text = time.monotonic() - begin, checked(group)
        good = "EPIC_EPEER" in text and f"rank {last}" in text and took < 2
        say(f"{'ok' if good else 'FAILED:'} killed ({took:.1f} s): {text}")
        say("right" if good else "wrong")
        sys.stdout.flush()
        os._exit(0 if good else 1)  # jax.distributed would wait for the killed process
