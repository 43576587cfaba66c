"""Every check in ci/tools lets good input through and rejects what is made here; for layers see test_ci_layers.py."""

import subprocess
import zipfile
from pathlib import Path

import pytest
from helpers.ci_tools import ROOT, load, run, write


def test_layers_script_fails_on_an_empty_folder(tmp_path: Path) -> None:
    """Nothing to look at is a failure; this package is a pass."""
    assert run("check_layers", tmp_path).returncode == 1
    passed = run("check_layers", ROOT / "rmm_managed_bridge")
    assert passed.returncode == 0, passed.stdout


def test_file_length(tmp_path: Path) -> None:
    """501 lines fail, 301 give a notice, other suffixes do not count."""
    files = {"ok.py": "\n" * 300, "long.pyx": "\n" * 301, "most.cpp": "\n" * 500, "notes.md": "\n" * 900}
    findings, notices = load("check_file_length").check([write(tmp_path, files)])
    assert findings == []
    assert [Path(notice.split(":")[0]).name for notice in notices] == ["long.pyx", "most.cpp"]
    write(tmp_path, {"sub/over.hpp": "\n" * 501})
    rejected = run("check_file_length", tmp_path)
    assert rejected.returncode == 1
    assert "over.hpp:501: 501 lines, above 500; split the file" in rejected.stdout


def test_file_length_fails_on_an_empty_folder(tmp_path: Path) -> None:
    """Each folder must hold a source file."""
    assert run("check_file_length", tmp_path).returncode == 1


MODULE = "ledger.cpython-311-x86_64-linux-gnu.so"
GOOD_C = "int PyInit_ledger(void) { return 0; }"
GOOD_LIBRARY = "int bridge_cupy_malloc(void) { return 1; } int _ZN10rmm_bridge4Pool4trimEm(void) { return 2; }"


def make_wheel(
    folder: Path, c_source: str = GOOD_C, flags: tuple[str, ...] = (), extra: str = "", name: str = MODULE
) -> Path:
    """Compile a tiny library and pack it as the native part of a wheel."""
    write(folder, {"ledger.c": c_source})
    built = folder / "ledger.so"
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", built, folder / "ledger.c"], check=True)
    wheel = folder / "rmm_managed_bridge-0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(built, f"rmm_managed_bridge/_native/{name}")
        for other in ("rmm_managed_bridge/py.typed", "rmm_managed_bridge/_native/ledger.pyi", extra):
            if other:
                archive.writestr(other, "")
    return wheel


def test_wheel_accepts_what_is_clean(tmp_path: Path) -> None:
    """Named entry points, a RUNPATH relative to the file, and types."""
    wheel = make_wheel(tmp_path, flags=("-Wl,-rpath,$ORIGIN/../../librmm/lib64",))
    passed = run("check_wheel", wheel, "--forbid", tmp_path)
    assert passed.returncode == 0, passed.stdout


def test_wheel_accepts_the_library_behind_the_modules(tmp_path: Path) -> None:
    """It needs no stub, and exports entry points and names of our namespace, which a module may not."""
    check = load("check_wheel").check
    assert check(make_wheel(tmp_path, GOOD_LIBRARY, name="librmm_managed_bridge.so"), []) == []
    (wrong,) = check(make_wheel(tmp_path, GOOD_LIBRARY + "int _ZN3rmm4PoolEv;", name="librmm_managed_bridge.so"), [])
    assert "exports _ZN3rmm4PoolEv; hide it" in wrong
    assert len(check(make_wheel(tmp_path, GOOD_C + GOOD_LIBRARY), [])) == 2


@pytest.mark.parametrize(
    ("c_source", "flags", "wrong"),
    [
        (GOOD_C + "int helper(void) { return 2; }", (), "exports helper; hide it"),
        (GOOD_C + "__attribute__((weak)) int _ZTI6Ledger;", (), "exports _ZTI6Ledger; hide it"),
        ("int PyInit_other(void) { return 0; }", (), "does not export PyInit_ledger"),
        (GOOD_C, ("-Wl,-rpath,$ORIGIN:/opt/rmm/lib",), "RUNPATH entry '/opt/rmm/lib'"),
        (GOOD_C, ("-Wl,--disable-new-dtags,-rpath,lib",), "RUNPATH entry 'lib'"),
        (GOOD_C + 'const char *place(void) __attribute__((visibility("hidden")));'
         'const char *place(void) { return "/build/machine/pool.hpp"; }', (), "holds '/build/machine'"),
    ],
)  # fmt: skip
def test_wheel_rejects_a_library(tmp_path: Path, c_source: str, flags: tuple[str, ...], wrong: str) -> None:
    """One flaw of a library is the one finding, under the library's name."""
    findings = load("check_wheel").check(make_wheel(tmp_path, c_source, flags), ["/build/machine"])
    assert len(findings) == 1
    assert "ledger.cpython" in findings[0]
    assert wrong in findings[0]


