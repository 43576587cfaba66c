import json
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.info import installed_versions
from rmm_managed_bridge.cli.info_driver import describe_driver
from rmm_managed_bridge.cli.main import main
from rmm_managed_bridge.records import Generation, Status


@pytest.fixture(autouse=True)
def invented_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status(
        installed=True,
        backend="host",
        reason="asked for",
        devices=(),
        frameworks={"numpy": "hooked", "cupy": "no GPU here"},
        numpy_scope="process",
        track="sites",
        pools=(Generation(1, -1, "host", True, 7, 1, 4096),),
    )
    monkeypatch.setattr(bridge, "status", lambda: status, raising=False)
    monkeypatch.setattr(bridge, "detect_backend", lambda: ("host", "no driver was found"), raising=False)


def test_info_says_what_auto_picks_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "host: no driver was found" in text
    assert "no GPU here" in text
    assert platform.python_version() in text


def test_json_is_one_object_with_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["auto"] == {"backend": "host", "reason": "no driver was found"}
    assert facts["versions"]["Python"] == platform.python_version()
    assert facts["status"]["frameworks"] == {"numpy": "hooked", "cupy": "no GPU here"}
    assert facts["status"]["pools"][0]["reserved_bytes"] == 4096
    assert facts["status"]["generations"] == facts["status"]["pools"], "the old name, for one release"
    assert isinstance(facts["driver"]["available"], bool)


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_are_found_under_any_name_of_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "cupy-cuda99x", "77.1")
    distribution(tmp_path, "rmm-cu99", "88.2")
    distribution(tmp_path, "torch-geometric", "9.9")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    versions = installed_versions()
    assert versions["CuPy"] == "77.1"
    assert versions["RMM"] == "88.2"
    assert versions["PyTorch"] is None


def test_missing_driver_is_an_answer() -> None:
    facts = describe_driver("libno_such_driver.so.1")
    assert not facts.available
    assert facts.devices == ()
    assert "libno_such_driver" in facts.summary


def invented_driver(init_code: int = 0) -> SimpleNamespace:
    """Return something that answers as libcuda does, for two devices of which the second has no name."""

    def put(value: object) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            # What ctypes.byref() made has the object inside.
            next(argument._obj for argument in arguments if hasattr(argument, "_obj")).value = value
            return 0

        return answer

    def name_device(name: Any, length: int, handle: object) -> int:
        name.value = b"Invented GPU"
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: init_code,
        cuDriverGetVersion=put(13020),
        cuDeviceGetCount=put(2),
        cuDeviceGet=lambda handle, ordinal: 0 if ordinal == 0 else 101,
        cuDeviceGetName=name_device,
        cuGetErrorName=put(b"CUDA_ERROR_INVENTED"),
    )


def test_driver_gives_version_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda library: invented_driver())
    facts = describe_driver("libcuda.so.1")
    assert facts.available
    assert "CUDA 13.2" in facts.summary
    assert facts.devices == ("cuda:0 Invented GPU", "cuda:1 (no name: CUDA_ERROR_INVENTED)")


def test_driver_that_does_not_start_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda library: invented_driver(init_code=100))
    facts = describe_driver("libcuda.so.1")
    assert not facts.available
    assert "CUDA_ERROR_INVENTED" in facts.summary


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status(False, None, "", (), {}, None, "sites")
    monkeypatch.setattr(bridge, "status", lambda: status, raising=False)


def test_without_a_bridge_there_is_no_table_about_it(not_installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "no RMM_BRIDGE_* variable is set" in text
    assert "hooked" not in text
    assert "numpy scope" not in text


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_settings_of_the_environment_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setenv("RMM_BRIDGE_BACKEND", "host")
    monkeypatch.setenv("RMM_BRIDGE_MAXIMUM_POOL_SIZE", "2G")
    assert main(["info", *options]) == 0
    text = capsys.readouterr().out
    assert "RMM_BRIDGE_BACKEND" in text
    if options:
        settings = {"RMM_BRIDGE_BACKEND": "host", "RMM_BRIDGE_MAXIMUM_POOL_SIZE": "2G"}
        assert json.loads(text)["settings"] == settings


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RMM_BRIDGE_BACKEND", "gpu", "RMM_BRIDGE_BACKEND='gpu' is not one of"),
        ("RMM_BRIDGE_BACKND", "host", "did you mean RMM_BRIDGE_BACKEND?"),
        ("RMM_BRIDGE_FRAMEWORKS", "numpie", "'numpie' is not a framework"),
    ],
)
def test_settings_that_install_would_refuse_are_misuse(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["info", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert name in captured.out, "the rest is shown all the same"
