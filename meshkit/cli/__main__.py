"""`python -m meshkit.cli`: the same as `chipmesh`."""

from __future__ import annotations

import sys

from meshkit.cli.app import main

sys.exit(main())
