"""``python -m services.rollout``: one rollout replica for the run named by MYXO_RUN, or a further node of its engine."""

from shared.runtime import quick_imports

with quick_imports():
    from services.rollout.engine_nodes import settle_node
    from services.rollout.rollout_service import serve
    from shared.service.service_base import run

if __name__ == "__main__":
    run("rollout", serve, settle_node)
