"""Process groups between trainer and engines, beside whatever group either of them has already.

`torch.distributed` has no public call for a group whose members are not all in the default group. Both ends build it
as SGLang's server does (`init_custom_process_group`): one store, keys prefixed by the group's name. Torch is imported
where it is used.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["broadcast", "join_group", "leave_group", "open_store"]


def open_store(host: str, *, timeout: float) -> tuple[Any, int]:
    """A store on a free port of `host`, and the port. It lives as long as the first value does."""
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=timeout)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    return store, store.port


def join_group(
    name: str,
    *,
    host: str,
    port: int,
    rank: int,
    size: int,
    backend: str,
    timeout: float,
    store: Any = None,
) -> ProcessGroup:
    """Meet the others at the store; blocks until all `size` are there. `store` is this process's own, where it has
    opened it. `backend` is `gloo` or `nccl`; `timeout` seconds hold for every operation of the group."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import distributed_c10d as c10d

    limit = datetime.timedelta(seconds=timeout)
    shared = store if store is not None else TCPStore(host, port, is_master=False, timeout=limit)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, shared),
        group_name=c10d.GroupName(name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    joined: ProcessGroup = group
    return joined


def broadcast(group: ProcessGroup, data: torch.Tensor) -> None:
    """The bytes of rank 0 (uint8 [n]), in place on all others. RuntimeError when a member is gone or too late."""
    import torch.distributed as dist

    dist.broadcast(data, src=0, group=group)


def leave_group(group: ProcessGroup) -> None:
    """Release the group's connections."""
    import torch.distributed as dist

    dist.destroy_process_group(group)
