"""The working memory of one run (spec page 4, M1-M6): what its root agent has to know now.

Everything that is put in stands in a section with a budget of tokens. What does not fit is moved
to the archive, where it stays as it is, and a summary with a reference stands in its place. Pure:
no model, no clock, and the same operations always leave the same memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bottega.agents.tokens import estimated_tokens
from bottega.memory.archive import Archive, Listener
from bottega.memory.sections import Budgets, Entry, Key, Kind, Part, Section, label_of
from bottega.memory.summaries import TokenCounter, summary_of
from bottega.memory.variables import (
    KIND_IN,
    Place,
    Scope,
    Variable,
    VariableKind,
    jsonable,
    text_of,
)

_DESCRIPTION = ("note", "description")
_TITLES = {
    Part.SYSTEM: "System",
    Part.TASK: "Task",
    Part.STATE: "State of the work",
    Part.INTERMEDIATE: "Intermediate results",
    Part.RETRIEVED: "From earlier runs",
}
_PART_OF = {
    Scope.GLOBAL: Part.TASK,
    Scope.TASK: Part.TASK,
    Scope.EXECUTION: Part.STATE,
    Scope.INTERMEDIATE: Part.INTERMEDIATE,
    Scope.METADATA: Part.STATE,
}


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Something of an earlier run that may help: a bounded text, and where it comes from.

    Attributes:
        source: an episode's id, or whatever names it for a reader.
        text: a summary.
    """

    source: str
    text: str


