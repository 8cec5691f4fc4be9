"""`miles serve sessions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["serve"]


@click.group()
def serve() -> None:
    """Serve a part of miles by itself."""


@serve.command()
@click.option("--engine", "engines", multiple=True, metavar="URL", help="Engine to sample with; repeatable.")
@click.option("--router", metavar="URL", help="Router to sample through, instead of engines.")
@click.option("--family", default="chatml", show_default=True, help="Model family that renders and parses messages.")
@click.option(
    "--family-option", "family_options", multiple=True, metavar="KEY=JSON", help="Key of the family's section."
)
@click.option("--tokenizer", required=True, type=click.Path(path_type=Path), help="Directory with the tokenizer.")
@click.option(
    "--matcher", default="tool_arguments", show_default=True, help="When a replayed message is the stored one."
)
@click.option("--mode", type=click.Choice(["branching", "linear"]), default="branching", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
@click.option("--max-new-tokens", default=4096, show_default=True, help="Most tokens of one turn.")
@click.option("--max-tokens", default=0, show_default=True, help="Most tokens of one conversation; 0 for no limit.")
@click.option("--ttl", default=3600.0, show_default=True, help="Seconds without a request before a session ends.")
@click.option("--admin-token", envvar="MILES_SESSIONS_ADMIN_TOKEN", help="Token that opening a session needs.")
@click.option("--model", default="policy", show_default=True, help="Name of the model to clients.")
def sessions(**options: Any) -> None:
    """Serve sessions over engines that speak SGLang's protocol. Prints one JSON line with its URL when it serves."""
    if bool(options["engines"]) == bool(options["router"]):
        raise click.UsageError("give either --engine, once or more, or --router")
    from miles_core.eventloop import run

    run(_serve(**options))


async def _serve(
    *,
    engines: tuple[str, ...],
    router: str | None,
    family: str,
    family_options: tuple[str, ...],
    tokenizer: Path,
    matcher: str,
    mode: Any,
    host: str,
    port: int,
    max_new_tokens: int,
    max_tokens: int,
    ttl: float,
    admin_token: str | None,
    model: str,
) -> None:
    from contextlib import AsyncExitStack

    from miles_core.contracts.engines import Sampling
    from miles_core.contracts.families import ModelFamily
    from miles_core.contracts.matchers import MessageMatcher
    from miles_core.data.tokenizer import load_tokenizer
    from miles_core.engines.pool import EnginePool
    from miles_core.plugins import PluginManager
    from miles_core.routing.watch import EngineWatch
    from miles_core.tito.server import SessionApp
    from miles_core.tito.serving import SessionServer
    from miles_core.tito.settings import Codec, SessionSettings
    from miles_core.tito.store import SessionStore

    plugins = PluginManager.discover()
    settings = family_settings(family_options)
    codec = Codec(
        family=plugins.create("miles_model_families", family, settings, ModelFamily),
        tokenizer=load_tokenizer(tokenizer),
        matcher=plugins.create("miles_message_matchers", matcher, {}, MessageMatcher),
    )
    if codec.matcher.merges_histories:
        click.echo(f"miles: with the matcher {matcher!r}, different histories can become one", err=True)
    pool = EnginePool(engines or [str(router)], router=router is not None)

    def opened(_: Any) -> SessionSettings:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        return SessionSettings(engine=pool, sampling=sampling, mode=mode, max_tokens=max_tokens, ttl=ttl)

    app = SessionApp(SessionStore(codec), settings=opened, admin_token=admin_token, model=model)
    server = SessionServer(app, host=host, port=port)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        if router is None:
            await stack.enter_async_context(EngineWatch(pool.table, drain=pool.drain).watching())
        stack.push_async_callback(server.close)
        await _until_told(await server.start())


@serve.command()
@click.option("--engine", "engines", multiple=True, metavar="URL", help="Engine to route to; repeatable.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
@click.option("--deadline", default=600.0, show_default=True, help="Most seconds of a request.")
@click.option(
    "--session-ttl", default=3600.0, show_default=True, help="Seconds without a request, then it is forgotten."
)
@click.option("--version", help="Weight version that engines must hold; the newest that any holds when not given.")
@click.option("--watch-interval", default=2.0, show_default=True, help="Seconds between two looks at every engine.")
@click.option("--admin-token", envvar="MILES_ROUTER_ADMIN_TOKEN", help="Token that the paths under /router need.")
def router(**options: Any) -> None:
    """Route requests to engines: sessions stay where their prefix is. Prints one JSON line with its URL when it serves.

    Engines are added and removed while it runs, with POST and DELETE on /router/engines.
    """
    from miles_core.eventloop import run

    run(_route(**options))


async def _route(
    *, engines: tuple[str, ...], host: str, port: int, deadline: float, session_ttl: float, **options: Any
) -> None:
    from miles_core.routing.router import RouterSettings
    from miles_core.routing.serving import RouterServer

    settings = RouterSettings(deadline=deadline, session_ttl=session_ttl)
    try:
        server = RouterServer(engines, settings=settings, host=host, port=port, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        await _until_told(await server.start())
    finally:
        await server.close()


async def _until_told(url: str) -> None:
    """Say where this serves, and return when the process is told to end."""
    import asyncio
    import signal

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    click.echo(json.dumps({"url": url}))
    await stop.wait()


def family_settings(options: tuple[str, ...]) -> dict[str, Any]:
    """`KEY=JSON` options as a section; a value that is no JSON is a string. Raises `click.BadParameter` without a
    `=`."""
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise click.BadParameter(f"{option!r} is not KEY=JSON", param_hint="--family-option")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings
