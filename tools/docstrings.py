# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe for the site: rewrites lists and examples of docstrings as Markdown.

Without it, mkdocstrings would join "name: meaning" lines to one paragraph, and show ">>>" as a
quotation. Sections in Google style, such as Args, do not change.
"""

import re
import textwrap
from typing import Any

import griffe

FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*)( \[[^\]]*\][^:]*)?: ")


def as_list(text: str) -> str:
    """Return a docstring with "- " before each line that begins with "name: ".

    Lines after such a line, up to an empty line, are indented.
    """
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


def fence_example(text: str) -> str:
    """Return a docstring with the code of its section "Example:" in a code block.

    A section that only names another place ("See ...") does not change.
    """
    before, title, example = text.partition("Example:\n")
    code = textwrap.dedent(example).rstrip()
    if not code or code.startswith("See "):
        return text
    return before + title + textwrap.indent("```python\n" + code + "\n```\n", "    ")


class FieldLists(griffe.Extension):
    """Rewrites every docstring while griffe reads the sources."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object; griffe calls this for each object."""
        if obj.docstring:
            obj.docstring.value = fence_example(as_list(obj.docstring.value))
