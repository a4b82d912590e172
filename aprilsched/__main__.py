"""Lets ``python -m aprilsched`` run the command line where the script is not on the path."""

import sys

from aprilsched.cli.main import main

sys.exit(main())
