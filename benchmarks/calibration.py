"""How well does a calibration on GPipe predict 1F1B, interleaved and zero-bubble?

    python benchmarks/calibration.py [--emulate] [--rounds N] [--folder FOLDER]

Two ranks on CPUs (gloo, one thread each), or with --emulate eight ranks whose ops sleep for 5 to 20 ms. Calibration and verification
runs take turns. Prints what was calibrated and a table of predicted against measured iteration times; nothing is asserted. Runs that are
in the folder are reused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import pipesim as ps
from pipesim.calibration import Plan, calibrate, calibration_report, predict, prediction_table, run_plan
from pipesim.replay import ReplayModel, Settings

PREDICTED = ("1f1b", "interleaved-1f1b", "zb-h1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    devices, microbatches = (8, 16) if arguments.emulate else (2, 8)
    verify = tuple(ps.generate(name, devices, microbatches) for name in PREDICTED)
    if arguments.emulate:
        costs = ps.UniformCosts(
            forward=0.010, backward=0.020, input_grad=0.010, weight_grad=0.010, optimizer=0.005, message=65536, stages=devices, unit="s"
        )
        plan = Plan(devices, microbatches, (1, 2), Settings(mode="emulate", iterations=5), costs, arguments.rounds, verify)
    else:
        model = ReplayModel(layers=8, hidden=256, microbatch=64)
        plan = Plan(devices, microbatches, (1, 2), Settings(model, iterations=5), rounds=arguments.rounds, verify=verify)
    with tempfile.TemporaryDirectory() as temporary:
        done = run_plan(plan, arguments.folder or temporary, lambda text: print(text, file=sys.stderr, flush=True))
    found = calibrate(done.calibration)
    print(calibration_report(found))
    print()
    print(prediction_table([predict(found, schedule, runs) for schedule, runs in zip(verify, done.verification, strict=True)]))
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
