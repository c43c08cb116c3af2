"""Replaying a schedule for real, under torch.distributed. Importing this needs no torch; running needs ``pipesim[replay]``."""

from __future__ import annotations

from pipesim.replay.launch import ReplayError, Task, default_backend, replay, replay_all
from pipesim.replay.result import append, save
from pipesim.replay.settings import ReplayModel, Settings

__all__ = ["ReplayError", "ReplayModel", "Settings", "Task", "append", "default_backend", "replay", "replay_all", "save"]
