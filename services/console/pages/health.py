"""``/api/health``: the answers of the page *Health*."""

from fastapi import APIRouter

from services.console.run_source import RunSource


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    return APIRouter()
