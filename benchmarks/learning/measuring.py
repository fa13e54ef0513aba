"""The arms, run side by side on the same tasks, and their measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean
from uuid import UUID

from benchmarks.learning.memory import Episodes, Patterns
from benchmarks.learning.running import (
    LastFew,
    Misaddressed,
    Nothing,
    Played,
    Remembering,
    Told,
    play,
)
from benchmarks.learning.world import START, World, world
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.pattern import (
    Application,
    Arm,
    Baseline,
    Category,
    Content,
    ContentKind,
    Pattern,
    PatternState,
)

FULL, PLACEBO, NONE = "episodes + patterns", "shuffled memory", "no memory"
ARMS = (NONE, "last k", "episodes only", FULL, "oracle", PLACEBO)
FOLLOWS = 0.8
TELLS = 0.2
NIGHT = 20
"""Tasks per day, after which a night follows."""
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Course:
    """The results of one arm's runs with one seed, in order.

    Attributes:
        validated: patterns that are VALIDATED at the end.
        left: for each pattern that was validated at the change and left VALIDATED later, its
            applications in between.
        stayed: number of patterns that did not leave.
    """

    good: Sequence[bool]
    repeated: Sequence[bool]
    harmed: Sequence[bool]
    tokens: Sequence[int]
    given: Sequence[int]
    validated: int = 0
    left: Sequence[int] = ()
    stayed: int = 0

    def quarter(self, number: int) -> float:
        size = len(self.good) // QUARTERS
        return mean(self.good[number * size : (number + 1) * size])


async def measure(
    seed: int,
    episodes: int,
    *,
    follows: float = FOLLOWS,
    tells: float = TELLS,
    drift: bool = False,
    arms: Sequence[str] = ARMS,
    options: LearningOptions | None = None,
) -> dict[str, Course]:
    """Run the arms on the tasks of one seed.

    Args:
        follows: probability that the model follows memory.
        tells: probability that an episode reports how the work was done.
        drift: change the right way in the middle.
    """
    options = options or LearningOptions()
    tasks = world(seed, episodes, follows=follows, tells=tells, drift=drift)
    full = Remembering(tasks, options, learns=True)
    made: Mapping[str, Nothing] = {
        NONE: Nothing(),
        "last k": LastFew(),
        "episodes only": Remembering(tasks, options, learns=False),
        PLACEBO: Misaddressed(full),  # before that memory learns from the task
        FULL: full,
        "oracle": Told(tasks),
    }
    played: dict[str, list[Played]] = {name: [] for name in made if name in arms}
    for task in tasks.tasks:
        for name in played:
            done = await play(task, tasks.right(task.number), made[name])
            played[name].append(done)
            await made[name].learn(done)
            if task.number % NIGHT == NIGHT - 1:
                made[name].night()
    changed = episodes // 2 if drift else episodes
    return {
        name: _course(done, full.patterns if name == FULL else None, tasks, changed)
        for name, done in played.items()
    }


def _course(
    played: Sequence[Played], patterns: Patterns | None, tasks: World, changed: int
) -> Course:
    repeated, met = [], set()
    for each in played:
        kind = (each.episode.domain, each.episode.failure_signature)
        repeated.append(not each.good and kind in met)
        if not each.good:
            met.add(kind)
    known = [] if patterns is None else list(patterns.all.values())
    left: list[int] = []
    stayed = 0
    if patterns is not None and changed < len(tasks.tasks):
        left, stayed = patterns.left_after(tasks.tasks[changed].at)
    return Course(
        good=[each.good for each in played],
        repeated=repeated,
        harmed=[each.harmed for each in played],
        tokens=[each.tokens for each in played],
        given=[each.given for each in played],
        validated=sum(each.state is PatternState.VALIDATED for each in known),
        left=left,
        stayed=stayed,
    )


def failing(options: LearningOptions | None = None, good: int = 90, n: int = 100) -> int | None:
    """Return the failed applications after which a pattern leaves VALIDATED, within a hundred.

    Before, ``good`` of ``n`` applications succeeded. ``None``: it does not leave.
    """
    patterns = Patterns(Episodes(1), options or LearningOptions())
    patterns.now = START
    content = Content(ContentKind.HEURISTIC, {"action": "use it"}, ("it",), ())
    kept = patterns.add(Pattern("it", Category.STRATEGIC, content, fingerprint="it"))
    spread = [(number * good) // n != ((number + 1) * good) // n for number in range(n)]
    for number, well in enumerate(spread):
        patterns.record(_used(kept.key, number, well))
    patterns.validate()
    assert patterns.all[kept.key].state is PatternState.VALIDATED
    for number in range(100):
        patterns.now = START + timedelta(days=1)
        patterns.record(_used(kept.key, n + number, False))
        if patterns.all[kept.key].state is not PatternState.VALIDATED:
            return number + 1
    return None


def _used(pattern_id: UUID, number: int, good: bool) -> Application:
    return Application(
        pattern_id, 1, Arm.USED, START, Baseline(), episode_id=UUID(int=number + 1), good=good
    )
