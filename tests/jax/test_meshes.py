# SPDX-License-Identifier: Apache-2.0
"""Tests that a program on another mesh than that of its group gets an error.

Each kind of mix-up is tried with every call of a program. Without the checks the results would be
wrong without an error.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import mesh_checks, meshes
from steps import ALL, LAYER, TOKENS, TOP_K, choices, numbers

Mesh = jax.sharding.Mesh
SIZES: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 20000}
HIDDEN = 20


def mesh_of(order: Any, names: tuple[str, ...] = ("dp", "ep")) -> Mesh:
    """Return a mesh of devices by their indices in jax.devices()."""
    devices = np.array(jax.devices())
    return Mesh(devices[np.array(order)], names)


# Descriptions of meshes that do not have the group's devices in the order of ranks. The group is
# over [[0, 1], [2, 3]], so its ranks are [0 1] and [2 3].
OTHERS = {
    "reversed": mesh_of([[1, 0], [3, 2]]),
    "one_reversed": mesh_of([[0, 1], [3, 2]]),
    "swapped_partners": mesh_of([[0, 3], [2, 1]]),
    "transposed": mesh_of([[0, 2], [1, 3]]),
    "axes_exchanged": mesh_of([[0, 1], [2, 3]], ("ep", "dp")),
}
SAME = {
    "itself": mesh_of([[0, 1], [2, 3]]),
    "groups_exchanged": mesh_of([[2, 3], [0, 1]]),
    "axes_in_another_order": mesh_of([[0, 2], [1, 3]], ("ep", "dp")),
}
others = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())


def rounds(mesh: Mesh, group: Any) -> dict[str, Callable[[], Any]]:
    """Return jitted functions without arguments, one for each kind of call."""
    spec = P(mesh.axis_names)
    x, w = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K)
    ids = choices(3)

    def on(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        inner = jax.shard_map(
            function, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
        )
        jitted = jax.jit(inner)
        return lambda: jax.block_until_ready(jitted(*args))

    def fused(x: Any, w: Any, ids: Any) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w)
        return epic.jax.combine(plan, recv, slot)

    def gradient(x: Any, w: Any, ids: Any) -> Any:
        return jax.grad(lambda x: (fused(x, w, ids) ** 2).sum())(x)

    return {
        "plan": on(lambda ids: epic.jax.plan(group, LAYER, ids).load, ids),
        "plan_dispatch": on(fused, x, w, ids),
        "gradient": on(gradient, x, w, ids),
        "sum": on(lambda x: epic.jax.sum(group, x), x),
    }


@others
def test_another_mesh_in_a_shard_map(other: Mesh, opened: Any) -> None:
    """The program is refused when it is compiled; the group stays usable."""
    home = SAME["itself"]
    group = opened(home)
    for name, run in rounds(other, group).items():
        with pytest.raises(ValueError, match=r"the mesh has devices \[.*'ep'.*opened with") as said:
            run()
        assert "epic.jax.open(mesh, 'ep', name=...)" in str(said.value), name
    for run in rounds(home, group).values():
        run()
    epic.jax.check(group)


@others
def test_another_mesh_in_sharded_functions(other: Mesh, opened: Any) -> None:
    """sharded.moe, plan_dispatch and combine refuse the mesh while tracing."""
    group = opened(SAME["itself"])
    case = layers.CASES["softmax"]
    x, ct = layers.arrays()
    with pytest.raises(ValueError, match="opened with devices"):
        jax.eval_shape(layers.step(other, group, case), x, layers.weights(case), ct)
    rows, weights, ids = numbers(1, 24, HIDDEN), numbers(2, 24, TOP_K), choices(3)
    split = (group, LAYER, ids, rows, weights)
    with pytest.raises(ValueError, match="opened with devices"):
        epic.jax.sharded.plan_dispatch(other, *split)
    plan, recv, slot = epic.jax.sharded.plan_dispatch(SAME["itself"], *split)
    with pytest.raises(ValueError, match="opened with devices"):
        epic.jax.sharded.combine(other, plan, recv, slot)


@pytest.mark.parametrize("mesh", SAME.values(), ids=SAME.keys())
def test_the_same_groups_in_another_mesh(mesh: Mesh, opened: Any) -> None:
    """A mesh that has the same devices by rank works."""
    group = opened(SAME["itself"])
    for run in rounds(mesh, group).values():
        run()
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    run = layers.step(mesh, group, case, token_axes=("dp", "ep"))
    layers.compare(run(x, layers.weights(case), ct), layers.true_step(case, 2))


def test_a_part_of_the_mesh(opened: Any) -> None:
    """A mesh of one of the groups fits; a group over a part does not fit the whole."""
    half = mesh_of([[0, 1]])
    group = opened(SAME["itself"])
    total = jax.shard_map(lambda x: epic.jax.sum(group, x), mesh=half, in_specs=ALL, out_specs=ALL)
    assert jax.jit(total)(jnp.arange(2, dtype=jnp.float32)).tolist() == [1, 1]
    with epic.jax.open(half, "ep", name="half", **SIZES) as part:
        for run in rounds(SAME["itself"], part).values():
            with pytest.raises(ValueError, match="opened with no device 2"):
                run()


@pytest.mark.parametrize(("ranks", "used"), [(4, 2), (2, 4), (1, 2), (2, 1)])
def test_another_number_of_ranks(ranks: int, used: int, opened: Any) -> None:
    """A group of 4 ranks on ep=2, and similar cases, are refused while tracing."""
    group = opened(make_mesh(ranks))
    for run in rounds(make_mesh(used), group).values():
        with pytest.raises(ValueError, match=f"'ep' has {used} devices.*with {ranks} ranks"):
            run()
    case = layers.CASES["softmax"]
    x, ct = layers.arrays()
    with pytest.raises(ValueError, match="opened with devices"):
        layers.step(make_mesh(used), group, case)(x, layers.weights(case), ct)


@pytest.mark.parametrize("other", [OTHERS["reversed"], OTHERS["swapped_partners"]])
def test_opened_again_with_other_devices(other: Mesh, opened: Any) -> None:
    """Programs compiled for the former group do not run on the new one. Those of the new group do.
    The former programs run again when their devices are back."""
    home = SAME["itself"]
    group = opened(home)
    former = rounds(home, group)
    wanted = {name: jax.tree.map(np.asarray, run()) for name, run in former.items()}
    epic.jax.close(group)
    again = opened(other)
    for name, run in former.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match="FAILED_PRECONDITION") as said:
            run()
        sentence = r'made for group "epic" of devices [0 1] [2 3], and'
        assert sentence in str(said.value), (name, said.value)
    for run in rounds(other, again).values():
        run()
    epic.jax.check(again)
    epic.jax.close(again)
    opened(home)
    for name, run in former.items():
        got = jax.tree.map(np.asarray, run())
        assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(wanted[name]))), name


def test_a_group_that_is_no_longer_open(opened: Any) -> None:
    """Check the object of a former group in a program that is traced after the new group opened."""
    former = opened(SAME["itself"])
    epic.jax.close(former)
    opened(OTHERS["reversed"])
    for run in rounds(SAME["itself"], former).values():
        with pytest.raises(jax.errors.JaxRuntimeError, match="open under this name has devices"):
            run()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the devices of the program from JAX, so that only the handlers can compare them."""
    monkeypatch.setattr(mesh_checks, "check_lowering", lambda *_: None)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("order", [[2, 1, 0, 3], [1, 2, 3, 0]])
