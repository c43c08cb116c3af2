"""What a training step of a transformer takes: the figures by which people compare runs, from a simulated schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipesim import registry
from pipesim.batch import microbatch_sizes
from pipesim.engine import Engine, simulate
from pipesim.errors import DeadlockError, ScheduleError, require_count
from pipesim.models import DeviceSpec, ModelSpec, Parallelism, TransformerCosts, forward_flops
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = [
    "DEFINITIONS",
    "Estimate",
    "contenders",
    "estimate",
    "memory_savers",
    "rank",
    "schedules_not_ranked",
    "schedules_to_rank",
    "with_less_memory",
]

DEFINITIONS = {
    "iteration_time": "first start to last end of the batch, gradient reduction and optimizer included",
    "tokens_per_second": "batch x sequence / iteration_time, of all GPUs together",
    "mfu": "model FLOPs / (iteration_time x GPUs x peak); model FLOPs are 72BLsh²(1 + s/6h + V/12hL) for GPT (Korthikanti et al. 2022)",
    "hfu": "the same with the FLOPs that recomputation adds",
    "bubble": "part of iteration_time in which a GPU idles for want of work: mean of all devices",
    "exposed": "part of it in which a GPU does nothing but communicate (in ops, on links, gradient reduction): mean of all devices",
    "peak_memory": "the most bytes that a GPU holds at once, of the device that holds most",
}

# what schedules_to_rank leaves out, and why
_NOT_RANKED = {
    "gnnpipe": "of another workload: dependent chunks of a graph",
    "pipad": "of another workload: resources of one machine",
    "seq1f1b": "of another workload: pieces of a sequence",
    "graphpipe": "of another workload: branches of a model",
    "zb-auto": "searches within a --memory-limit to be given; zb-1p and zb-2p, which search within the usual ones, are there",
    "v-auto": "searches within a --memory-limit to be given; v-min, v-half and v-zb, for the usual ones, are there",
}
_TRIED, _MOST_OPS = 6, 150_000  # schedules that are simulated with each way to save memory, and ops in all: a second or two


@dataclass(frozen=True, eq=False)
class Estimate:
    """A schedule of a model on a machine, simulated.

    Attributes:
        name: The schedule, as it was asked for.
        costs: Model, device and parallelism.
        run: One step; for a schedule without a flush, the batch.
        batch: Samples over all pipelines.
    """

    name: str
    costs: TransformerCosts
    run: Timeline
    batch: int

    @property
    def iteration_time(self) -> float:
        """Seconds of the batch, from first start to last end."""
        return self.run.makespan

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.batch * self.costs.model.sequence / self.iteration_time

    @property
    def fits(self) -> bool:
        """Whether every device's memory suffices."""
        return not self.run.overflows()

    @cached_property
    def model_flops(self) -> float:
        """FLOPs that training on the batch takes, however it is done: three forwards."""
        return 3.0 * self.batch * sum(forward_flops(self.costs.model))

    @cached_property
    def recompute_flops(self) -> float:
        """FLOPs that are done again."""
        model, parallel, schedule = self.costs.model, self.costs.parallel, self.run.schedule
        linear, attention, head = forward_flops(model)
        linear, attention = linear / model.layers, attention / model.layers
        layout, listed = self.costs.layout(schedule.num_stages), schedule.rows_of(Kind.R) >= 0
        again = {"none": 0.0, "selective": attention, "full": linear + attention}[parallel.recompute]
        per_sample = np.where(listed, layout.sums(linear + attention, 0.0, head)[:, None], layout.sums(again)[:, None])
        if parallel.flash_attention:  # its backward computes the scores again: one of the forward's two products
            per_sample = per_sample + layout.sums(attention / 2)[:, None]
        return float((per_sample * np.array(self.costs.sample_sizes(schedule))).sum()) * parallel.data

    @property
    def mfu(self) -> float:
        """Model FLOPs over the FLOPs that the GPUs could do in that time."""
        return self.model_flops / self._possible_flops

    @property
    def hfu(self) -> float:
        """The same with the FLOPs of recomputation."""
        return (self.model_flops + self.recompute_flops) / self._possible_flops

    @property
    def _possible_flops(self) -> float:
        parallel = self.costs.parallel
        return self.iteration_time * parallel.gpus * self.costs.device.peak(parallel.precision)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by what a GPU spends them on, mean of all devices; they add up to *iteration_time*.

        ``gradient reduction`` is over data-parallel pipelines, a stage's replicas and tied embeddings; ``bubble`` is idle
        time that is no link's.
        """
        schedule, idle = self.run.schedule, self.run.idle_causes()
        parts = {part: float(seconds.sum()) / schedule.num_devices for part, seconds in self.costs.slot_parts(schedule.with_updates()).items()}
        waiting = {cause: sum(one[cause] for one in idle) / len(idle) for cause in idle[0]}
        parts["gradient reduction"] += waiting.pop("gradient reduction")
        parts["waiting for the link"] = waiting.pop("waiting for the link") + waiting.pop("waiting for weights")
        parts["bubble"] = sum(waiting.values())
        return parts

    @property
    def bubble(self) -> float:
        """Part of the iteration in which a GPU idles for want of work."""
        return self.breakdown["bubble"] / self.iteration_time

    @property
    def exposed(self) -> float:
        """Part of the iteration in which a GPU does nothing but communicate."""
        return sum(self.breakdown[part] for part in ("communication in ops", "waiting for the link", "gradient reduction")) / self.iteration_time

    def figures(self) -> dict[str, Any]:
        """Every figure by its name, as ``--json`` prints them; the run's own are beside them."""
        run = self.run
        own = run.figures()
        kept = ("bubble_fraction", "span_bubble_rate", "idle_causes", "peak_memory", "peak_memory_by_category", "peak_activations", "does_not_fit")
        return {
            "schedule": self.name,
            "fits": self.fits,
            "iteration_time": self.iteration_time,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "exposed": self.exposed,
            "breakdown": self.breakdown,
            "stages": run.schedule.num_stages,
            "microbatches": run.schedule.num_microbatches,
            "layers": list(self.costs.layout(run.schedule.num_stages).layers),
            "flush": run.schedule.weights == "flush",
            **{name: own[name] for name in kept},
        }


