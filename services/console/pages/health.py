"""``/api/health``: the answers of the page *Health*."""

from fastapi import APIRouter

from services.console.run_pipeline import RunPipeline
from shared.view.alarms import HealthView


def router(pipeline: RunPipeline) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()

    @router.get("")
    async def read_health() -> HealthView:
        """Alarms with what they mean and what to do, services with their restarts and errors, groups that died, what services told."""
        return await pipeline.health()

    return router
