"""Programs that print the call sites of what they allocate, and packages to go through."""

import json
import textwrap
from pathlib import Path
from typing import Any

from helpers.programs import must_succeed, program_environment, run_python

PROGRAM = """
    import json
    import numpy as np
    import rmm_managed_bridge as bridge

    def show(array):
        site = bridge.allocation_of(array).site
        via = site.via
        print(json.dumps([site.file, site.line, site.function, via and via.file, site.library]))
"""
MAKE = "import numpy as np\ndef make(): return np.empty(9)\ndef call(function): return function()\n"


def shown_sites(program: str, *arguments: object, path: Path | None = None, **variables: str) -> list[list[Any]]:
    """Return (file, line, function, file of `via`, library) of what `program` calls ``show`` with."""
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    environment = program_environment() | variables
    if path is not None:
        environment["PYTHONPATH"] = f"{path}:{environment['PYTHONPATH']}"
    done = run_python(code, *arguments, environment=environment)
    return [json.loads(line) for line in must_succeed(done).splitlines()]


def make_package(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a package with these files, and return its folder."""
    (folder / name).mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (folder / name / file).write_text(text)
    return folder / name