def estimate(
    model: ModelSpec,
    device: DeviceSpec,
    parallel: Parallelism,
    schedule: str | Schedule = "1f1b",
    *,
    batch: int | None = None,
    memory: float | None = None,
    engine: Engine = "auto",
    **options: Any,
) -> Estimate:
    """Simulates one training step of a transformer.

    Args:
        model: From :func:`pipesim.models.read_model`, or a ModelSpec.
        device: From :func:`pipesim.models.read_device`, or a DeviceSpec.
        parallel: How the model is spread.
        schedule: A schedule's name, a schedule file, or a schedule.
        batch: Samples of one step over all pipelines; by default 8 microbatches for each device of a pipeline.
        memory: Bytes of each GPU; the device's by default.
        engine: As for :func:`pipesim.simulate`.
        **options: The schedule's own options. Times that its order may depend on are filled in.

    Raises:
        ScheduleError: The model cannot be spread so, or the schedule does not allow the size.

    Examples:
        >>> from pipesim.models import Parallelism, read_device, read_model
        >>> parallel = Parallelism(tensor=8, microbatch=4, recompute="selective", sequence_parallel=True)
        >>> found = estimate(read_model("gpt-22b"), read_device("a100-80g"), parallel, batch=4)
        >>> found.fits, 0.4 < found.mfu < found.hfu < 0.5
        (True, True)
    """
    batch = 8 * parallel.pipeline * parallel.data * parallel.microbatch if batch is None else require_count("batch", batch)
    sizes = microbatch_sizes(batch, parallel.microbatch, parallel.data)
    costs = TransformerCosts(model, device, parallel, microbatch_sizes=sizes)
    name = schedule if isinstance(schedule, str) else schedule.name
    if isinstance(schedule, str) and registry.is_file(schedule):
        schedule = registry.read_file(schedule, **options)
    elif isinstance(schedule, str):
        schedule = registry.generate(schedule, parallel.pipeline, len(sizes), **_times_for_order(costs, registry.find(schedule)) | options)
    if schedule.num_microbatches != len(sizes):
        raise ScheduleError(f"{name} has {schedule.num_microbatches} microbatches and the batch makes {len(sizes)}")
    if not schedule.has_backward:
        raise ScheduleError(f"{name} has no backward, and a training step has one")
    cluster = costs.cluster()
    return Estimate(name, costs, simulate(schedule, costs, cluster=cluster if memory is None else cluster.with_memory(memory), engine=engine), batch)


