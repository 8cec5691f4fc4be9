"""The audit's second half: what the trajectories of sessions hold, against what their conversations say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miles_core.contracts.families import ModelFamily
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.data.trajectory import Trajectory
from miles_core.models.reference import resolve_model
from miles_core.plugins import PluginManager
from miles_core.tito.fidelity import CLASSES, HARD, compare

if TYPE_CHECKING:
    from miles_core.config.run import RunConfig

__all__ = ["TextAudit"]


class TextAudit:
    """Renders conversations anew, with the run's family and tokenizer, and counts the differences by their class."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._parts: tuple[ModelFamily[Any], FileTokenizer] | None = None
        self.compared = 0
        self.found: Counter[str] = Counter(dict.fromkeys(CLASSES, 0))

    def check(self, trajectory: Trajectory) -> Iterator[str]:
        """The hard mismatches of one trajectory, a sentence each; nothing for one without a conversation. Raises
        `ModelError` when the run's tokenizer cannot be read."""
        if trajectory.conversation is None:
            return
        if self._parts is None:
            self._parts = self._family(), self._tokenizer()
        self.compared += 1
        for mismatch in compare(trajectory, *self._parts):
            self.found[mismatch.kind] += 1
            if mismatch.kind in HARD:
                yield f"{trajectory.trajectory_id}: {mismatch.kind}: {mismatch.detail}"

    def _family(self) -> ModelFamily[Any]:
        chosen = self._config.model.family
        plugins = PluginManager.discover(enable=self._config.plugins.enable)
        return plugins.create("miles_model_families", chosen.use, chosen.settings, ModelFamily)

    def _tokenizer(self) -> FileTokenizer:
        return load_tokenizer(resolve_model(self._config.model.path).directory)
