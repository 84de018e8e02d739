"""``python -m services.rollout``: one rollout replica for the run named by MYXO_RUN."""

from services.rollout.service import serve
from shared.service import run

if __name__ == "__main__":
    run("rollout", serve)
