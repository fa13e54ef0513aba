"""Messages that come while a query is under way."""

from bottega.agents.messages import HumanMessage, StandardMessage
from bottega.agents.query import Query


def sent_to(query: Query, *, answered: bool) -> tuple[list[StandardMessage], list[StandardMessage]]:
    """Return the messages of users, and those of a parent to its task, for the next model call.

    Args:
        answered: true if otherwise the query's last answer was final.
    """
    inbox, task = query.recorder.inbox, query.task
    of_users = [] if inbox is None else list(inbox.due(query, answered=answered))
    texts = () if task is None else task.messages(query)
    return of_users, [HumanMessage(content=text) for text in texts]
