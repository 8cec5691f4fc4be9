"""`miles eval`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.options import config_argument, overrides_option

__all__ = ["evaluate"]


@click.command("eval")
@config_argument
@overrides_option
@click.option("--model", help="Model to measure, such as a run's export directory; without it, the config's own.")
def evaluate(config: Path, overrides: tuple[str, ...], model: str | None) -> None:
    """Measure a model on the held-out data of a config, on an engine of its own."""
    from miles_core.config.load import load_config
    from miles_core.config.preflight import preflight
    from miles_core.plugins import PluginManager
    from miles_core.runs.held_out import measure

    loaded = load_config(config, overrides)
    plugins = PluginManager.discover(enable=loaded.config.plugins.enable)
    preflight(loaded, plugins).raise_problems()
    for point in measure(loaded, plugins, model):
        passes = "".join(f"  pass@{k} {value:.3f}" for k, value in point.pass_at.items())
        click.echo(
            f"{point.dataset}, {point.mode}: {point.mean:.3f} ± {point.standard_error:.3f} on {point.prompts} prompts, "
            f"{100 * point.truncated:.0f} % truncated, {point.missing} unscored{passes}  ({point.seconds:.1f} s)"
        )
