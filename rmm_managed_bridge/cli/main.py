"""Entry point of `rmm-bridge`: the only catch, and the only exit code."""

from collections.abc import Sequence

import click

from rmm_managed_bridge.cli.demo.command import demo
from rmm_managed_bridge.cli.info import info
from rmm_managed_bridge.cli.recording.compare import compare
from rmm_managed_bridge.cli.recording.export import export
from rmm_managed_bridge.cli.recording.leaks import leaks
from rmm_managed_bridge.cli.recording.live import live
from rmm_managed_bridge.cli.recording.peak import peak
from rmm_managed_bridge.cli.recording.report import report
from rmm_managed_bridge.cli.recording.stats import stats
from rmm_managed_bridge.cli.recording.timeline import timeline
from rmm_managed_bridge.cli.recording.where import where
from rmm_managed_bridge.cli.run import run
from rmm_managed_bridge.errors import BridgeError

__all__ = ["main"]

FAILED = 1
INTERRUPTED = 130


def _print_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from rmm_managed_bridge import __version__

    click.echo(f"rmm-bridge {__version__}")
    context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def rmm_bridge() -> None:
    """One RMM managed-memory pool behind NumPy, CuPy and Warp, that knows who allocated every byte."""


for _verb in (run, stats, peak, leaks, timeline, compare, where, live, report, export, info, demo):
    rmm_bridge.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code, as docs/guide/command_line.md has it.

    Parameters
    ----------
    arguments
        Those of the command line, without the program's name; None for the ones this process was started with.
    """
    try:
        # Not standalone: click would call sys.exit itself, and turn Ctrl-C into code 1.
        result = rmm_bridge.main(
            args=None if arguments is None else list(arguments), prog_name="rmm-bridge", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BridgeError as error:
        return _fail(_with_notes(str(error), error), FAILED)
    except MemoryError as error:
        return _fail(_with_notes(f"out of memory: {error}" if str(error) else "out of memory", error), FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _with_notes(message: str, error: BaseException) -> str:
    """Add the notes (PEP 678): who holds the memory is in one, where NumPy raised."""
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _fail(message: str, exit_code: int) -> int:
    click.echo(f"rmm-bridge: {message}", err=True)
    return exit_code
