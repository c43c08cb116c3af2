"""What is no test: scripts that tests start as processes. Collecting their doctests would import torch, which may be missing."""

from __future__ import annotations

collect_ignore = ["pytorch_runtime_worker.py"]
