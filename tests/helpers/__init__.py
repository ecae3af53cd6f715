"""What tests share. The makers of the demo are tools of the repository, not of the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
