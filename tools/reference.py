#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the C reference as Markdown, from include/epic/epic.h.

It contains an index, then the chapters of the header, with each comment above its declaration.

usage: reference.py HEADER OUT      appends to OUT
"""

import re
import sys
from pathlib import Path

CHAPTER = re.compile(r"^/\* -{5,} (.+?) -{3,}")
NAMES = (
    re.compile(r"^typedef (?:struct|enum) (epic_\w+) \{", re.M),
    re.compile(r"^(?:struct|enum) (epic_\w+) \{", re.M),
    re.compile(r"\b(epic_\w+)\((?!\*)[^;{]*\);", re.S),
    re.compile(r"^typedef [\w ]+?\*?\s?\*?(epic_\w+);", re.M),
    re.compile(r"^#define (EPIC_\w+)", re.M),
)


def chunks(header: str) -> list[str]:
    """Return the parts of the header between blank lines; comments and braces are not divided."""
    found: list[str] = []
    lines: list[str] = []
    comment = depth = 0
    for line in header.splitlines():
        if not line.strip() and not comment and not depth:
            if lines:
                found.append("\n".join(lines))
            lines = []
            continue
        lines.append(line)
        text = re.sub(r"/\*.*?\*/", "", line)
        comment = (comment or "/*" in text) and "*/" not in text
        depth += text.count("{") - text.count("}")
    return found + ["\n".join(lines)] if lines else found


def prose(comment: str) -> str:
    """Return the text of a comment as Markdown.

    Lines with "- ", "(a)", "NAME: " and the last lines of a call ("Errors: ") become lists. Other
    indented lines become code.
    """
    text = re.sub(r"^/\*+ ?|\s*\*/$", "", comment.strip())
    lines = [re.sub(r"^ ?\* ?", "", line) for line in text.splitlines()]
    out, code, item = [], False, False
    for line in lines:
        begins = bool(
            re.match(r"^ {2,3}(?:- |\(\w\) |[A-Z_]{4,}: )\S|^(?:Errors|Threads|CUDA): ", line)
        )
        item = begins or (item and line.startswith("    "))
        indented = not item and bool(re.match(r"^ {3,}\S", line))
        if indented != code:
            out.append("```text" if indented else "```")
        code = indented
        if begins and not (out and out[-1].startswith(("- ", "  "))):
            out.append("")
        if begins:
            line = "- " + line.strip().removeprefix("- ")
        elif item:
            line = "  " + line.strip()
        out.append(line if indented or begins or item else escape(line))
    return "\n".join([*out, "```"] if code else out)


def escape(line: str) -> str:
    """Escape text that Markdown would interpret, except *emphasis*."""
    line = re.sub(r"[<>_|\[\]]|\*(?!\w[\w ]*\*)(?<!\w\*)", lambda m: "\\" + m[0], line)
    return re.sub(r"^(\s*)([-+#])", r"\1\\\2", line.removeprefix("  "))


def name_of(code: str) -> str | None:
    """Return the name of the first declaration."""
    places = [(m.start(), m[1]) for pattern in NAMES if (m := pattern.search(code))]
    return min(places)[1] if places else None


def split(chunk: str) -> tuple[str, str]:
    """Return the comment at the beginning of a chunk, and the rest."""
    match = re.match(r"/\*.*?\*/\s*", chunk, re.S)
    if not match or not chunk[match.end() :].strip():
        return (chunk, "") if match else ("", chunk)
    return match[0], chunk[match.end() :]


def page(header: str) -> tuple[str, int]:
    """Return the whole page, and the number of declarations in it."""
    body: list[str] = []
    index: dict[str, list[str]] = {}
    chapter = "All of it"
    header = header[header.index("/* EPIC:") :].replace('extern "C" {\n', "")
    for chunk in chunks(header):
        head = CHAPTER.match(chunk)
        if head:
            chapter = head[1].strip().capitalize()
            body.append(f"## {chapter}\n")
            rest = re.sub(r"^/\* -+ .+? -+[ \t]*", "/* ", chunk)
            chunk = rest if len(rest.strip("/* \n")) else ""
        comment, code = split(chunk)
        code = re.sub(r"^EPIC_API ", "", code, flags=re.M)
        if re.match(r"#(if|endif|include|define EPIC_H|define EPIC_API)", code) or not chunk:
            if comment:
                body.append(prose(comment) + "\n")
            continue
        name = name_of(code)
        if name:
            body.append(f"### {name}\n")
            if not any(name in things for things in index.values()):
                index.setdefault(chapter, []).append(name)
        if comment:
            body.append(prose(comment) + "\n")
        if code.strip():
            body.append(f"```c\n{code.rstrip()}\n```\n")
    front: list[str] = []
    for name, things in index.items():
        links = ", ".join(f"[{thing}](#{thing.lower()})" for thing in things)
        front += [f"**{name}**: {links}", ""]
    return "\n".join(front + body), sum(map(len, index.values()))


def main() -> int:
    """Write the page; return 1 if it contains too few declarations."""
    text, num = page(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(sys.argv[2]).open("a", encoding="utf-8") as out:
        out.write("\n" + text)
    print(f"reference: {num} types, calls and numbers")
    return 0 if num > 100 else 1


if __name__ == "__main__":
    sys.exit(main())
