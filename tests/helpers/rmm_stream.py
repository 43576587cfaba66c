"""Streams of the fake driver as RMM takes them."""

from typing import Any

import rmm
from fake_cuda import Stream


class CudaStream:
    """A stream as other libraries show theirs to RMM."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def rmm_stream(stream: Stream) -> Any:
    return rmm.pylibrmm.stream.Stream(obj=CudaStream(stream.handle))
