"""Work with an artifact from the command line: `python -m training_io inspect`, `verify` and `export`.

Needs numpy alone (`export datasets` needs pyarrow). Results go to stdout; an error is one line on stderr with exit
status 1, and verify exits with 1 when a law is violated. Output that cannot be written ends as in
`training_io.command_line`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training_io.command_line import complain, exit_status_of, say
from training_io.errors import CorpusmillError
from training_io.exports import FORMATS, export_shards
from training_io.home import artifact_folder
from training_io.inspection import inspect
from training_io.verification import verify

ARTIFACT_IN_WORDS = "artifact, split or package folder; or an asset's name, such as lsh_clusters: its latest artifact"
HEADINGS = {"cluster_sizes": "cluster_sizes (documents in a cluster: how many clusters)"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return exit_status_of(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        parsed.artifact = artifact_folder(parsed.artifact)
        status: int = parsed.run(parsed)
    except CorpusmillError as error:
        complain(f"{type(error).__name__}: {error}")
        return 1
    except OSError as error:
        complain(f"{type(error).__name__}: {error}. Check the folders, their disk and permissions.")
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training_io", description="Inspect, verify and export artifacts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspecting = commands.add_parser("inspect", help="counts, length quantiles, packs, segments, tokens, utilisation")
    inspecting.add_argument(
        "--config", type=Path, metavar="RECIPE", help="recipe (JSON, or YAML with PyYAML) to compare"
    )
    inspecting.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON to a file as well")
    inspecting.set_defaults(run=_inspect)
    verifying = commands.add_parser("verify", help="every hash, size and law; status 1 when one is violated")
    verifying.set_defaults(run=_verify)
    exporting = commands.add_parser("export", help="write token shards as another trainer reads them")
    add_export_options(exporting)
    exporting.set_defaults(run=run_export)
    for command in (inspecting, verifying, exporting):
        command.add_argument("artifact", type=Path, metavar="ARTIFACT", help=ARTIFACT_IN_WORDS)
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The options of `export`, here and in `python -m pipeline_assets`, which finds the artifact itself."""
    parser.add_argument("format", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument(
        "--split", nargs="+", action="extend", default=[], metavar="NAME", help="which splits (default: all)"
    )


def run_export(parsed: argparse.Namespace) -> int:
    """Export `parsed.artifact` and say what is where."""
    manifest = export_shards(parsed.artifact, parsed.format, parsed.output, parsed.split)
    if parsed.json:
        say(json.dumps(manifest.to_json(), indent=1))
        return 0
    for name, counts in manifest.counts["splits"].items():
        say(f"{name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    num_bytes = sum(int(entry["bytes"]) for entry in manifest.files.values())
    say(f"{parsed.format}: {len(manifest.files):,} files, {num_bytes:,} bytes in {parsed.output}")
    return 0


def _inspect(parsed: argparse.Namespace) -> int:
    report = inspect(parsed.artifact, parsed.config)
    text = json.dumps(report, indent=1)
    if parsed.output is not None:
        parsed.output.write_text(text + "\n", encoding="utf-8")
    say(text if parsed.json else "\n".join(_lines(report, "")))
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    verification = verify(parsed.artifact)
    if parsed.json:
        say(json.dumps({"verified": verification.verified, "violations": verification.violations}, indent=1))
    else:
        failed = [f"FAIL {violation}" for violation in verification.violations]
        say("\n".join(failed or verification.verified))
    return 1 if verification.violations else 0


def _lines(value: Any, indent: str) -> Iterator[str]:
    """One line a number, nested objects indented; a list of names with their values reads like an object."""
    for name, item in _entries(value):
        if isinstance(item, dict | list) and item:
            yield f"{indent}{HEADINGS.get(name, name)}"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{name}: {_shown(item)}"


def _entries(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return [(name, item) for name, item in value]
    return [(f"[{at}]", item) for at, item in enumerate(value)]


def _shown(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:.4f}"
    if isinstance(item, int):
        return f"{item:,}"
    return str(item) if item else "none"


if __name__ == "__main__":
    sys.exit(main())
