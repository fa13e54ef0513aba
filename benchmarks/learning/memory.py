"""The service's stored state in memory: episodes, patterns, applications, nights.

All decisions are the service's own pure functions; only the database is missing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np

from benchmarks.learning.world import START
from bottega.engine.replay import EPISODE
from bottega.llm.builtin_embedder import DIMENSION, BuiltinEmbedder
from bottega.memory.episodes.embedding_worker import GROWN
from bottega.memory.episodes.episode import Episode, Outcome
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.episodes.scoring import Candidate, ScoringOptions, score
from bottega.memory.episodes.store import Hit
from bottega.memory.learning.mining import Observed, mine, observed
from bottega.memory.learning.reflection import applications_of
from bottega.memory.patterns.evidence import (
    Group,
    Tally,
    WeighedEvidence,
    falling,
    validated,
    weigh,
)
from bottega.memory.patterns.matcher import Match, Matcher
from bottega.memory.patterns.pattern import (
    APPLIED,
    OF_RUN,
    ON_FAILURE,
    Application,
    Baseline,
    Category,
    Features,
    Pattern,
    PatternState,
)
from bottega.memory.patterns.refinement import (
    narrowed,
    narrowing,
    of_low_value,
    started_over,
    tally_of,
)
from bottega.memory.text.embeddings import Background, Vectors, floor_of, measured_background

AT_START = frozenset(Category) - ON_FAILURE
LIVE = (PatternState.CANDIDATE, PatternState.VALIDATED)
_CANDIDATES = 20
_LIKE = 200


class Episodes:
    """Episodes, retrieved by the built-in embedder's vectors and the service's scoring.

    The service also searches by words, which needs a database.
    """

    def __init__(self, room: int) -> None:
        self.all: list[Episode] = []
        self._embedder = BuiltinEmbedder()
        self._vectors: Vectors = np.zeros((room, DIMENSION), np.float32)
        self._accesses: Counter[UUID] = Counter()
        self._background: Background | None = None

    async def store(self, episode: Episode) -> None:
        self._vectors[len(self.all)] = (await self._embedder.embed([episode.summary.task]))[0]
        self.all.append(episode)
        if len(self.all) in GROWN:
            known = self._vectors[: len(self.all)]
            others = ~np.eye(len(known), dtype=bool)
            self._background = measured_background(known, known, others)

    async def search(self, text: str, *, k: int, domain: str | None, now: datetime) -> list[Hit]:
        vector = (await self._embedder.embed([text]))[0]
        cosines = self._vectors[: len(self.all)] @ vector
        nearest = np.argsort(-cosines, kind="stable")[:_CANDIDATES].tolist()
        by_id = {self.all[each].id: self.all[each] for each in nearest}
        found = [
            Candidate(
                episode_id=_known(self.all[each].id),
                at=self.all[each].at,
                outcome=self.all[each].judged,
                domain=self.all[each].domain,
                access_count=self._accesses[_known(self.all[each].id)],
                cosine=float(cosines[each]),
                lexical=None,
            )
            for each in nearest
        ]
        best = score(found, ScoringOptions(), now, domain)[:k]
        least = floor_of(self._embedder, vector, self._background).alone
        return [
            Hit(by_id[candidate.episode_id], parts, floor=least, relevant=cosine >= least)
            for candidate, parts in best
            if (cosine := parts.cosine) is not None
        ]

    def touch(self, sources: Iterable[str]) -> None:
        """Count an access of each episode that a run was given."""
        ids = (each.removeprefix(EPISODE) for each in sources if each.startswith(EPISODE))
        self._accesses.update(map(UUID, ids))

    def similar_failures(self, signature: str, k: int) -> list[Episode]:
        alike = (each for each in reversed(self.all) if each.failure_signature == signature)
        return [each for each, _ in zip(alike, range(k), strict=False)]


def _known(episode_id: UUID | None) -> UUID:
    assert episode_id is not None
    return episode_id


class Patterns:
    """Patterns and their applications: the rules of ``PatternCache``."""

    def __init__(self, episodes: Episodes, options: LearningOptions) -> None:
        self.options = options
        self.now = START
        self.all: dict[UUID, Pattern] = {}
        self.applications: dict[UUID, list[Application]] = defaultdict(list)
        self._validated: dict[tuple[UUID, int], tuple[datetime, datetime | None]] = {}
        self._episodes = episodes
        self._observed: list[Observed] = []
        self._by_fingerprint: dict[str, UUID] = {}
        self._matcher: Matcher | None = None

    # --- Matching -------------------------------------------------------------------------------

    async def matcher(self, _: UUID) -> Matcher:
        return self._index

    @property
    def _index(self) -> Matcher:
        if self._matcher is None:
            self._matcher = Matcher(each for each in self.all.values() if each.state in LIVE)
        return self._matcher

    async def find_applicable(
        self,
        tenant_id: UUID,
        features: Features,
        *,
        failure_signature: str | None = None,
        k: int = 5,
    ) -> list[Match]:
        told, of = _asked(features, failure_signature)
        return self._index.find(told, now=self.now, k=k, categories=of)

    async def candidates(
        self, tenant_id: UUID, features: Features, draw: Callable[[Pattern], float]
    ) -> list[Match]:
        """Return applicable candidates, the most promising first."""

        def promise(match: Match) -> tuple[float, float]:
            return -tally_of(match.pattern.evidence).expected, draw(match.pattern)

        told, of = _asked(features, None)
        return sorted(
            self._index.ranked(PatternState.CANDIDATE, told, now=self.now, categories=of),
            key=promise,
        )

    async def baselines(
        self, tenant_id: UUID, patterns: Sequence[Pattern], features: Features
    ) -> dict[UUID, Baseline]:
        return {each.key: self._baseline(each, features) for each in patterns}

    def _baseline(self, pattern: Pattern, features: Features) -> Baseline:
        if pattern.category in OF_RUN:
            name, outcomes = "like_tasks", self._like(pattern, features)
        else:
            name = "controls"
            outcomes = [
                bool(each.good)
                for each in self.applications[pattern.key]
                if each.arm not in APPLIED and each.good is not None
            ]
        good, n = sum(outcomes), len(outcomes)
        return Baseline(name if n else "unknown", (5 + good) / (10 + n), n)

    def _like(self, pattern: Pattern, features: Features) -> list[bool]:
        found: list[bool] = []
        for each in reversed(self._episodes.all):
            if (each.domain, each.task_type) != (features.get("domain"), features.get("task_type")):
                continue
            if str(pattern.key) not in each.metadata["strategies_applied"]:
                found.append(each.judged is Outcome.SUCCESS)
            if len(found) == _LIKE:
                break
        return found

    # --- Outcomes -------------------------------------------------------------------------------

    def reflect(self, episode: Episode) -> None:
        """Record the applications of an episode, and review patterns that declined."""
        seen = observed(episode)
        if seen is not None:
            self._observed.append(seen)
        for each in applications_of(episode):
            pattern = self.all[each.pattern_id]
            if each.good is None or each.episode_id in pattern.evidence.mined_from:
                continue
            self.record(each)

    def record(self, application: Application) -> None:
        pattern = self.all[application.pattern_id]
        self.applications[pattern.key].append(application)
        used = pattern.lifecycle.uses + (application.arm in APPLIED)
        life = replace(pattern.lifecycle, uses=used, last_used=self.now)
        self._keep(pattern.but(lifecycle=life), matters=False)
        if pattern.state is PatternState.VALIDATED:
            why = falling(self._weighed(pattern), self.options)
            if why is not None:
                self._fall(self.all[pattern.key], why)

    def left_after(self, since: datetime) -> tuple[list[int], int]:
        """Return the applications after which patterns left VALIDATED, and how many stayed.

        Counts patterns for the start of a run that were VALIDATED at ``since``.
        """
        left: list[int] = []
        stayed = 0
        for (key, version), (entered, gone) in self._validated.items():
            if entered > since or (gone is not None and gone <= since):
                continue
            if self.all[key].category in ON_FAILURE:
                continue
            applied = [
                each.at
                for each in self.applications[key]
                if each.version == version and each.arm in APPLIED and each.at >= since
            ]
            if gone is None:
                stayed += 1
            else:
                left.append(sum(at <= gone for at in applied))
        return left, stayed

    def _of(self, pattern: Pattern) -> list[Application]:
        of_all = self.applications[pattern.key]
        return [each for each in of_all if each.version == pattern.version]

    def _given(self, pattern: Pattern) -> list[Application]:
        return [each for each in self._of(pattern) if each.arm in APPLIED]

    def _weighed(self, pattern: Pattern) -> WeighedEvidence:
        since = self.now - timedelta(days=self.options.evidence_days)
        counts: Counter[tuple[Any, ...]] = Counter()
        lately: Counter[tuple[Any, ...]] = Counter()
        for each in self._of(pattern):
            key = (each.arm, bool(each.good), each.baseline)
            counts[key] += 1
            lately[key] += each.at >= since
        groups = [
            Group(arm, good, baseline, n, lately[arm, good, baseline])
            for (arm, good, baseline), n in counts.items()
        ]
        latest = self._given(pattern)[-self.options.decline_each :]
        return weigh(groups, Tally.of(bool(each.good) for each in latest))

    # --- Nights ---------------------------------------------------------------------------------

    def night(self) -> None:
        """Mine, validate and refine, as the nightly maintenance does."""
        for each in mine(self._observed):
            self.add(each)
        self.validate()
        self.refine()

    def add(self, pattern: Pattern) -> Pattern:
        """Add a candidate; a deprecated one returns if enough new episodes support it."""
        known = self._by_fingerprint.get(str(pattern.fingerprint))
        if known is None:
            number = UUID(int=len(self.all) + 1)
            life = replace(pattern.lifecycle, state=PatternState.CANDIDATE)
            new = pattern.but(id=number, lifecycle=life, created_at=self.now, updated_at=self.now)
            self._by_fingerprint[str(pattern.fingerprint)] = number
            self._keep(new)
            return new
        was = self.all[known]
        if was.state is PatternState.DEPRECATED and was.updated_at is not None:
            since = self._ended_after(pattern.evidence.mined_from, was.updated_at)
            if since >= self.options.min_applications:
                mined_from = {*was.evidence.mined_from, *pattern.evidence.mined_from}
                evidence = replace(was.evidence, mined_from=tuple(mined_from))
                self._keep(started_over(was.but(evidence=evidence, updated_at=self.now)))
        return self.all[known]

    def _ended_after(self, ids: Collection[UUID], at: datetime) -> int:
        wanted = set(ids)
        return sum(each.id in wanted and each.at > at for each in self._episodes.all)

    def validate(self) -> None:
        for pattern in [each for each in self.all.values() if each.state in LIVE]:
            after, found = validated(pattern, self._weighed(pattern), self.options, self.now)
            if found.state is PatternState.IN_REVIEW:
                self._fall(after, found.reason or "")
            elif after != pattern:
                if found.state is PatternState.VALIDATED:
                    self._validated.setdefault((pattern.key, pattern.version), (self.now, None))
                self._keep(after.but(updated_at=self.now))

    def refine(self) -> None:
        """End reviews, and deprecate patterns of low value."""
        for pattern in list(self.all.values()):
            if pattern.state is PatternState.IN_REVIEW:
                self._review(pattern)
            elif (why := of_low_value(pattern, self.now, self.options)) is not None:
                self._give_up(pattern, why)

    def _review(self, pattern: Pattern) -> None:
        applied = [(each.features, bool(each.good)) for each in self._given(pattern)]
        by = narrowing(applied, self.options)
        applicability = None if by is None else narrowed(pattern.applicability, by)
        weighed = self._weighed(pattern)
        again = started_over(pattern).but(updated_at=self.now)
        if applicability is not None:
            self._keep(again.but(applicability=applicability))
        elif falling(weighed, self.options) is None and (
            weighed.given.rate >= self.options.min_rate
        ):
            self._keep(again)
        else:
            self._give_up(pattern, pattern.lifecycle.reason)

    def _give_up(self, pattern: Pattern, why: str | None) -> None:
        self._keep(pattern.moved(PatternState.DEPRECATED, why).but(updated_at=self.now))

    def _fall(self, pattern: Pattern, why: str) -> None:
        this = pattern.key, pattern.version
        self._validated[this] = (self._validated[this][0], self.now)
        self._keep(pattern.moved(PatternState.IN_REVIEW, why).but(updated_at=self.now))

    def _keep(self, pattern: Pattern, *, matters: bool = True) -> None:
        self.all[pattern.key] = pattern
        if matters:
            self._matcher = None


def _asked(
    features: Features, failure_signature: str | None
) -> tuple[Features, Collection[Category]]:
    """Return the matcher's query and categories: at the start, or after a failure."""
    if failure_signature is None:
        return features, AT_START
    return {**features, "failure_signature": failure_signature}, ON_FAILURE
