"""``/api/flow``: the answers of the page *Flow*."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.console.run_pipeline import RunPipeline
from shared.view.flow_view import WINDOWS, FlowView


def router(pipeline: RunPipeline) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()

    @router.get("")
    async def read_flow(
        window: Annotated[float, Query(ge=10, le=WINDOWS[-1], description="seconds to look back")] = WINDOWS[1],
    ) -> FlowView:
        """The pipeline over the last ``window`` seconds: where groups are, what services do, who waits for whom and what would help."""
        return await pipeline.flow(window)

    return router
