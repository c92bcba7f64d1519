"""`python -m dagrl.cli` is `dagrl`."""

import sys

from dagrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
