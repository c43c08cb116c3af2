"""Measured and catalogue figures that ship with pipesim, as TOML files, and how they are found by name."""

from __future__ import annotations

from pathlib import Path

from pipesim.errors import ScheduleError, did_you_mean

__all__ = ["file_or_preset", "preset_names"]

FOLDER = Path(__file__).parent


def preset_names(kind: str) -> list[str]:
    """Names of all presets of a kind: ``cluster``, ``collectives``, ``device``, ``model`` or ``times``.

    Examples:
        >>> preset_names("collectives")
        ['a100', 'v100']
    """
    return sorted(path.stem.removeprefix(f"{kind}-") for path in FOLDER.glob(f"{kind}-*.toml"))


def file_or_preset(source: str | Path, kind: str, what: str) -> Path:
    """The file that a path or the name of a preset means.

    Args:
        source: A path, or one of :func:`preset_names`, in any case.
        kind: The same.
        what: What to call such a file in an error.

    Raises:
        ScheduleError: There is neither such a file nor such a preset.

    Examples:
        >>> file_or_preset("A100", "collectives", "curve").name
        'collectives-a100.toml'
    """
    path, preset = Path(source), FOLDER / f"{kind}-{str(source).lower()}.toml"
    if path.is_file():
        return path
    if preset.is_file():
        return preset
    known = preset_names(kind)
    raise ScheduleError(
        f"there is no {what} file {str(source)!r}, and no preset of that name{did_you_mean(str(source), known)}; presets: {', '.join(known)}"
    )
