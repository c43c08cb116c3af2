"""One process of tests/replay/test_pytorch_runtime.py: runs CSV files in PyTorch's own pipeline runtime, on gloo.

    python pytorch_runtime_worker.py FOLDER RANK PROCESSES

FOLDER holds cases.json, a list of {"name", "csv", "format", "stages", "microbatches"}, and gets rank{RANK}.jsonl, one line per
case: the largest relative error of losses and gradients against the same model on one process, or what went wrong.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ROWS = 6, 2  # of a layer; of a microbatch


def layers(stages: int) -> list[torch.nn.Module]:
    """The model: one layer per stage, each with weights of its own, the same on every rank."""
    torch.manual_seed(7)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(stages)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()  # a sum, so that gradients of microbatches add up to those of the batch


def run_case(case: dict[str, Any], rank: int, processes: int) -> float:
    stages, microbatches = case["stages"], case["microbatches"]
    torch.manual_seed(11)
    batch, target = (torch.randn(microbatches * ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    model = layers(stages)
    owners = case["owners"]
    mine = [stage for stage in range(stages) if owners[stage] == rank]
    pieces = [PipelineStage(model[stage], stage, stages, torch.device("cpu")) for stage in mine]
    runtime = _PipelineScheduleRuntime(pieces, microbatches, loss_fn=loss_of, scale_grads=False)
    runtime._load_csv(case["csv"], format=case["format"])
    losses: list[torch.Tensor] = []
    runtime.step(
        *([batch] if 0 in mine else []),
        target=target if stages - 1 in mine else None,
        losses=losses if stages - 1 in mine else None,
    )

    alone = layers(stages)
    expected = []
    for part, wanted in zip(batch.chunk(microbatches), target.chunk(microbatches), strict=True):
        loss = loss_of(torch.nn.Sequential(*alone)(part), wanted)
        loss.backward()
        expected.append(loss.detach())
    pairs = [(torch.stack([loss.detach() for loss in losses]), torch.stack(expected))] if losses else []
    for stage in mine:
        for got, right in zip(model[stage].parameters(), alone[stage].parameters(), strict=True):
            if got.grad is None or right.grad is None:
                raise RuntimeError(f"a parameter of stage {stage} has no gradient")
            pairs.append((got.grad, right.grad))
    if stages - 1 in mine and not losses:
        raise RuntimeError("the last stage has no losses")
    return max(float((got - right).abs().max() / right.abs().max()) for got, right in pairs)


def main(folder: Path, rank: int, processes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes, timeout=timedelta(seconds=30))
    with (folder / f"rank{rank}.jsonl").open("w") as results:
        for case in json.loads((folder / "cases.json").read_text()):
            try:
                outcome: dict[str, Any] = {"error": run_case(case, rank, processes)}
            except Exception as failure:
                outcome = {"failure": f"{type(failure).__name__}: {failure}"[:2000]}
            print(json.dumps({"name": case["name"], **outcome}), file=results, flush=True)
            if "failure" in outcome:
                break  # the others wait for this rank, and stop at the timeout of gloo
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
