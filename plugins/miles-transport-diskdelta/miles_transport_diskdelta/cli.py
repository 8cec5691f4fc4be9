"""`miles delta`: chains by hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from miles_transport_diskdelta.chain import Chain
from miles_transport_diskdelta.manifest import FULL, ChainError, Entry, layout
from miles_transport_diskdelta.replica import Replica

__all__ = ["delta"]

_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group()
def delta() -> None:
    """Look into chains of disk deltas, verify them, and make weights of them."""


@delta.command()
@_DIRECTORY
def inspect(directory: Path) -> None:
    """List the entries of a chain, and its readers."""
    chain = Chain(directory)
    row = "{:>9} {:>8} {:>8} {:>14} {:>14} {:>7}  {}"
    click.echo(row.format("entry", "version", "base", "delta, bytes", "full, bytes", "share", "tensors by encoding"))
    for sequence in chain.sequences():
        entry = chain.entry(sequence)
        dense = sum(tensor.nbytes for tensor in entry.tensors)
        stored = sum(part.stored for part in entry.parts)
        full = entry.files.get(FULL)
        click.echo(
            row.format(
                sequence,
                entry.version,
                "-" if entry.base is None else entry.base.sequence,
                "-" if entry.base is None else f"{stored:,}",
                "-" if full is None else f"{full:,}",
                "-" if entry.base is None else f"{stored / max(dense, 1):.2%}",
                _encodings(entry),
            )
        )
    for name, held in chain.readers().items():
        click.echo(f"reader {name} holds entry {held}")


def _encodings(entry: Entry) -> str:
    kinds = [part.encoding for part in entry.parts]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or f"{len(entry.tensors)} whole"


@delta.command()
@_DIRECTORY
@click.option("--threads", default=2, show_default=True, help="Threads that apply and verify.")
def verify(directory: Path, threads: int) -> None:
    """Apply every delta and read every full snapshot; exit status 1 names what is wrong."""
    chain = Chain(directory)
    sequences = chain.sequences()
    if not sequences:
        raise ChainError(f"{directory}: no entry")
    missing = sorted(set(range(sequences[0], sequences[-1] + 1)) - set(sequences))
    if missing:
        raise ChainError(f"{directory}: entry {missing[0]} is missing between {sequences[0]} and {sequences[-1]}")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        replica = Replica(Path(scratch) / "replica", threads=threads)
        alone = Replica(Path(scratch) / "snapshot", threads=threads)
        for sequence in sequences:
            entry = chain.entry(sequence)
            if entry.is_full:
                alone.load(chain, entry)
            if entry.base is not None and replica.held is not None:
                replica.follow(chain, chain.between(replica.held, sequence))
            elif entry.is_full:
                replica.bring(chain, sequence)
    click.echo(f"{len(sequences)} entries, {sequences[0]} to {sequences[-1]}: every delta and every snapshot verified")


@delta.command()
@_DIRECTORY
@click.argument("replica", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--version", type=int, default=None, help="Policy version; default: the last.")
@click.option("--safetensors", type=click.Path(dir_okay=False, path_type=Path), help="Write a checkpoint file too.")
@click.option("--threads", default=2, show_default=True, help="Threads that apply and verify.")
def apply(directory: Path, replica: Path, version: int | None, safetensors: Path | None, threads: int) -> None:
    """Bring the file REPLICA (made when it is not there) to a version, every tensor verified.

    Run it again later, and only what has changed since is read.
    """
    chain = Chain(directory)
    held = Replica(replica, threads=threads)
    entry = held.bring(chain, chain.last_of(version).sequence)
    click.echo(f"{replica} holds version {entry.version} (entry {entry.sequence}), {layout(entry.tensors)[1]:,} bytes")
    if safetensors is not None:
        from miles_transport_diskdelta.export import write_safetensors

        write_safetensors(safetensors, held)
        click.echo(f"wrote {safetensors}")
