"""Refuse imports against the order in docs/design/layers.md, in circles, relative or of frameworks at module level."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "rmm_managed_bridge"
FRAMEWORKS = frozenset({"cupy", "cupy_backends", "cupyx", "torch", "warp"})
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("decorating", "units"),
    ("records",),
    ("_native",),
    ("frameworks",),
    ("config",),
    ("machine",),
    ("arrays",),
    ("hints",),
    ("overview", "tags"),
    ("adapters", "recordings", "reports", "views"),
    ("lifecycle",),
    ("__init__",),  # below cli, which uses the public names as any other program does
    ("cli",),
    ("__main__",),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
# (importer, imported) rooms that the order would let through.
REFUSED: dict[tuple[str, str], str] = {
    ("recordings", "_native"): "a recording is read where no bridge could be installed",
    ("reports", "_native"): "reports take records; let the caller read the ledger and pass what it read",
}
# Modules that may import a framework at module level, each with its reason; others must then import them lazily.
FRAMEWORK_MODULES: dict[str, str] = {
    "cli.demo.kernel": "Warp takes a kernel's source from a function at module level",
}

_STRING = re.compile(r"'''.*?'''|\"\"\".*?\"\"\"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|#[^\n]*", re.DOTALL)
_BRACKETS = re.compile(r"\(([^()]*)\)|\\(\n)")
_FUNCTION = re.compile(r"(async\s+)?def\b|c(p)?def\b(?!\s+(class|extern|enum|struct|union)\b)")
_IMPORT = re.compile(
    r"(?:^|[:;])\s*(?:from\s+(?P<source>[.\w\s]+?)\s+c?import\s+(?P<names>[^;]+)|c?import\s+(?P<modules>[^;]+))"
)


class Import(NamedTuple):
    """One imported name: `module` is absolute, or has `level` dots before it; `lazy` ones run after import time."""

    line: int
    level: int
    module: str
    name: str
    lazy: bool


def python_imports(source: str) -> Iterator[Import]:
    """Yield the imports of Python text, dynamic ones with a constant name included."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, lazy = pending.pop()
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, 0, alias.name, "", lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(node.lineno, node.level, node.module or "", alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(argument := node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(argument.value, str):
                level = len(argument.value) - len(argument.value.lstrip("."))
                yield Import(node.lineno, level, argument.value[level:], "", lazy)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend((child, True) for child in node.body)
            pending.extend((child, lazy) for child in (*node.decorator_list, node.args))
        elif isinstance(node, ast.Lambda):
            pending.append((node.body, True))
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend((child, True) for child in node.body)
            pending.extend((child, lazy) for child in node.orelse)
        else:
            pending.extend((child, lazy) for child in ast.iter_child_nodes(node))


def cython_imports(source: str) -> Iterator[Import]:
    """Yield the imports and cimports of Cython text, which Python's own parser cannot read."""
    text = _STRING.sub(lambda m: "" if m[0][0] == "#" else '""' + "\n" * m[0].count("\n"), source)
    before = ""
    # Innermost brackets first; a line break inside becomes a form feed, so that lines still count.
    while before != text:
        before, text = text, _BRACKETS.sub(lambda m: " " + (m[1] or m[2] or "").replace("\n", "\f") + " ", text)
    functions: list[int] = []
    number = 1
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped:
            indent = len(line) - len(line.lstrip())
            functions = [outer for outer in functions if outer < indent]
            for match in _IMPORT.finditer(stripped):
                lazy = bool(functions)
                if match["modules"]:
                    for module in match["modules"].split(","):
                        yield Import(number, 0, module.split()[0], "", lazy)
                else:
                    origin = "".join(match["source"].split())
                    level = len(origin) - len(origin.lstrip("."))
                    for name in match["names"].split(","):
                        if name.strip():
                            yield Import(number, level, origin[level:], name.split()[0], lazy)
            if _FUNCTION.match(stripped) and stripped.endswith(":"):
                functions.append(indent)
        number += 1 + line.count("\f")


def _target(found: Import, modules: set[str]) -> str:
    """Return the module of this package that is meant, without the package's name; empty for other packages."""
    if found.module.split(".")[0] != PACKAGE:
        return ""
    named = ".".join(part for part in (found.module, found.name) if part).removeprefix(PACKAGE).lstrip(".")
    if named in modules or named.split(".")[0] in LAYER_OF:
        return named if named in modules or not found.name else named.rpartition(".")[0] or named
    return "__init__"


def judge(module: str, found: Import, modules: set[str]) -> str:
    """Return what is wrong with one import of `module`, and what to do; empty if nothing is."""
    if found.level:
        return "relative import; write the full name"
    target = _target(found, modules)
    held = found.module.split(".")[0] in FRAMEWORKS or target in FRAMEWORK_MODULES
    if held and (module == "__init__" or not found.lazy) and module not in FRAMEWORK_MODULES:
        where = "in the package's __init__" if module == "__init__" else "at module level"
        return (
            f"imports {target or found.module} {where}; import it inside the function that needs it, in an adapter say"
        )
    if not target:
        return ""
    room, other = module.partition(".")[0], target.partition(".")[0]
    if (room, other) in REFUSED:
        return f"{room} must not import {other}; {REFUSED[room, other]}"
    if room == other == "adapters" and module not in ("adapters", target) and not target.startswith(f"{module}_"):
        return "adapters never import each other; move what they share to a room below adapters"
    if room == other or LAYER_OF.get(other, -1) < LAYER_OF[room]:
        return ""
    return (
        f"{room} must not import {other}, which is not below it; move what both need to a room below {room}, or pass "
        "it as an argument"
    )


def check(package: Path) -> list[str]:
    """Return the findings for the package folder `package`."""
    paths = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".pyx", ".pxd"))
    if not paths:
        return [f"{package}:1: no .py, .pyx or .pxd file here; name the package folder"]
    parts = {path: path.relative_to(package).with_suffix("").parts for path in paths}
    names = {path: ".".join(p[:-1] if len(p) > 1 and p[-1] == "__init__" else p) for path, p in parts.items()}
    findings = []
    edges: dict[str, dict[str, int]] = {}
    paths_of = {module: path for path, module in names.items()}
    for path, module in names.items():
        if module.split(".")[0] not in LAYER_OF:
            room = module.split(".", maxsplit=1)[0]
            findings.append(
                f"{path}:1: {room} is in no layer; add it to LAYERS in ci/tools/check_layers.py and to "
                "docs/design/layers.md, above all that it imports"
            )
            continue
        parse = python_imports if path.suffix == ".py" else cython_imports
        for found in sorted(parse(path.read_text(encoding="utf-8"))):
            wrong = judge(module, found, set(names.values()))
            if wrong:
                findings.append(f"{path}:{found.line}: {wrong}")
            elif (target := _target(found, set(names.values()))) in paths_of and target != module:
                edges.setdefault(module, {})[target] = found.line
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]  # as they import each other
        findings.append(
            f"{paths_of[circle[0]]}:{edges[circle[0]][circle[1]]}: imports in a circle, also inside functions: "
            f"{' -> '.join(circle)}; move what both need below both"
        )
    return list(dict.fromkeys(findings))


def main() -> int:
    """Check the folder given, or the package in the working directory."""
    findings = check(Path(sys.argv[1] if len(sys.argv) > 1 else PACKAGE))
    print("\n".join(findings) or "layers: nothing wrong")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
