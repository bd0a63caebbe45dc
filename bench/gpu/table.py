# SPDX-License-Identifier: Apache-2.0
"""Prints results of gpu_bench and gpu_moe as one table: a row per shape, operation, SMs and tokens.

table.py JSON [LAST]

JSON: the file that the programs wrote with json=, one object per line. LAST: such a file of an
earlier run. If a file has two results of the same case, the last one counts.

A row has the median time in microseconds, the time that nine in ten repetitions stay below, the
longest time, the ratio of the median to the floor of the same run, and its ratio to the median of
the earlier run with equally many ranks. Values that a file does not contain are left empty. After
the table the program prints how many rows have no ratio to the earlier run.
"""

import json
import sys
from pathlib import Path
from typing import Any


def describe_shape(result: dict[str, Any]) -> str:
    """Return the shape of a result, without default values."""
    text = f"{result['hidden']} {result['top_k']}/{result['experts']}"
    if result["layout"] != "expert":
        text += f" {result['layout']}"
    if result["type"] != "bf16":
        text += f" {result['type']}" + (" quantized on the way" if result["quantize"] else "")
    if result["scales"]:
        text += f" scales {result['scales']}"
    if result["alignment"] != 128:
        text += f" alignment {result['alignment']}"
    if not result["padding"]:
        text += " no padding"
    if result["routing"] != "uniform":
        text += f" {result['routing']}"
    if result.get("windows"):
        text += " windows"
    if result.get("note"):
        text += f", {result['note']}"
    return text


Key = tuple[str, str, int, int, int]


def key_of(result: dict[str, Any]) -> Key:
    """Return what identifies a result: shape, operation, SMs, tokens and ranks."""
    shape = describe_shape(result)
    return shape, result["op"], result["sms"], result["tokens"], result["ranks"]


def table(results: list[dict[str, Any]], last: dict[Key, float]) -> list[str]:
    """Return the lines of the table."""
    results = list({key_of(result): result for result in results}.values())
    width = max(len(describe_shape(result)) for result in results)
    heads = "".join(f"{head:>9}" for head in ("p50 us", "p90", "worst", "/ floor", "/ last"))
    lines = [f"{'shape':{width}} {'operation':18} {'SMs':>4} {'tokens':>6}{heads}"]
    missing = 0
    for result in results:
        key = key_of(result)
        shape, op, sms, tokens, _ = key
        values = [result.get(name) for name in ("us", "p90_us", "worst_us")]
        times = "".join(" " * 9 if value is None else f"{value:9.1f}" for value in values)
        floor = f"{result['of_floor']:.2f}" if result.get("floor_us", 0) > 0 else ""
        change = f"{result['us'] / last[key]:.2f}" if key in last else ""
        missing += key not in last
        lines.append(f"{shape:{width}} {op:18} {sms:>4} {tokens:>6}{times}{floor:>9}{change:>9}")
    if last and missing:
        ranks = ", ".join(str(number) for number in sorted({key[4] for key in last}))
        lines.append(f"{missing} of {len(results)} rows are not in the earlier run ({ranks} ranks)")
    return lines


def read(path: str) -> list[dict[str, Any]]:
    """Return the results in a file."""
    results = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    if not results:
        sys.exit(f"{path} has no results")
    return results


def main() -> None:
    """Read the files and print the table."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    last = {key_of(result): result["us"] for path in sys.argv[2:] for result in read(path)}
    print("\n".join(table(read(sys.argv[1]), last)))


if __name__ == "__main__":
    main()
