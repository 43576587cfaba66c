"""The process that `rmm-bridge run` starts: the bridge is installed, and the program runs as if Python ran it."""

import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from rmm_managed_bridge.errors import BridgeError


def main(how: str, what: str, arguments: list[str]) -> None:
    """Install, and run the program until its end."""
    import rmm_managed_bridge as bridge

    sys.argv = [what if how != "code" else "-c", *arguments]
    try:
        bridge.install()
    except BridgeError as error:
        sys.exit(f"rmm-bridge: {error}")
    try:
        if how == "script":
            _run_script(what)
        elif how == "module":
            sys.path[0] = os.getcwd()  # noqa: PTH109 - as python -m has it
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = ""
            exec(compile(what, "<string>", "exec"), _fresh_main())
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_of_the_program(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        sys.exit(1)


def _run_script(name: str) -> None:
    path = Path(name)
    if not path.exists():
        print(f"rmm-bridge: can't open {name!r}: no such file", file=sys.stderr)
        sys.exit(2)
    sys.path[0] = str(path.parent.resolve())
    runpy.run_path(name, run_name="__main__")


def _fresh_main() -> dict[str, object]:
    from types import ModuleType

    module = ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    return module.__dict__


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in _OURS:
        inner = inner.tb_next
    return inner or traceback


_OURS = (main.__code__.co_filename, runpy.run_path.__code__.co_filename)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
