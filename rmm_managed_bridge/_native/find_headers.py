"""Print, for CMake, the folder with rmm's .pxd files, librmm's folder, and then the include folders of the build requirements."""

import importlib.util
import sys
from pathlib import Path

import numpy


def package_folder(name: str) -> Path:
    """Return where a package lies without importing it: rmm would load its native libraries."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is needed to build rmm_managed_bridge and is not installed; see build-system in pyproject.toml")
    return Path(next(iter(spec.submodule_search_locations)))


def cuda_include() -> Path:
    """Return the folder with cuda.h from the nvidia-cuda-runtime wheel."""
    spec = importlib.util.find_spec("nvidia")
    for location in spec.submodule_search_locations or () if spec else ():
        for header in sorted(Path(location).glob("cu*/include/cuda.h")):
            return header.parent
    return sys.exit("nvidia-cuda-runtime is needed to build rmm_managed_bridge and is not installed")


librmm = package_folder("librmm")
folders = [
    package_folder("rmm").parent,
    librmm,
    librmm / "include",
    librmm / "include" / "rapids",
    cuda_include(),
    package_folder("rapids_logger") / "include",
    Path(numpy.get_include()),
]
print(";".join(str(folder) for folder in folders))
