"""`rmm-bridge info`: what is installed here, what the machine has, and which backend the bridge would pick."""

import dataclasses
import json
import os
import platform
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["info", "installed_versions"]

_DISTRIBUTIONS = {
    "rmm_managed_bridge": r"rmm-managed-bridge",
    "NumPy": r"numpy",
    "RMM": r"rmm(-cu\d+)?",
    "CuPy": r"cupy(-cuda\d+x|-rocm-[\d-]+)?",
    "Warp": r"warp-lang",
    "PyTorch": r"torch",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(as_json: bool) -> None:
    """Show versions, the driver, what `auto` picks here, and settings.

    Settings are the variables RMM_BRIDGE_* as `install` would read them: exit code 2 if it could not.
    """
    import rmm_managed_bridge as bridge
    from rmm_managed_bridge.cli.info_driver import describe_driver
    from rmm_managed_bridge.config.environment import settings_in
    from rmm_managed_bridge.machine import host_memory

    versions: dict[str, str | None] = {"Python": platform.python_version(), **installed_versions()}
    driver = describe_driver()
    backend, reason = bridge.detect_backend()
    status = bridge.status()
    memory = host_memory()
    settings = settings_in(os.environ)
    wrong = _check_settings()
    if as_json:
        plain = _plain(status)
        plain["generations"] = plain["pools"]  # the old name, for one release: JSON has no place for a warning
        facts = {
            "versions": versions,
            "platform": platform.platform(),
            "memory": memory._asdict(),
            "driver": dataclasses.asdict(driver),
            "auto": {"backend": backend, "reason": reason},
            "status": plain,
            "settings": settings,
        }
        click.echo(json.dumps(facts, indent=2))
        if wrong is not None:
            raise click.UsageError(wrong)
        return

    from rmm_managed_bridge.cli.console import make_console
    from rmm_managed_bridge.reports.tables import status_table

    console = make_console()
    _print_pairs(console, {name: version or "not installed" for name, version in versions.items()})
    console.print()
    machine = {
        "platform": platform.platform(),
        "memory": str(memory),
        "driver": driver.summary,
        "GPUs": "\n".join(driver.devices) or "none",
        "auto picks": f"{backend}: {reason}",
    }
    _print_pairs(console, machine)
    console.print()
    if settings:
        _print_pairs(console, settings)
    else:
        console.print("no RMM_BRIDGE_* variable is set: install() takes its defaults")
    if status.installed:  # a program may call this after its own install(); the command by itself never has
        console.print()
        console.print(status_table(status))
    if wrong is not None:
        raise click.UsageError(wrong)


def _check_settings() -> str | None:
    """Return what is wrong with the variables of the bridge, in the words of `install`."""
    import warnings

    from rmm_managed_bridge.config import read_config
    from rmm_managed_bridge.errors import BridgeError, BridgeWarning

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            read_config()
        except BridgeError as error:
            return str(error)
    unknown = [str(each.message) for each in said if issubclass(each.category, BridgeWarning)]
    return "; ".join(unknown) or None


def installed_versions() -> dict[str, str | None]:
    """Return the version of each package that matters, None where it is missing, without importing any of them."""
    found: dict[str, str | None] = dict.fromkeys(_DISTRIBUTIONS)
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        for label, pattern in _DISTRIBUTIONS.items():
            # First wins, as on sys.path; two CuPy distributions side by side are a broken installation anyway.
            if found[label] is None and re.fullmatch(pattern, name):
                found[label] = distribution.version
    return found


def _plain(record: Any) -> Any:
    """Return records, mappings and sequences as what JSON knows."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, tuple) and hasattr(record, "_asdict"):
        return {name: _plain(value) for name, value in record._asdict().items()}
    if hasattr(record, "items"):
        return {str(key): _plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_plain(value) for value in record]
    return record


def _print_pairs(console: "Console", pairs: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(Text(name), Text(value))
    console.print(grid)
