"""The gate that closes before the interpreter ends: alone, under the sanitizers."""

from pathlib import Path

import pytest
from helpers.native_sources import compile_program, run_program

SOURCE = Path(__file__).with_name("gate.cpp")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_nobody_is_inside_once_it_is_closed(sanitizer: str, tmp_path: Path) -> None:
    program = compile_program(tmp_path / "gate", [SOURCE], f"-fsanitize={sanitizer}")
    run_program(program, "30")
