"""The program of the keeper: ``python -I -S __main__.py RUNTIME_DIR``."""

from __future__ import annotations

import sys

# Without site, no path leads to the package. Append its path last, so that no file there hides a standard module.
sys.path.append(__file__[: __file__.rindex("/cpumond/")])

from cpumond.host.executor.keeper.parent import main

sys.exit(main(sys.argv[1]))
