"""The teams in examples/ that the console offers as templates.

tests/docs/test_example_folders.py runs them, tests/console/test_pictures.py asks their questions.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATES = ("support", "letters", "research", "evaluator", "coding")
PAGE = Path(__file__).parents[2] / "app/bottega/console/js/setup/examples.json"


def template(name: str) -> dict[str, Any]:
    """Return what the console needs of an example: its head, definitions and first run."""
    text = (EXAMPLES / name / "team.yaml").read_text()
    first, second, *_ = text.splitlines()
    title, about = first.removeprefix("# ").split(": ", 1)
    definitions = yaml.safe_load(text)
    graphs = definitions.get("graphs")
    agent = {"agent": definitions["agents"][-1]["name"]}
    return {
        "id": name,
        "title": title,
        "about": about,
        "ask": second.removeprefix("# Ask: ").replace(" | ", "\n"),
        "batch": title.startswith("Batch"),
        "run": {"mode": "dag", "graph": graphs[-1]["name"]} if graphs else agent,
        "definitions": definitions,
    }


def test_the_console_has_them_as_they_are() -> None:
    made = json.dumps([template(name) for name in TEMPLATES], indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made
