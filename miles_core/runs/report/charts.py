"""Small SVG charts, drawn for reading: one series or a few, an interval, direct labels, no legend to decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["Point", "bars", "curve", "round_ticks", "short", "timeline"]

Point = tuple[float, float, float]
"""(x, y, half width of the interval around y)."""

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 26
_NAME_HEIGHT = 13


def curve(series: Mapping[str, Sequence[Point]], *, title: str, x_label: str = "step") -> str:
    """A line a series, with its interval as a band. Series are told apart by colour and by a label at their end."""
    points = [p for one in series.values() for p in one]
    if not points:
        return ""
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] - p[2] for p in points), max(p[1] + p[2] for p in points)
    if y1 - y0 < 1e-12:
        pad = abs(y0) * 0.1 or 0.5
        y0, y1 = y0 - pad, y1 + pad
    ticks = round_ticks(y0, y1)
    y0, y1 = min(y0, ticks[0]), max(y1, ticks[-1])

    def sx(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def sy(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y0) / (y1 - y0)

    parts = [_open(title)]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(tick):.1f}" y2="{sy(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{sy(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for x, anchor in ((x0, "start"), (x1, "end")):
        parts.append(f'<text class="tick" x="{sx(x):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{short(x)}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>'
    )
    for number, (name, one) in enumerate(series.items()):
        ordered = sorted(one)
        if any(p[2] for p in ordered):
            upper = [f"{sx(x):.1f},{sy(y + e):.1f}" for x, y, e in ordered]
            lower = [f"{sx(x):.1f},{sy(y - e):.1f}" for x, y, e in reversed(ordered)]
            parts.append(f'<polygon class="band s{number}" points="{" ".join(upper + lower)}"/>')
        line = " ".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y, _ in ordered)
        parts.append(f'<polyline class="line s{number}" points="{line}"/>')
        if len(ordered) <= 40:
            for x, y, e in ordered:
                label = f"{name} at {short(x)}: {y:.4g}" + (f" ± {e:.2g}" if e else "")
                parts.append(
                    f'<circle class="dot s{number}" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="2.6">'
                    f"<title>{escape(label)}</title></circle>"
                )
    if len(series) > 1:
        parts += _names({name: (sx(max(one)[0]), sy(max(one)[1])) for name, one in series.items()})
    parts.append("</svg>")
    return "".join(parts)


def _names(ends: Mapping[str, tuple[float, float]]) -> list[str]:
    """The name of each series above the end of its line, of the lowest below it; names that would stand on each other
    are moved apart."""
    parts: list[str] = []
    lowest = float(TOP)
    numbers = {name: number for number, name in enumerate(ends)}
    ordered = sorted(ends.items(), key=lambda end: end[1][1])
    for name, (x, y) in ordered:
        below = name == ordered[-1][0] and y + 15 < HEIGHT - BOTTOM
        lowest = max(lowest + _NAME_HEIGHT, y + 15 if below else y - 7)
        place = f'x="{x - 4:.1f}" y="{lowest:.1f}" text-anchor="end"'
        parts.append(f'<text class="name s{numbers[name]}" {place}>{escape(name)}</text>')
    return parts


def bars(counts: Mapping[str, float], *, title: str) -> str:
    """Horizontal bars with their numbers, in the given order."""
    if not counts:
        return ""
    row, left, width = 22, 150, 420
    height = TOP + row * len(counts) + 6
    largest = max(counts.values()) or 1.0
    parts = [_open(title, width=width, height=height)]
    for index, (name, value) in enumerate(counts.items()):
        y = TOP + row * index
        length = (width - left - 70) * value / largest
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar" x="{left}" y="{y + 3}" width="{max(length, 1):.1f}" height="{row - 8}" rx="2"/>'
        )
        parts.append(f'<text class="tick" x="{left + length + 6:.1f}" y="{y + 14}">{short(value)}</text>')
    return "".join([*parts, "</svg>"])


def timeline(spans: Sequence[tuple[str, str, int, float, float]], *, title: str) -> str:
    """Phases on their lanes, wall-clock seconds from the first; white between them is idle time."""
    if not spans:
        return ""
    origin, end = min(s[3] for s in spans), max(s[4] for s in spans)
    lanes = list(dict.fromkeys(s[0] for s in spans))
    phases = list(dict.fromkeys(s[1] for s in spans))
    width, row, left = 880, 34, 84
    height = TOP + row * len(lanes) + 30
    scale = (width - left - RIGHT) / max(end - origin, 1e-9)
    parts = [_open(title, width=width, height=height)]
    for index, lane in enumerate(lanes):
        y = TOP + row * index
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 18}" text-anchor="end">{escape(lane)}</text>')
        parts.append(f'<rect class="idle" x="{left}" y="{y + 2}" width="{width - left - RIGHT}" height="{row - 10}"/>')
    for lane, name, step, start, stop in spans:
        x, y = left + (start - origin) * scale, TOP + row * lanes.index(lane)
        label = f"{name}, step {step}: {stop - start:.2f} s"
        parts.append(
            f'<rect class="phase s{phases.index(name)}" x="{x:.2f}" y="{y + 2}" '
            f'width="{max((stop - start) * scale, 0.6):.2f}" height="{row - 10}"><title>{escape(label)}</title></rect>'
        )
    x = float(left)
    for number, name in enumerate(phases):
        y = TOP + row * len(lanes)
        parts.append(f'<rect class="phase s{number}" x="{x}" y="{y + 4}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="tick" x="{x + 15}" y="{y + 13}">{escape(name)}</text>')
        x += 28 + 7.0 * len(name)
    parts.append(
        f'<text class="tick" x="{width - RIGHT}" y="{height - 4}" text-anchor="end">{end - origin:.0f} s</text>'
    )
    return "".join([*parts, "</svg>"])


def _open(title: str, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:{width}px"><title>{escape(title)}</title>'
    )


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that cover the range."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number as an axis shows it."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"
