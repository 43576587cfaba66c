"""Why memory of the bridge has no IPC handle, said where a framework is asked for one."""

from typing import Any, NoReturn

from rmm_managed_bridge._native import blocks
from rmm_managed_bridge.arrays.access import kind_at, pointer_of
from rmm_managed_bridge.errors import AccessError


def ipc_handle(x: Any) -> NoReturn:
    """Raise: memory of the bridge cannot be exported to another process.

    Parameters
    ----------
    x
        An array of any framework, or an address.

    Raises
    ------
    AccessError
        Always, with the reason and what to do instead.

    Examples
    --------
    >>> try:
    ...     bridge.ipc_handle(np.ones(1000))
    ... except bridge.AccessError as error:
    ...     print("multiprocessing.shared_memory" in str(error))
    True
    """
    ptr = pointer_of(x)
    kind = kind_at(x, ptr)
    if ptr == 0 or blocks.block_of(ptr) is None:
        raise AccessError(
            f"this {type(x).__name__} does not lie in a live block of the bridge; ask the framework that made it for "
            "its IPC handle"
        )
    raise AccessError(not_exportable(kind))


def not_exportable(kind: str) -> str:
    """Return why a block of this kind has no IPC handle, and what to do."""
    if kind == "managed":
        reason = "CUDA cannot export managed memory to another process"
    else:
        reason = f"{kind} memory of the bridge is part of a larger piece, of which CUDA exports all or nothing"
    return (
        f"no IPC handle: {reason}. Between processes use multiprocessing.shared_memory for arrays of the CPU; for the "
        "device, copy into memory that CUDA can export: a block of cudaMalloc (cupy.cuda.Memory, or Warp with "
        "ScopedMempool(device, False) and no custom allocator), or a CUDA memory pool made for export"
    )


class ExportGuard:
    """Stands in front of a framework's function that gives IPC handles, and refuses blocks of the bridge.

    The driver's own error for them says "invalid argument". Everything else goes through.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._theirs: Any = None
        self._mine: Any = None
        self._inherited = False

    def put(self) -> None:
        """Take the function's place."""
        theirs = getattr(self._owner, self._name)

        def ask(x: Any, *args: Any, **kwargs: Any) -> Any:
            ptr = pointer_of(x)
            if ptr != 0 and blocks.block_of(ptr) is not None:
                raise AccessError(not_exportable(kind_at(x, ptr)))
            return theirs(x, *args, **kwargs)

        ask.__name__, ask.__doc__ = self._name, getattr(theirs, "__doc__", None)
        self._theirs, self._mine = theirs, ask
        self._inherited = self._name not in vars(self._owner)
        setattr(self._owner, self._name, ask)

    def take_away(self) -> None:
        """Put the function back, unless somebody else took the place since."""
        if self._mine is not None and getattr(self._owner, self._name) is self._mine:
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._theirs)
        self._mine = None


def guard_torch(torch: Any) -> None:
    """Refuse IPC handles of pool memory in PyTorch from now on, and so in what `torch.multiprocessing` sends.

    For good: its allocator and memory pools stay, too, and tensors over pool memory may come from anywhere.
    """
    storage = torch.UntypedStorage
    if storage not in _guarded:
        _guarded.add(storage)
        ExportGuard(storage, "_share_cuda_").put()


_guarded: set[Any] = set()
"""PyTorch's class of storages, once it is guarded."""
