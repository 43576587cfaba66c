"""`rmm-bridge run`: an unchanged program under the bridge, with a recording."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from rmm_managed_bridge.errors import BridgeError

__all__ = ["run"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE", help="The recording; %p becomes the number of the process.")
@click.option("--size", default=None, help='How large the recording is: "128MiB".')
@click.option("--backend", default=None, help="As install(backend=...): auto, managed, system or host.")
@click.option("--frameworks", default=None, help="As install(frameworks=...): numpy,cupy,warp,torch or some of them.")
@click.option("--initial-pool-size", default=None, help='As install(initial_pool_size=...): "2GiB".')
@click.option("--maximum-pool-size", default=None, help='As install(maximum_pool_size=...): "8GiB".')
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.option("-c", "code", metavar="CODE", help="Run this text, as python -c does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard error at the end.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    output: str | None,
    size: str | None,
    backend: str | None,
    frameworks: str | None,
    initial_pool_size: str | None,
    maximum_pool_size: str | None,
    module: str | None,
    code: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT, or -m MODULE, or -c CODE, with its arguments, and record it. The program's exit code is passed on.

    NumPy's arrays come from the pool, and those of --frameworks.
    """
    from rmm_managed_bridge.lifecycle.recorder import OWNER_VARIABLE, VARIABLE, expanded

    how, what, rest = _program(module, code, arguments)
    pattern = output or f"rmm-bridge-{_short(what) if how == 'script' else how}-%p.rec"
    if VARIABLE in os.environ and output is None:
        pattern = os.environ[VARIABLE]
    environment = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
    environment[VARIABLE] = str(Path(str(Path.cwd()).replace("%", "%%")) / pattern)
    asked = {
        "BACKEND": backend,
        "FRAMEWORKS": frameworks,
        "INITIAL_POOL_SIZE": initial_pool_size,
        "MAXIMUM_POOL_SIZE": maximum_pool_size,
        "RECORD_SIZE": size,
    }
    environment |= {f"RMM_BRIDGE_{name}": value for name, value in asked.items() if value is not None}
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "rmm_managed_bridge.cli.child"]
    with subprocess.Popen([*command, how, what, *rest], env=environment) as process:
        code_or_signal = _wait(process)
    path = expanded(environment[VARIABLE], process.pid)
    _say(path, process.pid, code_or_signal, as_json)
    if code_or_signal < 0:
        return 128 - code_or_signal
    return code_or_signal


def _program(module: str | None, code: str | None, arguments: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    if module is not None and code is not None:
        raise click.UsageError("-m and -c exclude each other")
    if module is not None:
        return "module", module, arguments
    if code is not None:
        return "code", code, arguments
    if not arguments:
        raise click.UsageError("name a script, or a module with -m, or text with -c")
    return "script", arguments[0], arguments[1:]


def _short(name: str) -> str:
    return Path(name).stem.replace("%", "_") or "program"


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the program. What is sent to us is sent on; the terminal itself interrupts both."""

    def send_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, send_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(path: Path, pid: int, code: int, as_json: bool) -> None:
    """Say on standard error how it went: what the program printed stays as it is."""
    from rmm_managed_bridge.cli.recording.common import line_facts, state_of
    from rmm_managed_bridge.recordings import read
    from rmm_managed_bridge.units import format_bytes

    facts: dict[str, object] = {"file": str(path), "exit_code": max(code, 0), "signal": max(-code, 0)}
    try:
        content = read(path)
        if content.header.pid != pid:
            raise BridgeError(f"{path} is another program's")
    except BridgeError as error:
        text = f"rmm-bridge: no recording: {error}"
        facts["error"] = str(error)
    else:
        peak = content.peak
        facts |= {
            "peak_bytes": peak.current_bytes,
            "current_bytes": content.current_bytes,
            "peak_lines": line_facts(peak.holders, 5),
        }
        text = (
            f"rmm-bridge: the program {state_of(content)}, peak {format_bytes(peak.current_bytes)}, "
            f"{format_bytes(content.current_bytes)} alive at its end; recorded in {path}"
        )
    if as_json:
        from json import dumps

        text = dumps(facts)
    click.echo(text, err=True)
