"""The `p2p` transport for miles-core: one-sided writes into registered memory, by NIXL or Mooncake."""

from __future__ import annotations

from miles_core import hookimpl
from miles_transport_p2p.transport import P2PTransport

__all__ = ["P2PTransport", "miles_weight_transports"]


@hookimpl
def miles_weight_transports() -> dict[str, type[P2PTransport]]:
    """`p2p`."""
    return {"p2p": P2PTransport}
