"""`python -m dagrl` is `dagrl`."""

import sys

from dagrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
