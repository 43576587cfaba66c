"""Refuse a wheel that exports more than it should, points at the machine that built it, or lacks its types."""

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

NATIVE = "rmm_managed_bridge/_native"
# C functions that frameworks are given by address. Add a name here together with its `extern "C"` definition.
ENTRY_POINTS = frozenset(
    {
        "bridge_cupy_malloc",
        "bridge_cupy_free",
        "bridge_torch_malloc",
        "bridge_torch_pool_malloc",
        "bridge_torch_free",
        "bridge_torch_record_stream",
    }
)
MACHINES = {0x3E: "x86-64", 0xB7: "aarch64"}
SOURCES = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".pxd", ".pxi", ".pyx"})
# What the modules call in the one library: names of our namespace, as the compiler mangles them.
_OURS = re.compile(r"_ZN?[A-Z0-9]*10rmm_bridge|_ZT[VISH]N10rmm_bridge|_ZZ?N[KV]*10rmm_bridge|_ZGVZ?N[KV]*10rmm_bridge")
_RUNPATH = re.compile(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]")


def _tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_library(path: Path) -> list[str]:
    """Return what is wrong with the extension module at `path`, without the file's name."""
    header = path.read_bytes()[:20]
    if len(header) < 20 or header[:6] != b"\x7fELF\x02\x01":
        return ["not a 64-bit little-endian ELF file; build it on Linux"]
    machine = struct.unpack_from("<H", header, 18)[0]
    if machine not in MACHINES:
        return [f"ELF machine {machine:#x}; only {' and '.join(MACHINES.values())} are supported"]
    wrong = []
    is_library = path.name.startswith("lib")
    symbols = {line.split()[-1] for line in _tool("nm", "-D", "--defined-only", str(path)).splitlines() if line}
    init = f"PyInit_{path.name.split('.')[0]}"
    if not is_library and init not in symbols:
        wrong.append(f"does not export {init}, so Python cannot import it")
    for symbol in sorted(symbols):
        ours = symbol in ENTRY_POINTS or _OURS.match(symbol) if is_library else symbol.startswith("PyInit_")
        if not ours:
            wrong.append(f"exports {symbol}; hide it, or list it in ENTRY_POINTS")
    for entries in _RUNPATH.findall(_tool("readelf", "-d", "-W", str(path))):
        for entry in entries.split(":"):
            # A relative entry means the working directory of the process, which is no better than an absolute one.
            if not entry.startswith("$ORIGIN"):
                wrong.append(f"RUNPATH entry {entry!r}; only entries that start with $ORIGIN are portable")
    return wrong


def check(wheel: Path, forbidden: Sequence[str]) -> list[str]:
    """Return the findings for `wheel`, whose files must hold none of the texts in `forbidden`."""
    findings = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        libraries = [name for name in names if name.endswith(".so")]
        if not libraries:
            findings.append(f"{wheel}:1: holds no .so file; name a wheel with the native part")
        if "rmm_managed_bridge/py.typed" not in names:
            findings.append(f"{wheel}:1: rmm_managed_bridge/py.typed is missing; install it with the package")
        for name in names:
            place = f"{wheel}/{name}:1"
            content = archive.read(name)
            if PurePosixPath(name).suffix in SOURCES or PurePosixPath(name).name == "CMakeLists.txt":
                findings.append(f"{place}: source file in the wheel; exclude it")
            if PurePosixPath(name).parts[0] in ("tests", "ci", "docs") or "tests" in PurePosixPath(name).parts:
                findings.append(f"{place}: not part of the package; exclude it")
            for text in forbidden:
                if text.encode() in content:
                    findings.append(f"{place}: holds {text!r}, a path of the build machine; map or strip it")
        for name in libraries:
            stub = f"{name.split('.')[0]}.pyi"
            is_module = not PurePosixPath(name).name.startswith("lib")
            if name.startswith(f"{NATIVE}/") and is_module and stub not in names:
                findings.append(f"{wheel}/{name}:1: {stub} is missing; write the stub and install it")
            extracted = Path(archive.extract(name, folder))
            findings.extend(f"{wheel}/{name}:1: {wrong}" for wrong in check_library(extracted))
    return findings


def main() -> int:
    """Check the wheel named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--forbid", action="append", default=[], metavar="TEXT", help="path of the build machine")
    arguments = parser.parse_args()
    if "" in arguments.forbid:
        parser.error("--forbid needs a text that is not empty")
    findings = check(arguments.wheel, arguments.forbid)
    print("\n".join(findings) or f"{arguments.wheel.name}: nothing wrong")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