@pytest.mark.usefixtures("unseen")
def test_ranks_are_compared_at_each_call(order: list[int]) -> None:
    """The handler refuses the call: every rank gets an exception within seconds that gives the
    reason."""
    home = make_mesh(4)
    for name in ("plan", "plan_dispatch", "gradient", "sum"):
        with epic.jax.open(home, "ep", name="calls", **SIZES) as group:
            run = rounds(mesh_of([order]), group)[name]
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"another order|is rank") as said:
                run()
            assert "mesh that the group was opened with" in str(said.value), said.value
            with pytest.raises(epic.jax.EpicError, match="another order"):
                epic.jax.check(group)


@pytest.mark.usefixtures("unseen")
def test_the_layer_compares_ranks_too() -> None:
    """The core's own layer compares ranks, too."""
    case = layers.CASES["softmax"]
    x, _ = layers.arrays()
    weights = epic.jax.MoeWeights(**layers.weights(case))
    spec = P(("dp", "ep"))
    mesh = mesh_of([[3, 2, 1, 0]])
    with epic.jax.open(make_mesh(4), "ep", **SIZES) as group:
        specs = epic.jax.sharded.weight_specs(group, weights)
        run = jax.shard_map(
            lambda x, w: epic.jax.moe(group, layers.options(case, 4), x, w).out,
            mesh=mesh, in_specs=(spec, specs), out_specs=spec,
        )  # fmt: skip
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"another order|is rank"):
            jax.block_until_ready(jax.jit(run)(x, weights))


