"""Checks that schedules/ imports only what a third party's package could: its own root, which import-linter cannot map.

Run by ``make lint``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "schedules"
ALLOWED = {"pipesim.op", "pipesim.schedule", "pipesim.errors", "pipesim.listscheduler"}


def main() -> int:
    wrong = []
    for path in sorted(FOLDER.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                if name.partition(".")[0] == "pipesim" and name not in ALLOWED:
                    wrong.append(
                        f"{path.relative_to(FOLDER.parent)}:{node.lineno}: imports {name}; schedules may import {', '.join(sorted(ALLOWED))}"
                    )
    print("\n".join(wrong) or f"schedules/ imports only {', '.join(sorted(ALLOWED))}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
