# SPDX-License-Identifier: Apache-2.0
"""Tests capacity_limit of plans and layers: a number of slots that each call reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import ALL, EXPERTS, HIDDEN, TOKENS, mapped, numbers

DROP = epic.jax.Layer(EXPERTS, 1, overflow="drop")
LIMITS = ((3, 3), (100, 8), (0, 1), (-5, 1))  # capacity_limit, and the slots with capacity 8


def run(group: Any, x: Any, fused: bool, **more: Any) -> tuple[Any, ...]:
    """Send all tokens to expert 0 and back."""
    ids, w = jnp.zeros((x.shape[0], 1), jnp.int32), jnp.ones((x.shape[0], 1))
    if fused:
        plan, recv, slot = epic.jax.plan_dispatch(group, DROP, ids, x, w, **more)
    else:
        plan = epic.jax.plan(group, DROP, ids, **more)
        recv, slot = epic.jax.dispatch(plan, x, w)
    return epic.jax.combine(plan, recv, slot), plan.expert_rows, plan.has_overflow


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["plain_jit", "shard_map"])
def test_slots(fused: bool, inside: bool, opened: Any) -> None:
    """The plan keeps as many rows as with that capacity, and no limit compiles a program again."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, HIDDEN)
    traced = 0

    def step(x: Any, limit: Any, capacity: int) -> Any:
        nonlocal traced
        traced += 1
        more = {"capacity": capacity, "capacity_limit": limit}

        def local(x: Any) -> Any:
            return run(group, x, fused, **more)

        function = mapped(mesh, local, 1) if inside else local
        out, pull, (rows, over) = jax.vjp(lambda x: pair(function(x)), x, has_aux=True)
        return out, rows, over, pull(ct)[0]

    def pair(found: tuple[Any, ...]) -> Any:
        return found[0], found[1:]

    compiled = jax.jit(step, static_argnums=2)
    limited = [compiled(x, jnp.int32(limit), 8) for limit, _ in LIMITS]
    assert traced == 1
    for found, (_, slots) in zip(limited, LIMITS, strict=True):
        wanted = compiled(x, None, slots)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert found[2].tolist() == [True, False] * 2  # two groups of two ranks
        assert int(found[1].sum()) == 2 * slots


WISH: dict[str, Any] = {
    "num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "inner": 12, "overflow": "drop",
    "balance_coeff": 0.1,
}  # fmt: skip
SLOTS = ((5, 5), (100, 20), (0, 1), (-5, 1), (14, 14))  # limits, and the slots with capacity 20


def weights_of_layer() -> epic.jax.MoeWeights:
    """Return the weights of all experts."""
    shapes = {"w_gate": (HIDDEN, EXPERTS), "w_gate_up": (EXPERTS, HIDDEN, 24)}
    shapes["w_down"] = (EXPERTS, 12, HIDDEN)
    return epic.jax.MoeWeights(**{n: numbers(i, *s) for i, (n, s) in enumerate(shapes.items())})


@pytest.mark.parametrize("kind", ["plain", "token_mask", "grouped_gemm", "quantize"])
@pytest.mark.parametrize("inside", [False, True], ids=["plain_jit", "shard_map"])
def test_layer(kind: str, inside: bool, opened: Any) -> None:
    """A layer with a limit has the results and gradients of a layer with that capacity, and no
    limit compiles a program again."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, weights, traced = numbers(5, 4 * TOKENS, HIDDEN), weights_of_layer(), 0
    wish = WISH | ({"quantize": "1x32"} if kind == "quantize" else {})
    mask = jnp.arange(4 * TOKENS) % 3 != 1 if kind == "token_mask" else None
    product: Any = {"grouped_gemm": jax.lax.ragged_dot} if kind == "grouped_gemm" else {}

    def step(x: Any, weights: Any, limit: Any, capacity: int) -> Any:
        nonlocal traced
        traced += 1
        options = epic.jax.Moe.of(**wish, capacity=capacity)

        def local(x: Any, weights: Any, mask: Any) -> Any:
            more = {"token_mask": mask, "capacity_limit": limit, **product}
            out = epic.jax.moe(group, options, x, weights, **more)
            loss = jax.lax.psum(out.loss, "ep")[None] if inside else out.loss
            return out.out, loss, out.demand

        function = local
        if inside:
            places = epic.jax.sharded.weight_specs(group, weights)
            function = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(ALL, places, ALL),
                out_specs=(ALL, jax.sharding.PartitionSpec("dp"), ALL),
            )

        def loss_of(x: Any, weights: Any) -> Any:
            out, loss, demand = function(x, weights, mask)
            return jnp.square(out).sum() + loss.sum(), (out, demand)

        return jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(x, weights)

    compiled = jax.jit(step, static_argnums=3)
    limited = [compiled(x, weights, jnp.int32(limit), 20) for limit, _ in SLOTS]
    assert traced == 1
    for found, (_, slots) in zip(limited, SLOTS, strict=True):
        wanted = compiled(x, weights, None, slots)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    outs = [found[0][1][0] for found in limited]
    assert np.abs(outs[1] - outs[2]).max() > 0 and np.abs(outs[1] - outs[0]).max() > 0


def test_flax(opened: Any) -> None:
    """The Flax modules pass the limit on."""
    pytest.importorskip("flax")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = make_mesh(4)
    group = opened(mesh)
    x, limit = numbers(5, 4 * TOKENS, HIDDEN), jnp.int32(9)
    options = [epic.jax.Moe.of(**WISH, capacity=slots) for slots in (20, 9)]
    linen = [epic.jax.linen.MoEBlock(mesh, group, wish) for wish in options]
    params = linen[0].init(jax.random.key(0), x)
    wanted = linen[1].apply(params, x)[0]
    np.testing.assert_array_equal(linen[0].apply(params, x, capacity_limit=limit)[0], wanted)
    assert np.abs(linen[0].apply(params, x)[0] - wanted).max() > 0
    layers = [epic.jax.nnx.MoEBlock(mesh, group, w, rngs=nnx.Rngs(0)) for w in options]
    np.testing.assert_array_equal(layers[0](x, capacity_limit=limit)[0], layers[1](x)[0])


def test_error(opened: Any) -> None:
    """A plan that may not drop choices reports the limit as its number of slots."""
    group = opened(None)
    ids = jnp.zeros((4, 1), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 3 slots and needs 4"):
        epic.jax.plan(group, epic.jax.Layer(EXPERTS, 1), ids, capacity_limit=jnp.int32(3))
    options = epic.jax.Moe.of(**WISH | {"overflow": "error"})
    given = (options, numbers(5, 4, HIDDEN), weights_of_layer())
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 3 slots and needs 8"):
        jax.block_until_ready(epic.jax.moe(group, *given, capacity_limit=jnp.int32(3)).out)


@pytest.mark.parametrize("wrong", [np.float32(3), jnp.ones(1, jnp.int32), "3"])
def test_wrong_limits(wrong: Any, opened: Any) -> None:
    """Only an int32 array without dimensions is a limit."""
    group, ids = opened(None), jnp.zeros((4, 1), jnp.int32)
    for call in (
        lambda: epic.jax.plan(group, DROP, ids, capacity_limit=wrong),
        lambda: epic.jax.plan_dispatch(group, DROP, ids, ids * 1.0, capacity_limit=wrong),
        lambda: epic.jax.moe(
            group,
            epic.jax.Moe.of(**WISH),
            numbers(5, 4, HIDDEN),
            weights_of_layer(),
            capacity_limit=wrong,
        ),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=r"capacity_limit is .*: must be"):
            call()
