"""The states of a rollout as a drawing, made from the table of legal moves.

The table decides what is drawn, :data:`PLACES` only where. A state without a place, or a move whose
way would be ambiguous, fails the build instead of being left out.

Colours are those of the page, so the drawing is readable in its light and in its dark form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from aprilsched.kernel.core.state.records import TERMINAL, Move, State

__all__ = ["Arrow", "arrows", "draw", "moves_table"]

PLACES: Mapping[State, tuple[int, int]] = {
    State.HELD: (1, 0),
    State.RETURNING: (2, 0),
    State.DELIVERED: (5, 0),
    State.QUEUED: (0, 1),
    State.RUNNING: (1, 1),
    State.THINKING: (3, 1),
    State.SCORING: (4, 1),
    State.DONE: (5, 1),
    State.DROPPED: (5, 2),
}
"""Column and row."""

_COLUMN, _ROW = 160, 118
_WIDTH, _HEIGHT = 96, 38
_LEFT, _TOP, _BOTTOM = 8, 46, 14
_LANE = 26
"""The distance from a row at which an arrow passes around a state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """One move as it is drawn: an SVG path, and the place of its name."""

    source: State
    move: Move
    target: State
    path: str
    label: tuple[float, float] | None
    anchor: str = "middle"


def arrows(moves: Mapping[tuple[State, Move], State]) -> list[Arrow]:
    """Every move of the table, with its way.

    Raises:
        ValueError: if a state has no place, or two moves lead from one state to another.
    """
    missing = {s for (source, _), target in moves.items() for s in (source, target)} - set(PLACES)
    if missing:
        raise ValueError(f"no place in the diagram for {', '.join(sorted(missing))}")
    pairs = [(source, target) for (source, _), target in moves.items()]
    if len(pairs) != len(set(pairs)):
        raise ValueError("two moves lead from one state to the same other one")
    both = set(pairs)
    drawn = [
        _drop(source, move, target)
        if target is State.DROPPED
        else _arrow(source, move, target, two_way=(target, source) in both)
        for (source, move), target in moves.items()
    ]
    return _named_once(drawn)


def _named_once(drawn: list[Arrow]) -> list[Arrow]:
    """The moves on the rail share one name."""
    rail = [arrow for arrow in drawn if arrow.target is State.DROPPED]
    if not rail:
        return drawn
    x, y = _centre(State.DROPPED)
    name = Arrow(
        source=rail[0].source,
        move=rail[0].move,
        target=rail[0].target,
        path=rail[0].path,
        label=(x - _WIDTH / 2 - 24, y - 8),
        anchor="end",
    )
    return [name if arrow is rail[0] else arrow for arrow in drawn]


def _arrow(source: State, move: Move, target: State, *, two_way: bool) -> Arrow:
    (column, row), (to_column, to_row) = PLACES[source], PLACES[target]
    blocked = any(
        (between, row) in PLACES.values()
        for between in range(min(column, to_column) + 1, max(column, to_column))
    )
    if blocked:
        if row == to_row:
            return _below(source, move, target)
        return _over(source, move, target)
    if row == to_row:
        return _straight(source, move, target, two_way=two_way)
    if column == to_column:
        return _vertical(source, move, target, two_way=two_way)
    return _elbow(source, move, target)


def _straight(source: State, move: Move, target: State, *, two_way: bool) -> Arrow:
    (x, y), (to_x, _) = _centre(source), _centre(target)
    right = to_x > x
    side = _WIDTH / 2 if right else -_WIDTH / 2
    y += (-9 if right else 9) if two_way else 0
    start, end = x + side, to_x - side
    path = f"M {start:g} {y:g} H {end:g}"
    # Two columns away, other arrows come down in the middle.
    middle = (start + end) / 2 if abs(end - start) < _COLUMN else end - side
    label = (middle, y - 6 if right else y + 15)
    return Arrow(source=source, move=move, target=target, path=path, label=label)


def _below(source: State, move: Move, target: State) -> Arrow:
    """A path around the states in between; arrows backward run inside those forward."""
    (x, y), (to_x, _) = _centre(source), _centre(target)
    on = to_x > x
    x, to_x, bottom = x - 20, to_x + 20, y + _HEIGHT / 2
    low = bottom + (2 * _LANE if on else _LANE)
    path = f"M {x:g} {bottom:g} V {low:g} H {to_x:g} V {bottom:g}"
    label = ((x + to_x) / 2, low - 6)
    return Arrow(source=source, move=move, target=target, path=path, label=label)


def _over(source: State, move: Move, target: State) -> Arrow:
    (x, y), (to_x, to_y) = _centre(source), _centre(target)
    top, to_x = y - _HEIGHT / 2, to_x + 14
    high = top - _LANE
    path = f"M {x:g} {top:g} V {high:g} H {to_x:g} V {to_y - _HEIGHT / 2:g}"
    label = ((x + to_x) / 2, high - 6)
    return Arrow(source=source, move=move, target=target, path=path, label=label)


