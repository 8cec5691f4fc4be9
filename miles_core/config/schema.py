"""JSON Schema of a run config, with the section of every installed component, so that editors complete it."""

from __future__ import annotations

from typing import Any

from miles_core.config.run import RunConfig
from miles_core.config.sections import ComponentSection
from miles_core.config.slots import SECTION_HOOKS
from miles_core.plugins import PluginManager

__all__ = ["config_schema"]


def config_schema(plugins: PluginManager) -> dict[str, Any]:
    """JSON Schema 2020-12. Sections that choose a component are a union of the components' own schemas."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for section, hooks in SECTION_HOOKS.items():
        registrations = [r for hook in hooks for r in plugins.registrations(hook)]
        options: list[dict[str, Any]] = [{"enum": [r.name for r in registrations]}]
        for registration in registrations:
            own = registration.component.Config.model_json_schema()
            definitions = own.pop("$defs", {})
            schema.setdefault("$defs", {}).update(definitions)
            properties = {"use": {"const": registration.name}, **own.get("properties", {})}
            default = RunConfig.model_fields[section].default
            named = isinstance(default, ComponentSection) and default.use == registration.name
            required = [*([] if named else ["use"]), *own.get("required", [])]
            if section == "reward":
                properties["reward_key"] = {"type": ["string", "null"]}
            options.append(
                {
                    "type": "object",
                    "title": registration.name,
                    "description": registration.component.__doc__ or "",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                }
            )
        described = schema["properties"][section]
        schema["properties"][section] = {
            "description": described.get("description", ""),
            "anyOf": options,
        }
    return schema
