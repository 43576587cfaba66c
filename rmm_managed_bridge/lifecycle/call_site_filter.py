"""Whose files are whose, so that a call site names the line that a user would look for: one of the program's own."""

import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

from rmm_managed_bridge._native import process
from rmm_managed_bridge.errors import warn_user

_OURS = Path(__file__).parents[1]
_rules_are_set = False


def set_file_rules(libraries: Iterable[str]) -> None:
    """Tell the native code whose files are whose: `libraries` as `install` takes them, before what ``__main__`` is."""
    global _rules_are_set
    _rules_are_set = True
    hidden, program = _of_the_bridge()
    rules = dict.fromkeys(hidden, "hidden") | dict.fromkeys(program, "program")
    for prefix in _standard_library():
        rules.setdefault(prefix, "library")
    for prefix in _distribution_of(sys.modules.get("__main__")):
        rules.setdefault(prefix, "program")
    unknown = []
    for each in libraries:
        name = each.removeprefix("-")
        found = list(_files_of(name))
        rules |= dict.fromkeys(found, "program" if each.startswith("-") else "library")
        if not found:
            unknown.append(name)
    process.set_file_rules(
        **{owner: [prefix for prefix, whose in rules.items() if whose == owner] for owner in set(rules.values())}
    )
    if unknown:
        warn_user(f"libraries: there is no module or folder {', '.join(unknown)}; its name may be misspelt")


def ensure_file_rules() -> None:
    """Set the rules where nothing was installed that has."""
    if not _rules_are_set:
        set_file_rules(())


def _of_the_bridge() -> tuple[list[str], list[str]]:
    """Return its own files, and those of its command line: the demo is a program like any other."""
    return [f"{_OURS}{os.sep}"], [f"{_OURS / 'cli'}{os.sep}", str(_OURS / "__main__.py")]


def _standard_library() -> set[str]:
    # As import says it: of an environment that is the folder of the interpreter it was made by.
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(os.__file__).parent)}
    return {f"{folder}{os.sep}" for folder in folders}


def _files_of(name: str) -> Iterator[str]:
    """Yield the folder or file of a module, found without importing it, or of a path."""
    if os.sep in name:
        yield from _prefix_of(Path(name).absolute())  # not resolved: import does not either
        return
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that was put into sys.modules has no spec, perhaps
        return
    if spec is None:
        return
    folders = list(spec.submodule_search_locations or ())
    if not parts:
        yield from (f"{folder}{os.sep}" for folder in folders)
        if not folders and spec.origin is not None:
            yield spec.origin
    for folder in folders if parts else ():
        inner = Path(folder, *parts)
        yield from _prefix_of(inner)
        yield from _prefix_of(inner.with_name(f"{inner.name}.py"))


def _prefix_of(path: Path) -> Iterator[str]:
    if path.is_dir():
        yield f"{path}{os.sep}"
    elif path.exists():
        yield str(path)


def _distribution_of(main: ModuleType | None) -> Iterator[str]:
    """Yield the packages and modules of the distribution that was started: by ``-m``, or as an installed command."""
    distribution = None
    file = Path(getattr(main, "__file__", None) or "")
    if (spec := getattr(main, "__spec__", None)) is not None:
        distribution = _providing(spec.name.partition(".")[0], spec.origin)
    elif str(file.parent) == sysconfig.get_path("scripts"):
        for entry in importlib.metadata.entry_points(group="console_scripts", name=file.name):
            distribution = entry.dist
    if distribution is None or distribution.files is None:
        return
    modules = {PurePosixPath(file) for file in distribution.files if file.suffix == ".py"}
    found = set()
    for module in modules:
        # The outermost package: the folders above it may be other distributions' too.
        packages = [folder for folder in module.parents if folder / "__init__.py" in modules]
        found.add(packages[-1] if packages else module)
    for each in found:
        path = Path(str(distribution.locate_file(each)))
        if path != _OURS:
            yield from _prefix_of(path)


def _providing(package: str, file: str | None) -> importlib.metadata.Distribution | None:
    """Return the distribution that has this file of the top package `package`."""
    if file is None or "-packages" not in file:
        return None  # of the standard library, or the program's anyway
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package, ())
        return importlib.metadata.distribution(names[0]) if names else None
