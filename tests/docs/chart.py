"""Draws a table of transitions as an SVG: readable on light and on dark.

Each state is a column. A row is an event in a state, or several that lead to the same:
a dot where it happens, an arrowhead at each state that it may lead to, a ring where it
changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

GREY, ONWARD, BACK = "#7f7f7f", "#2f81f7", "#db6d28"
LETTER, CAPITAL = 6.3, 8.8  # width of one, at most
COLUMN, ROW, MARGIN = 44, 21, 12
Transition = tuple[str, str, str]  # source, target, event


def svg(title: str, states: Sequence[str], transitions: Iterable[Transition]) -> str:
    """Returns the text of the SVG file.

    Args:
        title: description for readers who cannot see the image.
        states: states in the order of the columns.
        transitions: transitions between the states.
    """
    lines = rows(states, transitions)
    longest = CAPITAL * max(map(len, states))
    names = 2 * MARGIN + longest
    left = names + LETTER * max(len(events) for _, events, _ in lines) + COLUMN
    x = {state: left + COLUMN * place for place, state in enumerate(states)}
    head = int(0.77 * longest) + 2 * MARGIN  # names lean by 50 degrees
    bottom = head + ROW * len(lines)
    width, height = left + COLUMN * len(states) + 24, bottom + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="11.5" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
    ]
    for state in states:
        parts.append(
            f'<path d="M{x[state]:.0f} {head - 8}V{bottom}" stroke="{GREY}" '
            f'stroke-opacity=".35"/><text transform="translate({x[state]:.0f} '
            f'{head - 14}) rotate(-50)">{state}</text>'
        )
    shown = ""
    for number, (source, events, targets) in enumerate(lines):
        y = head + ROW * number + ROW // 2
        if source != shown:
            parts.append(
                f'<path d="M{MARGIN} {y - ROW // 2}H{width - MARGIN:.0f}" '
                f'stroke="{GREY}" stroke-opacity=".2"/>'
                f'<text x="{MARGIN}" y="{y + 4}" font-weight="600">{source}</text>'
            )
        shown = source
        parts.append(f'<text x="{names:.0f}" y="{y + 4}">{escape(events)}</text>')
        parts += [_arrow(x[source], x[target], y) for target in targets]
        parts.append(f'<circle cx="{x[source]:.0f}" cy="{y}" r="3.5"/>')
    return "\n".join([*parts, "</svg>", ""])


def rows(
    states: Sequence[str], transitions: Iterable[Transition]
) -> list[tuple[str, str, list[str]]]:
    """Returns source, events and targets; events with equal targets are joined."""
    targets = defaultdict(set)
    for source, target, event in transitions:
        targets[source, event].add(target)
    events = defaultdict(list)
    for (source, event), found in sorted(targets.items()):
        events[source, tuple(sorted(found, key=states.index))].append(event)
    ordered = sorted(events, key=lambda way: (states.index(way[0]), -len(way[1]), way))
    return [(way[0], ", ".join(events[way]), list(way[1])) for way in ordered]


def _arrow(start: float, end: float, y: int) -> str:
    if start == end:
        return (
            f'<circle cx="{start:.0f}" cy="{y}" r="7" fill="none" stroke="{ONWARD}" '
            'stroke-width="1.6"/>'
        )
    colour, back = (ONWARD, -7) if end > start else (BACK, 7)
    return (
        f'<path d="M{start:.0f} {y}H{end + back:.0f}" stroke="{colour}" '
        f'stroke-width="1.6"/><path d="M{end:.0f} {y}l{back} -4v8z" fill="{colour}"/>'
    )
