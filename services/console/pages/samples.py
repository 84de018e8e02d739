"""``/api/samples``: the answers of the page *Samples*."""

from fastapi import APIRouter

from services.console.run_source import RunSource


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    return APIRouter()
