"""What a NumPy program is told when memory is short: M1, N5."""

import threading
from typing import Any

import numpy as np
import pytest
from helpers.programs import run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

MIB = 1 << 20
ERROR: Any = np._core._exceptions._ArrayMemoryError  # type: ignore[attr-defined]


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.mark.behaviour("M1")
@pytest.mark.parametrize("make", [np.empty, np.zeros])
@pytest.mark.parametrize("scope", ["process", "context"])
def test_numpys_own_error_says_who_holds_the_memory(make: Any, scope: str) -> None:
    with bridge.installed("host", frameworks=["numpy"], numpy_scope=scope):
        with bridge.tag("kept"):
            kept = np.ones(8 * MIB, "u1")
        with pytest.raises(MemoryError) as caught:
            make(1 << 50, "u1")
        assert type(caught.value) is ERROR
        assert "Unable to allocate 1.00 PiB" in str(caught.value)
        (note,) = _notes(caught.value)
        assert note.startswith("cannot allocate 1.00 PiB: 8.00 MiB live")
        assert 'tag "kept"' in note
        assert f"{__file__}:" in note
        assert "largest free piece" in note
        small = np.ones(10)
        assert bridge.owns(small) and small.all()
        del kept, small


@pytest.mark.behaviour("M1")
def test_only_the_pools_own_refusals_are_noted_and_each_once() -> None:
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB"):
        array = np.ones(MIB, "u1")
        with pytest.raises(MemoryError) as caught:
            array.resize(
                128 * MIB, refcheck=False
            )  # NumPy tells it in another way, which leaves the refusal unasked for
        assert _notes(caught.value) == []
        assert _notes(ERROR((100,), np.dtype("u1"))) == []
        with pytest.raises(MemoryError) as caught:
            np.empty((16, 8 * MIB), "u1")
        assert len(_notes(caught.value)) == 1
        assert _notes(ERROR((16, 8 * MIB), np.dtype("u1"))) == []
        del array


@pytest.mark.behaviour("M1")
def test_the_limit_of_a_tag_and_a_failing_callback_are_told_too() -> None:
    def on_oom(size_bytes: int, attempt: int) -> bool:
        raise ValueError(f"{size_bytes} bytes, attempt {attempt}")

    with bridge.installed("host", frameworks=["numpy"], on_oom=on_oom):
        with bridge.tag("bounded", limit="1MiB"), pytest.raises(MemoryError) as caught:
            np.empty(8 * MIB, "u1")
        told, raised = _notes(caught.value)
        assert "tag 'bounded' has 0 B live of 1.00 MiB" in told
        assert raised.startswith("on_oom raised ValueError")


@pytest.mark.behaviour("M1")
def test_a_refusal_is_its_threads_own() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        handler = numpy_handler.default_handler()
        assert handler.malloc(1 << 46) == 0
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(numpy_handler.take_refusal()))
        thread.start()
        thread.join()
        assert other == [None]
        refusal = numpy_handler.take_refusal()
        assert refusal is not None
        assert refusal[0] == 1 << 46
        assert isinstance(refusal[1], MemoryError)
        assert numpy_handler.take_refusal() is None


def test_uninstall_takes_the_notes_off_unless_somebody_wrapped_the_function_since() -> None:
    before = ERROR.__init__
    with bridge.installed("host", frameworks=["numpy"]):
        assert ERROR.__init__ is not before
    assert ERROR.__init__ is before

    def theirs(error: Any, *args: Any) -> None:
        ours(error, *args)

    try:
        with bridge.installed("host", frameworks=["numpy"]):
            ours = ERROR.__init__
            ERROR.__init__ = theirs
        assert ERROR.__init__ is theirs
        assert _notes(ERROR((100,), np.dtype("u1"))) == []
    finally:
        ERROR.__init__ = before


def test_a_numpy_with_another_error_class_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(np._core._exceptions, "_ArrayMemoryError")  # type: ignore[attr-defined]
    with bridge.installed("host", frameworks=["numpy"]):
        assert bridge.owns(np.ones(10))


def test_the_note_is_printed_with_the_traceback() -> None:
    done = run_python(
        """
        import numpy as np
        import rmm_managed_bridge as bridge

        bridge.install("host")
        np.empty(1 << 50, "u1")
        """
    )
    assert done.returncode == 1
    assert "Unable to allocate 1.00 PiB" in done.stderr
    assert "cannot allocate 1.00 PiB: 0 B live" in done.stderr


@pytest.mark.behaviour("N5")
def test_after_a_failed_resize_the_array_is_whole_and_can_grow() -> None:
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB"):
        array = np.arange(MIB // 8)
        for _ in range(3):
            with pytest.raises(MemoryError):
                array.resize(128 * MIB // 8, refcheck=False)
            assert array.flags.owndata
            assert array.tolist() == list(range(MIB // 8))
        array.resize(2 * MIB // 8, refcheck=False)
        assert array[: MIB // 8].tolist() == list(range(MIB // 8))
        assert not array[MIB // 8 :].any()
        del array