def _times_for_order(costs: TransformerCosts, generator: registry.Generator) -> dict[str, Any]:
    """The times and sizes that a schedule's order may depend on (zb-auto, v-auto, hanayo, ampnet)."""
    known = registry.options_of(generator)
    if not known.keys() & {"forward", "input_grad", "weight_grad", "backward"}:
        return {}
    times = costs.stage_times(costs.parallel.pipeline)
    lists = {"forward": times.forward, "backward": times.backward + times.recompute, "input_grad": times.input_grad + times.recompute}
    lists["weight_grad"] = times.weight_grad
    # one number, where the option takes no list: the mean, because only its ratio to the other times matters
    found: dict[str, Any] = {
        name: values.tolist() if "Sequence" in str(known[name].annotation) else float(values.mean())
        for name, values in lists.items()
        if name in known
    }
    if "latency" in known:
        found["latency"] = costs.cluster().link(0, 1).time(costs.message_size()) if costs.parallel.pipeline > 1 else 0.0
    if "weight_grad_memory" in known:
        found["weight_grad_memory"] = costs.weight_grad_memory()
    return found


def schedules_to_rank() -> list[str]:
    """Every installed schedule once, by its first name, without :func:`schedules_not_ranked`.

    Those without a flush are still among them; :func:`rank` can leave them out.

    Examples:
        >>> {"1f1b", "zb-v"} <= set(schedules_to_rank()), "dapple" in schedules_to_rank()
        (True, False)
    """
    seen: dict[registry.Generator, str] = {}
    for name, generator in registry.available().items():
        seen.setdefault(generator, name)
    return [name for name in seen.values() if name not in _NOT_RANKED]


def schedules_not_ranked() -> dict[str, str]:
    """Those of other workloads and those that search within a limit to be given, each with the reason.

    Examples:
        >>> schedules_not_ranked()["gnnpipe"]
        'of another workload: dependent chunks of a graph'
    """
    return dict(_NOT_RANKED)


def rank(
    model: ModelSpec,
    device: DeviceSpec,
    parallel: Parallelism,
    schedules: Sequence[str],
    *,
    batch: int | None = None,
    memory: float | None = None,
    engine: Engine = "auto",
    options: dict[str, dict[str, Any]] | None = None,
    flush_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Estimate], dict[str, str]]:
    """Estimates several schedules: those that fit first, then the fastest.

    Args:
        model: As for :func:`estimate`.
        device: The same.
        parallel: The same.
        schedules: Names.
        batch: The same.
        memory: The same.
        engine: The same.
        options: A schedule's name to its own options.
        flush_only: Leave out schedules that train on stale weights.
        progress: Called with how many have been done, and how many there are.

    Returns:
        The estimates in order, and the reason of every schedule that does not allow the size or that *flush_only* leaves out.

    Examples:
        >>> from pipesim.models import Parallelism, read_device, read_model
        >>> found, refused = rank(read_model("llama2-7b"), read_device("h100"), Parallelism(pipeline=4, flash_attention=True), ["gpipe", "1f1b", "zb-v"])
        >>> [one.name for one in found if one.fits]
        ['zb-v', '1f1b']
    """
    found: list[Estimate] = []
    refused: dict[str, str] = {}
    for number, name in enumerate(schedules):
        if progress is not None:
            progress(number, len(schedules))
        try:
            one = estimate(model, device, parallel, name, batch=batch, memory=memory, engine=engine, **(options or {}).get(name, {}))
        except (ScheduleError, DeadlockError) as error:
            refused[name] = str(error).partition("\n")[0]
            continue
        if flush_only and one.run.schedule.weights != "flush":
            refused[name] = "trains on stale weights, without a flush; name it to have it"
            continue
        found.append(one)
    # times that differ only by the order of float sums are ties, and the smaller peak comes first
    return sorted(found, key=lambda one: (not one.fits, float(f"{one.iteration_time:.9g}"), max(one.run.peak_memory))), refused


