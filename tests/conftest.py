"""What every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real profiles, schedules and measured runs, which is not part of the repository."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"the folder of outside data, {folder}, is not there")
    return folder
