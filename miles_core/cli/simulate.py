"""`miles simulate schedule` and `miles simulate sync`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from miles_core.simulation.outcome import Outcome
    from miles_core.simulation.sweep import Row

__all__ = ["simulate"]

COLUMNS: dict[str, tuple[Callable[[Outcome], float], str]] = {
    "wall s": (lambda o: o.seconds, ".0f"),
    "steps/h": (lambda o: o.steps_per_hour, ".2f"),
    "episodes/s": (lambda o: o.episodes_per_second, ".3g"),
    "tokens/s": (lambda o: o.tokens_per_second, ".0f"),
    "trainer idle %": (lambda o: 100 * o.trainer_idle, ".1f"),
    "engine idle %": (lambda o: 100 * o.engine_idle, ".1f"),
    "generating": (lambda o: o.generating, ".1f"),
    "running": (lambda o: o.running, ".1f"),
    "staleness": (lambda o: o.staleness_mean, ".2f"),
    "p95": (lambda o: o.staleness_p95, ".0f"),
    "max": (lambda o: o.staleness_max, ".0f"),
    "wasted %": (lambda o: 100 * o.wasted, ".1f"),
    "dropped": (lambda o: sum(o.dropped.values()), ".0f"),
    "again": (lambda o: sum(o.returned.values()), ".0f"),
}


@click.group()
def simulate() -> None:
    """Simulate a part of a run on a virtual clock."""


@simulate.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; repeatable.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,C", help="Try each value; several make a grid.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="Seeds of each point.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw staleness against idle time into this SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a point.")
def schedule(
    scenario: Path, overrides: tuple[str, ...], sweeps: tuple[str, ...], seeds: int, plot: Path | None, as_json: bool
) -> None:
    """Run the scheduler and the buffer of the product against simulated engines, tools and trainer.

    Prints utilisation, throughput, staleness, drops and the work-conserving bound of each point of the sweep; with
    several seeds, the mean and the standard deviation between them.
    """
    from miles_core.simulation.sweep import sweep

    rows = []
    for row in sweep(scenario, overrides, sweeps, seeds=seeds):
        rows.append(row)
        if as_json:
            click.echo(json.dumps({"overrides": row.overrides, "outcomes": [o.as_dict() for o in row.outcomes]}))
    if not as_json:
        click.echo(table(rows))
        click.echo()
        for row in rows:
            click.echo(told(row))
    if plot is not None:
        plot.write_text(drawn(rows, title=scenario.stem), encoding="utf-8")
        click.echo(str(plot), err=as_json)


@simulate.command()
@click.argument("scenario", type=click.Path(path_type=Path), required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; repeatable.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,C", help="Try each value; several make a grid.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a row.")
def sync(scenario: Path | None, overrides: tuple[str, ...], sweeps: tuple[str, ...], as_json: bool) -> None:
    """Seconds of publishing weights on a cluster, by broadcast and by one-sided writes, from bandwidths and layouts.

    Without a scenario: the published figures that the model was fitted to, and how far it is from each of them.
    """
    from miles_core.simulation.sweep import grid
    from miles_core.simulation.sync_model import broadcast_seconds, p2p_seconds
    from miles_core.simulation.sync_report import published_rows, published_table, scenario_table
    from miles_core.simulation.sync_scenario import load_sync_scenario

    if scenario is None:
        if overrides or sweeps:
            raise click.UsageError("--set and --sweep change a scenario: name its file first")
        rows = published_rows()
        click.echo("\n".join(json.dumps(row.as_dict()) for row in rows) if as_json else published_table(rows))
        return
    points = []
    for point in grid(sweeps):
        loaded = load_sync_scenario(scenario, (*overrides, *point))
        points.append((", ".join(point), broadcast_seconds(loaded), p2p_seconds(loaded)))
    if as_json:
        for label, broadcast, p2p in points:
            click.echo(json.dumps({"overrides": label, "broadcast": broadcast, "p2p": p2p}))
        return
    click.echo(scenario_table(points))


def table(rows: list[Row]) -> str:
    """A Markdown table, one row a point."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = []
        for number, form in COLUMNS.values():
            mean, spread = row.mean(number)
            cells.append(f"{mean:{form}}" + (f" ± {spread:.2g}" if spread else ""))
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(row: Row) -> str:
    """The bound, and why groups were lost, in words; of the first seed."""
    first = row.outcomes[0]
    lost = ", ".join(f"{reason} {n}" for reason, n in [*first.dropped.items(), *first.returned.items()]) or "none"
    return (
        f"{row.label or 'scenario'}: {first.seconds / first.bound_seconds:.4f} of the work-conserving bound "
        f"({first.bound_seconds:.0f} s); trainer idle {first.trainer_idle:.1%}, {first.trainer_idle_bound:.1%} "
        f"unavoidable; engines unused {first.engine_unused:.1%}, {first.engine_unused_bound:.1%} unavoidable; groups "
        f"dropped or tried again: {lost}"
    )


def drawn(rows: list[Row], *, title: str) -> str:
    """The frontier of mean staleness against the trainer's idle time."""
    from miles_core.simulation.frontier import Spot, frontier_svg

    spots = []
    for row in rows:
        (x, dx), (y, dy) = row.mean(lambda o: o.staleness_mean), row.mean(lambda o: 100 * o.trainer_idle)
        series, _, label = row.label.rpartition(", ")
        spots.append(Spot(x=x, y=y, dx=dx, dy=dy, series=series, label=label))
    return frontier_svg(
        spots, title=title, x_label="mean staleness of trained groups, versions", y_label="trainer idle, %"
    )
