"""``pipesim import``."""

from __future__ import annotations

import click

from pipesim.cli.options import is_run, json_option, print_json

__all__ = ["import_command"]

_SHOWN = 20  # malformed events, on a terminal


@click.command("import")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--schedule", type=click.Path(dir_okay=False), help="What ran, as CSV or text. Default: what the ranks did, in their order.")
@click.option("--legacy", is_flag=True, help="The schedule is in PyTorch's words of 2024 (B is the input half, BW the full backward).")
@click.option("--out", "-o", type=click.Path(dir_okay=False), required=True, help="Where to, run.json or run.json.gz.")
@json_option
def import_command(traces: tuple[str, ...], schedule: str | None, legacy: bool, out: str, as_json: bool) -> None:
    """Make a run of traces: torch.profiler's of PyTorch pipelining, one file per rank, or one that pipesim export wrote.

    \b
    pipesim import traces/ --out run.json.gz
    pipesim compare sim.json.gz run.json.gz --plot overlay.png

    TRACE is a .json or .json.gz file, or a folder of them. Ops are the annotations of _PipelineScheduleRuntime (PP:0F0), those of
    the GPU where there are any, and of ScheduleGPipe (Forward 0). Schedule1F1B writes none.
    """  # noqa: D301  click wants the character
    from pipesim.importing import import_traces
    from pipesim.registry import read_file

    if not is_run(out):
        raise click.UsageError(f"--out {out!r}: the name of a run ends in .json or .json.gz")
    found = import_traces(traces, None if schedule is None else read_file(schedule, legacy=legacy))
    found.timeline.save(out)
    if as_json:
        clocks = None if found.clocks is None else {"shift": found.clocks.shift.tolist(), "uncertainty": _finite(found.clocks.uncertainty)}
        more = {"clocks": clocks, "notes": list(found.notes), "malformed": list(found.problems)}
        print_json({**found.timeline.figures(), "info": dict(found.timeline.info), **more})
    else:
        click.echo(found.timeline.summary())
    for note in found.notes:
        click.echo(f"Note: {note}", err=True)
    for problem in found.problems[:_SHOWN]:
        click.echo(f"Not imported: {problem}", err=True)
    if len(found.problems) > _SHOWN:
        click.echo(f"and {len(found.problems) - _SHOWN} more that are malformed", err=True)
    click.echo(f"saved {out}", err=True)


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
