"""How large an event may be: an asset's or a check's metadata in, metadata that the event log can hold for ever out.

Every materialization and every verdict stays in the log, and the page of an asset loads it whole. Promise: an event
of what `within_event` gives is smaller than EVENT_BYTES as long as the numbers beside the previews are; where all is
too large together, the largest previews become links to files, which hold what was shown.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from resources.artifact_store import replace_file

EVENT_BYTES = 200_000
WRAPPING_BYTES = 16_000  # what an event has beside the metadata: names, tags, the run, a check's description
PAGES_FOLDER = "_pages"
PREVIEWS = (dg.MarkdownMetadataValue, dg.TableMetadataValue, dg.JsonMetadataValue, dg.TextMetadataValue, str)


def event_bytes(metadata: Mapping[str, Any]) -> int:
    """Bytes of metadata as the event log stores them."""
    return len(dg.serialize_value(dg.AssetMaterialization("asset", metadata=dict(metadata))))


def within_event(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The metadata, its largest previews as links where all of them are too large together.

    A preview beside a link of its own, `NAME_file`, is left to it; any other is written below `folder`, as JSON.
    """
    shown, total = dict(metadata), event_bytes(metadata)
    sizes = {name: event_bytes({name: value}) for name, value in metadata.items() if isinstance(value, PREVIEWS)}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if total <= EVENT_BYTES - WRAPPING_BYTES:
            break
        link = metadata.get(f"{name}_file")
        is_linked = isinstance(link, dg.PathMetadataValue)
        shown[name] = link if is_linked else _as_file(metadata[name], folder / f"{name}.json")
        total += event_bytes({name: shown[name]}) - sizes[name]
    return shown


def _as_file(value: Any, path: Path) -> dg.MetadataValue[Any]:
    if isinstance(value, dg.TableMetadataValue):
        content = [dict(record.data) for record in value.records]
    else:
        content = value if isinstance(value, str) else value.value
    replace_file(path, json.dumps(content, indent=1))
    return dg.MetadataValue.path(str(path))
