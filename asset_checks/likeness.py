"""How similar what was removed is to what was kept in its place.

In: the evidence of `lsh_clusters`, a row for each removed copy with an exact similarity, and how many copies were
removed. Out: counts of each pool, in words and as numbers. Promise: a chain of documents of which each is like the
next, and the ends are not, is told, and so is a removed copy whose similarity is not known. Cost: four columns of the
evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from asset_checks.columns import named
from pipeline_assets.duplicates import EVIDENCE_NAME
from pipeline_assets.signatures import minhash_params
from pipeline_assets.stripes import Stage, number_in_words
from pipeline_assets.transforms.lsh import steepest_similarity
from resources.artifact_store import ArtifactRef

MAX_UNLIKE_SHARE = 0.5  # of a pool's removed documents
DOUBTFUL = 0.8  # below it a pair is often called no near copy


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How similar removed documents are to those kept in their place: of each pool how many, how many are unlike."""

    limit: float
    removed: Mapping[str, int]  # copies that were removed
    compared: Mapping[str, int]  # those of them of which the evidence has a similarity
    unlike: Mapping[str, int]
    num_doubtful: int  # less similar than DOUBTFUL, of all pools
    lowest: float | None  # None where nothing was compared

    @property
    def violations(self) -> list[str]:
        """The pools of which most removed documents are unlike, and those with others than the evidence tells of."""
        untold = [
            f"pool {name}: expected evidence with a similarity for"
            f" {number_in_words(self.removed.get(name, 0), 'removed document')}, found it for"
            f" {self.compared.get(name, 0):,}; materialize lsh_clusters again"
            for name in sorted(self.removed.keys() | self.compared.keys())
            if self.removed.get(name, 0) != self.compared.get(name, 0)
        ]
        return untold + [
            f"pool {name}: {count:,} of {number_in_words(self.compared[name], 'compared document')} less than"
            f" {self.limit:.3f} similar to the one kept in their place; set or raise dedup.verify_jaccard, or raise"
            " dedup.rows_per_band"
            for name, count in self.unlike.items()
            if count > MAX_UNLIKE_SHARE * self.compared[name]
        ]

    @property
    def found(self) -> str:
        """The sums over the pools, in words."""
        if self.lowest is None:
            return "no removed document has a known similarity" if any(self.removed.values()) else "none removed"
        unlike, compared = (sum(counts.values()) for counts in (self.unlike, self.compared))
        return (
            f"of {compared:,} compared, {self.num_doubtful:,} are less than {DOUBTFUL} similar to the document kept,"
            f" {unlike:,} less than {self.limit:.3f}, the lowest {self.lowest:.3f}"
        )

    @property
    def numbers(self) -> dict[str, float]:
        """What is plotted over time."""
        lowest = {} if self.lowest is None else {"lowest_similarity_to_kept": self.lowest}
        unlike = sum(self.unlike.values())
        return {"removed_unlike_kept": unlike, "removed_doubtfully_like_kept": self.num_doubtful, **lowest}


def likeness_to_kept(stage: Stage, lsh_clusters: ArtifactRef, removed: Mapping[str, int]) -> Likeness:
    """What the evidence says of all removed documents. A copy of the text kept is like it, even without words.

    `removed`: how many exact and near copies were removed of each pool.
    """
    params = minhash_params(stage.recipe)
    limit = unlike_below(params.num_bands, params.rows_per_band)
    table = stage.table(lsh_clusters, EVIDENCE_NAME, ("removed_pool", "removed_doc_id", "kept_doc_id", "jaccard"))
    pools, names = named([table.column("removed_pool")])
    is_copy = np.asarray(pc.equal(table.column("removed_doc_id"), table.column("kept_doc_id")))
    similarity = np.where(is_copy, 1.0, np.asarray(table.column("jaccard")))
    is_known = ~np.isnan(similarity)  # as null reads
    pools, similarity = pools[is_known], similarity[is_known]
    compared, unlike = (np.bincount(some, minlength=len(names)).tolist() for some in (pools, pools[similarity < limit]))
    return Likeness(
        limit=limit,
        removed=removed,
        compared=dict(zip(names, compared, strict=True)),
        unlike=dict(zip(names, unlike, strict=True)),
        num_doubtful=int((similarity < DOUBTFUL).sum()),
        lowest=float(similarity.min()) if len(similarity) else None,
    )


def unlike_below(num_bands: int, rows_per_band: int) -> float:
    """The similarity below which two documents are unlike: half of (1/b)^(1/r), where the S-curve is steepest.

    With two documents alone a bucket is shared there at a chance of about 2^-r (Mining of Massive Datasets, 3.4.2): of
    one in 256 with 8 rows. What is less similar was mostly connected through others.

    >>> unlike_below(num_bands=4, rows_per_band=2)
    0.25
    """
    return steepest_similarity(num_bands, rows_per_band) / 2
