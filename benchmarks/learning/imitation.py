"""A scripted player of text games. It knows no game: it repeats what memory tells, else it guesses.

It reads memory as the service renders it, and nothing else. It repeats the steps of the successful
episodes, the first one first. Where the episode's task has another word than its own, it says its
own. A command that the game does not understand is replaced by the possible one with the same verb
that shares most words with it.
One rule is built in, for all arms: a guess focuses only on what the task says to focus on.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from random import Random
from typing import Protocol

from benchmarks.learning.outside import Call, steps_in, went_well

VERBS = (
    "look around", "look at", "look in", "pick up", "put down", "focus on", "go to", "teleport to",
    "open", "close", "move", "pour", "dunk", "mix", "use", "activate", "deactivate", "connect",
    "disconnect", "read", "eat", "flush", "wait1", "wait", "inventory", "examine",
)  # fmt: skip
"""Commands of the game; each is a tool of the agent."""
_TASK = re.compile(r"^\s*earlier run: Task: (.*)$", re.MULTILINE)
_WHAT = re.compile(r'what="([^"…]*)')
_FIRST_OF_SEVERAL = "0"


class Game(Protocol):
    """A game in progress."""

    @property
    def task(self) -> str:
        """Text of the task."""

    @property
    def over(self) -> bool:
        """True once the game has ended."""

    def act(self, command: str) -> tuple[str, bool]:
        """Do a command; return what the game says, and whether it was understood."""

    def possible(self) -> list[str]:
        """Return the commands that the game offers now."""


def call_of(command: str, said: str, understood: bool) -> Call:
    """Return a command as the call of a tool."""
    verb = next((v for v in VERBS if f"{command} ".startswith(f"{v} ")), command.split()[0])
    what = command.removeprefix(verb).strip()
    arguments = {"what": what} if what else {}
    return Call(tool_of(verb), arguments, " ".join(said.split()), failed=not understood)


def tool_of(verb: str) -> str:
    return verb.replace(" ", "_")


@dataclass(slots=True)
class Player:
    """A player of one game.

    Attributes:
        texts: of memory, as they stand in its prompt.
        limit: most commands.
        calls: what it did.
    """

    game: Game
    texts: Sequence[str]
    random: Random
    limit: int = 40
    calls: list[Call] = field(default_factory=list)

    def play(self) -> None:
        for command in told(self.texts, self.game.task):
            if not self._goes_on:
                return
            self._try(command)
        while self._goes_on and (guess := self._guess()) is not None:
            self._do(guess)

    @property
    def _goes_on(self) -> bool:
        return not self.game.over and len(self.calls) < self.limit

    def _do(self, command: str) -> tuple[str, bool]:
        said, understood = self.game.act(command)
        if said.startswith("Ambiguous"):
            said, understood = self.game.act(_FIRST_OF_SEVERAL)
        self.calls.append(call_of(command, said, understood))
        return said, understood

    def _try(self, command: str) -> None:
        """Do a command from memory, or the possible one that is most like it."""
        if self._do(command)[1] or not self._goes_on:
            return
        tool = call_of(command, "", True).name
        same = [each for each in self.game.possible() if call_of(each, "", True).name == tool]
        best = max(same, key=lambda each: (_shared(each, command), each), default=None)
        if best is not None and _shared(best, command) > len(tool.split("_")):
            self._do(best)

    def _dares(self, command: str) -> bool:
        """Check if a guess may be this command: focus on the wrong thing ends a game."""
        what = command.removeprefix("focus on ")
        return what == command or f"focus on the {what}" in self.game.task.lower()

    def _guess(self) -> str | None:
        """Return a possible command."""
        possible = sorted(each for each in self.game.possible() if self._dares(each))
        if not possible:
            return None
        if self.random.random() < 0.5:  # something that the task names
            most = max(_shared(each, self.game.task) for each in possible)
            possible = [each for each in possible if _shared(each, self.game.task) == most]
        return self.random.choice(possible)


def told(texts: Iterable[str], task: str) -> Iterator[str]:
    """Yield the commands of the successful episodes, in the words of this task."""
    for text in texts:
        if went_well(text):
            found = _TASK.search(text)
            changes = changed(found[1], task) if found else {}
            for name, said in steps_in(text):
                what = _WHAT.search(said)
                command = f"{name.replace('_', ' ')} {what[1] if what else ''}".strip()
                for old, new in changes.items():
                    command = re.sub(rf"\b{re.escape(old)}\b", new, command)
                yield command


def changed(theirs: str, ours: str) -> dict[str, str]:
    """Return the words of another task that stand in place of others in ours."""
    one, other = _WORD.findall(theirs), _WORD.findall(ours)
    matched = SequenceMatcher(None, one, other, autojunk=False)
    return {
        " ".join(one[a:b]): " ".join(other[c:d])
        for kind, a, b, c, d in matched.get_opcodes()
        if kind == "replace" and b - a < _LONGEST_CHANGE and d - c < _LONGEST_CHANGE
    }


_WORD = re.compile(r"[\w'-]+")
_LONGEST_CHANGE = 5


def _shared(one: str, other: str) -> int:
    return len({*_WORD.findall(one.lower())} & {*_WORD.findall(other.lower())})
