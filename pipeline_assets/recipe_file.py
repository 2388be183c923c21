"""A recipe's file: where it is, and what is wrong in it.

In: a built-in name or a path. Out: the `Recipe`. The promise: what is wrong is refused with what was expected, what was
found, and where, and without a value that may be a secret.
"""

import os
from functools import lru_cache
from importlib import resources as package_resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline_assets.recipe import Recipe
from pipeline_assets.recipes import BUILT_IN, DEFAULT_RECIPE
from resources.shapes import shown_value
from training_io.errors import RecipeError

SHOWN_CHARACTERS = 200  # of a wrong value


def load_recipe(name_or_path: str | None = None) -> Recipe:
    """The recipe of a built-in name or a YAML file; RecipeError says what is wrong and where.

    Without an argument it is `CORPUSMILL_RECIPE`, or the built-in `sample`.
    """
    chosen = name_or_path or os.environ.get("CORPUSMILL_RECIPE") or DEFAULT_RECIPE
    if chosen in BUILT_IN:
        text = (package_resources.files("pipeline_assets.recipes") / f"{chosen}.yaml").read_text(encoding="utf-8")
        return parse_recipe(text, where=f"built-in recipe {chosen}", folder=Path.cwd())
    path = Path(chosen)
    if not path.is_file():
        raise RecipeError(
            f"recipe: expected a built-in name ({', '.join(BUILT_IN)}) or the path of a YAML file, found {chosen!r}."
            " Set CORPUSMILL_RECIPE to one of them."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: expected UTF-8 text, found {error}. Save the file as UTF-8.") from error
    return parse_recipe(text, where=str(path), folder=path.resolve().parent)


@lru_cache(maxsize=8)  # every step asks for it, and PyYAML is slow
def parse_recipe(text: str, where: str, folder: Path) -> Recipe:
    """A recipe from YAML text; relative paths in it are taken from `folder`."""
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where}: expected YAML, found {_without_lines(error)}. Mend the file.") from error
    if not isinstance(value, dict):
        raise RecipeError(
            f"{where}: expected a mapping of sections, found {type(value).__name__}. The built-in recipes are examples."
        )
    try:
        return Recipe.model_validate(_absolute_paths(value, folder))
    except (RecursionError, RuntimeError) as error:  # an alias of its own parent; the home of an unknown user
        raise RecipeError(f"{where}: expected plain sections and paths, found {error}. Mend the file.") from error
    except ValidationError as error:  # left out of tracebacks: it shows every value
        raise RecipeError("\n".join(_one_line(where, problem) for problem in error.errors())) from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may be written once: PyYAML would keep the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; ConstructorError, with the line, for a key that is there twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(problem=f"the key {name!r} twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; ConstructorError, with the line, for a number or a date that is none."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError) as error:  # PyYAML lets what int() and the like raise pass
            raise yaml.constructor.ConstructorError(
                problem=f"{_shown(node.value)}, which is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from error


def _one_line(where: str, problem: Any) -> str:
    location = ".".join(str(part) for part in problem["loc"])  # none of a law over several sections, which names them
    value = problem.get("ctx", {}).get("tag", problem["input"])  # of sections of several kinds, the kind
    is_hidden = isinstance(value, dict) or _may_be_secret(problem)
    found = "" if is_hidden else f", found {_shown(value)}"
    advice = "Mend the recipe; pipeline_assets/sections/ lists its keys."
    return ": ".join(filter(None, [where, location, f"{_expected(problem)}{found}. {advice}"]))


def _may_be_secret(problem: Any) -> bool:
    """Whether a value may be a key, a token or a URL that holds one: those of a source, or of who knows what."""
    return problem["loc"][:1] == ("source",) or problem["type"] == "extra_forbidden"


def _expected(problem: Any) -> str:
    """What should have been there, without what was."""
    if problem["type"] == "union_tag_invalid":
        return f"expected {problem['ctx']['discriminator']} among {problem['ctx']['expected_tags']}"
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return {"extra_forbidden": "unknown key", "missing": "required key is missing"}.get(problem["type"], said)


def _without_lines(error: Exception) -> Exception:
    """The same error, with the numbers of the lines that it is about and not their text, which may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError):
        for mark in (error.context_mark, error.problem_mark):
            if mark is not None:
                mark.buffer = None
    return error


def _shown(value: Any) -> str:
    """A value as a message shows it: not every number has few digits, or may be written out at all."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    return shown_value(value, SHOWN_CHARACTERS)


def _absolute_paths(value: Any, folder: Path) -> Any:
    """The same tree with every relative `path` and `local_path` taken from the recipe's own folder."""
    if isinstance(value, list):
        return [_absolute_paths(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    is_hub = value.get("kind") == "hub"
    return {
        key: str(folder / Path(item).expanduser())
        if isinstance(item, str) and (key == "local_path" or (key == "path" and not is_hub))
        else _absolute_paths(item, folder)
        for key, item in value.items()
    }
