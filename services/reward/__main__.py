"""``python -m services.reward``: scores for the run named by MYXO_RUN."""

from services.reward.service import serve
from shared.service import run

if __name__ == "__main__":
    run("reward", serve)
