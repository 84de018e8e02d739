"""``python -m myxo`` is ``myxo``."""

import sys

from myxo.main import main

if __name__ == "__main__":
    sys.exit(main())
