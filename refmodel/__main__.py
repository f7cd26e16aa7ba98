"""`python -m refmodel`: the same as the `refmodel` command.

The one place where the model's package reaches for the commands. `python -m` puts the working directory first on the
path, and a working directory may hold a `scripts` package of its own: this project's root must come before it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.main import main

sys.exit(main())
