"""``python -m services.buffer``: the buffer of the run named by MYXO_RUN."""

from services.buffer.service import serve
from shared.service import run

if __name__ == "__main__":
    run("buffer", serve)