def _vertical(source: State, move: Move, target: State, *, two_way: bool) -> Arrow:
    (x, y), (_, to_y) = _centre(source), _centre(target)
    up = y > to_y
    x += (-13 if up else 13) if two_way else 0
    start, end = (
        (y - _HEIGHT / 2, to_y + _HEIGHT / 2)
        if up
        else (
            y + _HEIGHT / 2,
            to_y - _HEIGHT / 2,
        )
    )
    path = f"M {x:g} {start:g} V {end:g}"
    return Arrow(
        source=source,
        move=move,
        target=target,
        path=path,
        label=(x - 6 if up else x + 6, (start + end) / 2 + 4),
        anchor="end" if up else "start",
    )


def _elbow(source: State, move: Move, target: State) -> Arrow:
    (x, y), (to_x, to_y) = _centre(source), _centre(target)
    right, up = to_x > x, to_y < y
    start = x + _WIDTH / 2 if right else x - _WIDTH / 2
    y -= 10 if up else 0
    to_x += -14 if right else 14
    end = to_y + _HEIGHT / 2 if up else to_y - _HEIGHT / 2
    path = f"M {start:g} {y:g} H {to_x:g} V {end:g}"
    if up:
        label, anchor = (to_x - 6, (y + end) / 2 + 4), "end"
    else:
        label, anchor = ((start + to_x) / 2, y - 8), "middle"
    return Arrow(source=source, move=move, target=target, path=path, label=label, anchor=anchor)


def _drop(source: State, move: Move, target: State) -> Arrow:
    (x, y), (to_x, to_y) = _centre(source), _centre(target)
    column, row = PLACES[source]
    bottom, side = y + _HEIGHT / 2, to_x - _WIDTH / 2
    if column == PLACES[target][0]:
        path = f"M {x:g} {bottom:g} V {to_y - _HEIGHT / 2:g}"
    elif (column, row + 1) in PLACES.values():  # past the state below it, on its left
        x -= 34
        path = f"M {x:g} {bottom:g} V {bottom + 16:g} H {x - 30:g} V {to_y:g} H {side:g}"
    else:
        # From the first column down on the left, where no arrow leaves the state below.
        x += 34 if column else -34
        path = f"M {x:g} {bottom:g} V {to_y:g} H {side:g}"
    return Arrow(source=source, move=move, target=target, path=path, label=None)


def _centre(state: State) -> tuple[float, float]:
    column, row = PLACES[state]
    return (_LEFT + column * _COLUMN + _WIDTH / 2, _TOP + row * _ROW + _HEIGHT / 2)


def draw(moves: Mapping[tuple[State, Move], State]) -> str:
    """The diagram as an SVG element."""
    columns = max(column for column, _ in PLACES.values()) + 1
    rows = max(row for _, row in PLACES.values()) + 1
    width = 2 * _LEFT + (columns - 1) * _COLUMN + _WIDTH
    height = _TOP + _BOTTOM + (rows - 1) * _ROW + _HEIGHT
    parts = [
        f'<svg class="state-diagram" role="img" viewBox="0 0 {width} {height}"'
        ' xmlns="http://www.w3.org/2000/svg">',
        "<title>The states of a rollout and its legal moves</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.2" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M 0 0.6 L 8 4 L 0 7.4 z"/></marker></defs>',
        *(_line(arrow) for arrow in arrows(moves)),
        *(_name(arrow) for arrow in arrows(moves) if arrow.label is not None),
        *(_box(state) for state in PLACES),
        "</svg>",
    ]
    return "\n".join(parts)


def _line(arrow: Arrow) -> str:
    kind = "drop" if arrow.target is State.DROPPED else "move"
    facts = f'data-from="{arrow.source}" data-move="{arrow.move}" data-to="{arrow.target}"'
    return f'<path class="{kind}" {facts} d="{arrow.path}" marker-end="url(#tip)"/>'


def _name(arrow: Arrow) -> str:
    x, y = arrow.label or (0, 0)
    name = escape(arrow.move.replace("_", " "))
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{arrow.anchor}">{name}</text>'


def _box(state: State) -> str:
    x, y = _centre(state)
    kind = "state terminal" if state in TERMINAL else "state"
    return (
        f'<g class="{kind}" data-state="{state}"><rect x="{x - _WIDTH / 2:g}"'
        f' y="{y - _HEIGHT / 2:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle">{escape(state)}</text></g>'
    )


def moves_table(moves: Mapping[tuple[State, Move], State]) -> str:
    """The table of moves as Markdown: from each state, what can happen and where it leads."""
    lines = ["| from | moves |", "|---|---|"]
    for state in State:
        found = [
            f"{move.replace('_', ' ')} → **{target}**"
            for (source, move), target in moves.items()
            if source is state
        ]
        lines.append(f"| {state} | {', '.join(found) or 'none: it ends here'} |")
    return "\n".join(lines)
