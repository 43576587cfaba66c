"""``python -m rmm_managed_bridge``: the same as the `rmm-bridge` command."""

import sys

from rmm_managed_bridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
