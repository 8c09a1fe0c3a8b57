"""``python -m shorthaul.bench``."""

import sys

from . import main

sys.exit(main())
