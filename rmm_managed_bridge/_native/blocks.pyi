from collections.abc import Callable
from typing import Any, Final, Protocol, Self, final

import numpy as np

from rmm_managed_bridge._native.process import KINDS as KINDS

NOBODY: int
CPU: int
STREAM: int

@final
class Block:
    start: Final[int]
    size_bytes: Final[int]
    kind: Final[str]
    device: Final[int]
    borrowed: Final[bool]
    def __init__(self, *args: object, **kwargs: object) -> None: ...

class _CurrentStream(Protocol):
    @property
    def handle(self) -> Callable[[int], int]: ...
    @property
    def object(self) -> Callable[[int], Any]: ...

@final
class KnownArray:
    source: Final[Any]
    framework: Final[Any]
    ptr: Final[int]
    shape: Final[tuple[int, ...]]
    strides: Final[tuple[int, ...] | None]
    dtype: Final[np.dtype[Any]]
    readonly: Final[bool]
    low: Final[int]
    size_bytes: Final[int]
    block: Final[Block | None]
    within: Final[bool]
    plain: Final[bool]
    def __init__(
        self,
        source: object,
        framework: object,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        readonly: bool,
    ) -> None: ...

@final
class Loan:
    source: Final[Any]
    def __new__(
        cls,
        source: object,
        ptr: int,
        device: int,
        current: _CurrentStream | None,
        hold: Callable[[int, Any], None] | None,
    ) -> Self: ...

def find(address: int) -> Block | None: ...
def block_of(address: int) -> tuple[int, int] | None: ...
def kind_of(ptr: int) -> str | None: ...
def device_of(ptr: int) -> int | None: ...
def driver_attribute(address: int, attribute: int, device: int = -1) -> int | None: ...
def reaches(ptr: int, device: int) -> bool: ...
def record_stream(ptr: int, stream: int) -> bool: ...
def order(ptr: int, stream: int) -> bool: ...
def synchronize(ptr: int) -> None: ...
def hand_over(ptr: int, used: int | None, to: int, user: int = 0, *, any_stream: bool = False) -> bool: ...
