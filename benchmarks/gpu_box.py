"""What does a GPU box say: durations, peak memory, links, and how good are the predictions?

    python benchmarks/gpu_box.py [--out gpu_box.json]      # one GPU or eight, under 8 minutes; pip install '.[replay]' is all it needs
    python benchmarks/gpu_box.py --dry-run                 # the same on CPUs with tiny sizes, in a minute or two

Works with torch 2.6 to 2.13 and Python 3.11 to 3.12. Every section is a process of its own with a time limit, and the results file is
rewritten after each: what fails or hangs costs its own section only, and says so in the file.

    machine   what is here
    solo-*    a transformer that fills the GPU, cut in four, one stage after the other on the first GPU: durations per kind, peak memory
    memory    peak memory, simulated from gpipe and the split probe against measured by the allocator (goal: within 5 %)
    gloo      two ranks on CPUs: calibrate, predict, and the host's time per op
    nccl      where there are two GPUs or more: the same with a rank per GPU
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BUDGET = 465.0  # seconds in all
# name: the most seconds it may take
SECTIONS = {
    "machine": 60.0, "solo-gpipe": 110.0, "solo-split": 110.0, "solo-1f1b": 80.0, "solo-zb-h1": 80.0, "memory": 40.0, "gloo": 90.0, "nccl": 170.0,
}  # fmt: skip
STAGES = 4
PREDICTED = ("1f1b", "interleaved-1f1b", "zb-h1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_box.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on CPUs")
    parser.add_argument("--only", help="sections, with commas")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = Path(arguments.out).resolve()
    folder = out.with_name(f"{out.stem}-runs")
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.section:
        result = run_section(arguments.section, folder, arguments.dry_run)
        (folder / f"{arguments.section}.json").write_text(json.dumps(result, default=float))
        return
    begin = time.monotonic()
    wanted = arguments.only.split(",") if arguments.only else list(SECTIONS)
    report: dict[str, Any] = {"script": "gpu_box", "dry_run": arguments.dry_run, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "sections": {}}
    for name in wanted:
        left = BUDGET - (time.monotonic() - begin)
        report["sections"][name] = child(name, out, folder, arguments.dry_run, min(SECTIONS[name], left))
        report["seconds"] = time.monotonic() - begin
        write(out, report)
    report["complete"] = all(section["status"] in ("ok", "skipped") for section in report["sections"].values())
    write(out, report)
    print(f"wrote {out} after {report['seconds']:.0f} s")


def write(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(report, indent=1))
    os.replace(part, path)


def child(name: str, out: Path, folder: Path, dry_run: bool, limit: float) -> dict[str, Any]:
    """Runs a section in a process group of its own, and ends all of it when its time is over."""
    if limit < 10:
        return {"status": "skipped", "why": "no time left"}
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--section", name, *(["--dry-run"] if dry_run else [])]
    print(f"{name} (at most {limit:.0f} s) ...", flush=True)
    begin = time.monotonic()
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever is left of it; its ranks watch their launcher besides
            process.wait()
    section: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1)}
    if result.is_file():
        found = json.loads(result.read_text())
        section |= {"status": "skipped" if "skipped" in found else "ok", **found}
    else:
        lines = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        section |= {"status": "timed out" if status is None else "failed", "why": lines[-1] if lines else f"exit status {status}", "log": lines[-30:]}
    print(
        f"  {section['status']} after {section['seconds']} s{': ' + str(section.get('why') or section.get('skipped') or '') if section['status'] != 'ok' else ''}"
    )
    for line in section.get("text", "").splitlines():
        print(f"  {line}")
    return section


def run_section(name: str, folder: Path, dry_run: bool) -> dict[str, Any]:
    if name.startswith("solo-"):
        return solo(name.removeprefix("solo-"), folder, dry_run)
    sections = {"machine": machine, "memory": memory, "gloo": gloo, "nccl": nccl}
    return sections[name](folder, dry_run)


# -- sections ------------------------------------------------------------------------------------------------------------------------


def machine(folder: Path, dry_run: bool) -> dict[str, Any]:
    import torch

    import pipesim

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if cuda else []
    found: dict[str, Any] = {
        "pipesim": pipesim.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": str(torch.cuda.nccl.version()) if cuda and torch.distributed.is_nccl_available() else None,
        "cores": os.cpu_count(),
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
    }
    if cuda:
        peers = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b and torch.cuda.can_device_access_peer(a, b)]
        found["peer_access"] = len(peers)
    names = ", ".join(f"{gpu['name']} ({gpu['memory'] / 1e9:.0f} GB)" for gpu in found["gpus"]) or "no GPU"
    return {**found, "text": f"{names}; torch {found['torch']}, Python {found['python']}, {found['cores']} cores"}


def settings(dry_run: bool, layers: int) -> Any:
    """A transformer in bfloat16 on the GPU, or a tiny one on the CPU."""
    from pipesim.replay import ReplayModel, Settings

    if dry_run:
        model = ReplayModel("transformer", layers=layers, hidden=32, heads=2, sequence=16, vocabulary=64, microbatch=2)
        return Settings(model, "solo", "gloo", iterations=3, warm_up=1, timeout=60.0)
    model = ReplayModel("transformer", layers=layers, hidden=2048, heads=16, sequence=4096, vocabulary=32000, microbatch=1, dtype="bfloat16")
    return Settings(model, "solo", "nccl", iterations=3, warm_up=1, optimizer="adam", timeout=60.0)


def schedule_of(name: str) -> Any:
    import pipesim as ps
    from pipesim.calibration import gpipe_probe, split_probe

    probes = {"gpipe": gpipe_probe, "split": split_probe}
    return probes[name](STAGES, 2 * STAGES) if name in probes else ps.generate(name, STAGES, 2 * STAGES)


def solo(name: str, folder: Path, dry_run: bool) -> dict[str, Any]:
    """One schedule, one device's stream after the other; with half the layers where they do not fit."""
    import torch

    from pipesim.calibration import calibrate
    from pipesim.replay import ReplayError, Task, replay_all

    if not dry_run and not torch.cuda.is_available():
        return {"skipped": "no CUDA device"}
    chosen = folder / "layers.json"
    layers = json.loads(chosen.read_text()) if chosen.is_file() and name != "gpipe" else first_guess(dry_run)
    while True:
        try:
            run = replay_all([Task(schedule_of(name), settings(dry_run, layers * STAGES))])[0]
            break
        except ReplayError as error:
            if "out of memory" not in str(error) or layers == 1 or name != "gpipe":
                raise
            layers //= 2
            print(f"out of memory; now with {layers} layers per stage", flush=True)
    chosen.write_text(json.dumps(layers))
    run.save(folder / f"solo-{name}.json.gz")
    found = calibrate([run])
    kinds = [{"stage": one.stage, "kind": one.kind, **dataclasses.asdict(one.spread)} for one in found.spreads]
    text = [f"{layers} layers per stage; medians and deviations per stage:"]
    for kind in dict.fromkeys(one["kind"] for one in kinds):
        text.append(f"  {kind} " + "  ".join(f"{1e3 * one['median']:.2f} ± {1e3 * one['deviation']:.2f} ms" for one in kinds if one["kind"] == kind))
    peak = run.info.get("peak_memory")
    return {
        "layers_per_stage": layers,
        "durations": kinds,
        "peak_memory": peak,
        "info": dict(run.info),
        "notes": list(found.notes),
        "text": "\n".join(text),
    }


