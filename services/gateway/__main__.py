"""``python -m services.gateway``: serves the API for the run named by MYXO_RUN."""

from shared.runtime import quick_imports

with quick_imports():
    from services.gateway.gateway_service import serve
    from shared.service.service_base import run

if __name__ == "__main__":
    run("gateway", serve)
