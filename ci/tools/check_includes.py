"""Refuse C++ includes against the order of the folders in _native/cpp, in circles, and of what one folder may name."""

import graphlib
import re
import sys
from pathlib import Path

FOLDERS = ("base", "driver", "pages", "ledger", "recording", "hints", "streams", "pool", "entry")
"""Each leans only on those before it, and on itself. _native/cpp/README.md lists them in this order."""

# Header, folders or files that may include it, and why nobody else does.
RESERVED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Python.h", ("entry",), "the interpreter is met in entry/ alone, so that all else is tested without it"),
    ("cuda.h", ("driver",), "the driver is called through the table in driver/driver.hpp"),
    ("rmm/", ("entry/rmm.hpp",), "one module is linked to RMM, and no other breaks with a release of it"),
)

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_EXTERN = re.compile(r'^cdef extern from "([a-z_]+/[a-z_]+\.hpp)"')
_LISTED = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def includes(path: Path) -> list[tuple[int, str, bool]]:
    """Return (line, name, whether it is in quotes) of each include."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := _INCLUDE.match(line):
            found.append((number, match[2], match[1] == '"'))
    return found


def _wrong(name: str, target: str, quoted: bool, files: set[str]) -> str:
    """Return what is wrong with one include of the file `name`; empty if nothing is."""
    folder = name.split("/", maxsplit=1)[0]
    if quoted:
        if target not in files:
            return f"includes {target!r}, which is no file here; write folder/file.hpp"
        if FOLDERS.index(target.split("/", maxsplit=1)[0]) > FOLDERS.index(folder):
            return f"{folder} must not include {target}, which is above it; move what both need to a folder below"
        return ""
    for header, allowed, reason in RESERVED:
        if (target == header or (header.endswith("/") and target.startswith(header))) and not (
            folder in allowed or name in allowed
        ):
            return f"includes <{target}>; {reason}"
    return ""


def check(native: Path) -> list[str]:
    """Return the findings for the folder `native`, which holds cpp/ and Cython modules."""
    cpp = native / "cpp"
    paths = {path.relative_to(cpp).as_posix(): path for path in sorted(cpp.rglob("*.?pp"))}
    if not paths:
        return [f"{cpp}:1: no C++ file here; name the folder that holds cpp/"]
    findings = []
    edges: dict[str, dict[str, int]] = {}
    for name, path in paths.items():
        if name.split("/")[0] not in FOLDERS or name.count("/") != 1:
            findings.append(f"{path}:1: not in one of the folders {', '.join(FOLDERS)}; move it there")
            continue
        for line, target, quoted in includes(path):
            if wrong := _wrong(name, target, quoted, set(paths)):
                findings.append(f"{path}:{line}: {wrong}")
            elif quoted:
                edges.setdefault(name, {})[target] = line
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]  # as they include each other
        line = edges[circle[0]][circle[1]]
        findings.append(f"{paths[circle[0]]}:{line}: includes in a circle: {' -> '.join(circle)}; let one of them go")
    readme = cpp / "README.md"
    listed = tuple(_LISTED.findall(readme.read_text(encoding="utf-8"))) if readme.exists() else ()
    if listed != FOLDERS:
        findings.append(f"{readme}:1: lists the folders {', '.join(listed) or '(none)'}, not {', '.join(FOLDERS)}")
    for path in sorted((*native.glob("*.pyx"), *native.glob("*.pxd"))):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = _EXTERN.match(text)
            if match and match[1] not in paths:
                findings.append(f"{path}:{number}: declares from {match[1]!r}, which is no file of cpp/")
    return findings


def main() -> int:
    """Check the folder given, or the package's in the working directory."""
    findings = check(Path(sys.argv[1] if len(sys.argv) > 1 else "rmm_managed_bridge/_native"))
    print("\n".join(findings) or "includes: nothing wrong")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
