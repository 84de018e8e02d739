"""``python -m services.buffer``: the buffer of the run named by MYXO_RUN."""

from shared.runtime import quick_imports

with quick_imports():
    from services.buffer.buffer_service import serve
    from shared.service.service_base import run

if __name__ == "__main__":
    run("buffer", serve)
