"""`python -m vision` is the `vision` command."""

import sys

from vision.cli.app import main

sys.exit(main())
