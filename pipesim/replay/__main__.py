"""A rank: ``python -m pipesim.replay``, started by the launcher (``--job FOLDER``) or by torchrun (``SCHEDULE ...``)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from pipesim.replay.records import SETTING_UP, open_progress, write_facts

__all__ = ["main"]


def main() -> None:
    """Runs the tasks of a job as the rank that the environment says, or the command line as torchrun started it."""
    if sys.argv[1:2] == ["--job"] and len(sys.argv) == 3:
        _launched(Path(sys.argv[2]))
        return
    from pipesim.cli import main as command_line

    sys.argv = ["pipesim", "replay", *sys.argv[1:]]
    command_line()


def _launched(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    progress = open_progress(folder, rank)
    try:
        _run_tasks(folder, rank, world, progress)
    except BaseException as error:  # whatever it is, the launcher says it
        from pipesim.replay.failures import describe

        write_facts(folder / f"rank{rank}.error", describe(error))
        if not isinstance(error, Exception):
            raise
        import traceback

        traceback.print_exc()  # into the rank's log
        sys.stderr.flush()
        os._exit(1)  # at once: peers wait, and destructors would wait for them


def _run_tasks(folder: Path, rank: int, world: int, progress: Any) -> None:
    warnings.simplefilter("ignore")
    import torch

    from pipesim.replay.settings import Settings
    from pipesim.replay.worker import Rank, join, leave, torch_device

    job = json.loads((folder / "job.json").read_text())
    settings = Settings.from_data(job["tasks"][0]["settings"])
    torch.set_num_threads(settings.threads)
    torch_device(settings)  # which is said best before anybody waits for anybody
    if settings.mode != "solo":
        join(settings, rank, world, folder / "store")
    for number, task in enumerate(job["tasks"]):
        progress[0], progress[2] = SETTING_UP, number
        progress[3] += 1
        Rank(task, rank, world, folder / str(number), progress).run()
    leave()


def _end_with_the_launcher() -> None:
    os.read(0, 1)  # returns when the launcher has gone; unbuffered, so that it holds no lock when this process ends first
    time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
