"""install, uninstall, installed: once, more, undone, nested, from the environment."""

import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, run_python
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

MIB = 1 << 20


def test_import_has_no_effect_and_brings_no_framework() -> None:
    out = must_succeed(
        run_python(
            """
            import sys
            import rmm_managed_bridge as bridge

            print(sorted({"cupy", "warp", "torch", "rmm"} & set(sys.modules)), bridge.status().installed)
            import numpy as np

            print(np._core.multiarray.get_handler_name(np.empty(1)), bridge.stats().pools)
            """
        )
    )
    assert out == "[] False\ndefault_allocator ()\n"


def test_install_is_idempotent() -> None:
    first = bridge.install("host", frameworks=["numpy"])
    status = bridge.status()
    for arguments in ({}, {"backend": "auto"}, {"backend": "host"}, {"frameworks": "numpy"}, {"track": "sites"}):
        assert bridge.install(**arguments) is first
        assert bridge.status() == status
    bridge.uninstall()
    assert not bridge.status().installed


def test_uninstall_without_install_does_nothing() -> None:
    before = bridge.status()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.uninstall()
        bridge.uninstall()
    assert bridge.status() == before
    assert not before.installed


def test_other_settings_are_refused_and_change_nothing() -> None:
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB"):
        status = bridge.status()
        for arguments in (
            {"track": "off"},
            {"maximum_pool_size": "1GiB"},
            {"numpy_min_bytes": "1KiB"},
            {"backend": "managed"},
        ):
            with pytest.raises(bridge.InstallError, match=r"uninstall\(\) first"):
                bridge.install(**arguments)  # type: ignore[arg-type]
            assert bridge.status() == status
        assert bridge.owns(np.ones(10))


def test_a_setting_that_is_back_at_its_default_is_another_setting() -> None:
    with bridge.installed("host", frameworks=["numpy"], track="counters"):
        with pytest.raises(bridge.InstallError, match="track"):
            bridge.install("host", track="sites")
        assert bridge.status().track == "counters"


def test_a_bridge_uninstalls_only_itself() -> None:
    old = bridge.install("host", frameworks=["numpy"])
    bridge.uninstall()
    new = bridge.install("host", frameworks=["numpy"])
    old.uninstall()
    assert bridge.status().installed
    new.uninstall()
    assert not bridge.status().installed


@pytest.mark.behaviour("L7")
def test_nested_blocks_share_one_bridge_until_the_outermost_ends() -> None:
    with bridge.installed("host", frameworks=["numpy"]) as outer:
        with bridge.installed("host") as inner:
            assert inner is outer
        assert bridge.owns(np.ones(10))
        with pytest.raises(ZeroDivisionError), bridge.installed("host"):
            raise ZeroDivisionError
        assert bridge.owns(np.ones(10))
    assert not bridge.owns(np.ones(10))
    assert not bridge.status().installed


@pytest.mark.behaviour("L7")
def test_a_block_inside_an_installed_program_leaves_it_installed() -> None:
    bridge.install("host", frameworks=["numpy"])
    with bridge.installed("host"):
        assert bridge.owns(np.ones(10))
    still = (bridge.status().installed, bridge.owns(np.ones(10)))
    bridge.uninstall()
    assert still == (True, True), "a library's `with installed()` ended the program's own install()"


def test_the_block_of_one_install_uninstalls_it() -> None:
    with bridge.install("host", frameworks=["numpy"]) as installed:
        assert installed.backend == "host"
        assert installed.devices == ()
        assert repr(installed) == "<Bridge: host on host, hooked: numpy>"
    assert not bridge.status().installed


def test_a_handler_that_was_set_since_stays_and_the_user_is_told() -> None:
    before = numpy_handler.current()
    bridge.install("host", frameworks=["numpy"], numpy_scope="context")
    theirs = numpy_handler.NumpyHandler()
    numpy_handler.set_current(theirs.capsule)
    try:
        with pytest.warns(bridge.BridgeWarning, match="NumPy handler") as caught:
            bridge.uninstall()
        assert caught[0].filename == __file__
        assert numpy_handler.current() is theirs.capsule
    finally:
        numpy_handler.set_current(before)
    assert not bridge.owns(np.ones(10))


def test_uninstall_from_another_thread_says_what_it_could_not_undo() -> None:
    bridge.install("host", frameworks=["numpy"], numpy_scope="context")
    array = np.ones(10)
    caught: list[Any] = []

    def work() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            bridge.uninstall()
        caught.extend(found)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not bridge.status().installed
    # This context still has the handler, which is inactive: new arrays are not the bridge's.
    assert not bridge.owns(np.ones(10))
    assert bridge.owns(array)
    assert [each.category for each in caught] == [bridge.BridgeWarning]
    numpy_handler.set_current(None)


def test_a_numpy_hook_that_does_not_work_is_noticed_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_handler, "NAME", "somebody else")
    before = numpy_handler.current()
    with pytest.raises(bridge.FrameworkError, match="does not use the bridge's handler"):
        bridge.install("host", frameworks=["numpy"], numpy_scope="context")
    assert numpy_handler.current() is before
    assert not bridge.status().installed
    assert eventually(lambda: not bridge.stats().pools)
    assert not bridge.owns(np.ones(10))


