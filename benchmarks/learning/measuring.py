"""The arms, run side by side on the same tasks, and what is measured of each."""

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
from bottega.memory.options import LearningOptions
from bottega.memory.pattern import (
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
"""Tasks between two nights: a day's."""
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Course:
    """How one arm's runs of one seed went, in order.

    Attributes:
        validated: patterns that were VALIDATED at the end.
        left: of each pattern that was validated when what is right changed, and left VALIDATED,
            applications since the change until then. stayed: how many did not leave.
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
        """Success in it, 0 to 1."""
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
    """The arms on the tasks of one seed.

    Args:
        follows: how often the model does what memory says.
        tells: how often an episode says how the work was done.
        drift: in the middle what is right becomes something else.
    """
    options = options or LearningOptions()
    tasks = world(seed, episodes, follows=follows, tells=tells, drift=drift)
    full = Remembering(tasks, options, learns=True)
    made: Mapping[str, Nothing] = {
        NONE: Nothing(),
        "last k": LastFew(),
        "episodes only": Remembering(tasks, options, learns=False),
        PLACEBO: Misaddressed(full),  # before what it looks into has learned of the same task
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
    """After how many applications that fail a validated pattern leaves VALIDATED of which so many
    went well; ``None``: not within a hundred."""
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
