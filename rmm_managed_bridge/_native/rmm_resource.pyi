from typing import Any, Self

from rmm.pylibrmm.device_buffer import DeviceBuffer
from rmm.pylibrmm.memory_resource import DeviceMemoryResource, UpstreamResourceAdaptor
from rmm.pylibrmm.stream import Stream
from typing_extensions import disjoint_base

from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native.process import KINDS as KINDS
from rmm_managed_bridge._native.process import TRACKS as TRACKS
from rmm_managed_bridge.config import PoolSettings

def stream_of_buffer(buffer: DeviceBuffer) -> Any: ...
def owner_of(stream: Stream) -> Any: ...

@disjoint_base
class NativeBridgeResource(UpstreamResourceAdaptor):
    def __new__(
        cls,
        upstream_mr: DeviceMemoryResource,
        *,
        ordered: bool,
        device: int,
        settings: PoolSettings | None,
        kind: str,
        track: str,
        hugepages: bool,
        concurrent: bool,
    ) -> Self: ...
    @property
    def pool(self) -> native_pool.Pool: ...
    # `stream` is what RMM takes: its own Stream, or any object with `__cuda_stream__`.
    def allocate(self, nbytes: int, stream: Any = ...) -> int: ...
    def deallocate(self, ptr: int, nbytes: int, stream: Any = ...) -> None: ...
    def get_allocated_bytes(self) -> int: ...