def memory_savers(parallel: Parallelism) -> dict[str, Parallelism]:
    """Ways to hold less that *parallel* does not take yet: the option of ``pipesim estimate``, and the parallelism with it.

    Examples:
        >>> list(memory_savers(Parallelism(pipeline=4, flash_attention=True)))
        ['--recompute full']
    """
    scores = parallel.recompute == "none" and not parallel.flash_attention  # which selective recomputation would not keep
    ways: dict[str, Parallelism] = {}
    if not parallel.flash_attention:
        ways["--flash-attention"] = replace(parallel, flash_attention=True)
    if scores:
        ways["--recompute selective"] = replace(parallel, recompute="selective")
    if parallel.recompute != "full":
        ways["--recompute full"] = replace(parallel, recompute="full")
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        also = "--recompute selective " if scores else ""
        ways[f"{also}--sequence-parallel"] = replace(parallel, sequence_parallel=True, recompute="selective" if scores else parallel.recompute)
    if parallel.data > 1 and not parallel.zero:
        ways["--zero 1"] = replace(parallel, zero=1)
    return ways


def contenders(found: Sequence[Estimate]) -> list[Estimate]:
    """Up to six estimates, the fastest first: what to try with less memory.

    Of more, those than which no other is both faster and smaller. With less memory another could still be the fastest, by a
    few percent: what saves memory slows whole and split backwards down by different amounts.
    """
    ordered = sorted(found, key=lambda one: (one.iteration_time, max(one.run.peak_memory)))
    if len(ordered) <= _TRIED:
        return ordered
    kept: list[Estimate] = []
    for one in ordered:
        if not kept or max(one.run.peak_memory) < max(kept[-1].run.peak_memory):
            kept.append(one)
    return kept[:_TRIED]


def with_less_memory(
    found: Sequence[Estimate], *, memory: float | None = None, engine: Engine = "auto", options: dict[str, dict[str, Any]] | None = None
) -> dict[str, Estimate | None]:
    """The fastest of some schedules that fits with each of :func:`memory_savers`.

    Args:
        found: From :func:`contenders`.
        memory: As it was given to :func:`rank`.
        engine: The same.
        options: The same.

    Returns:
        A way to the estimate, None where none fits; nothing at all where it would take more than a few seconds.

    Examples:
        >>> from pipesim.models import Parallelism, read_device, read_model
        >>> parallel = Parallelism(tensor=8, pipeline=8, recompute="selective")
        >>> found, _ = rank(read_model("gpt3-175b"), read_device("a100-80g"), parallel, ["1f1b"], batch=16)
        >>> {way: one is not None for way, one in with_less_memory(found).items()}
        {'--flash-attention': False, '--recompute full': True, '--sequence-parallel': True}
    """
    costs, ways = found[0].costs, memory_savers(found[0].costs.parallel)
    if len(ways) * sum(one.run.schedule.num_slots for one in found) > _MOST_OPS:
        return {}
    names = [one.name for one in found]
    best: dict[str, Estimate | None] = {}
    for way, parallel in ways.items():
        then, _ = rank(costs.model, costs.device, parallel, names, batch=found[0].batch, memory=memory, engine=engine, options=options)
        best[way] = then[0] if then and then[0].fits else None
    return best
