"""Whose files are whose, so that a call site names the line that a user would look for: one of the program's own."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from rmm_managed_bridge._native import process
from rmm_managed_bridge.errors import warn_user

_OURS = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages")
_rules_are_set = False


def set_file_rules(libraries: Iterable[str]) -> None:
    """Tell the native code whose files are whose: `libraries` as `install` takes them, before what ``__main__`` is."""
    global _rules_are_set
    _rules_are_set = True
    hidden, program = _of_the_bridge()
    rules = dict.fromkeys(hidden, "hidden") | dict.fromkeys(program, "program")
    for prefix in (*_standard_library(), *_installed_beside(tuple(sys.path))):
        rules.setdefault(prefix, "library")
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    for prefix in _of_the_distribution(getattr(main, "__file__", None) or "", module):
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


@functools.cache
def _installed_beside(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was installed into folders of other names (``pip install --target``), where a program may lie too."""
    found: set[str] = set()
    for folder in map(Path, folders):
        if folder.name in _INSTALLED or not folder.is_dir():
            continue
        for record in folder.glob("*.dist-info/RECORD"):
            lines = record.read_text("utf-8", "replace").splitlines()
            tops = {line.partition(",")[0].partition("/")[0] for line in lines}
            for top in tops:
                if not top.startswith((".", "_")) and not top.endswith(".dist-info"):
                    found.update(_prefix_of(folder / top))
    return tuple(found)


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


@functools.cache
def _of_the_distribution(main: str, module: str | None) -> tuple[str, ...]:
    """Return the packages and modules of what was started: by ``-m``, as a module, or as an installed command."""
    return tuple(_find_distribution(Path(main), module))


def _find_distribution(file: Path, module: str | None) -> Iterator[str]:
    distribution = None
    if module is not None:
        if not any(part in _INSTALLED for part in file.parts):
            return  # of the standard library, or the program's anyway
        distribution = _recording(file)
        if distribution is None:  # as a package manager of the system installs it
            yield from _files_of(module.partition(".")[0])
    elif str(file.parent) == sysconfig.get_path("scripts"):
        for entry in importlib.metadata.entry_points(group="console_scripts", name=file.name):
            distribution = entry.dist
    if distribution is None or distribution.files is None:
        return
    sources = {PurePosixPath(each) for each in distribution.files if each.suffix == ".py"}
    found = set()
    for source in sources:
        # The outermost package: the folders above it may be other distributions' too.
        packages = [folder for folder in source.parents if folder / "__init__.py" in sources]
        found.add(packages[-1] if packages else source)
    for each in found:
        path = Path(str(distribution.locate_file(each)))
        if path != _OURS:
            yield from _prefix_of(path)


def _recording(file: Path) -> importlib.metadata.Distribution | None:
    """Return the distribution that has this installed file.

    The names of packages say little, and `importlib.metadata` would read all that is known of every distribution.
    """
    site = next(folder for folder in file.parents if folder.name in _INSTALLED)
    line = f"\n{file.relative_to(site).as_posix()},"
    for record in site.glob("*.dist-info/RECORD"):
        if line in "\n" + record.read_text("utf-8", "replace"):
            return importlib.metadata.PathDistribution(record.parent)
    return None
