"""Follow a run to its end, and let the person at the terminal decide what it asks."""

from collections.abc import Callable

from bottega.cli.remote.events import Event, RunEvents
from bottega.cli.remote.people import People

STATUSES = {"completed": 0, "failed": 1, "timeout": 1, "cancelled": 3, "waiting": 4}
"""Exit statuses of commands, by how a run ended or stands."""
REFUSED = 5
"""Exit status: the server refused the request, or cannot be reached."""
INTERRUPTED = 130


def follow(
    events: RunEvents, show: Callable[[Event], None], people: People, *, ours: bool = True
) -> None:
    """Show events until the run is over.

    Args:
        ours: this process started the run.

    Raises:
        Undecided: the run waits for people, and nobody here decides.
        RemoteError: the run cannot be followed any more.
    """
    for event in events:
        show(event)
        if event["type"] == "interrupt.created":
            people.decide(event["data"]["interrupt_id"], ours=ours)
