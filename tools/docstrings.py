# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe for the site: prints "name: meaning" lines of docstrings as a list.

mkdocstrings would otherwise join such lines to one paragraph. Sections of Google's style stay as
they are.
"""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*)( \[[^\]]*\][^:]*)?: ")


def as_list(text: str) -> str:
    """Put "- " before each line that begins with a field's name, and indent its continuation
    lines."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        if found := FIELD.match(line):
            if not inside:
                out.append("")
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            out.append(f"- {names}{found[2] or ''}: {line[found.end() :]}")
            inside = True
        elif inside and line.strip():
            out.append("    " + line.strip())
        else:
            inside = False
            out.append(line)
    return "\n".join(out)


class FieldLists(griffe.Extension):
    """Rewrites every docstring while griffe reads the sources."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object."""
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
