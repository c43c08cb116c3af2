"""``pipesim check``."""

from __future__ import annotations

from typing import Any

import click

from pipesim.cli.options import Request, json_option, print_json, schedule_command, schedule_options
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.lowering import crossings, is_explicit
from pipesim.schedule import Schedule

__all__ = ["check_command"]


@schedule_command("check", "FILE|SCHEDULE")
@schedule_options
@json_option
def check_command(words: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Check a schedule: what can be seen in the listing, and a dry run that finds deadlocks.

    SENDs and RECVs that are listed run in their order, on one stream per device, as in PyTorch's runtime.
    """
    request = Request(words, values)
    name = request.name
    schedule = request.schedule(name).check()
    _refuse_crossings(schedule)
    simulate(schedule)
    if as_json:
        print_json({"ok": True, **_facts(schedule)})
        return
    facts = _facts(schedule)
    click.echo(
        f"{name}: right. {facts['devices']} devices, {facts['stages']} stages, {facts['microbatches']} microbatches, {facts['ops']} ops, weights {facts['weights']}"
    )
    if is_explicit(schedule):
        click.echo(
            "Its messages were taken in their order, with sends that wait for nobody; pipesim simulate --sends rendezvous judges those that do."
        )
    for stage, devices in facts["replicas"].items():
        click.echo(f"stage {stage} has replicas on devices {', '.join(map(str, devices))}")


def _refuse_crossings(schedule: Schedule) -> None:
    crossed = crossings(schedule)
    if crossed:
        more = f" ({len(crossed)} of that kind)" if len(crossed) > 1 else ""
        raise ScheduleError(
            f"messages cross: {crossed[0]}{more}. A first-in, first-out stream between the two (as PyTorch's runtime has) takes one for the other, "
            "or hangs; list the RECVs in the order of the SENDs, as --drop-communication --lower early does"
        )


def _facts(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "ops": len(schedule),
        "weights": schedule.weights,
        "placement": {str(stage): list(devices) for stage, devices in schedule.placement.items()},
        "replicas": {str(stage): list(devices) for stage, devices in schedule.replicas.items()},
    }
