"""`python -m vtoken.cli` is `vtoken`."""

import sys

from vtoken.cli import main

sys.exit(main())
