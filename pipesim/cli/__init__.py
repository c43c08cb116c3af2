"""The command line. Each command's module is imported when the command runs, so that ``pipesim --help`` is quick."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module

import click

from pipesim import __version__

__all__ = ["cli", "main"]

# name: (module, one line of help); in the order in which somebody new wants them
_COMMANDS = {
    "list": ("listing", "The schedules there are, a line each."),
    "show": ("listing", "A schedule's order and its picture in time."),
    "simulate": ("running", "Run a schedule: time, bubbles, idle causes, memory."),
    "estimate": ("estimating", "A training step of GPT-3, Llama, ... on so many GPUs: time, MFU, memory, which schedule fits."),
    "compare": ("running", "Several schedules or saved runs side by side; of a simulated and a measured run, why they differ."),
    "import": ("importing", "A run from traces of torch.profiler (PyTorch pipelining), one per rank."),
    "sweep": ("sweeping", "Many schedules, sizes and links at once, into a file that can be continued."),
    "jitter": ("jittering", "A schedule with durations that vary, slow devices and slow links."),
    "fit": ("profiling", "Efficiencies and links from measured iteration times, with an honest report."),
    "profile": ("profiling", "Measure a torch model layer by layer: forward, input gradient, weight gradient, bytes."),
    "replay": ("replaying", "Run a schedule for real under torch.distributed, and measure every op."),
    "calibrate": ("calibrating", "Measure ops, messages and the host, and predict schedules that were not run."),
    "plot": ("drawing", "A Gantt chart with memory curves: PNG, SVG, PDF or HTML."),
    "export": ("drawing", "A schedule as CSV or text, a run as trace or JSON."),
    "check": ("checking", "Whether a schedule file is right, and whether it finishes."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"pipesim.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from pipesim.errors import did_you_mean

            raise click.UsageError(f"{error.message.rstrip('.')}{did_you_mean(args[0], _COMMANDS)}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every command for its first line
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipesim")
def cli() -> None:
    """Simulate pipeline-parallel schedules: how long, how much memory, and why a device is idle.

    \b
    pipesim simulate 1f1b --devices 4 --microbatches 8 --forward 1 --backward 2
    pipesim plot 1f1b --devices 4 --microbatches 8 --out 1f1b.png
    """  # noqa: D301  \b is the backspace that click wants


def main() -> None:
    """Runs the command line; a user's mistake is one message on stderr and exit status 1, a wrong call is 2."""
    # a warning is for the user too: its text, not the place in our code that it came from
    warnings.showwarning = lambda message, *_args, **_more: click.echo(f"Warning: {message}", err=True)
    try:
        cli.main(prog_name="pipesim", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # `pipesim list | head`: the reader has gone, and Python would complain once more when it flushes stdout
        sys.stdout = None
        sys.exit(0)
    except Exception as error:
        from pipesim.errors import DeadlockError, ScheduleError

        if not isinstance(error, DeadlockError | ScheduleError | OSError | MemoryError | ModuleNotFoundError):
            raise
        click.echo(f"Error: {_describe(error)}", err=True)
        sys.exit(1)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"there is not enough memory for a run of this size {error}"
    if isinstance(error, ModuleNotFoundError):
        extra = {"joblib": "sweep", "pyarrow": "sweep", "numba": "fast", "scipy": "fit", "torch": "replay"}.get(
            str(error.name).partition(".")[0], "plot"
        )
        return f"{error}; this needs an extra: pip install 'pipesim[{extra}]'"
    return str(error)
