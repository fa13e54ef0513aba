"""An agent without sub-agents: it works with the shared context.

Its answers cite the shared context, so that a missing edge or a surplus one is visible.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from bottega.llm.demo_model.conversation import Conversation, Source

_TOPIC = 80
_READ = 2_000
_REQUIREMENT = re.compile(r"^(R\d+)\b[ \t]*([A-Za-z]+)?", re.MULTILINE)
_COMPONENT = re.compile(r"^(C\d+) (\w+) covers (R\d+)\b", re.MULTILINE)
_WORD = re.compile(r"[^\W\d_]{4,}")
_COMMON = frozenset(
    _WORD.findall(
        "about also build could create design does every from have implement into just like make "
        "many more most much need please should small some such system than that their them then "
        "there these they this those tool what when which will with without would write your "
        "parallel using want give each other only very must"
    )
)
_ORDERS = frozenset(
    ("research", "investigate", "study", "state", "report", "parts", "part", "tasks", "task")
)
_SUBJECT = 4
_SENTENCES = 3
_FINDINGS = (
    "What is known of {subject} bears on the {part}; most of it is recent.",
    "Where {word} meets its surroundings, the sources on the {part} disagree.",
    "The {part} of {subject} changed more in the last two years than in the ten before.",
    "Of {word} as such, the {part} is measured in a few places only.",
    "Open: how the {part} would change if {word} were done at ten times the scale.",
    "Those who work with {subject} name the {part} before anything else.",
    "Half of what is written about the {part} of {subject} repeats the other half.",
)
_COMPONENT_NAMES = {
    "Input": "InputParser",
    "Core": "CoreEngine",
    "Errors": "ErrorReporter",
    "Limits": "LoadLimiter",
}


class Role(Enum):
    REQUIREMENTS = "requirements"
    DESIGN = "design"
    IMPLEMENTATION = "implementation"
    OTHER = "other"


_WORDS = {
    r"requirements?|analyst": Role.REQUIREMENTS,
    r"design\w*|architect\w*|components?": Role.DESIGN,
    r"implement\w*|develop\w*|programm\w*|coder|coding|code": Role.IMPLEMENTATION,
}
_IS = re.compile(r"\byou are ([^.,;:\n]+?)(?: (?:who|that|and|for|of)\b|[.,;:\n]|$)", re.IGNORECASE)
# A designer's message also mentions requirements, as its input.
_GIVEN = re.compile(
    r"\b(turn|take|read|use|given|from|for|with|follow|meet|cover|satisfy|implement)(\w*)"
    rf"\s+(?:\w+\s+){{0,2}}?(?:{'|'.join(_WORDS)})\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Requirement:
    id: str
    title: str
    source: str


@dataclass(frozen=True, slots=True)
class Component:
    id: str
    name: str
    covers: str
    source: str


def answer(conversation: Conversation) -> str:
    topic = topic_of(conversation.asked)
    sources = conversation.sources
    match role(conversation):
        case Role.REQUIREMENTS:
            return requirements_text(topic)
        case Role.DESIGN:
            return design_text(topic, sources)
        case Role.IMPLEMENTATION:
            return implementation_text(topic, sources)
        case Role.OTHER if conversation.folder:
            found = findings_text(topic, conversation.part, sources)
            return "\n\n".join([found, *(f"Noted: {note}" for note in conversation.notes)])
        case Role.OTHER:
            return other_text(topic, sources)


def has_context(conversation: Conversation) -> bool:
    """Return true if it has more to say than its tools' results."""
    known = role(conversation) is not Role.OTHER
    return known or bool(conversation.sources or conversation.folder)


def role(conversation: Conversation) -> Role:
    """Return its role, from the coordinator's hint or else from its own system message."""
    own = conversation.own[:_READ]
    said = _IS.search(own)
    places = (conversation.part, said[1] if said else "", _GIVEN.sub(r"\1\2", own), own)
    return next((found for text in places if (found := _first_of(text))), Role.OTHER)


def topic_of(asked: str) -> str:
    """Return the request on one line, shortened at a word."""
    text = " ".join(asked.split()).rstrip(".!?")
    if len(text) <= _TOPIC:
        return text or "nothing in particular"
    return f"{text[:_TOPIC].rsplit(' ', 1)[0]}…"


def words_of(topic: str) -> list[str]:
    """Return the topic's distinctive words, each once."""
    words = (word.lower() for word in _WORD.findall(topic))
    return list(dict.fromkeys(word for word in words if word not in _COMMON))


