"""The frontier of staleness against idle time, as one SVG file without outside resources."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from miles_core.runs.report.charts import round_ticks, short

__all__ = ["Spot", "frontier_svg", "pareto"]

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 62, 48
COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#475569", "#0891b2", "#a16207")
STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; }
text { fill: #334155; }
.title { font-size: 14px; font-weight: 600; fill: #0f172a; }
.grid { stroke: #e2e8f0; }
.spread { stroke-width: 1.2; opacity: .55; }
.frontier { fill: none; stroke: #94a3b8; stroke-width: 1.5; stroke-dasharray: 5 4; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A point of the plot; `series` gives its colour, `label` stands beside it. `dx` and `dy` are half widths."""

    x: float
    y: float
    label: str
    series: str = ""
    dx: float = 0.0
    dy: float = 0.0


def pareto(spots: Sequence[Spot]) -> list[Spot]:
    """The spots to which no other is at least as good in both and better in one, by ascending x; less is better."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda s: (s.x, s.y)):
        if not kept or spot.y < kept[-1].y:
            kept.append(spot)
    return kept


def frontier_svg(spots: Sequence[Spot], *, title: str, x_label: str, y_label: str) -> str:
    """Spots with their spread, the frontier as a dashed line."""
    xs = round_ticks(*_padded([s.x - s.dx for s in spots], [s.x + s.dx for s in spots]))
    ys = round_ticks(*_padded([s.y - s.dy for s in spots], [s.y + s.dy for s in spots]))
    xs, ys = [x for x in xs if x >= 0], [y for y in ys if y >= 0]

    def sx(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - xs[0]) / (xs[-1] - xs[0])

    def sy(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - ys[0]) / (ys[-1] - ys[0])

    series = list(dict.fromkeys(s.series for s in spots))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    for x in xs:
        parts.append(f'<line class="grid" x1="{sx(x):.1f}" x2="{sx(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{sx(x):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{short(x)}</text>')
    for y in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(y):.1f}" y2="{sy(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{sy(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    line = " ".join(f"{sx(s.x):.1f},{sy(s.y):.1f}" for s in pareto(spots))
    parts.append(f'<polyline class="frontier" points="{line}"/>')
    taken: list[tuple[float, float, float]] = []
    for spot in spots:
        colour = COLOURS[series.index(spot.series) % len(COLOURS)]
        x, y = sx(spot.x), sy(spot.y)
        for x1, x2, y1, y2 in (
            (sx(spot.x - spot.dx), sx(spot.x + spot.dx), y, y),
            (x, x, sy(spot.y - spot.dy), sy(spot.y + spot.dy)),
        ):
            parts.append(
                f'<line class="spread" stroke="{colour}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
            )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(spot.series)} {escape(spot.label)}: {spot.x:.3g}, {spot.y:.3g}</title></circle>"
        )
        place = _free(x, y, 6.2 * len(spot.label), taken)
        if place is not None:
            anchor, lx, ly = place
            parts.append(f'<text x="{lx:.1f}" y="{ly:.1f}" text-anchor="{anchor}">{escape(spot.label)}</text>')
    x, y = float(LEFT), 37
    for name, colour in zip(series, COLOURS * len(series), strict=False):
        if x + 13 + 6.4 * len(name) > WIDTH:
            x, y = float(LEFT), y + 16
        if name:
            parts.append(f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{colour}"/>')
            parts.append(f'<text x="{x + 13}" y="{y}">{escape(name)}</text>')
            x += 30 + 6.4 * len(name)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _free(x: float, y: float, width: float, taken: list[tuple[float, float, float]]) -> tuple[str, float, float] | None:
    """Where a label beside a spot meets no other; None where it would, and the spot's tooltip has to do."""
    for anchor, lx, ly in (
        ("start", x + 7, y + 4),
        ("end", x - 7, y + 4),
        ("start", x + 5, y - 8),
        ("end", x - 5, y + 18),
    ):
        left = lx if anchor == "start" else lx - width
        inside = left >= LEFT and left + width <= WIDTH - 4
        if inside and all(left > end or left + width < begin or abs(ly - at) > 12 for begin, end, at in taken):
            taken.append((left, left + width, ly))
            return anchor, lx, ly
    return None


def _padded(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    low, high = min(lows), max(highs)
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)
