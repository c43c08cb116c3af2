"""``python -m pipesim``: the same as the ``pipesim`` command."""

from __future__ import annotations

from pipesim.cli import main

if __name__ == "__main__":
    main()
