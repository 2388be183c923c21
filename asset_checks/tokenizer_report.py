"""Promise: a pool's bytes a token are those of its token units, and what the recipe holds to be plausible."""

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokenizer_report import REPORT_NAME
from pipeline_assets.tokens import LENGTHS
from resources.artifact_store import ArtifactRef
from resources.tables import read_json


def bytes_a_token_is_in_the_recipe_range(
    stage: Stage, tokenizer_report: ArtifactRef, document_tokens: ArtifactRef
) -> Verdict:
    """Pool by pool, recounted from the token units: text bytes over tokens, as reported, and within the limits."""
    limits = stage.recipe.tokenizer_report
    least, most = limits.min_bytes_a_token, limits.max_bytes_a_token
    reported = {
        row["pool"]: (row["text_bytes"], row["tokens"])
        for row in read_json(stage.folder(tokenizer_report) / REPORT_NAME)["inventory"]
    }
    counted: dict[str, tuple[int, int]] = {}
    for unit in units_in(stage, document_tokens):
        text_bytes, tokens = counted.get(unit.counts["pool"], (0, 0))
        tokens += int(stage.array(unit, LENGTHS).sum())
        counted[unit.counts["pool"]] = (text_bytes + unit.counts["text_bytes"], tokens)
    ratios = {pool: text_bytes / tokens for pool, (text_bytes, tokens) in counted.items() if tokens}
    outside = {pool: ratio for pool, ratio in ratios.items() if not least <= ratio <= most}
    violations = [f"{pool}: {ratio:.3g} bytes a token" for pool, ratio in outside.items()]
    violations += [
        f"{pool}: the report says {reported.get(pool, (0, 0))} bytes and tokens, the token units {counted.get(pool)}"
        for pool in sorted(reported.keys() | ratios.keys())
        if reported.get(pool) != counted.get(pool)
    ]
    return Verdict(
        expected=f"{least:g} to {most:g} bytes a token in every pool",
        found=f"{len(outside):,} of {len(ratios):,} pools outside, "
        f"{len(violations) - len(outside):,} reported otherwise than counted",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={f"{pool}_bytes_a_token": ratio for pool, ratio in ratios.items()},
    )


CHECKS = [
    law(
        bytes_a_token_is_in_the_recipe_range,
        blocking=False,
        description="Warns when a pool takes far more or far fewer tokens than its bytes suggest: a tokenizer made for "
        "other text, or text that is none. Look at tokenizer_report, choose another tokenizer, or set the limits in "
        "tokenizer_report.",
    ),
]
