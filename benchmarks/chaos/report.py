"""Results of a scenario: figures, and claims that hold or fail."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """A scenario's table."""

    title: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    claims: list[tuple[str, list[str]]] = field(default_factory=list)

    def figure(self, name: str, value: object) -> None:
        self.figures.append((name, f"{value:.2f}" if isinstance(value, float) else str(value)))

    def claim(self, text: str, holds: bool, *failures: str) -> None:
        self.claims.append((text, [] if holds else list(failures) or ["it is not so"]))

    @property
    def holds(self) -> bool:
        return not any(failures for _, failures in self.claims)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.figures)
        lines = [self.title, *(f"  {name:{width}}  {value}" for name, value in self.figures)]
        for text, failures in self.claims:
            lines.append(f"  {'FAILS' if failures else 'holds'}  {text}")
            lines += [f"         {failure}" for failure in _shortened(failures)]
        return "\n".join(lines)


def _shortened(failures: Sequence[str]) -> list[str]:
    more = len(failures) - 5
    return [*failures[:5], *([f"… and {more} more"] if more > 0 else [])]
