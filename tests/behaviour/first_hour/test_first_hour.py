"""What a newcomer types in a first hour, and what each line prints: the sessions beside this file, on the host backend.

Differences of blanks do not count, and ``...`` stands for any text.
"""

from pathlib import Path

import pytest
from helpers.programs import run_python

SESSIONS = sorted(Path(__file__).parent.glob("*.txt"))
NEEDS = {"pandas": "pandas", "simulation": "warp"}
# A warning is printed where it is given, so that a session shows it.
RUN = """
import doctest, sys, warnings

warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *where, **more: print(f"{category.__name__}: {message}")
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
failed, count = doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags)
print(count, "lines typed")
sys.exit(failed > 0)
"""

pytestmark = pytest.mark.behaviour("U1", "U2", "U3")


@pytest.mark.parametrize("session", SESSIONS, ids=lambda path: path.stem)
def test_each_line_prints_what_the_session_shows(session: Path) -> None:
    if session.stem in NEEDS:
        pytest.importorskip(NEEDS[session.stem])
    done = run_python(RUN, session, options=())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_line_that_prints_something_else_is_seen(tmp_path: Path) -> None:
    session = tmp_path / "wrong.txt"
    session.write_text(">>> import rmm_managed_bridge as bridge\n>>> bridge.install('host', track='all')\n")
    done = run_python(RUN, session, options=())
    assert done.returncode == 1
    assert "track='all' is not one of 'sites', 'counters', 'off'" in done.stdout
