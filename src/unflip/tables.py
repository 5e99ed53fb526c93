"""Tables for people: as aligned text, for rich and in notebooks. One copy for the library and the command line."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

GAP = "  "  # between two columns


@dataclass(frozen=True)
class Table:
    """Cells are text. ``numbers`` names the columns that are aligned to the right; ``notes`` are lines below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row!r} should have {len(self.columns)} cells")

    def __str__(self) -> str:
        """Every row is one line, however wide."""
        return "\n".join([*([self.title] if self.title else []), *self._lines(), *self.notes])

    def _lines(self) -> Iterator[str]:
        widths = [
            max(len(cell) for cell in column)
            for column in zip(self.columns, *self.rows, strict=True)
        ]
        for row in (self.columns, ["─" * width for width in widths], *self.rows):
            cells = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._right(), strict=True)
            ]
            yield GAP.join(cells).rstrip()

    def _right(self) -> list[bool]:
        return [column in self.numbers for column in self.columns]

    def __rich__(self) -> RenderableType:
        """Cells are :class:`rich.text.Text`: a layer called ``[red]`` is not markup."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(title=Text(self.title) if self.title else None, box=SIMPLE_HEAD)
        for column, right in zip(self.columns, self._right(), strict=True):
            shown.add_column(Text(column), justify="right" if right else "left")
        for row in self.rows:
            shown.add_row(*map(Text, row))
        return Group(shown, *map(Text, self.notes))

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = self._html_row("th", self.columns)
        body = "".join(self._html_row("td", row) for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>{notes}"

    def _html_row(self, tag: str, cells: Sequence[str]) -> str:
        aligned = ("right" if right else "left" for right in self._right())
        made = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"


class Tabular:
    """Shows itself as its :meth:`table`: with ``print``, with rich and in a notebook."""

    def table(self, title: str = "") -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> RenderableType:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