def first_guess(dry_run: bool) -> int:
    """Layers per stage for which GPipe takes about 60 % of the GPU."""
    if dry_run:
        return 1
    import torch

    hidden, sequence, microbatches = 2048, 4096, 2 * STAGES
    layer = 12 * hidden**2 * 16 + microbatches * 40 * sequence * hidden  # weights with gradients and Adam, and activations
    room = 0.6 * torch.cuda.get_device_properties(0).total_memory
    return max(1, min(16, int(room // layer)))


def memory(folder: Path, dry_run: bool) -> dict[str, Any]:
    """Peaks of schedules that the calibration did not see, and of GPipe, against the allocator's."""
    import pipesim as ps
    from pipesim.calibration import calibrate, simulated
    from pipesim.units import format_bytes

    runs = {name: folder / f"solo-{name}.json.gz" for name in ("gpipe", "split", "1f1b", "zb-h1")}
    there = {name: ps.load(path) for name, path in runs.items() if path.is_file()}
    if not {"gpipe", "split"} <= there.keys():
        return {"skipped": "gpipe and the split probe did not run"}
    found = calibrate([there["gpipe"], there["split"]])
    rows, lines = [], []
    for name, run in there.items():
        predicted = simulated(found, run.schedule).peak_memory
        said = run.info.get("peak_memory")
        measured = [float(part) for part in said.split(",")] if said else None
        errors = None if measured is None else [a / b - 1 for a, b in zip(predicted, measured, strict=True)]
        rows.append({"schedule": name, "simulated": predicted, "measured": measured, "errors": errors, "unseen": name not in ("gpipe", "split")})
        told = "no allocator to ask on a CPU" if errors is None else "  ".join(f"{error:+.1%}" for error in errors)
        lines.append(f"{name:8} simulated " + "  ".join(format_bytes(peak, "s") for peak in predicted) + f"; against measured: {told}")
    return {"peaks": rows, "text": "\n".join(lines)}


def calibrated(plan: Any, folder: Path) -> dict[str, Any]:
    from pipesim.calibration import calibrate, calibration_report, predict, prediction_table, run_plan, save_calibration

    done = run_plan(plan, folder, lambda text: print(text, flush=True))
    found = calibrate(done.calibration, folder.name)
    save_calibration(found, folder / "calibration.toml")
    predictions = [predict(found, schedule, runs) for schedule, runs in zip(plan.verify, done.verification, strict=True)]
    text = f"{calibration_report(found)}\n\n{prediction_table(predictions)}"
    links = [{"from": a, "to": b, **vars(link)} for (a, b), link in sorted(found.links.items())]
    return {
        "predictions": [one.as_dict() for one in predictions],
        "host": vars(found.costs.host),
        "links": links,
        "notes": list(found.notes),
        "text": text,
    }


def gloo(folder: Path, dry_run: bool) -> dict[str, Any]:
    import pipesim as ps
    from pipesim.calibration import Plan
    from pipesim.replay import ReplayModel, Settings

    model = ReplayModel(layers=4, hidden=32, microbatch=4) if dry_run else ReplayModel(layers=8, hidden=256, microbatch=64)
    how = Settings(model, iterations=3 if dry_run else 10, warm_up=1)
    verify = tuple(ps.generate(name, 2, 4 if dry_run else 8) for name in PREDICTED)
    sizes = (1024, 65536) if dry_run else None
    plan = Plan(2, 4 if dry_run else 8, (1, 2), how, rounds=1 if dry_run else 3, verify=verify)
    return calibrated(dataclasses.replace(plan, sizes=sizes) if sizes else plan, folder / "gloo")


def nccl(folder: Path, dry_run: bool) -> dict[str, Any]:
    import torch

    import pipesim as ps
    from pipesim.calibration import Plan
    from pipesim.replay import ReplayModel, Settings

    count = 0 if dry_run or not torch.cuda.is_available() else torch.cuda.device_count()
    if count < 2:
        return {"skipped": f"{count} CUDA devices, and NCCL between ranks wants two or more"}
    devices = min(8, count)
    model = ReplayModel("transformer", layers=4 * devices, hidden=2048, heads=16, sequence=2048, vocabulary=32000, microbatch=1, dtype="bfloat16")
    how = Settings(model, "run", "nccl", iterations=5, warm_up=2, timeout=60.0)
    verify = tuple(ps.generate(name, devices, 2 * devices) for name in PREDICTED)
    return calibrated(Plan(devices, 2 * devices, (1, 2), how, rounds=2, verify=verify), folder / "nccl")


if __name__ == "__main__":
    main()