class WorkingMemory:
    """See the module. Not for several threads at once.

    Args:
        budgets: of the sections; their sum is the limit, which is never passed.
        count: how many tokens a text has.
        listener: told when a section is too small for what must stand in it (``memory_limit``).

    Attributes:
        count: see above.
        revision: counts the changes of what is known of the task and of earlier runs.
    """

    def __init__(
        self,
        budgets: Budgets | None = None,
        *,
        count: TokenCounter = estimated_tokens,
        listener: Listener | None = None,
    ) -> None:
        self.budgets = budgets or Budgets()
        self.revision = 0
        self.count = count
        self._listener = listener
        self._variables: dict[Place, Variable] = {}
        self._empty()

    def _empty(self) -> None:
        self._sections = {
            part: Section(_TITLES[part], self.budgets.of(part), self.count) for part in Part
        }
        self._archive = Archive(self.count, self._listener)
        self._control: set[Place] = set()
        self._results = self._states = 0
        self._subtask = ""
        self.revision += 1

    # What is put in

    def initialize(self, system: str = "", **metadata: Any) -> None:
        """Begin anew for another task: with what the agent is and can do, and its metadata."""
        self._variables.clear()
        self._empty()
        self._note(Part.SYSTEM, "system", system, hot=True)
        for key, value in metadata.items():
            self.set(key, value, Scope.METADATA)

    def load_task_context(
        self,
        task: str = "",
        *,
        goals: Iterable[str] = (),
        criteria: Iterable[str] = (),
        constraints: Iterable[str] = (),
        plan: Iterable[str] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Take in what the task is; what is given replaces what was, and the rest stays.

        Args:
            criteria: by which success is told.
            plan: its steps; they are warm, all the others hot.
        """
        self._note(Part.TASK, _DESCRIPTION[-1], task, hot=True)
        self._list("Goals", goals, hot=True)
        self._list("Success criteria", criteria, hot=True)
        self._list("Constraints", constraints, hot=True)
        self._list("Plan", plan, hot=False)
        for key, value in (variables or {}).items():
            self.set(key, value)

    def set(
        self,
        key: str,
        value: Any,
        scope: Scope | str = Scope.TASK,
        *,
        kind: VariableKind | str | None = None,
        subtask: str = "",
    ) -> None:
        """Give a variable a value; what JSON cannot hold becomes a text.

        Args:
            kind: defaults to what the scope holds; an accumulator appends the value.
            subtask: that the value is of, in the scope ``intermediate``.
        """
        scope = Scope(scope)
        kind = KIND_IN.get(scope, VariableKind.TASK) if kind is None else VariableKind(kind)
        place: Place = (scope.value, subtask, key)
        value = jsonable(value)
        self._control.discard(place)
        if kind is VariableKind.CONTROL:
            self._control.add(place)
        old = self._variables.get(place)
        if kind is not VariableKind.ACCUMULATOR or old is None or old.kind is not kind:
            variable = Variable([value] if kind is VariableKind.ACCUMULATOR else value, kind)
            self._variables[place] = variable
            self._show(place, variable)
            return
        old.value.append(value)
        section = self._sections[_PART_OF[scope]]
        entry = section.entries.get(("variable", *place))
        if entry is None or entry.reference is not None or entry.text is None:
            # What was archived stays as it is, and what comes now is collected beside it.
            self._show(place, Variable([value], kind))
            return
        more = f", {text_of(value)}"
        section.change(entry, entry.text + more, entry.tokens + self.count(more))
        self._changed(_PART_OF[scope])

    def get(
        self, key: str, scope: Scope | str = Scope.TASK, *, subtask: str = "", default: Any = None
    ) -> Any:
        """The value of a variable, whole even if it was archived; it is not to be changed."""
        place: Place = (Scope(scope).value, subtask, key)
        variable = self._variables.get(place)
        if variable is None:
            return default
        entry = self._sections[_PART_OF[Scope(scope)]].entries.get(("variable", *place))
        if entry is not None:
            entry.accessed = True
        return variable.value

    def push_state(
        self,
        phase: str,
        *,
        subtask: str = "",
        completed: Iterable[str] = (),
        failed: Mapping[str, str] | None = None,
        at: datetime | None = None,
    ) -> None:
        """Say how far the work is. What was said before stays as a trace of it.

        Args:
            subtask: that is worked on now; another one ends what was only for the last.
            completed: subtasks that are, since the last time.
            failed: subtasks that did, with their errors, since the last time.
        """
        now = f"{phase}: {subtask}" if subtask else phase
        self._states += 1
        when = f"{at.isoformat(timespec='seconds')} " if at else ""
        self._put(
            Part.STATE, ("state", str(self._states)), Kind.TRACE, f"step {self._states}", when + now
        )
        for name in completed:
            self._put(Part.STATE, ("ended", name), Kind.NOTE, name, f"completed: {name}")
        for name, error in (failed or {}).items():
            self._put(Part.STATE, ("ended", name), Kind.NOTE, name, f"failed: {name}: {error}")
        self._put(Part.STATE, ("now",), Kind.NOTE, "now", f"now: {now}", hot=True)
        if subtask != self._subtask:
            self._subtask = subtask
            for place in self._control:
                self._variables.pop(place, None)
                self._sections[_PART_OF[Scope(place[0])]].remove(("variable", *place))
            self._control.clear()

    def add_intermediate(self, subtask: str, output: Any, *, refers_to: Iterable[str] = ()) -> str:
        """Take in what a subtask, tool or sub-agent answered.

        Args:
            refers_to: references of earlier results that this one builds on; they stay longer.

        Returns:
            the reference by which it can be recalled from now on: ``m1``, ``m2`` and so on.
        """
        self._results += 1
        reference = f"m{self._results}"
        text = self._archive.texts[reference] = text_of(jsonable(output))
        self._archive.referred.update(refers_to)
        self._archive.turn = self._results
        label = label_of(subtask)
        line = f"{reference} {label}: {text}"
        self._put(Part.INTERMEDIATE, ("result", reference), Kind.RESULT, label, line)
        return reference

    def skip(self, results: int) -> None:
        """So many results came before, and are kept elsewhere: what comes now is numbered on."""
        if results > 0:
            self._results += results
            gone = (results, "m1", f"m{self._results}")
            self._sections[Part.INTERMEDIATE].gone = gone

    def retrieve_from_episodic(self, found: Iterable[Retrieved]) -> None:
        """Take in what was found of earlier runs, the best first; each is shortened to its share.

        What was retrieved before and never sent to a model makes room.
        """
        section = self._sections[Part.RETRIEVED]
        items = list(found)
        share = section.room // max(len(items), 1)
        new: list[tuple[Key, str, str]] = []
        for item in items:
            label = label_of(item.source)
            most = share - self.count(f"{label}: ") - 1
            if most > 0 and (text := summary_of(item.text, most, self.count)):
                new.append((("episode", item.source), label, f"{label}: {text}"))
        left = section.room - sum(self.count(line) + 1 for *_, line in new)
        self._archive.drop_unread(section, left)
        for key in list(section.entries):  # the oldest first
            if section.filled <= left:
                break
            section.remove(key)
        for key, label, line in new:
            self._put(Part.RETRIEVED, key, Kind.EPISODE, label, line)

    # What is had back

    def recall(self, reference: str) -> str | None:
        """What is behind a reference, unchanged; ``None``: nothing is."""
        return self._archive.texts.get(reference)

    @property
    def references(self) -> list[str]:
        """All references, in the order in which they came."""
        return list(self._archive.texts)

    def compose(self, *parts: Part, description: bool = True) -> str:
        """The sections (all, if none are named) as a model reads them; what it is sent counts as
        accessed.

        Args:
            description: of the task, which a model may have been sent already.
        """
        without = () if description else _DESCRIPTION
        lines: list[str] = []
        for part in parts or Part:
            section = self._sections[part]
            for entry in section.entries.values():
                entry.accessed = True
                if entry.text is None:
                    self._archive.gist(section, entry)
            lines += section.lines(without)
        return "\n".join(lines)

    @property
    def tokens(self) -> int:
        """What all sections take; never more than ``budgets.total``."""
        return sum(section.tokens for section in self._sections.values())

    def tokens_of(self, part: Part) -> int:
        """What a section takes; never more than its budget."""
        return self._sections[part].tokens

    def holds(self, part: Part) -> bool:
        """Whether there is anything to read in a section."""
        return self._sections[part].tokens > 0

    def variables(self, scope: Scope | str) -> dict[str, Any]:
        """The values of a scope by name; those of a subtask as ``subtask.name``."""
        return {
            f"{subtask}.{key}" if subtask else key: variable.value
            for (where, subtask, key), variable in self._variables.items()
            if where == scope
        }

    # What goes

    def prune(self) -> None:
        """Move what is cold out of the way: results of more than 5 subtasks ago that nothing
        refers to, traces, and what was retrieved and never read."""
        for part, section in self._sections.items():
            self._archive.archive_old(section, 0)
            self._archive.shorten_traces(section, 0)
            self._archive.drop_unread(section, 0)
            self._changed(part)

    def clear(self) -> None:
        """Forget everything but the metadata, which is for reflection."""
        kept = {
            place: variable
            for place, variable in self._variables.items()
            if place[0] == Scope.METADATA or variable.kind is VariableKind.METADATA
        }
        self.initialize()
        self._variables |= kept
        for place, variable in kept.items():
            self._show(place, variable)

    def snapshot(self) -> dict[str, Any]:
        """Everything, archive included, as JSON can hold it; nothing changes it later."""
        return {
            "budgets": [self.budgets.of(part) for part in Part],
            "sections": {part.value: each.snapshot() for part, each in self._sections.items()},
            "variables": [
                [*place, each.copied(), each.kind.value] for place, each in self._variables.items()
            ],
            "control": sorted(list(place) for place in self._control),
            "archive": dict(self._archive.texts),
            "referred": sorted(self._archive.referred),
            "counts": [self._results, self._states, self._archive.others],
            "subtask": self._subtask,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Be as the memory was of which the snapshot was made."""
        self.budgets = Budgets(*snapshot["budgets"])
        self._empty()
        for part, section in self._sections.items():
            section.restore(snapshot["sections"][part.value])
        self._variables = {
            (scope, subtask, key): Variable(Variable(value, kind).copied(), VariableKind(kind))
            for scope, subtask, key, value, kind in snapshot["variables"]
        }
        self._control = {(scope, subtask, key) for scope, subtask, key in snapshot["control"]}
        archive = self._archive
        archive.texts = dict(snapshot["archive"])
        archive.referred = set(snapshot["referred"])
        self._results, self._states, archive.others = snapshot["counts"]
        archive.turn = self._results
        self._subtask = snapshot["subtask"]

    # How it is done

    def _note(self, part: Part, name: str, text: str, *, hot: bool) -> None:
        if text:
            self._put(part, ("note", name), Kind.NOTE, name, text, hot=hot)

    def _list(self, title: str, lines: Iterable[str], *, hot: bool) -> None:
        text = "\n".join(f"- {line}" for line in lines)
        self._note(Part.TASK, title, f"{title}:\n{text}" if text else "", hot=hot)

    def _show(self, place: Place, variable: Variable) -> None:
        part, label = _PART_OF[Scope(place[0])], label_of(place[2])
        line = f"{label} {variable.told}"
        self._put(part, ("variable", *place), Kind.VARIABLE, label, line)

    def _put(
        self, part: Part, key: Key, kind: Kind, label: str, text: str, *, hot: bool = False
    ) -> None:
        size = self.count(text) + 1  # and the end of the line
        self._sections[part].put(key, Entry(kind, label, text, size, self._archive.turn, hot))
        self._changed(part)

    def _changed(self, part: Part) -> None:
        self.revision += part in (Part.TASK, Part.RETRIEVED)
        self._archive.make_room(self._sections[part])
