"""Where artifacts live, and which one an asset's name stands for there: known without Dagster.

In: what was typed for an artifact. Out: its folder. Promise: a path that is there is taken as it is; a name stands for
what a run recorded last for the asset of that name, of whichever recipe. Cost: one small file is read.
"""

import json
import os
from pathlib import Path

from training_io.errors import FormatError

HOME_VARIABLE = "CORPUSMILL_HOME"
DEFAULT_HOME = ".corpusmill"
REFERENCES_FOLDER = "_references"  # a folder for each asset, with what runs recorded of it


def artifact_folder(typed: Path) -> Path:
    """The path itself, or the latest artifact of the asset that it names; FormatError for a name that has none."""
    if typed.exists() or len(typed.parts) != 1:
        return typed
    home = Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).expanduser().absolute()
    try:
        entry = json.loads((home / REFERENCES_FOLDER / typed / "latest.json").read_bytes())
        return home / typed / "-" / str(entry["ref"]["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{typed}: expected the folder of an artifact or a package, or the name of an asset with an artifact in"
            f" {home}, found neither. Check the path or the name, or set {HOME_VARIABLE}."
        ) from error
