"""Messages that come while a query is under way."""

from bottega.agents.messages import HumanMessage, StandardMessage
from bottega.agents.query import Query


def sent_to(query: Query, *, answered: bool) -> tuple[list[StandardMessage], list[StandardMessage]]:
    """Return users' messages for the next model call, and these with a parent's to its task.

    Args:
        answered: true if otherwise the query's last answer was final.
    """
    inbox, task = query.recorder.inbox, query.task
    of_users = [] if inbox is None else list(inbox.due(query, answered=answered))
    texts = () if task is None else task.messages(query, answered=answered)
    return of_users, [*of_users, *(HumanMessage(content=text) for text in texts)]
