# SPDX-License-Identifier: Apache-2.0
"""Grouped products for Hopper GPUs, in Pallas.

Slabs begin at multiples of TILE rows, so each tile of rows belongs to one expert.  A thread block
has three warpgroups: one loads operands, and two multiply, each up to 64 x 256 elements of an
output tile.  The grid is persistent, with one thread block for each SM.  Tiles past the last slab
are not written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 128  # rows of an output tile
WIDTHS = (256, 128)  # columns of an output tile: the first of these that divides n
STEP = 64  # elements of the summed dimension in one pipeline stage
STAGES = 4  # number of pipeline stages
WARPGROUPS = 2  # number of warpgroups that multiply
HALF = TILE // WARPGROUPS  # rows of an output tile that one warpgroup computes
PART = 64  # columns that a warpgroup stores at a time


# Other arguments of plgpu.kernel. Tests without a GPU set them to interpret the kernels.
interpreter: dict[str, Any] = {}


def transpose_ref(ref: Any) -> Any:
    """Return a reference with exchanged dimensions. In JAX 0.10 this is a function of plgpu."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def width_of(columns: int) -> int:
    """Return the width of output tiles for a number of columns; 0 if no width divides it."""
    return next((width for width in WIDTHS if columns % width == 0), 0)


def swizzle_transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Return the layout in shared memory of a tile with this many columns."""
    pallas: Any = plgpu  # Any, because mypy considers some of its classes abstract
    swizzle = pallas.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
    elements = swizzle // jnp.dtype(dtype).itemsize
    return pallas.TilingTransform((8, elements)), pallas.SwizzleTransform(swizzle)


def operand_block(shape: tuple[int, int], index: Callable[..., Any], dtype: Any) -> Any:
    """Return the specification of one pipeline stage of an operand."""
    return plgpu.BlockSpec(
        shape, index, transforms=swizzle_transforms(shape[1], dtype), delay_release=1
    )


def multiply_tile(
    operands: tuple[Any, Any],
    width: int,
    specs: list[Any],
    steps: Any,
    body: Callable[..., Any],
    out: Any,
    scratch: Any,
    pipe: dict[str, Any] | None,
) -> Any:
    """Compute one output tile and store it to `out`, or return the allocations for that.

    Args:
        operands: the two operands in global memory.
        width: the columns of the tile.
        specs: the block of each operand in one pipeline stage.
        steps: the number of pipeline steps.
        body: multiplies the blocks of one step, and adds the product to the accumulator.
        out: the tile in global memory.
        scratch: shared memory for stores.
        pipe: the shared memory of the pipeline.  None: return the allocations that it needs.

    """

    def store(evaluate: Any) -> None:
        def tile(acc: Any) -> None:
            evaluate(acc)
            half, wg = acc[...].astype(out.dtype), lax.axis_index("wg")
            rows = pl.ds(wg * HALF, HALF)
            for part in range(width // PART):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                columns = slice(part * PART, (part + 1) * PART)
                scratch[wg, part % 2] = half[:, columns]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch.at[wg, part % 2], out.at[rows, columns])

        pl.run_scoped(tile, plgpu.ACC((HALF, width), jnp.float32))

    run = plgpu.emit_pipeline_warp_specialized(
        body if pipe is not None else lambda *_: None,
        grid=(steps,),
        memory_registers=40,
        in_specs=specs,
        wg_axis="wg",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=STAGES,
        compute_context=store if pipe is not None else lambda _: None,
    )
    if pipe is None:
        return run.get_allocations(*operands)
    return run(*operands, allocations=pipe)


def num_sms() -> int:
    """Return the number of SMs of this process's GPUs."""
    return jax.local_devices(backend="gpu")[0].core_count


def launch_kernel(body: Any, out: Any, *operands: Any) -> Any:
    """Launch a kernel with one block on each SM."""
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(num_sms(),),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **interpreter,
    )
    return kernel(*operands)


