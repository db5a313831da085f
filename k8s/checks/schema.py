"""A Kubernetes structural schema as a strict JSON schema: what the API server would drop in silence is an error here.

Structural schemas: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from pathlib import Path
from typing import Any

import jsonschema
import yaml

from encoder.errors import InvalidInput
from k8s.checks.render import Document

Schema = dict[str, Any]

# Go's integer widths; JSON schema knows no such formats, and numbers of a manifest are far inside them.
_WIDTHS = {"int32", "int64"}


class CustomResource:
    """One version of a CustomResourceDefinition; `rules` are its CEL rules, which are counted and not evaluated."""

    def __init__(self, definition: Document, version: str) -> None:
        versions = {entry["name"]: entry for entry in definition["spec"]["versions"]}
        if version not in versions:
            raise InvalidInput(f"the CRD has no version {version!r}: it has {', '.join(sorted(versions))}")
        self.rules = 0
        schema = self._strict(versions[version]["schema"]["openAPIV3Schema"])
        # The API server checks metadata by itself, and CRDs leave it open.
        schema["properties"]["metadata"] = {"type": "object"}
        self._validator = jsonschema.Draft202012Validator(schema)

    def problems(self, document: Document) -> list[str]:
        """What is wrong, one line each; empty when nothing is."""
        return [describe(error) for error in self._validator.iter_errors(document)]

    def _strict(self, schema: Schema) -> Schema:
        """The same schema for a JSON schema validator, with fields it does not name forbidden."""
        strict: Schema = {
            key: value for key, value in schema.items() if not key.startswith("x-kubernetes-") and key != "nullable"
        }
        self.rules += len(schema.get("x-kubernetes-validations", []))
        if schema.get("x-kubernetes-int-or-string"):
            strict.pop("anyOf", None)
            strict["type"] = ["integer", "string"]
        if schema.get("nullable") and "type" in strict:
            strict["type"] = [strict["type"], "null"]
        if strict.get("format") in _WIDTHS:
            del strict["format"]
        if "properties" in schema:
            strict["properties"] = {name: self._strict(inner) for name, inner in schema["properties"].items()}
            if not schema.get("x-kubernetes-preserve-unknown-fields"):
                strict.setdefault("additionalProperties", False)
        if isinstance(schema.get("additionalProperties"), dict):
            strict["additionalProperties"] = self._strict(schema["additionalProperties"])
        if isinstance(schema.get("items"), dict):
            strict["items"] = self._strict(schema["items"])
        return strict


def load_definition(path: Path) -> Document:
    """A CustomResourceDefinition from its file; raises InvalidInput."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        definition = yaml.load(path.read_text(), Loader=loader)
        kind = definition["kind"]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise InvalidInput(f"the CRD {path} cannot be read: {' '.join(str(error).split())}") from None
    if kind != "CustomResourceDefinition":
        raise InvalidInput(f"{path} holds a {kind}, not a CustomResourceDefinition")
    return dict(definition)


def describe(error: jsonschema.ValidationError) -> str:
    """One line: where, and what is wrong there."""
    where = ".".join(str(part) for part in error.absolute_path) or "the object"
    return f"{where}: {' '.join(error.message.split())[:300]}"