def test_what_is_free_goes_back_when_arrays_outlive_the_bridge() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        kept = np.full(1000, 7, "u1")
        passing = [np.ones(40 * MIB, "u1") for _ in range(4)]
        del passing
        assert bridge.stats().reserved_bytes > 160 * MIB
    assert eventually(lambda: bridge.stats().reserved_bytes <= 64 * MIB), "one piece, in which the live array lies"
    assert (kept == 7).all()
    del kept
    assert eventually(lambda: not bridge.stats().pools)


def test_numpy_min_bytes_leaves_smaller_arrays_to_the_c_library() -> None:
    with bridge.installed("host", frameworks=["numpy"], numpy_min_bytes="1KiB"):
        assert [bridge.owns(np.empty(size, "u1")) for size in (1, 1023, 1024, MIB)] == [False, False, True, True]
        array = np.arange(100)
        array.resize(1000, refcheck=False)
        array.resize(10, refcheck=False)
        assert array.tolist() == list(range(10))


def test_the_pool_never_takes_more_than_its_maximum() -> None:
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB"):
        kept = []
        with pytest.raises(MemoryError):
            while True:
                kept.append(np.empty(8 * MIB, "u1"))
        assert len(kept) >= 7
        assert bridge.stats().reserved_bytes <= 64 * MIB
        del kept[:2]
        assert bridge.owns(np.empty(8 * MIB, "u1"))
        kept.clear()


ENVIRONMENT = {
    "RMM_BRIDGE_BACKEND": "host",
    "RMM_BRIDGE_FRAMEWORKS": "numpy",
    "RMM_BRIDGE_MAXIMUM_POOL_SIZE": "128MiB",
    "RMM_BRIDGE_NUMPY_SCOPE": "context",
    "RMM_BRIDGE_NUMPY_MIN_BYTES": "4KiB",
    "RMM_BRIDGE_TRACK": "counters",
    "RMM_BRIDGE_FORK": "warn",
    "RMM_BRIDGE_FORK_LIMIT": "1GiB",
}


def test_every_setting_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with bridge.installed() as installed:
        config = installed.config
        assert (config.backend, config.frameworks, config.track) == ("host", ("numpy",), "counters")
        assert (config.maximum_pool_size, config.numpy_min_bytes) == (128 * MIB, 4096)
        assert (config.fork, config.fork_limit, bridge.status().fork) == ("warn", 1024 * MIB, "warn")
        assert not bridge.owns(np.empty(4095, "u1"))
        array = np.empty(4096, "u1")
        record = bridge.allocation_of(array)
        assert record is not None
        assert record.site.file == "not recorded"


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RMM_BRIDGE_BACKEND", "nonsense")
    with bridge.installed("host", track="sites", numpy_min_bytes=0) as installed:
        assert (installed.config.track, installed.config.numpy_min_bytes) == ("sites", 0)
        assert bridge.owns(np.empty(1, "u1"))


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_TRACK", "")
    with bridge.installed("host", frameworks=["numpy"]):
        assert bridge.status().track == "sites"


@pytest.mark.requires("no_gpu")
def test_without_a_driver_install_says_once_that_it_uses_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rmm_managed_bridge"):
        bridge.install(frameworks=["numpy"])
        bridge.install(frameworks=["numpy"])
    bridge.uninstall()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "host" in caplog.text
    assert bridge.detect_backend()[0] == "host"


def test_status_and_stats_print() -> None:
    assert "not installed" in str(bridge.status())
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.empty(MIB, "u1")
        assert "numpy: hooked" in str(bridge.status())
        assert "live 1.00 MiB in 1" in str(bridge.stats())
        text = str(bridge.snapshot())
        assert f"{Path(__file__).name}:" in text
        assert "1.00 MiB" in text
        del array


def test_frameworks_that_are_imported_later_are_not_hooked_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "warp", raising=False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with bridge.installed("host"):
        assert dict(bridge.status().frameworks) == {"numpy": "hooked"}


def test_installing_for_no_framework_hooks_none() -> None:
    with bridge.installed("host", frameworks=[]):
        assert bridge.status().frameworks == {}
        assert not bridge.owns(np.ones(100))


def test_an_installation_that_fails_late_leaves_numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(around: object) -> None:
        raise ImportError("no rmm here")

    monkeypatch.setattr("rmm_managed_bridge.lifecycle.reinitialize.watch", fails)
    with pytest.raises(ImportError):
        bridge.install("host", frameworks=["numpy"])
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(100))


def test_what_install_tries_is_not_counted_at_the_line_that_installs() -> None:
    code = """
        import numpy as np
        import rmm_managed_bridge as bridge

        with bridge.tag("start"):
            bridge.install("host")
        assert list(bridge.stats().by("site")) == ["<rmm_managed_bridge: does NumPy use it?>:1"]
        assert "start" not in bridge.stats().by("tag")
        """
    must_succeed(run_python(code))
