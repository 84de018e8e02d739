"""``python -m services.buffer``: the buffer of the run named by MYXO_RUN."""

from services.buffer.buffer_service import serve
from shared.runtime.service_base import run

if __name__ == "__main__":
    run("buffer", serve)
