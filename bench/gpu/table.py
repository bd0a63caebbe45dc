# SPDX-License-Identifier: Apache-2.0
"""Prints results of gpu_bench as one table: a row per shape, operation and number of SMs.

table.py JSON

JSON: the file that gpu_bench wrote with json=, one object per line. A cell has the median time in
microseconds and its ratio to the floor of the same run.
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
    if result["routing"] != "uniform":
        text += f" {result['routing']}"
    if result.get("windows"):
        text += " windows"
    return text


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    columns = sorted({result["tokens"] for result in results})
    rows: dict[tuple[str, str, int], dict[int, str]] = {}
    for result in results:
        row = rows.setdefault((describe_shape(result), result["op"], result["sms"]), {})
        ratio = f" {result['of_floor']:.2f}x" if result["floor_us"] > 0 else ""
        row[result["tokens"]] = f"{result['us']:.1f}{ratio}"
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'shape':{width}} {'operation':18} {'SMs':>4}"]
    lines[0] += "".join(f"{count:>14}" for count in columns) + "   tokens"
    for (name, op, sms), cells in rows.items():
        line = f"{name:{width}} {op:18} {sms:>4}"
        lines.append(line + "".join(f"{cells.get(count, ''):>14}" for count in columns))
    return lines


def main() -> None:
    """Read the file and print the table."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = Path(sys.argv[1]).read_text().splitlines()
    results = [json.loads(line) for line in lines if line]
    if not results:
        sys.exit(f"{sys.argv[1]} has no results")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
