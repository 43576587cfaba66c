"""Pack the tests of one library, for a machine that has the library without them.

python tests/peers/archive.py warp OUT                                    # from the wheel that is installed here
python tests/peers/archive.py cupy OUT --git CHECKOUT --ref v14.2.0
python tests/peers/archive.py rmm OUT --git CHECKOUT --ref v26.10.00

Writes ``OUT/peers-<library>.tar.xz``. Unpacked, the folder is what compare.py wants as ``--sources``; the archives of
several libraries go into one.
"""

import argparse
import importlib.util
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from suites import SUITES  # noqa: E402 - a script among its helpers, not a package

FROM_GIT = {
    "cupy": ("LICENSE", "tests/conftest.py", "tests/cupy_tests/__init__.py", "tests/cupy_tests/core_tests/__init__.py"),
    "rmm": ("LICENSE", "python/rmm/rmm/tests/conftest.py"),
}
FOLDERS = {"cupy": "tests", "rmm": "python/rmm/rmm/tests"}


def _warp_files() -> Iterator[tuple[str, bytes]]:
    spec = importlib.util.find_spec("warp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("Warp is not installed here")
    package = Path(spec.submodule_search_locations[0])
    for name in ("__init__.py", "unittest_utils.py", "cuda/__init__.py", *SUITES["warp"].tests):
        yield f"warp/tests/{name}", (package / "tests" / name).read_bytes()


def _git_files(library: str, checkout: Path, ref: str) -> Iterator[tuple[str, bytes]]:
    wanted = [*FROM_GIT[library], *(f"{FOLDERS[library]}/{name}" for name in SUITES[library].tests)]
    if library == "cupy":
        wanted.append("tests/cupy_tests/cuda_tests/__init__.py")
    packed = subprocess.run(
        ["git", "archive", "--format=tar", ref, *wanted], cwd=checkout, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one archive and print its path and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("cupy", "rmm", "warp"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--git", type=Path, help="a clone of the library's repository")
    parser.add_argument("--ref", default="HEAD", help="the commit or tag that fits the installed version")
    given = parser.parse_args(arguments)
    if given.library != "warp" and given.git is None:
        parser.error(f"{given.library}'s tests are not in its wheel: pass --git with a clone of its repository")
    files = _warp_files() if given.library == "warp" else _git_files(given.library, given.git, given.ref)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"peers-{given.library}.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
