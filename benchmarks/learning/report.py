"""Summary of the courses of several seeds: tables, intervals, a plot."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import mean, stdev

from benchmarks.learning.measuring import ARMS, FULL, NONE, PLACEBO, QUARTERS, Course

Courses = Sequence[Mapping[str, Course]]
"""Courses by seed and arm."""

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
      2.12, 2.11, 2.10, 2.09)  # fmt: skip
"""Student's t at 97.5 %, by degrees of freedom, from 1."""
_COLOURS = ("#888888", "#c08000", "#3070c0", "#c02020", "#208040", "#9050b0")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 360, 50, 40


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean over seeds, by Student's t."""
    if len(values) < 2:
        return values[0], values[0]
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96 + 2.6 / (len(values) - 1)
    half = t * stdev(values) / sqrt(len(values))
    return mean(values) - half, mean(values) + half


def stated(values: Sequence[float], digits: int = 2) -> str:
    low, high = interval(values)
    return f"{mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def of(courses: Courses, arm: str, measure: Callable[[Course], float]) -> list[float]:
    return [measure(each[arm]) for each in courses]


def last(course: Course) -> float:
    return course.quarter(QUARTERS - 1)


def paired(courses: Courses, one: str, other: str) -> list[float]:
    """Return the difference of two arms in the last quarter, on the same tasks."""
    pairs = zip(of(courses, one, last), of(courses, other, last), strict=True)
    return [a - b for a, b in pairs]


def arms(courses: Courses) -> list[str]:
    """Return the lines of the table and its summary."""
    lines = [f"{'success by quarter, with the 95 % interval over seeds':22}"]
    for arm in ARMS:
        quarters = [
            stated(of(courses, arm, lambda each, n=number: each.quarter(n)))  # type: ignore[misc]
            for number in range(QUARTERS)
        ]
        lines.append(f"  {arm:20} {'  '.join(quarters)}")
    lines.append("")
    lines.append(f"  {'':20} {'failed as before':19} {'harmed':19} {'tokens':20} from memory")
    lines += [
        f"  {arm:20} {stated(of(courses, arm, lambda each: mean(each.repeated))):19} "
        f"{stated(of(courses, arm, lambda each: mean(each.harmed))):19} "
        f"{stated(of(courses, arm, lambda each: mean(each.tokens)), 0):20} "
        f"{stated(of(courses, arm, lambda each: mean(each.given)), 0)}"
        for arm in ARMS
    ]
    lines += ["", "last quarter, by how much more often on the same tasks"]
    for other in (PLACEBO, NONE, "last k", "episodes only"):
        differences = paired(courses, FULL, other)
        better = sum(each > 0 for each in differences)
        lines.append(
            f"  {FULL} - {other:15} {stated(differences)}, better on {better} of {len(differences)}"
        )
    validated = [each[FULL].validated for each in courses]
    lines.append(f"  patterns validated in the end: {mean(validated):.1f} on average")
    return lines


def drift(courses: Courses) -> list[str]:
    """Return the lines about a change of the right way in the middle."""
    size = len(courses[0][FULL].good)
    eighth = size // 8
    spans = {
        "before": (size // 2 - eighth, size // 2),
        "right after": (size // 2, size // 2 + eighth),
        "at the end": (size - eighth, size),
    }
    lines = [
        "what is right becomes something else in the middle: success before, after, at the end"
    ]
    for arm in courses[0]:
        said = [
            f"{name} {stated(of(courses, arm, lambda each, s=span: mean(each.good[s[0] : s[1]])))}"  # type: ignore[misc]
            for name, span in spans.items()
        ]
        lines.append(f"  {arm:20} {', '.join(said)}")
    left = sorted(each for course in courses for each in course[FULL].left)
    stay = sum(course[FULL].stayed for course in courses)
    if left:
        middle = left[len(left) // 2]
        after = f" after {middle} applications (median), {left[-1]} at most"
    else:
        after = ""
    of_all = len(left) + stay
    lines.append(f"  patterns that it made wrong: {len(left)} of {of_all} left VALIDATED{after}")
    return lines


# --- The plot ---------------------------------------------------------------------------------


def moving(courses: Courses, arm: str, points: int = 20) -> list[float]:
    """Return success over time: means over seeds, in ``points`` parts of equal length."""
    size = len(courses[0][arm].good) // points
    return [
        mean(of(courses, arm, lambda each, n=number: mean(each.good[n * size : (n + 1) * size])))  # type: ignore[misc]
        for number in range(points)
    ]


def sparks(courses: Courses) -> list[str]:
    """Return a line for each arm that rises with success, from 0 to 1."""
    blocks = "▁▂▃▄▅▆▇█"
    return [
        f"  {arm:20} {''.join(blocks[min(7, int(each * 8))] for each in moving(courses, arm))}"
        for arm in courses[0]
    ]


def svg(courses: Courses, title: str) -> str:
    wide, high = _WIDTH - _LEFT - 150, _HEIGHT - 2 * _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        "<style>text { font: 12px sans-serif } polyline { fill: none; stroke-width: 2 }</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{title}</text>',
    ]
    for tenth in range(0, 11, 2):
        y = _HEIGHT - _BOTTOM - high * tenth / 10
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{wide}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 30}" y="{y + 4:.1f}">{tenth / 10:.1f}</text>')
    for place, (arm, colour) in enumerate(zip(courses[0], _COLOURS, strict=False)):
        values = moving(courses, arm)
        points = " ".join(
            f"{_LEFT + wide * (n + 0.5) / len(values):.1f},{_HEIGHT - _BOTTOM - high * value:.1f}"
            for n, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" stroke="{colour}"/>')
        at = 60 + 18 * place
        parts.append(f'<text x="{_LEFT + wide + 10}" y="{at}" fill="{colour}">{arm}</text>')
    tasks = len(next(iter(courses[0].values())).good)
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 12}">tasks, 1 to {tasks}</text></svg>')
    return "\n".join(parts) + "\n"
