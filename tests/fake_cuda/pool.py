"""A pool of the native core on the fake driver, with what tests do to it again and again."""

from typing import Any

from fake_cuda import FakeCuda, Stream
from rmm_managed_bridge.config import PoolSettings

KIB, MIB = 1 << 10, 1 << 20
EVERYTHING = 1 << 62


class Owner:
    """Stands for a framework's stream object: the stream lives as long as this does."""


class Bench:
    """A heap on one device of the fake, and the streams and blocks that a test has there."""

    def __init__(
        self,
        fake: FakeCuda,
        *,
        device: int = 0,
        limit_bytes: int = EVERYTHING,
        track: str = "sites",
        concurrent: bool = True,
        **settings: Any,
    ) -> None:
        """`settings`: further fields of `PoolSettings`.

        Without ``retain="budget"`` all is retained: the bridge's thread would call the driver when it likes. Nothing is
        populated unless asked for.
        """
        from rmm_managed_bridge._native import blocks, ledger
        from rmm_managed_bridge._native import pool as native_pool
        from rmm_managed_bridge._native import process as native_process

        self.fake, self.ledger, self.blocks, self.device = fake, ledger, blocks, device
        self.native_process = native_process
        self.limit_bytes = limit_bytes
        self.heap = native_pool.host_pool(
            ordered=True,
            device=device,
            kind="managed",
            settings=PoolSettings(limit_bytes=limit_bytes, **{"retain": "all", "populate": False, **settings}),
            track=track,
            concurrent=concurrent,
        )
        self.owners: dict[Stream, Owner] = {}
        self.live: dict[int, tuple[int, Stream | None]] = {}

    def borrowed(self, *, blocking: bool = False) -> Stream:
        """Return a new stream whose object the bridge does not hold."""
        return self.fake.stream(blocking=blocking, device=self.device)

    def owned(self, *, blocking: bool = False) -> Stream:
        """Return a new stream whose object the bridge holds too."""
        stream = self.borrowed(blocking=blocking)
        self.adopt(stream)
        return stream

    def adopt(self, stream: Stream) -> None:
        """Give the bridge a reference to the stream's object, as an adapter does."""
        owner = self.owners.setdefault(stream, Owner())
        self.heap.hold(stream.handle, owner)

    def allocate(self, size_bytes: int, stream: Stream | None = None, *, cpu: bool = False) -> int:
        """Return a block that overlaps no live one."""
        ptr = int(self.heap.allocate(size_bytes, stream=None if stream is None else stream.handle, cpu=cpu))
        self.add(ptr, size_bytes, stream)
        return ptr

    def add(self, ptr: int, size_bytes: int, stream: Stream | None) -> None:
        """Note a live block, which overlaps no other."""
        for other, (size, _) in self.live.items():
            assert ptr + size_bytes <= other or other + size <= ptr, "two live blocks overlap"
        self.live[ptr] = size_bytes, stream

    def free(self, ptr: int, stream: Stream | None = None) -> None:
        """Free a block; `stream` is where its last use is ordered."""
        size, _ = self.live.pop(ptr)
        self.heap.deallocate(ptr, size, stream=None if stream is None else stream.handle)

    def expose(self, ptr: int, stream: Stream) -> None:
        """Tell the bridge that the stream may touch the block."""
        assert self.blocks.record_stream(ptr, stream.handle)

    def order(self, ptr: int, stream: Stream) -> None:
        """Make the stream wait for the block's work, as a view does."""
        assert self.blocks.order(ptr, stream.handle)

    def used_and_freed(self, size_bytes: int, stream: Stream, *, state_stream: bool = True) -> tuple[int, int]:
        """Allocate on the stream, enqueue work there and free: return the block and the unfinished operation."""
        ptr = self.allocate(size_bytes, stream)
        operation = self.fake.enqueue(stream)
        self.free(ptr, stream if state_stream else None)
        return ptr, operation

    @property
    def reserved_bytes(self) -> int:
        """What the pool holds from upstream."""
        return int(self.heap.numbers[0])

    @property
    def quarantined_bytes(self) -> int:
        """What waits for device work."""
        return int(self.heap.numbers[2])

    def close(self) -> bool:
        """End all work, free what is live and close the heap; return True if it closed."""
        self.fake.finish_all()
        for ptr, (_, stream) in list(self.live.items()):
            alive = stream is not None and self.fake.lib.fake_stream_id(stream.handle, self.device) == stream.id
            self.free(ptr, stream if alive else None)
        self.owners.clear()
        if not self.heap.closed:
            self.heap.retire()
        return bool(self.heap.closed)
