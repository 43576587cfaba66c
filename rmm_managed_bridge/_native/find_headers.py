"""Print, for CMake, the folder with rmm's .pxd files, librmm's folder, and the include folders of what is built on."""

import importlib.util
import sys
from pathlib import Path

import numpy


def package_folder(name: str) -> Path:
    """Return where a package lies without importing it: rmm would load its native libraries."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"{name} is needed to build rmm_managed_bridge and is not installed; see build-system in pyproject.toml"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def cuda_includes() -> list[Path]:
    """Return the include folders of the nvidia-cuda-* wheels, which need not be installed in one place."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec.submodule_search_locations or ()) if spec else ()
    found = [folder for location in locations for folder in sorted(Path(location).glob("cu*/include"))]
    for header, wheel in (("cuda.h", "nvidia-cuda-runtime"), ("crt/host_defines.h", "nvidia-cuda-crt")):
        if not any((folder / header).is_file() for folder in found):
            sys.exit(f"{wheel} is needed to build rmm_managed_bridge and is not installed: no {header} was found")
    return found


librmm = package_folder("librmm")
folders = [
    package_folder("rmm").parent,
    librmm,
    librmm / "include",
    librmm / "include" / "rapids",
    *cuda_includes(),
    package_folder("rapids_logger") / "include",
    Path(numpy.get_include()),
]
print(";".join(str(folder) for folder in folders))
