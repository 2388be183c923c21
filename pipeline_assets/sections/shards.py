"""The files of tokens."""

from typing import Annotated

from pydantic import Field

from pipeline_assets.sections.section import Section


class Shards(Section):
    """How the token files are cut."""

    max_shard_tokens: Annotated[int, Field(gt=0, lt=2**31)] = 100_000_000
