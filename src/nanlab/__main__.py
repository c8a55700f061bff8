"""`python -m nanlab`, and so `accelerate launch -m nanlab run …`."""

import sys

from nanlab.cli import main

sys.exit(main())
