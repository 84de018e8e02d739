"""``python -m services.rollout``: one rollout replica for the run named by MYXO_RUN."""

from services.rollout.rollout_service import serve
from shared.runtime.service_base import run

if __name__ == "__main__":
    run("rollout", serve)
