"""Options about links and collectives: how devices communicate, and what is shared by several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import click

from pipesim.cli.grouping import grouped
from pipesim.cluster import Cluster
from pipesim.communication import Communication

__all__ = ["COLLECTIVES", "MODES", "collective_options", "communication", "communication_options"]

# options that are fields of UniformCosts, beside the times; and those that are fields of Communication
COLLECTIVES = ("tied", "buckets", "reduce_every_microbatch")
MODES = ("sends", "blocking", "stream", "batched", "receives", "shape_messages", "interference")


def collective_options() -> list[Callable[[Any], Any]]:
    """What --reduction, --tied-reduction and --unshard, which are times like others, do not say."""
    group = "Collectives"
    return [
        grouped(group, "--tied", metavar="STAGES", help="Groups of stages that share weights, such as 0+3 or 0+7,1+6; see --tied-reduction."),
        grouped(group, "--buckets", type=click.IntRange(min=1), help="Pieces of a reduction; they start during the last backward. Default 1."),
        grouped(group, "--reduce-every-microbatch", is_flag=True, help="Reduce gradients after every microbatch, not once per update."),
    ]


def communication_options() -> list[Callable[[Any], Any]]:
    """How devices communicate; what is given goes before what the cluster says."""
    group = "Communication (default: what the cluster says, else eager sends beside compute)"
    return [
        grouped(
            group, "--sends", type=click.Choice(["eager", "rendezvous"]), help="rendezvous: a transfer begins when its receive has been posted, too."
        ),
        grouped(group, "--blocking", is_flag=True, help="A transfer holds the compute lanes of both devices."),
        grouped(
            group,
            "--stream",
            type=click.Choice(["free", "device", "peer"]),
            help="Transfers go one after another per device, or per device and peer, in the order of the listing.",
        ),
        grouped(group, "--batched", is_flag=True, help="Neighbouring SENDs and RECVs are one group: it starts when all peers' are there."),
        grouped(group, "--receives", type=click.Choice(["early", "late"]), help="When receives that the schedule does not list are posted."),
        grouped(group, "--shape-messages", is_flag=True, help="A message of no size goes before every tensor, which is sent when it has arrived."),
        grouped(
            group,
            "--interference",
            metavar="FACTORS",
            help="How many times slower compute is beside traffic: p2p=1.05,collective=1.2,offload=1.1.",
        ),
    ]


def communication(values: Mapping[str, Any], cluster: Cluster | None) -> Communication | None:
    """What the options ask for, beside what the cluster says; None where nothing is asked for."""
    given = {name: values[name] for name in MODES if values.get(name) not in (None, False)}
    if not given:
        return None
    if "interference" in given:
        given["interference"] = _factors(given["interference"])
    return replace(Communication() if cluster is None else cluster.communication, **given)


def _factors(text: str) -> dict[str, float]:
    """``p2p=1.05,collective=1.2`` as a dict."""
    result: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        try:
            if not equals or name in result:
                raise ValueError
            result[name] = float(number)
        except ValueError:
            raise click.UsageError(f"--interference {part.strip()!r} is no factor of its own; write p2p=1.05,collective=1.2") from None
    return result
