"""The `disk_delta` transport for miles-core: changed bytes in a chain of verified versions."""

from __future__ import annotations

from miles_core import hookimpl
from miles_transport_diskdelta.transport import DiskDeltaTransport

__all__ = ["DiskDeltaTransport", "miles_weight_transports"]


@hookimpl
def miles_weight_transports() -> dict[str, type[DiskDeltaTransport]]:
    """`disk_delta`."""
    return {"disk_delta": DiskDeltaTransport}
