"""Which experts a mixture-of-experts model sent each token to, kept by pool slot.

Hooks sit on the routers only during steps that somebody asked for, so that other steps cost nothing. Kept by
slot, because a prompt prefix that another request computed has routes too; slots whose step was not recorded
are marked, and the scheduler does not share them with a request that wants routes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from transformers import PreTrainedModel


class RouteRecorder:
    """The routes of every slot of a pool of ``slots`` tokens, over the model's routers in layer order."""

    def __init__(self, model: PreTrainedModel, *, slots: int) -> None:
        self._routers = _find_routers(model)
        self._slots = slots
        self._routes: npt.NDArray[np.int32] | None = None
        self.known = np.zeros(slots, dtype=np.bool_)
        """[slots], whether a slot's routes are those of what it holds."""

    @property
    def supported(self) -> bool:
        """Whether the model has routers that name the experts they chose."""
        return bool(self._routers)

    @contextmanager
    def recording(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Keep the routes of the forward pass inside the block for its tokens' ``slots``; None records nothing."""
        if slots is None or not self._routers:
            yield
            return
        chosen: list[torch.Tensor] = []

        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            chosen.extend(part for part in _parts(output) if not part.is_floating_point())

        handles = [router.register_forward_hook(hook) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if len(chosen) != len(self._routers):  # routers of this model give scores and not choices
            self._routers = []
            return
        routes = torch.stack([part.reshape(len(slots), -1) for part in chosen], dim=1).cpu().numpy()
        if self._routes is None:
            self._routes = np.zeros((self._slots, *routes.shape[1:]), dtype=np.int32)
        index = slots.cpu().numpy()
        self._routes[index] = routes
        self.known[index] = True

    def forget(self, slots: torch.Tensor) -> None:
        """Mark slots that a step wrote without recording."""
        if self._routers:
            self.known[slots.cpu().numpy()] = False

    def read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the routes [tokens, layers, k] of slots."""
        assert self._routes is not None, "routes were asked for and none recorded"
        assert self.known[slots].all(), "a slot's routes were asked for and not recorded"
        return self._routes[slots]


def _parts(output: Any) -> list[torch.Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _find_routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that transformers itself records router logits from."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router_class = getattr(recorder, "target_class", recorder)
    if not isinstance(router_class, type) or router_class is torch.nn.Linear:
        return []
    return [module for module in model.modules() if isinstance(module, router_class)]
