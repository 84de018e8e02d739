"""``python -m services.buffer.simulation``: see `services.buffer.simulation.simulate_command`."""

import sys

from services.buffer.simulation.simulate_command import main

if __name__ == "__main__":
    sys.exit(main())
