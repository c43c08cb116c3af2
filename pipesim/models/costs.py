"""The cost model of a transformer on a GPU: durations, messages and bytes of every stage of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster, Unit
from pipesim.costs.model import ActivationBytes, slot_durations
from pipesim.dataflow import messages
from pipesim.errors import ScheduleError
from pipesim.models import layers
from pipesim.models.devices import DeviceSpec
from pipesim.models.layout import Layout, layout_of
from pipesim.models.links import Group, gradient_group, pipeline_cluster, ring_time, tensor_group
from pipesim.models.parallelism import Parallelism
from pipesim.models.spec import ModelSpec
from pipesim.models.times import PassTimes, work_times
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["PARTS", "StageTimes", "TransformerCosts"]

Floats = NDArray[np.float64]

# what the seconds of an op are spent on; the last three make up an update
PARTS = ("computing", "recomputing", "communication in ops", "gradient reduction", "optimizer", "overhead")


class StageTimes(NamedTuple):
    """Seconds per stage for one size of microbatch, each (stages,).

    Attributes:
        forward: F.
        backward: B.
        input_grad: I.
        weight_grad: W.
        recompute: What recomputation adds to B or I.
        exposed: Kind to the part of it that is communication nothing hides; ``R`` is that of *recompute*.
    """

    forward: Floats
    backward: Floats
    input_grad: Floats
    weight_grad: Floats
    recompute: Floats
    exposed: Mapping[Kind, Floats]


class TransformerCosts:
    """Durations and bytes of a transformer, its layers spread over the stages of whatever schedule is asked about.

    Times are those of one GPU; tensor-parallel collectives are inside the ops, gradient reduction over the data-parallel
    pipelines and the optimizer are the update U, which the engine puts after the last backward. Run it on
    :meth:`cluster`, whose links and capacity are those of one GPU.

    Args:
        model: The model.
        device: The GPU and its node.
        parallel: How the model is spread.
        microbatch_sizes: Samples of each microbatch; ``parallel.microbatch`` for all of them by default.

    Raises:
        ScheduleError: The model cannot be split so.

    Examples:
        >>> from pipesim import generate, simulate
        >>> from pipesim.models import read_device, read_model
        >>> parallel = Parallelism(tensor=8, pipeline=8, recompute="selective", sequence_parallel=True)
        >>> costs = TransformerCosts(read_model("gpt3-175b"), read_device("a100-80g"), parallel)
        >>> run = simulate(generate("1f1b", devices=8, microbatches=64), costs, cluster=costs.cluster())
        >>> 13 < run.iteration_time < 18, max(run.peak_memory) < 80e9
        (True, True)
    """

    unit: Unit = "s"

    def __init__(self, model: ModelSpec, device: DeviceSpec, parallel: Parallelism, *, microbatch_sizes: Sequence[int] | None = None) -> None:
        parallel.check(model)
        self.model, self.device, self.parallel = model, device, parallel
        self.name = f"{model.name} on {device.name}"
        self._sizes = None if microbatch_sizes is None else tuple(microbatch_sizes)
        self._parameters = layers.parameters(model, parallel.tensor)
        self._layouts: dict[int, Layout] = {}
        self._passes: dict[float, tuple[PassTimes, PassTimes, PassTimes]] = {}

    def cluster(self) -> Cluster:
        """The cluster as one pipeline sees it, with the capacity of one GPU."""
        return pipeline_cluster(self.device, self.parallel)

    def layout(self, stages: int) -> Layout:
        """Which layers each of *stages* stages holds."""
        if stages not in self._layouts:
            parallel = self.parallel
            self._layouts[stages] = layout_of(
                parallel.layout,
                self.model.layers,
                stages,
                embedding=parallel.embedding_weight,
                head=parallel.head_weight,
                devices=parallel.pipeline,
            )
        return self._layouts[stages]

    # -- times ---------------------------------------------------------------------------------------------------------

    def stage_times(self, stages: int, samples: float | None = None, *, local_cuts: Sequence[int] = ()) -> StageTimes:
        """Seconds of every op of a stage.

        Args:
            stages: Number of stages.
            samples: Samples of the microbatch; ``parallel.microbatch`` by default.
            local_cuts: Stages that stand on the same device as the stage after them, so that nothing is sent between.

        Examples:
            >>> from pipesim.models import read_device, read_model
            >>> costs = TransformerCosts(read_model("gpt3-175b"), read_device("a100-80g"), Parallelism(tensor=8, pipeline=8))
            >>> times = costs.stage_times(8)
            >>> bool((times.weight_grad < times.input_grad).all()), bool(times.forward[7] > times.forward[1])
            (True, True)
        """
        parallel, efficiency = self.parallel, self.device.efficiency
        samples = parallel.microbatch if samples is None else samples
        layout = self.layout(stages)
        layer, embedding, head = self._pass_times(samples)
        received = np.zeros((2, stages))
        if parallel.scatter_gather and not parallel.sequence_parallel and parallel.tensor > 1:
            gather = ring_time("all_gather", tensor_group(self.device, parallel), self.boundary_bytes(samples))
            cuts = np.setdiff1d(np.arange(stages - 1), np.asarray(local_cuts, dtype=np.int64))
            received[0, cuts + 1] = received[1, cuts] = gather

        def total(field: str) -> Floats:
            return layout.sums(*(getattr(part, field) for part in (layer, embedding, head)))

        forward_link, backward_link = total("forward_collectives") + received[0], total("backward_collectives") + received[1]
        again = {"none": 0.0, "selective": layer.attention, "full": layer.forward}[parallel.recompute]
        again_link = layout.sums(layer.forward_collectives) if parallel.recompute == "full" else np.zeros(stages)
        recompute = layout.sums(again) + again_link
        computing = {Kind.F: total("forward"), Kind.I: total("input_grad"), Kind.W: total("weight_grad")}
        computing = {kind: seconds + efficiency.op_overhead for kind, seconds in computing.items()}
        computing[Kind.B] = computing[Kind.I] + computing[Kind.W] - efficiency.op_overhead
        linked = {Kind.F: forward_link, Kind.I: backward_link, Kind.W: np.zeros(stages), Kind.B: backward_link}
        beside = self._beside(layout, samples)
        times = {kind: np.maximum(computing[kind] + linked[kind], beside[kind]) for kind in computing}
        exposed = {kind: linked[kind] + np.maximum(0.0, beside[kind] - computing[kind] - linked[kind]) for kind in computing}
        exposed[Kind.R] = again_link
        return StageTimes(times[Kind.F], times[Kind.B], times[Kind.I], times[Kind.W], recompute, exposed)

    def _pass_times(self, samples: float) -> tuple[PassTimes, PassTimes, PassTimes]:
        """Times of a layer, of the embedding and of the output layer."""
        if samples not in self._passes:
            arguments = (self.device, self.model, self.parallel, samples)
            work = [part(self.model, self.parallel, samples) for part in (layers.layer_work, layers.embedding_work, layers.head_work)]
            overhead = self.device.efficiency.layer_overhead
            self._passes[samples] = (
                work_times(work[0], *arguments, overhead=overhead),
                work_times(work[1], *arguments),
                work_times(work[2], *arguments),
            )
        return self._passes[samples]

    def _beside(self, layout: Layout, samples: float) -> dict[Kind, Floats]:
        """Seconds per stage of what runs beside an op and may outlast it: weights gathered, gradients scattered, activations offloaded."""
        parallel, stages = self.parallel, len(layout)
        nothing = np.zeros(stages)
        gather = scatter = offload = nothing
        if parallel.data > 1 and parallel.zero >= 2:
            group, count = gradient_group(self.device, parallel), self.stage_parameters(layout)
            per_parameter = parallel.gradient_bytes if parallel.precision == "mixed" else 4
            scatter = np.array([ring_time("reduce_scatter", group, size) for size in count * per_parameter])
            if parallel.zero >= 3:
                gather = np.array([ring_time("all_gather", group, size) for size in count * parallel.element])
        if parallel.offload_activations:
            whole, _, _ = self._stage_activation(layout, samples)
            offload = whole / self.device.host_bandwidth
        return {Kind.F: gather + offload, Kind.I: gather + offload, Kind.W: scatter, Kind.B: gather + scatter + offload}

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) seconds of every slot."""
        tables = self._tables(schedule)
        times = {kind: tables[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
        update = np.sum(list(self.update_times(schedule).values()), axis=0)
        return slot_durations(schedule, {**times, Kind.R: times[Kind.F], Kind.U: update}, self.recompute(schedule))

    def slot_parts(self, schedule: Schedule) -> dict[str, Floats]:
        """(slots,) seconds of every slot by what they are spent on: the names are those of :data:`PARTS`, and they add up to the durations."""
        times, links = self._tables(schedule), self._tables(schedule, exposed=True)
        listed = schedule.rows_of(Kind.R) >= 0
        again, again_link = (np.where(listed, 0.0, tables[Kind.R]) for tables in (times, links))
        ops = (Kind.F, Kind.B, Kind.I, Kind.W)
        collectives = slot_durations(schedule, {**{kind: links[kind] for kind in ops}, Kind.R: links[Kind.F]}, again_link)
        recomputing = slot_durations(schedule, {Kind.R: times[Kind.F] - links[Kind.F]}, again - again_link)
        update = {part: slot_durations(schedule, {Kind.U: seconds}) for part, seconds in self.update_times(schedule).items()}
        computing = slot_durations(schedule, {kind: times[kind] - links[kind] for kind in ops})
        return dict(zip(PARTS, (computing, recomputing, collectives, *update.values()), strict=True))

    def recompute(self, schedule: Schedule) -> Floats | None:
        """(stages, microbatches) seconds that recomputation adds to the backward; where R is listed, it is that op."""
        if self.parallel.recompute == "none" or not schedule.has_backward:
            return None
        return np.where(schedule.rows_of(Kind.R) >= 0, 0.0, self._tables(schedule)[Kind.R])

    def update_times(self, schedule: Schedule) -> dict[str, Floats]:
        """Seconds of each stage's update by what they are spent on, each (stages,); the names are the last three of :data:`PARTS`.

        The gradients of data-parallel pipelines, of a stage's replicas and of tied embeddings are reduced one after the
        other and hidden by nothing; with ``zero=1`` or ``2`` the weights are gathered after the step.
        """
        parallel, device = self.parallel, self.device
        layout = self._checked_layout(schedule)
        parameters = self.stage_parameters(layout)
        replicas = np.array([len(schedule.placement.get(stage, (0,))) for stage in range(len(layout))])
        per_gradient = parallel.gradient_bytes if parallel.precision == "mixed" else 4
        gradients = np.zeros(len(layout))
        for stage, count in enumerate(parameters):
            members = parallel.data * int(replicas[stage])
            if members > 1:
                peers = gradient_group(device, parallel, int(replicas[stage]))
                scatter = ring_time("reduce_scatter", peers, count * per_gradient)
                gather = ring_time("all_gather", peers, count * parallel.element)
                # zero: 0 all-reduce; 1 reduce-scatter and gather; 2 the gradients went with each backward; 3 the weights come with each op
                gradients[stage] = (2 * scatter, scatter + gather, gather, 0.0)[parallel.zero]
        for group in self.tied_stages(schedule):
            if not self._share_device(schedule, group):
                size = self._parameters.tied * per_gradient
                hop = self.cluster().link(schedule.placement[group[0]][0], schedule.placement[group[1]][0])
                gradients[list(group)] += ring_time("all_reduce", Group(2, 1, hop, None), size)
        moved = per_gradient + (26 if parallel.precision == "mixed" else 24)  # master weights and both moments read and written, weights written
        optimizer = parameters / (parallel.data if parallel.zero else 1) * moved / (device.memory_bandwidth * device.efficiency.memory)
        if parallel.offload_optimizer:
            optimizer = parameters / (parallel.data if parallel.zero else 1) * (per_gradient + parallel.element) / device.host_bandwidth
        # a device's stages share its step's overhead
        owned = np.array([len(schedule.device_stages[schedule.placement.get(stage, (0,))[0]]) for stage in range(len(layout))])
        return dict(zip(PARTS[3:], (gradients, optimizer, device.efficiency.step_overhead / np.maximum(owned, 1)), strict=True))

    def _tables(self, schedule: Schedule, *, exposed: bool = False) -> dict[Kind, Floats]:
        """Kind to a (stages, microbatches) table of seconds; R is what recomputation adds."""
        layout = self._checked_layout(schedule)
        cuts = tuple(stage for stage in range(len(layout) - 1) if self._share_device(schedule, (stage, stage + 1)))
        sizes = self.sample_sizes(schedule)
        result = {kind: np.empty((len(layout), len(sizes))) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)}
        for size in set(sizes):
            found = self.stage_times(len(layout), size, local_cuts=cuts)
            times = {Kind.F: found.forward, Kind.B: found.backward, Kind.I: found.input_grad, Kind.W: found.weight_grad, Kind.R: found.recompute}
            own = np.array([one == size for one in sizes])
            for kind, table in result.items():
                table[:, own] = (found.exposed if exposed else times)[kind][:, None]
        return result

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def boundary_bytes(self, samples: float | None = None) -> float:
        """Bytes of the activation between two stages, undivided: 2bsh."""
        samples = self.parallel.microbatch if samples is None else samples
        return samples * self.model.sequence * self.model.hidden * self.parallel.element

    def message_size(self, samples: float | None = None) -> float:
        """Bytes of a message between two stages that one GPU sends: 2bsh, split over *tensor* with sequence parallelism or scatter-gather.

        Examples:
            >>> from pipesim.models import read_device
            >>> model = ModelSpec(name="x", layers=4, hidden=4096, heads=32, vocabulary=51200, sequence=2048)
            >>> [TransformerCosts(model, read_device("a100-80g"), Parallelism(tensor=4, scatter_gather=on)).message_size() / 2**20 for on in (False, True)]
            [16.0, 4.0]
        """
        split = self.parallel.tensor if self.parallel.sequence_parallel or self.parallel.scatter_gather else 1
        return self.boundary_bytes(samples) / split

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) bytes that one GPU sends."""
        self._checked_layout(schedule)
        sizes = np.array([self.message_size(size) for size in self.sample_sizes(schedule)])
        return np.asarray(sizes[schedule.microbatch[messages(schedule).source]])

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """(stages, microbatches) bytes; see :func:`pipesim.models.layers.layer_activation`."""
        layout = self._checked_layout(schedule)
        sizes = self.sample_sizes(schedule)
        shape = (len(layout), len(sizes))
        listed, split = schedule.rows_of(Kind.R) >= 0, schedule.rows_of(Kind.I) >= 0
        kept, freed, rebuilt = np.empty(shape), np.empty(shape), np.empty(shape)
        for size in set(sizes):
            own = np.array([one == size for one in sizes])
            whole, needed, into = (column[:, None] for column in self._stage_activation(layout, size))
            some, again, again_split = (column[:, None] for column in self._recomputed_activation(layout, size))
            kept[:, own] = np.where(listed[:, own], np.minimum(into, whole), some)
            rebuilt[:, own] = np.where(listed[:, own], whole - np.minimum(into, whole), np.where(split[:, own], again_split, again))
            freed[:, own] = np.maximum(0.0, kept[:, own] + rebuilt[:, own] - needed)
        return ActivationBytes(kept, freed, rebuilt)

    def _stage_activation(self, layout: Layout, samples: float) -> tuple[Floats, Floats, Floats]:
        """(stages,) bytes of a microbatch's whole activation, of what W needs of it, and of the stage's input."""
        layer = layers.layer_activation(self.model, self.parallel, samples)
        head, head_needed = layers.head_activation(self.model, self.parallel, samples)
        whole = layout.sums(layer.whole, layers.embedding_activation(self.model, self.parallel, samples), head)
        return whole, layout.sums(layer.weight_grad, 0.0, head_needed), np.full(len(layout), layer.input)

    def _recomputed_activation(self, layout: Layout, samples: float) -> tuple[Floats, Floats, Floats]:
        """(stages,) bytes kept from F under the wish for recomputation, and rebuilt by B, and by I for W.

        Layers are recomputed one unit at a time, so B holds one; W, put off, still needs them all.
        """
        parallel = self.parallel
        whole, _, into = self._stage_activation(layout, samples)
        if parallel.offload_activations:
            into = np.minimum(into, whole)
            return into, whole - into, whole - into
        layer = layers.layer_activation(self.model, parallel, samples)
        count = np.array(layout.layers, dtype=np.float64)
        if parallel.recompute == "selective":
            once = np.minimum(count, 1) * layer.attention
            return whole - count * layer.attention, once, once
        if parallel.recompute == "full":
            units = np.ceil(count / parallel.recompute_layers)
            once = np.minimum(count, parallel.recompute_layers) * layer.whole - np.minimum(units, 1) * layer.input
            return whole - count * layer.whole + units * layer.input, once, count * layer.whole - units * layer.input
        return whole, np.zeros_like(whole), np.zeros_like(whole)

    def weight_grad_memory(self) -> float:
        """The part of a layer's activation that stays for W, M_W/M_B: 32h/(34h + 5as) for GPT."""
        layer = layers.layer_activation(self.model, self.parallel, self.parallel.microbatch)
        return min(1.0, layer.weight_grad / layer.whole)

    def stage_parameters(self, layout: Layout) -> Floats:
        """(stages,) parameters on one GPU; tied weights count on both stages."""
        return layout.sums(self._parameters.layer, self._parameters.embedding, self._parameters.head)

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """Category to (stages,) bytes; tied embeddings count once on a device that has both."""
        layout, parallel = self._checked_layout(schedule), self.parallel
        parameters = self.stage_parameters(layout)
        for group in self.tied_stages(schedule) or ([(0, 0)] if self.model.tied_embeddings and len(layout) == 1 else []):
            if self._share_device(schedule, group):
                parameters[group[-1]] -= self._parameters.tied
        per_parameter = {"weights": parallel.weight_bytes, "gradients": parallel.grad_bytes, "optimizer": parallel.optimizer_bytes}
        return {category: parameters * size for category, size in per_parameter.items()}

    def tied_stages(self, schedule: Schedule) -> Sequence[Sequence[int]]:
        """First and last stage, with tied embeddings."""
        stages = schedule.num_stages
        return [(0, stages - 1)] if self.model.tied_embeddings and stages > 1 else []

    # -- the schedule --------------------------------------------------------------------------------------------------

    @staticmethod
    def _share_device(schedule: Schedule, stages: Sequence[int]) -> bool:
        """Whether two stages stand on the same device (or devices)."""
        return schedule.placement.get(stages[0]) == schedule.placement.get(stages[1])

    def _checked_layout(self, schedule: Schedule) -> Layout:
        if schedule.num_devices != self.parallel.pipeline:
            raise ScheduleError(f"the schedule has {schedule.num_devices} devices, and pipeline = {self.parallel.pipeline}")
        chain = tuple((stage, stage + 1) for stage in range(schedule.num_stages - 1))
        if schedule.stage_edges != chain:
            raise ScheduleError("a transformer is a chain of stages, and this schedule has another stage graph")
        return self.layout(schedule.num_stages)

    def sample_sizes(self, schedule: Schedule) -> tuple[int, ...]:
        """Samples of each microbatch."""
        count = schedule.num_microbatches
        if self._sizes is None:
            return (self.parallel.microbatch,) * count
        if len(self._sizes) != count:
            raise ScheduleError(f"the batch makes {len(self._sizes)} microbatches and the schedule has {count}")
        return self._sizes
