"""Builders that Serve configs name, as `import_path: deployments.app:build_pool`."""

from typing import Any

from ray.serve import Application

from deployments.pool import pool_deployment
from deployments.settings import parse_pool_settings


def build_pool(args: dict[str, Any]) -> Application:
    """The application of one pool from the `args` of its Serve config.

    Raises InvalidInput with one line that names each key that is unknown, missing or wrong.
    """
    settings = parse_pool_settings(args)
    return pool_deployment(settings).bind(settings.model_dump(mode="json"))
