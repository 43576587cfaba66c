"""A forked child, and what it may try with a pool that it inherited."""

import os
from collections.abc import Callable

from fake_cuda import Stream
from fake_cuda.pool import Bench

import rmm_managed_bridge as bridge
from rmm_managed_bridge.errors import BackendError, BridgeError


def in_forked_child(action: Callable[[], None]) -> str:
    """Run `action` in a forked child; return what went wrong there, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            said = ""
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


# What a child may try with what it inherited.
USES: dict[str, Callable[[Bench, Stream, int], object]] = {
    "allocate on a stream": lambda b, s, p: b.heap.allocate(64, stream=s.handle),
    "allocate for the host": lambda b, s, p: b.heap.allocate(64, cpu=True),
    "free": lambda b, s, p: b.heap.deallocate(p),
    "free on a stream": lambda b, s, p: b.heap.deallocate(p, stream=s.handle),
    "expose": lambda b, s, p: b.blocks.record_stream(p, s.handle),
    "order": lambda b, s, p: b.blocks.order(p, s.handle),
    "synchronize": lambda b, s, p: b.blocks.synchronize(p),
    "trim": lambda b, s, p: b.heap.trim(),
    "adopt": lambda b, s, p: b.heap.hold(s.handle, object()),
    "drop streams": lambda b, s, p: b.heap.drop_unused_streams(),
    "retire": lambda b, s, p: b.heap.retire(),
    "hint": lambda b, s, p: (bridge.prefetch(p, 0), bridge.advise(p, read_mostly=True), bridge.discard(p)),
    "look up": lambda b, s, p: (b.ledger.allocation_of(p), b.ledger.snapshot(), b.ledger.history()),
}


def attempt(use: str, bench: Bench, stream: Stream, ptr: int) -> None:
    """Try one of them: it may be refused, but not for another reason than the fork."""
    try:
        USES[use](bench, stream, ptr)
    except BackendError as error:
        assert "forked" in str(error)
    except BridgeError:
        pass