def with_shared_memory(body: Any, allocations: Any, dtype: Any) -> None:
    """Run the body with shared memory that all tiles of a thread block reuse."""
    shape = (WARPGROUPS, 2, HALF, PART)
    pl.run_scoped(
        body,
        pipe=allocations,
        scratch=plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(PART, dtype)),
        collective_axes="wg",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def rows_by_weights(x: Any, w: Any, sizes: Any, transposed: bool = False) -> Any:
    """Multiply the rows of each slab by the weight of its expert.

    Args:
        x: [rows, k].
        w: [experts, k, n], or with `transposed` [experts, n, k].
        sizes: [experts]: number of rows of each slab, a multiple of TILE.
        transposed: whether to multiply by the transposed weights.

    Returns:
        [rows, n].

    """
    rows, k = x.shape
    n = w.shape[1] if transposed else w.shape[2]
    width = width_of(n)
    tiles, columns = rows // TILE, n // width
    last = jnp.cumsum(sizes) // TILE  # end of each slab, in tiles
    owner = jnp.searchsorted(last, jnp.arange(tiles), side="right").astype(jnp.int32)

    def kernel(owners: Any, x_ref: Any, w_ref: Any, out: Any) -> None:
        first = operand_block((TILE, STEP), lambda i: (0, i), x.dtype)
        if transposed:
            second = operand_block((width, STEP), lambda i: (0, i), x.dtype)
        else:
            second = operand_block((STEP, width), lambda i: (i, 0), x.dtype)

        def body(_: Any, a: Any, b: Any, acc: Any) -> Any:
            mine = a.at[pl.ds(lax.axis_index("wg") * HALF, HALF)]
            plgpu.wgmma(acc, mine, transpose_ref(b) if transposed else b)
            plgpu.wgmma_wait(1)
            return acc

        def tile(index: Any, scratch: Any, pipe: Any) -> Any:
            m, c = index
            expert = owners[m]
            row, column = pl.ds(m * TILE, TILE), pl.ds(c * width, width)
            mine = w_ref.at[expert]
            mine = mine.at[column, :] if transposed else mine.at[:, column]
            where = out.at[row, column]
            return multiply_tile(
                (x_ref.at[row], mine), width, [first, second], k // STEP, body, where, scratch, pipe
            )

        def tile_loop(scratch: Any, pipe: Any) -> None:
            @plgpu.nd_loop((tiles * columns,), collective_axes="sm")
            def all_tiles(loop: Any) -> None:
                m, c = plgpu.planar_snake(loop.index[0], (tiles, columns), 0, 8)

                @pl.when(owners[m] < sizes.shape[0])
                def occupied() -> None:
                    tile((m, c), scratch, pipe)

        allocations = multiply_tile(
            (x_ref.at[pl.ds(0, TILE)], w_ref.at[0]),
            width,
            [first, second],
            k // STEP,
            body,
            out,
            None,
            None,
        )
        with_shared_memory(tile_loop, allocations, x.dtype)

    return launch_kernel(kernel, jax.ShapeDtypeStruct((rows, n), x.dtype), owner, x, w)


def slab_products(x: Any, y: Any, sizes: Any) -> Any:
    """Return x^T y of each slab: [experts, k, n] from x [rows, k] and y [rows, n]."""
    k, n, experts = x.shape[1], y.shape[1], sizes.shape[0]
    width = width_of(n)
    tiles, columns = k // TILE, n // width
    steps = sizes // STEP
    begin = (jnp.cumsum(sizes) - sizes) // STEP

    def kernel(begins: Any, counts: Any, x_ref: Any, y_ref: Any, out: Any) -> None:
        def body(_: Any, a: Any, b: Any, acc: Any) -> Any:
            mine = a.at[:, pl.ds(lax.axis_index("wg") * HALF, HALF)]
            plgpu.wgmma(acc, transpose_ref(mine), b)
            plgpu.wgmma_wait(1)
            return acc

        def run(expert: Any, m: Any, c: Any, scratch: Any, pipe: Any) -> Any:
            start = begins[expert]
            specs = [
                operand_block((STEP, TILE), lambda i: (start + i, m), x.dtype),
                operand_block((STEP, width), lambda i: (start + i, c), x.dtype),
            ]
            where = out.at[expert].at[pl.ds(m * TILE, TILE), pl.ds(c * width, width)]
            return multiply_tile(
                (x_ref, y_ref), width, specs, counts[expert], body, where, scratch, pipe
            )

        def tile_loop(scratch: Any, pipe: Any) -> None:
            @plgpu.nd_loop((experts, tiles * columns), collective_axes="sm")
            def all_tiles(loop: Any) -> None:
                m, c = plgpu.planar_snake(loop.index[1], (tiles, columns), 0, 8)
                run(loop.index[0], m, c, scratch, pipe)

        with_shared_memory(tile_loop, run(0, 0, 0, None, None), x.dtype)

    out = jax.ShapeDtypeStruct((experts, k, n), x.dtype)
    return launch_kernel(kernel, out, begin.astype(jnp.int32), steps.astype(jnp.int32), x, y)


weights_transposed = partial(rows_by_weights, transposed=True)
