"""`python -m vision` is the `vision` command."""

import sys

from vision.cli import main

sys.exit(main())
