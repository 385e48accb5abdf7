"""Files that are kept for the next run."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def keep_json(path: Path, value: Any) -> None:
    """Replace a file atomically, also if several processes write it; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary folder is removed with its content, whatever fails.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
        new = Path(folder) / path.name
        new.write_text(json.dumps(value))
        os.replace(new, path)
