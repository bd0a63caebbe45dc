# SPDX-License-Identifier: Apache-2.0
"""Writes the metadata of an installed epic-moe, with the entry points of pyproject.toml.

So vLLM finds the plugin in a checkout that is not installed.

usage: entry_point.py FOLDER, which is then put into PYTHONPATH
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
name, version = project["name"].replace("-", "_"), project["version"]
folder = Path(sys.argv[1]) / f"{name}-{version}.dist-info"
folder.mkdir(parents=True, exist_ok=True)
text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
(folder / "METADATA").write_text(text)
lines = []
for group, entries in project["entry-points"].items():
    lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
