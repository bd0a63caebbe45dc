# SPDX-License-Identifier: Apache-2.0
"""Compares epic.torch.experts on CPUs with oneDNN for few rows per expert, on one core.

python bench/torch_experts.py --dtype bfloat16 --hidden 2048 --inner 768 --experts 16

Times are microseconds per expert: both products and the activation. "packed" is oneDNN of torch,
with weights that were converted once to oneDNN's own layout. "plain" is
torch.nn.functional.linear, with weights as PyTorch stores them. If vLLM for CPUs is installed,
"vllm" is its operator for experts. The programs run by turns, one expert after the other. Together
the weights are larger than the caches of a core, as in a model. Each time is the median, or with
--least the smallest one, for machines that other programs use.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import epic.torch
from epic import _native


def make_packed(weights: list[Tensor], rows: int) -> list[Tensor]:
    """Convert weights [n, k] to the layout that oneDNN prefers for this number of rows."""
    return [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]


def make_vllm_call(x: Tensor, ups: list[Tensor], downs: list[Tensor]) -> Callable[[int], Tensor]:
    """Return the function that computes an expert with vLLM, from weights [n, k]."""
    from vllm import _custom_ops as ops

    isa = "vec"
    if x.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        isa = "amx"  # as vLLM chooses
    w13, w2 = ([ops.cpu_prepack_moe_weight(w[None], isa) for w in part] for part in (ups, downs))
    weights, ids = torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int32)

    def run(e: int) -> Tensor:
        out = torch.empty_like(x)
        ops.cpu_fused_moe(out, x, w13[e], w2[e], None, None, weights, ids, "silu", isa, False)
        return out

    return run


def make_calls(
    rows: int, args: argparse.Namespace, dtype: torch.dtype
) -> dict[str, Callable[[int], Tensor]]:
    """Return the functions to compare; each computes the expert with this number."""
    hidden, inner, local = args.hidden, args.inner, args.experts
    w_up = torch.randn(local, hidden, 2 * inner).mul_(hidden**-0.5).to(dtype)
    w_down = torch.randn(local, inner, hidden).mul_(inner**-0.5).to(dtype)
    x = torch.randn(rows, hidden).to(dtype)
    counts = torch.full((1,), rows, dtype=torch.int32)
    options = epic.torch.Experts(hidden=hidden, inner=inner)
    weights = [
        epic.torch.ExpertWeights(up, down)
        for up, down in zip(w_up.split(1), w_down.split(1), strict=True)
    ]

    def run(up: Tensor, down: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        gate, value = linear(x, up).chunk(2, dim=1)
        return linear(functional.silu(gate) * value, down)

    def packed_linear(part: Tensor, w: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(part, w, None, "none", [], "")

    ups = [w.t().contiguous() for w in w_up]
    downs = [w.t().contiguous() for w in w_down]
    vllm = {"vllm": make_vllm_call(x, ups, downs)} if importlib.util.find_spec("vllm") else {}
    packed_ups, packed_downs = make_packed(ups, rows), make_packed(downs, rows)
    return {
        "epic": lambda e: epic.torch.experts(options, x, counts, counts, weights[e]),
        "packed": lambda e: run(packed_ups[e], packed_downs[e], packed_linear),
        "plain": lambda e: run(ups[e], downs[e], functional.linear),
    } | vllm


def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--least", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    print(_native.core().epic_blas_name().decode(), "and torch", torch.__version__)
    print(f"{args.dtype}, hidden {args.hidden}, inner {args.inner}, {args.experts} experts")
    for index, rows in enumerate(args.rows):
        calls = make_calls(rows, args, dtype)
        others = [name for name in calls if name != "epic"]
        if index == 0:
            ratios = (f"{'epic/' + name:>12}" for name in others)
            print("rows", *(f"{name:>9}" for name in calls), *ratios, "  difference")
        times: dict[str, list[float]] = {name: [] for name in calls}
        with torch.inference_mode():
            results = {name: calls[name](0).float() for name in calls}
            for turn in range(args.rounds * args.experts):
                for name in calls:
                    begin = time.perf_counter()
                    calls[name](turn % args.experts)
                    times[name].append((time.perf_counter() - begin) * 1e6)
        choose = min if args.least else statistics.median
        found = {name: choose(times[name]) for name in calls}
        one = results["epic"]
        apart = max(((one - results[n]).abs().max() / one.abs().max()).item() for n in others)
        print(
            f"{rows:4}",
            *(f"{found[name]:9.1f}" for name in calls),
            *(f"{found['epic'] / found[name]:12.2f}" for name in others),
            f"{apart:12.1e}",
        )


if __name__ == "__main__":
    main()
