from typing import Final

from typing_extensions import CapsuleType

CPU: Final[int]
CUDA: Final[int]
CUDA_HOST: Final[int]
CUDA_MANAGED: Final[int]
CODES: Final[dict[str, int]]

def capsule(
    owner: object,
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    code: int,
    itemsize: int,
    device: tuple[int, int],
    readonly: bool,
    versioned: bool,
) -> CapsuleType: ...
