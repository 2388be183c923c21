"""Where artifacts live, and which one an asset's name stands for there: known without Dagster.

In: a given home, or what was typed for an artifact. Out: the folder. Promise: object storage is refused as a home; a
path that is there is taken as it is, and a name stands for what a run recorded last for the asset of that name, of
whichever recipe. Cost: one small file is read.
"""

import json
import os
from pathlib import Path

from training_io.errors import FormatError, RecipeError

HOME_VARIABLE = "CORPUSMILL_HOME"
DEFAULT_HOME = ".corpusmill"
LATEST = "latest"  # the newest record of an asset, of whichever recipe
REFERENCES_FOLDER = "_references"  # a folder for each asset, with what runs recorded of it


def home_folder(home: str = "") -> Path:
    """The root of all artifacts: the given folder, else `CORPUSMILL_HOME`, else `.corpusmill` in the current folder."""
    home = home or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME
    if "://" in home:
        raise RecipeError(
            f"{HOME_VARIABLE}: expected a local folder, found {home!r}."
            " Object storage is not supported as a home; name a folder."
        )
    return Path(home).expanduser().resolve()


def artifact_folder(typed: Path) -> Path:
    """The path itself, or the latest artifact of the asset that it names; FormatError for a name that has none."""
    if typed.exists() or len(typed.parts) != 1:
        return typed
    home = home_folder()
    try:
        entry = json.loads((home / REFERENCES_FOLDER / typed / f"{LATEST}.json").read_bytes())
        return home / typed / "-" / str(entry["ref"]["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{typed}: expected the folder of an artifact or a package, or the name of an asset with an artifact in"
            f" {home}, found neither. Check the path or the name, or set {HOME_VARIABLE}."
        ) from error
