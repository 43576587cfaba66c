"""Bad input: an error that names the fix, and nothing changed. Never an abort, never a hang."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rmm
from helpers.programs import HostMemory

import rmm_managed_bridge as bridge

MIB = 1 << 20


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which anything is installed, held or hooked that was not before."""
    initialize, resource = rmm.rmm._initialize, rmm.mr.get_per_device_resource(0)
    pools = bridge.stats().pools
    yield
    assert not bridge.status().installed
    if not {"allocator", "host_heap"} & set(request.fixturenames):
        assert {each.number for each in bridge.stats().pools} <= {each.number for each in pools}
    assert not bridge.owns(np.ones(10))
    assert rmm.rmm._initialize is initialize
    assert rmm.mr.get_per_device_resource(0) is resource


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "cuda"}, bridge.ConfigError, "'managed'"),
        ({"backend": 7}, bridge.ConfigError, "'auto'"),
        ({"frameworks": ["numpie"]}, bridge.FrameworkError, "use numpy, cupy, warp"),
        ({"frameworks": "numpy tensorflow"}, bridge.FrameworkError, "'tensorflow'.*use numpy"),
        ({"frameworks": 7}, bridge.ConfigError, "frameworks"),
        ({"frameworks": [7]}, bridge.FrameworkError, "use numpy"),
        ({"initial_pool_size": "2 gigs"}, bridge.ConfigError, "initial_pool_size='2 gigs'.*'2GiB'"),
        ({"maximum_pool_size": "much"}, bridge.ConfigError, "maximum_pool_size='much'.*'2GiB'"),
        ({"maximum_pool_size": -1}, bridge.ConfigError, "between 0 and"),
        ({"maximum_pool_size": 1 << 63}, bridge.ConfigError, "between 0 and"),
        (
            {"maximum_pool_size": 0},
            bridge.ConfigError,
            "maximum_pool_size=0 is less than a pool.*256 KiB",
        ),
        ({"maximum_pool_size": 1}, bridge.ConfigError, "maximum_pool_size=1 is less than a pool can work with"),
        ({"maximum_pool_size": True}, bridge.ConfigError, "maximum_pool_size=True is not a size"),
        ({"maximum_pool_size": "50%"}, bridge.ConfigError, "maximum_pool_size='50%'.*no share of the memory"),
        (
            {"maximum_pool_size": "1G", "initial_pool_size": "2G"},
            bridge.ConfigError,
            r"initial_pool_size \(1.86 GiB\) is more than maximum_pool_size \(954 MiB\)",
        ),
        ({"maximum_pool_size": 1.5}, bridge.ConfigError, "integer of bytes"),
        ({"numpy_min_bytes": "few"}, bridge.ConfigError, "numpy_min_bytes='few'"),
        ({"numpy_min_bytes": -1}, bridge.ConfigError, "between 0 and"),
        ({"fork": "always"}, bridge.ConfigError, "fork='always'.*'copy', 'warn', 'refuse'"),
        ({"fork_limit": "few"}, bridge.ConfigError, "fork_limit='few'"),
        ({"numpy_scope": "thread"}, bridge.ConfigError, "numpy_scope='thread'.*'context'"),
        ({"track": "everything"}, bridge.ConfigError, "'sites', 'counters', 'off'"),
        ({"devices": "all of them"}, bridge.ConfigError, r"write \[0\]"),
        ({"devices": -1}, bridge.ConfigError, r"write \[0\]"),
        ({"devices": []}, bridge.ConfigError, r"write \[0\]"),
        ({"devices": [0]}, bridge.ConfigError, "the host backend has no devices; leave it out"),
    ],
    ids=str,
)
def test_install_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        bridge.install(**{"backend": "host"} | arguments)
    assert isinstance(caught.value, bridge.BridgeError)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BACKEND", "gpu"),
        ("FRAMEWORKS", "numpie"),
        ("MAXIMUM_POOL_SIZE", "2 gigs"),
        ("MAXIMUM_POOL_SIZE", "1 KiB"),
        ("TRACK", "1"),
        ("DEVICES", "x"),
    ],
)
def test_the_message_names_the_variable_it_came_from(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"RMM_BRIDGE_{variable}", value)
    with pytest.raises(bridge.BridgeError, match=f"RMM_BRIDGE_{variable}"):
        bridge.install()


@pytest.mark.requires("no_gpu")
@pytest.mark.parametrize("backend", ["managed", "system"])
def test_a_backend_that_needs_a_device_says_which_does_not(backend: str) -> None:
    with pytest.raises(bridge.BackendError, match=r"needs a CUDA device.*use backend='host'"):
        bridge.install(backend, initial_pool_size="64MiB")


