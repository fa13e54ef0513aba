"""A run's tree of agents on a screen: redrawn on a terminal, as lines of text elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.tree import Tree

from bottega.cli.remote.board import Board
from bottega.cli.texts import one_line
from bottega.clock import utcnow

_PER_S = 12


@contextmanager
def drawing(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows an event."""
    board = Board()

    def fold(event: dict[str, Any]) -> None:
        board.apply(event)

    def write(event: dict[str, Any]) -> None:
        if line := board.apply(event):
            text = f"{event['seq']:>4}  {one_line(line)}"
            console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    if console.is_terminal:
        tree = partial(_tree, board)
        with Live(get_renderable=tree, console=console, refresh_per_second=_PER_S):
            yield fold
        return
    yield write


def _tree(board: Board) -> Tree:
    return board.render(utcnow())
