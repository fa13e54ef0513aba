"""The prose lint: plain docstrings, comments and texts, as ``docs/contributing.md`` describes them.

``python -m tests.arch.prose PATH ...`` prints the findings in some files or folders.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.arch.sources import ROOT, nodes, text_of

FIRST_SENTENCE = 100
"""Characters that a docstring's first sentence may have."""

BANNED = re.compile(
    r"\b("
    r"whoever|whomever|nobody\b[^.]{0,30}\b(?:that|who)|anew|by lot|(?:gives?|gave|given) up"
    r"|looked through|(?:comes?|came) of|the word on|whose word|is there again"
    r"|of (?:its|their) own accord|afresh"
    r"|what (?:is|was|are|were) told|told of|put right|that which|those who|he who|him who|who asks"
    r"|beforehand|thereof|therein|whatever speaks|answers how many|answers with how many"
    r")\b",
    re.IGNORECASE,
)
CITATION = re.compile(
    r"\bspec(?:ification)? pages?\b|\bpage \d+,|\bpages? \d+ of the spec|\([AGMS]\d{1,2}\)"
)
RIDDLE = re.compile(
    r"(What|Who|Whose|Whom|Whether|Which|How|When|Where|Why|As|If|That|Those|There|It|Its|So|Such|Not)\b"
)
NO_VERB = re.compile(
    r"(A|An|The|This|These|Each|Every|All|One|Two|Our|Ours|Their|His|Her|Another|Other|Some|Any|No|None|Nothing"
    r"|Same|Only|Also|And|Or|But|For|From|In|Of|On|To|With|By|At|Into|Out|Between|Beside|Before|After|Behind"
    r"|More|Most|Less|Least|Much|Many|Few|True|False|Now|Then|Up|Down|Has|Is|Are|Was|Were|Had|May|Can|Must|Does)\b"
)
EXEMPT = {
    # Model data: an answer of the scripted model, a tool's description in the prompt, an episode.
    ("app/bottega/memory/working_memory.py", "came of"),
}
"""Phrases that may stand in a file: changing the text would change what a model reads."""
SELF = "tests/arch/prose.py"
"""The file that has to spell the banned phrases."""
JOINT = re.compile(r"""(?:["']\s*[bfr]*["']|\\n|[\s#])+""")
"""What separates the words of a text that is wrapped in the source."""
NOUN_LIKE = {"property", "cached_property", "fixture", "setter", "field", "computed_field"}


class Finding(NamedTuple):
    """One place in a file, and the rule that its text breaks."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_sentence(docstring: str) -> str:
    """Return a docstring's first sentence, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*0-9]|$)", paragraph)[0].rstrip(":;")


def is_noun_like(node: Node) -> bool:
    """Return true for what may begin with a noun: a module, a class, a property, a fixture."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    decorators = (ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list)
    return any(name in NOUN_LIKE for name in decorators)


def docstring_findings(node: Node, path: str) -> Iterator[Finding]:
    """Check a docstring's first sentence: its length, and the word that it begins with."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    line = node.body[0].lineno
    first = first_sentence(docstring)
    if len(first) > FIRST_SENTENCE:
        yield Finding(path, line, f"first sentence has {len(first)} characters", first)
    if RIDDLE.match(first):
        yield Finding(path, line, "docstring begins with neither a verb nor a noun", first)
    elif not is_noun_like(node) and NO_VERB.match(first):
        yield Finding(path, line, "a function's docstring begins with a verb", first)


def phrase_findings(text: str, line: int, path: str) -> Iterator[Finding]:
    """Look for banned phrases, and for citations of documents outside of the repository."""
    flat = " ".join(text.split())
    for rule, pattern in (("say it plainly", BANNED), ("cites a document elsewhere", CITATION)):
        for match in pattern.finditer(flat):
            if (path, match.group(0)) in EXEMPT:
                continue
            near = flat[max(0, match.start() - 30) : match.end() + 30]
            yield Finding(path, line, f"{rule} ({match.group(0)})", near)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comment lines as one text, with its first line's number."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield start, " ".join(block)
            block = []
        start = start if block else token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield start, " ".join(block)


def may_have_phrases(source: str) -> bool:
    """Return false if no text in the source can have a phrase to report, without a parse."""
    flat = JOINT.sub(" ", source)
    return any(pattern.search(flat) for pattern in (BANNED, CITATION))


def python_findings(file: Path, path: str) -> Iterator[Finding]:
    """Check the docstrings, comments and texts of one Python file."""
    source = text_of(file)
    has_phrases = path != SELF and may_have_phrases(source)
    for node in nodes(file):
        if isinstance(node, Node):
            yield from docstring_findings(node, path)
        elif has_phrases and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from phrase_findings(node.value, node.lineno, path)
    if has_phrases:
        for line, text in comments(source):
            yield from phrase_findings(text, line, path)


def findings(file: Path) -> list[Finding]:
    """Return all findings in one file of Python, SQL or Markdown, in the order of lines."""
    path = str(file.relative_to(ROOT))
    if file.suffix == ".py":
        return sorted(python_findings(file, path), key=lambda f: f.line)
    blocks = re.split(r"\n\s*\n", text_of(file))
    found: list[Finding] = []
    line = 1
    for block in blocks:
        found += phrase_findings(re.sub(r"^\s*--\s?", "", block, flags=re.MULTILINE), line, path)
        line += block.count("\n") + 2
    return found


def files(*places: str | Path) -> list[Path]:
    """Return the files with prose in some files and folders."""
    found: list[Path] = []
    for place in map(Path, places):
        inside = place.rglob("*") if place.is_dir() else [place]
        own = (f for f in inside if "node_modules" not in f.parts)
        found += (f.resolve() for f in own if f.suffix in {".py", ".sql", ".md"})
    return sorted(found)


def main() -> int:
    """Print the findings in the files and folders that the command line names."""
    found = [finding for file in files(*sys.argv[1:]) for finding in findings(file)]
    print(*found, f"{len(found)} findings", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
