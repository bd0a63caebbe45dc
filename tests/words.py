#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks names: no function has a one-word name, and no file uses a replaced word.

usage: words.py ROOT

Each function or method of C or CUDA in src, kernels or bindings needs a name of at least two words,
such as plan_open. In their files no comment begins with What or Where. Texts, names of files and
patches do not contain a word that the project has replaced, except CHANGELOG.md and docs/lab.
"""

import re
import subprocess
import sys
from pathlib import Path

SOURCES = ("src/", "kernels/", "bindings/")
C_SUFFIXES = (".c", ".h", ".cc", ".cu", ".cuh")
HISTORY = ("CHANGELOG.md", "docs/lab/", "tests/words.py")

# A definition: a name and its arguments at the outermost level, then a brace.
DEFINITION = re.compile(r"^(?!#|\s|typedef|return|else)[^;{}()=]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)

# A definition in a struct. Constructors have the name of their struct, which begins with a capital.
METHOD = re.compile(
    r"^[ \t]+(?!return|else|typedef|if|for|while|switch|do\b)[\w<>:*&, ]*?[\w>*&]\s+[*&]?([a-z]\w*)"
    r"\((?:[^;{}()]|\([^()]*\))*\)\s*(?:const)?\s*\{",
    re.M,
)

REPLACED = re.compile(
    r"\b(?:"
    r"epic_meet\w*|epic_step_(?:open|close|dispatch|combine|config)\w*|epic_sum\b|epic_sum_args|"
    r"EPIC_WIRE\w*|epic_wire_name|placed_capacity|turn_back|Ledger|"
    r"failure\.step|epic/meeting|src/easy|src/meet|src/wire"
    r")"
)
# Words that are replaced also as a part of a name. wire_meshes() is a function of torchtitan.
WORDS = re.compile(
    r"(?<![A-Za-z])(?:ledger|guest|wire|tell|teller|told|untold|nobody|beside)s?(?![A-Za-z])(?!_meshes)",
    re.I,
)
# In names of files also words that are ordinary in a sentence.
FILE_WORDS = re.compile(
    r"(?<![a-z])(?:turns?|lives|sights?|places|parcels?|strands?|unheard|unsaid)(?![a-z])"
)
NO_SUBJECT = re.compile(r"/\*+ *(?:What|Where)\b(?! if\b)")


def strip_comments(text: str) -> str:
    """Removes comments and strings, and keeps line breaks so that line numbers stay valid."""

    def blank(match: re.Match[str]) -> str:
        return '""' if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])

    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def find_one_word_functions(path: str, text: str) -> list[str]:
    """Returns an error for each function definition with a one-word name."""
    found = []
    code = re.sub(r"__launch_bounds__\([^)]*\)|__attribute__\(\(.*?\)\)", "", strip_comments(text))
    for match in (*DEFINITION.finditer(code), *METHOD.finditer(code)):
        name = match[1]
        if "_" in name.strip("_") or name == "main" or name.isupper():
            continue
        line = code.count("\n", 0, match.start(1)) + 1
        found.append(f"{path}:{line}: function {name}() has a one-word name")
    return found


def find_replaced_words(path: str, text: str) -> list[str]:
    """Returns an error for each use of a replaced word."""
    return [
        f"{path}:{number}: the word {match[0]} was replaced"
        for number, line in enumerate(text.split("\n"), 1)
        for match in (*REPLACED.finditer(line), *WORDS.finditer(line))
    ]


def find_replaced_names(path: str) -> list[str]:
    """Returns an error if the name of a file has a replaced word."""
    matches = (*WORDS.finditer(path), *FILE_WORDS.finditer(path))
    return [f"{path}: the name has the word {match[0]}, which was replaced" for match in matches]


def find_comments_without_subject(path: str, text: str) -> list[str]:
    """Returns an error for each comment that begins with What or Where."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: the comment begins with no subject"
        for match in NO_SUBJECT.finditer(text)
    ]


def main() -> int:
    """Checks all files that git tracks, and prints the errors."""
    root = Path(sys.argv[1])
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        print("left out: names are checked in a checkout of git only")
        return 77
    problems, num_files = [], 0
    for path in listed.stdout.splitlines():
        if path.startswith(HISTORY) or path.endswith((".svg", ".png")):
            continue
        problems += find_replaced_names(path)
        try:
            text = (root / path).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        num_files += 1
        problems += find_replaced_words(path, text)
        if path.startswith(SOURCES) and path.endswith(C_SUFFIXES):
            problems += find_one_word_functions(path, text)
            problems += find_comments_without_subject(path, text)
    print("\n".join(problems))
    print(f"{num_files} files, {len(problems)} problems")
    return bool(problems) or num_files < 100


if __name__ == "__main__":
    sys.exit(main())
