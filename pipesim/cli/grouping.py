"""Options in groups, so that the help of a command with sixty of them can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["GroupedCommand", "grouped"]

_OTHERS = "Options"


class GroupedOption(click.Option):
    """An option that stands in the help under the heading of its group."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help has a section per group, in the order of their first options; those of no group come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options into the formatter."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "group", _OTHERS), []).append(record)
        sections[_OTHERS] = sections.pop(_OTHERS, [])
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def grouped(group: str, *declarations: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option of a group; otherwise like ``click.option``."""
    return click.option(*declarations, cls=GroupedOption, group=group, **attributes)
