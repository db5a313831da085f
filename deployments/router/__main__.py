"""`python -m deployments.router`."""

import sys

from deployments.router.main import main

sys.exit(main())
