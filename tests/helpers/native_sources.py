"""The C++ of the pool, for programs that are tests: without Python, and compiled as they like."""

from pathlib import Path

CPP = Path(__file__).parents[2] / "rmm_managed_bridge" / "_native" / "cpp"


def one_unit(folder: Path) -> Path:
    """Write one file with all of the pool but what belongs to the interpreter, which compiles faster than many."""
    sources = sorted(path for path in CPP.rglob("*.cpp") if path.parent.name != "entry")
    unit = folder / "pool.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    return unit
