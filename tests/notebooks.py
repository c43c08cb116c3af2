"""Executes the notebooks and writes them, with their outputs, to a folder: ``python tests/notebooks.py out``."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "notebooks"


def execute(path: Path):
    """Runs a notebook in its own folder and returns it with outputs; an exception in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def main(target: Path) -> None:
    import nbformat

    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), target / path.name)
        print(f"wrote {target / path.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