@pytest.mark.parametrize(
    "name", ["rmm_managed_bridge/_native/pool.hpp", "rmm_managed_bridge/_native/a.pyx", "tests/a.py"]
)
def test_wheel_rejects_sources(tmp_path: Path, name: str) -> None:
    """Neither native sources nor tests belong in the wheel."""
    rejected = run("check_wheel", make_wheel(tmp_path, extra=name))
    assert rejected.returncode == 1
    assert f"{name}:1: " in rejected.stdout


def test_wheel_rejects_missing_parts(tmp_path: Path) -> None:
    """No library, no types, no stub, and a library for another machine."""
    check = load("check_wheel").check
    wheel = tmp_path / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rmm_managed_bridge/__init__.py", "")
    assert len(check(wheel, [])) == 2
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("rmm_managed_bridge/py.typed", "")
        archive.writestr("rmm_managed_bridge/_native/a.abi3.so", b"\x7fELF\x02\x01".ljust(18, b"\0") + b"\xf3\0")
    assert ["a.pyi is missing" in finding or "ELF machine 0xf3" in finding for finding in check(wheel, [])] == [
        True
    ] * 2


def test_readme_command_takes_the_marked_block(tmp_path: Path) -> None:
    """The README of this repository has the block; a lost marker or block fails."""
    readme = (
        write(tmp_path, {"R.md": "```sh\nno\n```\n<!-- test-command -->\n\n```sh\na &&\nb\n```\n```\nno\n```\n"})
        / "R.md"
    )
    assert run("readme_command", readme, "test-command").stdout == "a &&\nb\n"
    assert run("readme_command", readme, "other").returncode == 1
    assert "pytest" in run("readme_command", ROOT / "README.md", "test-command").stdout
    for text in ("<!-- m -->\nwords\n```\na\n```\n", "<!-- m -->\n```\n```\n", "<!-- m -->\n<!-- m -->\n```\na\n```\n"):
        with pytest.raises(ValueError, match="<!-- m -->"):
            load("readme_command").find_command(text, "m")


GPU_CASE = '<testcase classname="tests.gpu.test_a" name="a"/>'
UNIT_CASE = '<testcase classname="tests.unit.test_gpu" name="a"/>'
FAILED_CASE = '<testcase classname="tests.gpu.test_a" name="b"><failure/></testcase>'
SKIPPED_CASE = '<testcase classname="tests.gpu.test_a" name="c"><skipped/></testcase>'


@pytest.mark.parametrize(
    ("cases", "pytest_code", "demo_code", "wrong"),
    [
        (GPU_CASE + UNIT_CASE + SKIPPED_CASE, 0, 0, ""),
        (GPU_CASE + FAILED_CASE, 1, 0, "test_a: 1 failed, exit code 1"),
        (UNIT_CASE + SKIPPED_CASE, 0, 0, "no test under tests/gpu passed"),
        (GPU_CASE, 0, 2, "the demo ended with exit code 2"),
        (GPU_CASE, 139, 0, "test_a: 0 failed, exit code 139"),
    ],
)
def test_gpu_table_fails_when_anything_failed_or_nothing_ran(
    tmp_path: Path, cases: str, pytest_code: int, demo_code: int, wrong: str
) -> None:
    """The verdict follows from the counts and all exit codes."""
    tool = load("gpu_table")
    xml = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    write(tmp_path, {"test_a.xml": xml, "test_a.code": f"{pytest_code} 3\n", "test_none.code": "5 0\n"})
    findings = tool.judge(tool.read_runs(tmp_path), demo_code)
    assert len(findings) == bool(wrong)
    assert wrong in "".join(findings)


def test_gpu_table_where_a_file_crashed(tmp_path: Path) -> None:
    """It leaves no report; the others' counts and the table are still printed."""
    xml = f"<testsuites><testsuite>{GPU_CASE}</testsuite></testsuites>"
    write(tmp_path, {"test_a.xml": xml, "test_a.code": "0 1\n", "test_b.xml": "", "test_b.code": "139 7\n"})
    result = run("gpu_table", tmp_path, 0)
    assert result.returncode == 1
    assert "| tests passed        | 1 |" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("| test_b: 0 failed, exit code 139 |")
