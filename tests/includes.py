#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks includes and calls in the C sources, and imports in the Python package, for circles.

usage: includes.py ROOT

ROOMS lists the folders from the bottom up. A folder may include and call itself and the folders on
the lines before its own. Folders on one line do not use each other. Within a folder, calls between
files must not form a circle.

A call is an identifier that is followed by '(' inside a function or a macro. It counts if the file
does not define this function and another file of the folders TOPS does. Members
(x.name(...), x->name(...), x::name(...)) do not count, because a lower folder calls a higher one
through a table of functions.

The modules of bindings/python must not import each other in a circle, also not inside a function.

The exit status is 0 if there is no wrong include, call or import. Otherwise it is 1, and the program
prints them.
"""

import ast
import os
import re
import sys

TOPS = ("include", "src", "kernels", "bindings", "tools")
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
src/backend/shared src/bootstrap
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
bindings tools
bindings/jax bindings/torch tools/sim
"""

# Calls of higher folders that the design allows, as (folder of the caller, function).
ALLOWED = {
    # only in CUDA code, which includes kernels/cuda/common/ptx.cuh first
    ("src/rules", "reciprocal_approx"),
}

KEYWORDS = frozenset(
    "if for while switch return sizeof do else case _Alignas _Alignof alignas alignof defined "
    "__attribute__ __declspec _Static_assert static_assert asm __asm__ decltype noexcept "
    "__launch_bounds__ __align__ constexpr catch new delete typeof __typeof__".split()
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
    for top in TOPS:
        for folder, _, names in sorted(os.walk(os.path.join(root, top))):
            for name in sorted(names):
                if name.endswith((".c", ".cc", ".h", ".cu", ".cuh")):
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
    if "/" in name and not name.startswith("../"):
        return "src/" + name
    return os.path.normpath(os.path.join(os.path.dirname(path), name))


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


def is_member(code, i):
    """Return whether the token at index i follows '.', '->' or '::'."""
    before = [token for token, _ in code[max(i - 2, 0) : i]]
    return before[-1:] in (["."], ["->"]) or before == [":", ":"]


def is_call(code, i):
    """Return whether the token at index i is a name followed by '(', and no member or keyword."""
    name = code[i][0]
    return (
        i + 1 < len(code)
        and code[i + 1][0] == "("
        and (name[0].isalpha() or name[0] == "_")
        and name not in KEYWORDS
        and not is_member(code, i)
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
        # shared: the functions that other files can call. These are functions that are not
        # static, and all functions of a header.
        self.defined, self.shared, self.calls = set(), set(), {}
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
                    if not is_static or self.path.endswith((".h", ".cuh")):
                        self.shared.add(token)
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
                if not found or found.group(1).startswith("xla/"):
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
    """Return {function: files that define it for other files}."""
    owners = {}
    for source in files:
        for name in source.shared:
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


def callees_of(folder):
    """Return {path: {path of a called file: (line, function)}} of the files of a folder."""
    owners, callees = {}, {}
    for source in folder:
        for name in source.shared:
            owners.setdefault(name, []).append(source.path)
    for source in folder:
        found = callees[source.path] = {}
        for name, line in source.calls.items():
            for owner in owners.get(name, ()) if name not in source.defined else ():
                if os.path.splitext(owner)[0] != os.path.splitext(source.path)[0]:
                    found.setdefault(owner, (line, name))
    return callees


def circle_from(callees, start):
    """Return the files of a shortest circle of calls from `start` to itself, or None."""
    ways = [[start]]
    reached = set()
    for way in ways:  # grows in the loop
        for path in callees[way[-1]]:
            if path == start:
                return way
            if path not in reached:
                reached.add(path)
                ways.append([*way, path])
    return None


def print_circles(callees, head, edge):
    """Print the circles in the graph `callees`; return their number.

    head: the first line for a circle. edge: the text for an edge, with the name and the callee.
    """
    circles = set()
    for start in callees:
        circle = circle_from(callees, start)
        if not circle or frozenset(circle) in circles:
            continue
        circles.add(frozenset(circle))
        print(head)
        for caller, callee in zip(circle, [*circle[1:], start]):
            line, name = callees[caller][callee]
            print(f"    {caller}:{line} {edge.format(name, callee)}")
    return len(circles)


def check_circles(files):
    """Print the circles of calls between the files of a folder; return their number."""
    folders, found = {}, 0
    for source in files:
        folders.setdefault(os.path.dirname(source.path), []).append(source)
    for folder in folders.values():
        head = "these files call each other in a circle:"
        found += print_circles(callees_of(folder), head, "calls {0}() of {1}")
    return found


def module_of(path):
    """Return the name of the module in a file below bindings/python."""
    name = os.path.splitext(path)[0].replace(os.sep, ".")
    return name.removesuffix(".__init__")


def imports_of(module, text, modules):
    """Yield (line, name) of each module of `modules` that a module imports, also in functions.

    `import epic` in the module epic.x does not count: it is the package that Python has begun to
    import before epic.x. But `from epic import Name` counts, because epic/__init__.py defines Name.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names if not module.startswith(x.name + ".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            submodules = [f"{node.module}.{x.name}" for x in node.names]
            names = [name if name in modules else node.module for name in submodules]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in modules)


def check_imports(root):
    """Print the circles of imports between the modules of bindings/python; return their number."""
    top = os.path.join(root, "bindings", "python")
    modules = {}
    for folder, _, names in sorted(os.walk(top)):
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                modules[module_of(os.path.relpath(path, top))] = path
    callees = {}
    for module, path in modules.items():
        with open(path, encoding="utf-8") as file:
            lines = imports_of(module, file.read(), modules)
            callees[module] = {name: (line, name) for line, name in lines}
    if len(modules) < 50 or sum(map(len, callees.values())) < 200:
        print(f"only {len(modules)} Python modules and their imports were found")
        return 1
    return print_circles(callees, "these modules import each other in a circle:", "imports {1}")


def main(root):
    levels, paths = levels_of(ROOMS), list(sources(root))
    files = []
    for path in paths:
        with open(os.path.join(root, path), encoding="utf-8") as file:
            files.append(Source(path, file.read()))
    owners = owners_of(files)
    num_includes, wrong_includes = check_includes(root, paths, levels)
    num_calls, wrong_calls = check_rooms(files, owners, levels)
    wrong_calls += check_circles(files) + check_imports(root)
    if num_includes < 100 or num_calls < 300:
        print(f"only {num_includes} includes and {num_calls} calls were found")
        return 1
    wrong = wrong_includes + wrong_calls
    print(f"{num_includes} includes, {num_calls} functions called across folders, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