def test_a_mesh_that_comes_with_the_context(opened: Any) -> None:
    """With jax.set_mesh the mesh comes from the context, not from the shard_map."""
    group = opened(SAME["itself"])

    def total(x: Any) -> Any:
        return jax.shard_map(
            lambda x: epic.jax.sum(group, x), in_specs=ALL, out_specs=ALL, check_vma=False
        )(x)

    run = jax.jit(total)
    x = np.arange(4, dtype=np.float32)
    for name, mesh in (SAME | OTHERS).items():
        if name.startswith("axes"):
            continue  # the order of ALL differs from the group's order here
        with jax.set_mesh(mesh):
            if name in SAME:
                assert run(x).tolist() in ([1, 1, 5, 5], [5, 5, 1, 1]), name
            else:
                with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="mesh"):
                    jax.block_until_ready(run(x))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_ranks_given_without_a_mesh(order: list[int]) -> None:
    """In a shard_map over all ranks, the index in its mesh must be the rank."""
    with epic.jax.open(ranks=range(4), num_ranks=4, **SIZES) as group:
        mesh = mesh_of(order, ("any",))
        run = jax.shard_map(
            lambda x: epic.jax.sum(group, x), mesh=mesh, in_specs=P("any"), out_specs=P("any")
        )
        x = np.ones(4, np.float32)
        if order[0] == 0:
            assert jax.jit(run)(x).tolist() == [4] * 4
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"another order|is rank"):
                jax.block_until_ready(jax.jit(run)(x))


def test_outside_of_a_shard_map(opened: Any) -> None:
    """A sum of a global array is refused while tracing if the devices do not divide its rows. A
    group of one rank allows all arrays."""
    group = opened(make_mesh(2))
    x = numbers(1, 6, HIDDEN)
    steps: list[Callable[[], Any]] = [
        lambda: epic.jax.sum(group, x),
        lambda: jax.eval_shape(lambda x: epic.jax.sum(group, x), x),
        lambda: jax.jit(jax.grad(lambda x: epic.jax.sum(group, x).sum()))(x),
    ]
    for step in steps:
        with pytest.raises(ValueError, match=r"a multiple of 4, the number of devices"):
            step()
    only = Mesh(np.array(jax.devices()[:1]), ("ep",))
    with epic.jax.open(only, "ep", name="one", **SIZES) as one:
        assert np.array_equal(jax.jit(lambda x: epic.jax.sum(one, x))(x), x)


def test_a_manual_part_of_the_axes(opened: Any) -> None:
    """A shard_map over axes other than the group's does not make a call valid."""
    group = opened(make_mesh(2))
    run = jax.shard_map(
        lambda x: epic.jax.sum(group, x), mesh=make_mesh(2), in_specs=P("dp"), out_specs=P("dp"),
        axis_names={"dp"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="outside of a shard_map over axis 'ep'"):
        jax.jit(run)(np.ones(4, np.float32))


def test_another_platform() -> None:
    """CPU devices are refused, although their numbers are those of the GPUs."""
    group = epic.jax.Group("g", ("ep",), 4, 1, 1, "gpu", devices=((0, 1, 2, 3),))
    with pytest.raises(epic.jax.EpicArgumentError, match=r"devices of cpu.*with devices of gpu"):
        mesh_checks.check_mesh(group, make_mesh(4))


def test_texts_of_many_devices() -> None:
    """Long lists of devices fit into the memory of handlers, and differences in them are found."""

    def text(order: Any) -> str:
        rows = tuple(tuple(row) for row in np.asarray(order).reshape(-1, 8).tolist())
        return meshes.describe_devices(rows, 8)

    first, second = np.arange(4096), np.arange(4096)
    second[[4000, 4001]] = 4001, 4000
    assert text(first) != text(second)
    assert len(text(first)) < 256 and text(first).startswith("devices [0 1 2 3 4 5 6 7] [8")
    assert text(first) == text(first.reshape(-1, 8)[::-1])
