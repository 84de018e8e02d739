"""``python -m services.reward``: scores for the run named by MYXO_RUN."""

from shared.runtime import quick_imports

with quick_imports():
    from services.reward.reward_service import serve
    from shared.service.service_base import run

if __name__ == "__main__":
    run("reward", serve)
