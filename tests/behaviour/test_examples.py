"""The example in the docstring of each public name runs as it is written, on the host backend."""

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge

pytestmark = pytest.mark.behaviour("U4")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What docs/api/README.md says that each example begins with; some of them uninstall, and some make files."""
    monkeypatch.chdir(tmp_path)
    bridge.install("host", frameworks=["numpy"])
    yield
    bridge.uninstall()


def failures_of(documented: Any, name: str) -> tuple[int, str]:
    """Run the example of `documented`. Returns how many statements it has, and what was not as it says."""
    text = inspect.getdoc(documented) or ""
    example = doctest.DocTestParser().get_doctest(text, {"bridge": bridge, "np": np}, name, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted == len(example.examples) or said
    return result.attempted, "".join(said)


@pytest.mark.parametrize("name", bridge.__all__)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    if name in ("as_numpy", "as_warp"):
        warp = pytest.importorskip("warp")
        warp.config.quiet = True
        warp.init()  # which says on the terminal what it found
    count, said = failures_of(getattr(bridge, name), name)
    assert said == ""
    assert count > 0


def test_an_example_that_is_wrong_is_seen() -> None:
    def wrong() -> None:
        """Return.

        >>> bridge.status().backend
        'managed'
        """

    assert "Got:\n    'host'" in failures_of(wrong, "wrong")[1]
