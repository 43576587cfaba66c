import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from helpers.programs import run_python

from rmm_managed_bridge.cli.main import main, rmm_bridge
from rmm_managed_bridge.errors import BackendError, BridgeError

Verb = Callable[[Callable[[], int | None]], None]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Give the command a verb named `work` that does what the test says."""

    def add(work: Callable[[], int | None]) -> None:
        monkeypatch.setitem(rmm_bridge.commands, "work", click.Command("work", callback=work))

    return add


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_verb_that_returns_is_success(verb: Verb) -> None:
    verb(lambda: None)
    assert main(["work"]) == 0


@pytest.mark.parametrize("error", [BridgeError("the pool is gone"), BackendError("the pool is gone")])
def test_bridge_error_is_one_line_and_code_1(
    verb: Verb, capsys: pytest.CaptureFixture[str], error: BridgeError
) -> None:
    verb(raising(error))
    assert main(["work"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "rmm-bridge: the pool is gone\n"
    assert captured.out == ""


def test_out_of_memory_is_code_1_and_keeps_its_message(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(MemoryError("asked for 16.0 MiB")))
    assert main(["work"]) == 1
    assert capsys.readouterr().err == "rmm-bridge: out of memory: asked for 16.0 MiB\n"


@pytest.mark.parametrize("error", [BridgeError("the pool is gone"), MemoryError("the pool is gone")])
def test_notes_of_an_error_are_printed(verb: Verb, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    error.add_note("refused by the limit of the pool")
    verb(raising(error))
    assert main(["work"]) == 1
    assert capsys.readouterr().err.endswith("the pool is gone\nrefused by the limit of the pool\n")


def test_interrupt_is_code_130(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(KeyboardInterrupt()))
    assert main(["work"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_bug_is_not_hidden(verb: Verb) -> None:
    verb(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["work"])


def test_misuse_is_code_2_and_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "3"]) == 2
    assert "--size" in capsys.readouterr().err


def test_unknown_verb_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    assert "dance" in capsys.readouterr().err


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "info" in text


def test_help_imports_no_framework() -> None:
    program = (
        "import sys; from rmm_managed_bridge.cli.main import main; code = main(['demo', '--help']);"
        "print(sorted({'cupy', 'matplotlib', 'rmm', 'skimage', 'torch', 'warp'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import rmm_managed_bridge as bridge

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rmm-bridge {bridge.__version__}\n"


def test_completion_that_the_guide_describes_is_there() -> None:
    code = "import sys\nsys.argv[:] = ['rmm-bridge']\nfrom rmm_managed_bridge.cli.main import main\nsys.exit(main())\n"
    done = run_python(code, environment={"_RMM_BRIDGE_COMPLETE": "bash_source"})
    assert "complete -o nosort -F _rmm_bridge_completion rmm-bridge" in done.stdout