@pytest.mark.parametrize("framework", ["cupy", "warp"])
def test_a_missing_framework_names_its_extra(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(bridge.FrameworkError, match=rf"pip install 'rmm-managed-bridge\[{framework}\]'"):
        bridge.install("host", frameworks=["numpy", framework])


@pytest.mark.parametrize("version", ["1.26.4", "2.0.2"])
def test_a_numpy_that_is_too_old_names_the_one_that_works(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(np, "__version__", version)
    with pytest.raises(bridge.FrameworkError, match=rf"NumPy {version} is too old; install numpy>=2.1"):
        bridge.install("host", frameworks=["numpy"])


@pytest.mark.parametrize("version", ["2.1.0rc1", "2.11.0.dev0+git", "3.0.0"])
def test_other_spellings_of_good_numpy_versions_work(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(np, "__version__", version)
    with bridge.installed("host", frameworks=["numpy"]):
        assert bridge.owns(np.ones(10))


@pytest.mark.requires("no_gpu")
@pytest.mark.parametrize("version", ["25.12.00", "26.12.00", "26.1", "26.100.0"])
def test_another_rmm_names_the_one_that_works(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    memory = HostMemory()
    monkeypatch.setattr(rmm, "__version__", version)
    with pytest.raises(bridge.BackendError, match=r"pip install 'rmm-cu13==26.10.\*'"):
        bridge.ManagedBridgeResource(memory.resource)
    assert not memory.given


@pytest.mark.parametrize("upstream", [None, 7, "managed", object(), rmm.mr.CudaMemoryResource], ids=str)
def test_an_upstream_that_is_no_rmm_resource_is_refused(upstream: Any) -> None:
    with pytest.raises(bridge.ConfigError, match="not an RMM memory resource; pass for example"):
        bridge.ManagedBridgeResource(upstream)


@pytest.mark.requires("no_gpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"track": "everything"}, "'sites', 'counters', 'off'"),
        ({"maximum_pool_size": "much"}, "'2GiB'"),
        ({"maximum_pool_size": -1}, "between 0 and"),
    ],
    ids=str,
)
def test_the_resource_refuses_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(bridge.ConfigError, match=message):
        bridge.ManagedBridgeResource(HostMemory().resource, **options)


@pytest.fixture(params=["heap", pytest.param("resource", marks=pytest.mark.requires("no_gpu"))])
def allocator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a host heap, then a resource: the two ways to ask for memory directly."""
    if request.param == "heap":
        yield request.getfixturevalue("host_heap")
        return
    memory = HostMemory()
    yield bridge.ManagedBridgeResource(memory.resource)
    assert not memory.wrong_frees


@pytest.mark.parametrize("size_bytes", [-1, -(1 << 40), -(1 << 63), -(1 << 64), -(1 << 100)])
def test_a_negative_size_is_a_value_error(allocator: Any, size_bytes: int) -> None:
    before = bridge.stats()
    with pytest.raises(ValueError, match="a size is 0 or more"):
        allocator.allocate(size_bytes)
    assert bridge.stats() == before


@pytest.mark.parametrize(
    "size_bytes", [1 << 50, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 100]
)
def test_an_absurd_size_is_a_memory_error_that_says_what_is_held(allocator: Any, size_bytes: int) -> None:
    with bridge.tag("holds"):
        kept = allocator.allocate(3 * MIB)
    before = bridge.stats()
    with pytest.raises(MemoryError, match=r"cannot allocate (?s:.*)3.00 MiB live(?s:.*)\"holds\"") as caught:
        allocator.allocate(size_bytes)
    if size_bytes == 1 << 50:
        assert "cannot allocate 1.00 PiB" in str(caught.value)
    after = bridge.stats()
    assert after.failures == before.failures + 1
    assert (after.current_bytes, after.current_count, after.reserved_bytes) == (
        before.current_bytes,
        before.current_count,
        before.reserved_bytes,
    )
    allocator.deallocate(kept, 3 * MIB)


@pytest.mark.parametrize("size_bytes", [1.5, "1", None, [1]])
def test_a_size_that_is_no_integer_is_a_type_error(allocator: Any, size_bytes: Any) -> None:
    with pytest.raises(TypeError):
        allocator.allocate(size_bytes)
    assert bridge.stats().current_count == 0


@pytest.mark.parametrize("size_bytes", [-1, -(1 << 64)])
def test_a_free_with_a_negative_size_frees_nothing(allocator: Any, size_bytes: int) -> None:
    kept = allocator.allocate(MIB)
    with pytest.raises(ValueError, match="size"):
        allocator.deallocate(kept, size_bytes)
    assert bridge.owns(kept)
    allocator.deallocate(kept, MIB)


@pytest.mark.parametrize("alignment", [0, 3, 100, 1 << 19, 1 << 40])
def test_an_alignment_that_cannot_be_is_refused(host_heap: Any, alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two up to 262144"):
        host_heap.allocate(100, alignment=alignment)


def test_the_numpy_allocator_refuses_a_kind_that_there_is_not() -> None:
    with pytest.raises(bridge.ConfigError, match="'nonsense' is not one of 'host'"), bridge.numpy_allocator("nonsense"):
        pass


@pytest.mark.parametrize("kind", ["managed", "pinned", None])
def test_the_numpy_allocator_alone_says_what_it_needs(kind: str | None) -> None:
    before = bridge.status()
    with pytest.raises(bridge.InstallError, match=r"call install\(\) first"), bridge.numpy_allocator(kind):
        pass
    assert bridge.status() == before
