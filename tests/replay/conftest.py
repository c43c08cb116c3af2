"""The command line in process, as the tests of the command line have it; and the tests of this folder as modules of each other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

_found = importlib.util.spec_from_file_location("_cli_conftest", HERE.parent / "cli" / "conftest.py")
assert _found is not None
assert _found.loader is not None
_module = importlib.util.module_from_spec(_found)
_found.loader.exec_module(_module)
pipesim = _module.pipesim
