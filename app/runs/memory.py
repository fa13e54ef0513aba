"""What a run's root agent is given of earlier runs, at its start (spec page 4, M3 and M12).

It is written into the run's log as ``context.recalled``, so that a run that is resumed, or repeated
from its last step, has the same again and asks nobody.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import structlog

from app.agents.base import BaseAgent
from app.events.types import EventType
from app.memory.episodic import EpisodicMemory, Hit
from app.memory.prompts import RunMemory
from app.memory.summaries import summary_of
from app.memory.telling import About
from app.memory.working import Retrieved, WorkingMemory
from app.runs.fold import EPISODE
from app.runs.recorder import JournalRecorder

MOST = 5
"""Episodes that a run is given, at most."""
_PATIENCE_S = 2.0
_TOKENS = 300  # of one episode
_NEAR = 0.3  # the cosine from which texts may be of the same though they share no word
_TRUST = {1: "imported", 2: "own run, read outside sources", 3: "own run"}

logger = structlog.get_logger(__name__)


def about_of(run_id: UUID, claim: Mapping[str, Any]) -> About:
    """What is known of a claimed run before it begins."""
    return About(
        run_id,
        claim["session_id"],
        claim["principal"],
        claim["input"],
        claim["agent"] or claim["graph_name"],
        claim["agents"],
        claim["metadata"],
    )


async def use_memory(
    agent: BaseAgent,
    about: About,
    recorder: JournalRecorder,
    episodes: EpisodicMemory | None,
    limit: int,
) -> None:
    """Give a run's root agent a working memory, and in it what earlier runs of its tenant taught.

    Args:
        episodes: where to look; ``None``: nowhere.
        limit: tokens of a prompt.
    """
    working = WorkingMemory()
    agent.memory = RunMemory(working, limit=limit)
    journal = recorder.journal
    given: Sequence[Mapping[str, Any]] = journal.folded.recalled
    if not given and not journal.folded.asked and episodes is not None:
        given = await _found(about, recorder, episodes)
        for data in given:
            journal.add(EventType.CONTEXT_RECALLED, dict(data), agent=agent.agent_name)
    working.retrieve_from_episodic(Retrieved(data["source"], data["content"]) for data in given)


async def _found(
    about: About, recorder: JournalRecorder, episodes: EpisodicMemory
) -> list[dict[str, Any]]:
    """What earlier runs taught that may help with this one, as events tell it, the best first."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            found = await episodes.search(
                recorder.journal.tenant_id, about.question, k=MOST, domain=about.said("domain")
            )
    except Exception as error:
        logger.warning("memory.unavailable", error=str(error))
        text = f"the run was given nothing of earlier ones: {type(error).__name__}: {error}"
        recorder.journal.add(
            EventType.WARNING, {"code": "memory_unavailable", "message": text[:500]}
        )
        return []
    return [
        {
            "source": f"{EPISODE}{hit.episode.id}",
            "version": 1,
            "score": round(hit.score, 4),
            "content": told(hit),
        }
        for hit in found.hits
        if may_help(hit)
    ]


def may_help(hit: Hit) -> bool:
    """Whether an episode is about the same at all; the best of many may still be about nothing."""
    return bool(hit.parts.lexical) or (hit.parts.cosine or 0.0) >= _NEAR


def told(hit: Hit) -> str:
    """An episode as a model reads it: what it was, how it ended, whose word that is.

    Only the first line is ours: those of its texts are indented, whatever they look like.
    """
    episode, summary = hit.episode, hit.episode.summary
    head = f"{episode.judged}, {episode.at:%Y-%m-%d}, {_TRUST[episode.trust]}"
    if episode.instances > 1:
        head += f", {episode.instances} times"
    said = {"Task": summary.task, "Result": summary.result, "Errors": summary.errors}
    parts = [f"[{head}]", *(f"{name}: {text}" for name, text in said.items() if text)]
    return "\n  ".join(summary_of("\n".join(parts), _TOKENS).splitlines())
