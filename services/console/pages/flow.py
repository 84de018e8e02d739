"""``/api/flow``: the answers of the page *Flow*."""

from fastapi import APIRouter

from services.console.run_source import RunSource


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    return APIRouter()