def requirements_text(topic: str) -> str:
    first, second, third = [*words_of(topic), "input", "result", "user"][:3]
    return "\n".join(
        [
            f'Requirements for "{topic}":',
            f"R1 Input: what comes in about {first} is checked before anything is done with it.",
            f"R2 Core: the same {first} and {second} give the same result every time.",
            f"R3 Errors: a bad {second} is answered with what to mend, and nothing is lost.",
            f"R4 Limits: 1,000 of {third} a minute are answered within a second each.",
        ]
    )


def design_text(topic: str, sources: Sequence[Source]) -> str:
    found = requirements_in(sources)
    if not found:
        return f'No shared requirements reached me for "{topic}".{_received(sources)}'
    lines = [
        f"{component.id} {component.name} covers {need.id} (from {need.source})"
        for need, component in zip(found, components_for(found), strict=True)
    ]
    return "\n".join([f'Design for "{topic}":', *lines])


def implementation_text(topic: str, sources: Sequence[Source]) -> str:
    """Return one module per component with its sources, and name missing sources."""
    components = components_in(sources)
    needs = {need.id: need for need in requirements_in(sources)}
    lines = [f'Implementation of "{topic}":']
    for part in components:
        need = needs.get(part.covers)
        origin = f"from {need.source}" if need else "known from the design only"
        lines.append(
            f"module {_snake(part.name)}.py implements {part.id} {part.name} (from {part.source}) "
            f"for {part.covers} ({origin})"
        )
    if not components:
        lines += [
            f"module {need.id.lower()}.py for {need.id} (from {need.source})"
            for need in needs.values()
        ]
        lines.append("No shared design reached me.")
    if not needs:
        lines.append("No shared requirements reached me.")
    return "\n".join(lines)


def findings_text(topic: str, part: str, sources: Sequence[Source]) -> str:
    """Return a task's findings: sentences with words of the topic, different for each part."""
    words = [word for word in words_of(topic) if word not in _ORDERS] or ["the subject"]
    about = part or "whole"
    turn = crc32(about.encode()) % len(_FINDINGS)
    sentences = [
        sentence.format(part=about, subject=" ".join(words[:_SUBJECT]), word=words[-1])
        for sentence in (_FINDINGS[turn:] + _FINDINGS[:turn])[:_SENTENCES]
    ]
    head = f'Findings on the {about} of "{topic}":'
    quotes = [f'{source.name} said: "{topic_of(source.content)}"' for source in sources]
    return "\n".join([head, " ".join(sentences), *quotes])


def other_text(topic: str, sources: Sequence[Source]) -> str:
    if not sources:
        return f'My answer to "{topic}": no other agent shared anything with me.'
    names = ", ".join(source.name for source in sources)
    quotes = [f'- {source.name} said: "{topic_of(source.content)}"' for source in sources]
    return "\n".join([f'My answer to "{topic}" builds on {names}:', *quotes])


def requirements_in(sources: Sequence[Source]) -> list[Requirement]:
    """Find requirements in sources by ids at the start of a line, each id once."""
    found: dict[str, Requirement] = {}
    for source in sources:
        for match in _REQUIREMENT.finditer(source.content):
            found.setdefault(match[1], Requirement(match[1], match[2] or "", source.name))
    return list(found.values())


def components_in(sources: Sequence[Source]) -> list[Component]:
    """Find components in sources, with the requirement that each covers; each id once."""
    found: dict[str, Component] = {}
    for source in sources:
        for match in _COMPONENT.finditer(source.content):
            found.setdefault(match[1], Component(match[1], match[2], match[3], source.name))
    return list(found.values())


def components_for(needs: Sequence[Requirement]) -> list[Component]:
    return [
        Component(
            f"C{number}",
            _COMPONENT_NAMES.get(need.title, f"{need.title.capitalize()}Part{number}"),
            need.id,
            need.source,
        )
        for number, need in enumerate(needs, start=1)
    ]


def _first_of(text: str) -> Role | None:
    best: tuple[int, Role] | None = None
    for pattern, meant in _WORDS.items():
        found = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
        if found and (best is None or found.start() < best[0]):
            best = found.start(), meant
    return best[1] if best else None


def _received(sources: Sequence[Source]) -> str:
    if not sources:
        return " Nothing was shared with me."
    return f" All I got is from {', '.join(source.name for source in sources)}."


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
