#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes and calls in the C sources go only to lower folders and files.

usage: includes.py ROOT

ROOMS lists the folders from the bottom up. A folder may include and call itself and the folders on
the lines before its own. Folders on one line do not use each other. FILES does the same for the
files of some folders, so that two files never call each other.

A call is an identifier that is followed by '(' inside a function or a macro. It counts if the file
does not define this function and another file of src, kernels or include does. Members
(x.name(...), x->name(...), x::name(...)) do not count, because a lower folder calls a higher one
through a table of functions. The exit status is 0 if there is no wrong include or call. Otherwise
it is 1, and each one is printed on a line.
"""

import os
import re
import sys

ROOMS = """
include/epic
kernels/host
src/rules
kernels/cuda/common src/base
kernels/cuda/net kernels/cuda/experts kernels/cuda/router
kernels/cuda/plan
kernels/cuda/dispatch kernels/cuda/allreduce
kernels/cuda/combine
kernels/cuda/lowlat
src/backend
src/backend/shared src/bootstrap src/members
src/net
src/net/striped
src/backend/self src/backend/threads src/backend/shm src/backend/mpi src/backend/p2p src/net/ucx
src/backend/hosts
src/context
src/plan
src/exchange
src/host_ops
src/api
src/router src/experts
src/moe
src/dispatcher
"""

# Files of a folder from the bottom up, without ".c". Every .c file of the folder must be listed.
FILES = {
    "src/moe": """
        dense_f32 dense_f64
        config
        buffers arrays
        args saved f64_weights losses
        stages
        host_forward device
        host_backward device_forward device_backward
        moe
    """,
    "src/backend/mpi": """
        runtime
        tables liveness
        control
        op_slots
        peer_status staging
        progress
        wait drain
        lifecycle
        create bootstrap
        join
        mpi
    """,
    "src/backend/shared": """
        segment
        wake
        failure
        op_slots rings
        peer_status
        wait
        group
        windows
    """,
}

# Calls of higher folders that the design allows, as (folder of the caller, function).
ALLOWED = {
    # only in CUDA code, which includes kernels/cuda/common/ptx.cuh first
    ("src/rules", "reciprocal_approx"),
}

KEYWORDS = frozenset(
    "if for while switch return sizeof do else case _Alignas _Alignof alignas alignof defined "
    "__attribute__ __declspec _Static_assert static_assert asm __asm__ decltype noexcept "
    "__launch_bounds__ __align__ catch new delete typeof __typeof__".split()
)
TOKEN = re.compile(r"[A-Za-z_]\w*|->|\.\.\.|[^\s\w]|\d[\w.]*")
COMMENT_OR_STRING = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)


def levels_of(text):
    """Return {name: level} of a list whose lines are levels."""
    lines = text.strip().split("\n")
    return {name: level for level, line in enumerate(lines) for name in line.split()}


def sources(root):
    """Yield the path of each C and CUDA file, relative to root."""
    for top in ("include", "src", "kernels"):
        for folder, _, names in sorted(os.walk(os.path.join(root, top))):
            for name in sorted(names):
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    yield os.path.relpath(os.path.join(folder, name), root)


def room_of(path):
    """Return the folder of a path; kernels/kernels.h is the interface of kernels/host."""
    folder = os.path.dirname(path)
    return "kernels/host" if folder == "kernels" else folder


def included_path(path, name):
    """Return the path that `#include "name"` in the file `path` means."""
    if name.startswith("epic/"):
        return "include/" + name
    if name.startswith(("cuda/", "host/")):
        return "kernels/" + name
    if name.startswith("kernels/"):
        return name
    return "src/" + name if "/" in name else os.path.join(os.path.dirname(path), name)


def blank(match):
    """Replace a comment or a string by as many newlines as it has."""
    return " " + "\n" * match.group(0).count("\n")


def tokens_of(text):
    """Return [(token, line)] of the code and, as a second list, of the bodies of macros."""
    text = COMMENT_OR_STRING.sub(blank, text)
    code, macros, number, in_macro, in_directive = [], [], 0, False, False
    for line in text.split("\n"):
        number += 1
        body = line
        if not in_macro and not in_directive and line.lstrip().startswith("#"):
            found = re.match(r"\s*#\s*define\s+\w+(\([^)]*\)?)?(.*)", line)
            in_macro, in_directive = bool(found), not found
            body = found.group(2) if found else ""
        if in_macro:
            macros += [(token, number) for token in TOKEN.findall(body)]
        elif not in_directive:
            code += [(token, number) for token in TOKEN.findall(body)]
        if not line.endswith("\\"):
            in_macro = in_directive = False
    return code, macros


def closing(code, at):
    """Return the index of the ')' that belongs to the '(' at index `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i][0] == "(") - (code[i][0] == ")")
        if depth == 0:
            return i
    return len(code) - 1


def is_call(code, i):
    """Return whether the token at index i is a name followed by '(', and no member or keyword."""
    name = code[i][0]
    return (
        i + 1 < len(code)
        and code[i + 1][0] == "("
        and (name[0].isalpha() or name[0] == "_")
        and name not in KEYWORDS
        and (i == 0 or code[i - 1][0] not in (".", "->", ":"))
    )


def is_inner_definition(code, i):
    """Return whether the token at index i, inside braces, defines a method or a lambda."""
    if i + 2 < len(code) and (code[i + 1][0], code[i + 2][0]) == ("=", "["):
        return True
    if not is_call(code, i):
        return False
    end = closing(code, i + 1) + 1
    if end < len(code) and code[end][0] == "const":
        end += 1
    return end < len(code) and code[end][0] == "{"


class Source:
    """The functions that a file defines, and those that it calls."""

    def __init__(self, path, text):
        self.path, self.room = path, room_of(path)
        self.defined, self.exported, self.calls = set(), set(), {}
        self.has_methods = path.endswith((".cu", ".cuh"))
        code, macros = tokens_of(text)
        self.read_code(code)
        for i in range(len(macros)):
            self.add_call(macros, i)

    def add_call(self, code, i):
        if is_call(code, i):
            self.calls.setdefault(code[i][0], code[i][1])

    def read_code(self, code):
        depth, is_static, i = 0, False, 0
        while i < len(code):
            token = code[i][0]
            if token == "{":
                is_linkage = i > 0 and depth == 0 and code[i - 1][0] == "extern"
                depth += 0 if is_linkage else 1
            elif token == "}":
                depth = max(depth - 1, 0)
                is_static = is_static and depth > 0
            elif depth > 0:
                if self.has_methods and is_inner_definition(code, i):
                    self.defined.add(token)
                self.add_call(code, i)
            elif token == ";":
                is_static = False
            elif token == "static":
                is_static = True
            elif is_call(code, i):
                end = closing(code, i + 1)
                if end + 1 < len(code) and code[end + 1][0] == "{":
                    self.defined.add(token)
                    if not is_static:
                        self.exported.add(token)
                i = end
            i += 1


def check_includes(root, paths, levels):
    """Print the includes of higher folders; return the numbers of all and of wrong includes."""
    total = wrong = 0
    for path in paths:
        source = room_of(path)
        with open(os.path.join(root, path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                found = re.match(r'#include "([^"]*)"', line)
                if not found:
                    continue
                total += 1
                target = room_of(included_path(path, found.group(1)))
                where = f"{path}:{number}"
                if source not in levels or target not in levels:
                    missing = source if source not in levels else target
                    print(f"{where}: the folder {missing} is not in ROOMS of tests/includes.py")
                    wrong += 1
                elif source != target and levels[target] >= levels[source]:
                    print(f"{where}: {source} must not include {found.group(1)}")
                    wrong += 1
    return total, wrong


def owners_of(files):
    """Return {function: files that define it for others}."""
    owners = {}
    for source in files:
        for name in source.exported:
            owners.setdefault(name, []).append(source)
    return owners


def check_rooms(files, owners, levels):
    """Print the calls of higher folders; return the numbers of all and of wrong calls."""
    total = wrong = 0
    for source in files:
        if source.room == "include/epic":  # wrappers of functions that the header itself declares
            continue
        for name, line in sorted(source.calls.items()):
            if name in source.defined or name not in owners:
                continue
            rooms = {owner.room for owner in owners[name]}
            if source.room in rooms or (source.room, name) in ALLOWED:
                continue
            total += 1
            level = levels.get(source.room, -1)
            if not any(levels.get(room, level) < level for room in rooms):
                rooms = " and ".join(sorted(rooms))
                print(f"{source.path}:{line}: {source.room} must not call {name}() of {rooms}")
                wrong += 1
    return total, wrong


def check_files(files, owners, folder, order):
    """Print the calls of higher files in a folder; return their number."""
    levels, wrong = levels_of(order), 0
    inside = [source for source in files if source.room == folder and source.path.endswith(".c")]
    names = {source: os.path.basename(source.path)[:-2] for source in inside}
    for name in sorted(set(names.values()) ^ set(levels)):
        print(f"{folder}/{name}.c: FILES of tests/includes.py and the folder differ")
        wrong += 1
    for source in inside:
        for name, line in sorted(source.calls.items()):
            if name in source.defined:
                continue
            for owner in owners.get(name, []):
                if owner not in names or owner is source:
                    continue
                if levels.get(names[owner], -1) >= levels.get(names[source], len(levels)):
                    print(f"{source.path}:{line}: must not call {name}() of {owner.path}")
                    wrong += 1
    return wrong


def main(root):
    levels, paths = levels_of(ROOMS), list(sources(root))
    files = []
    for path in paths:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            files.append(Source(path, file.read()))
    owners = owners_of(files)
    num_includes, wrong_includes = check_includes(root, paths, levels)
    num_calls, wrong_calls = check_rooms(files, owners, levels)
    wrong_calls += sum(check_files(files, owners, *item) for item in FILES.items())
    if num_includes < 100 or num_calls < 300:
        print(f"only {num_includes} includes and {num_calls} calls were found")
        return 1
    wrong = wrong_includes + wrong_calls
    print(f"{num_includes} includes, {num_calls} functions called across folders, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
