"""Publishing, every installed transport in one table, with memcpy and a plain gloo broadcast beside; and the aims.

    python benchmarks/sync.py [--megabytes N] [--repeats N]

The measurement is that of `miles sync bench`. GB/s are of the whole publish, checksums included, summed over engines.
Exit status 0 whatever is met: the table says it.
"""

from __future__ import annotations

import argparse

from miles_core.plugins import PluginManager
from miles_core.sync.auto import Measurement
from miles_core.testing.measuring import measure, plain_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    nbytes = options.megabytes * 1_000_000
    plugins = PluginManager.discover()
    names = [name for name in plugins.names("miles_weight_transports") if name not in ("auto", "p2p")]
    ways: list[tuple[str, dict[str, object]]] = [(name, {}) for name in names]
    if "p2p" in plugins.names("miles_weight_transports"):
        ways += [("p2p", {"library": library}) for library in ("nixl", "mooncake")]
    found: dict[tuple[str, int], float] = {}
    shares: dict[tuple[str, int], float] = {}
    print("| | engines | GB/s | seconds | paused | checksums |\n|---|---|---|---|---|---|", flush=True)
    for engines in (1, 4):
        for what, seconds in plain_rates(nbytes, engines, options.repeats).items():
            found[what, engines] = nbytes * engines / seconds / 1e9
            print(f"| {what} | {engines} | {found[what, engines]:.2f} | {seconds:.3f} | | |", flush=True)
        for use, settings in ways:
            row = measure(plugins, use, dict(settings), nbytes, engines, options.repeats)
            print(_line(row, engines), flush=True)
            if not row.failure:
                found[row.transport, engines] = row.rate
                shares[row.transport, engines] = row.verify_share
    print("\n| aim | found |\n|---|---|")
    for aim, of, beside, engines in (
        ("shared memory, verified: at least 0.4 of memcpy", "shared_memory", "memcpy", 1),
        ("broadcast: at least 0.9 of a plain gloo broadcast", "broadcast", "gloo broadcast", 1),
        ("p2p (NIXL) to 4 engines: at least 1.5 of a gloo broadcast", "p2p nixl", "gloo broadcast", 4),
    ):
        if (of, engines) in found:
            print(f"| {aim} | {found[of, engines] / found[beside, engines]:.2f} |")
    for way in ("shared_memory", "p2p nixl"):
        if (way, 1) in shares:
            print(f"| checksums: under 25 % of a publish in memory ({way}) | {shares[way, 1]:.0%} |")


def _line(row: Measurement, engines: int) -> str:
    if row.failure:
        return f"| {row.transport} | {engines} | {row.failure} | | | |"
    return (
        f"| {row.transport} | {engines} | {row.rate:.2f} | {row.seconds:.3f} | {row.paused_seconds:.3f} | "
        f"{row.verify_share:.0%} |"
    )


if __name__ == "__main__":
    main()
