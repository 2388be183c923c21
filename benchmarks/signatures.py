"""signatures: MinHash signatures of 112 values, against datasketch with xxhash, Daft and rensa.

All start from the same documents in memory: ours from an Arrow array, Daft from its own table, the others from lists of
`str` (making those is not timed), and all end with 112 values of 32 bits a document. Words and word hashes differ from
side to side, which is the point of a kernel.

* datasketch: words by a regular expression (`\\w+` of the lower-cased text), runs of five joined, hashed with xxh32,
  one copied MinHash a document updated with `update_batch`: the fastest way through its public interface that was
  found. That the signature scheme is ours is asserted first, on the same shingle hashes.
* Daft: `minhash(lower(text), num_hashes=112, ngram_size=5)` with the default hash. Its words are what spaces separate,
  and lower-casing is the cheapest of its normalizations: removing punctuation would take as long again. `minhash_alone`
  is the ratio when lower-casing is not timed either.
* rensa: the same Python shingles as datasketch, RMinHash's digests of many sets at once.

Of the latter two only the number of signatures and of their values is checked: their permutations are others.
"""

import hashlib
from statistics import median

import numpy as np
from bench import Bench
from corpus import write_plain
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import Ask, running_peer

from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.shingles import shingle_hashes

CHECKED_DOCUMENTS = 200
PARAMS = MinHashParams()


def measure(bench: Bench) -> list[Row]:
    """A row for each peer: MB of text a second."""
    return [against_datasketch(bench), against_daft(bench), against_rensa(bench)]


def our_seconds(bench: Bench) -> float:
    """Of signing all texts."""
    return seconds_of(lambda: sign_documents(bench.text.texts, PARAMS))


def against_datasketch(bench: Bench) -> Row:
    """Ours and datasketch in turns."""
    texts, folder = bench.text.texts, bench.scratch / "signatures"
    write_plain(folder, "texts", texts)
    hashes = [shingle_hashes(text) for text in texts[:CHECKED_DOCUMENTS].to_pylist()]
    np.save(folder / "hashes.npy", np.concatenate(hashes))
    np.save(folder / "hash_offsets.npy", np.cumsum([0, *map(len, hashes)]))
    with running_peer(bench.peer_python, "datasketch_signatures.py", folder) as ask:
        require_same_signatures(ask, sign_documents(texts[:CHECKED_DOCUMENTS], PARAMS)[0])
        contenders = {"ours": lambda: our_seconds(bench), "peer": lambda: float(ask("run")["seconds"])}
        seconds = alternate(bench.runs, contenders)
        peer = ask("versions")["versions"]
    return row_of(bench, "signatures", seconds, f"{peer}, Python shingles", at_least=25)


def require_same_signatures(ask: Ask, signatures: np.ndarray) -> None:
    """Refuse to time unless the peer gives the same signatures for the same shingle hashes."""
    require_same("signatures", hashlib.sha256(signatures.tobytes()).hexdigest(), ask("check")["digest"])


def against_daft(bench: Bench) -> Row:
    """Ours and Daft in turns, lower-casing timed and not."""
    folder = bench.scratch / "signatures_daft"
    write_plain(folder, "texts", bench.text.texts)
    with running_peer(bench.peer_python, "daft_signatures.py", folder) as ask:
        require_same_shape("signatures_daft", bench, ask)
        contenders = {
            "ours": lambda: our_seconds(bench),
            "peer": lambda: float(ask("run")["seconds"]),
            "alone": lambda: float(ask("run lowered")["seconds"]),
        }
        seconds = alternate(bench.runs, contenders)
        peer = ask("versions")["versions"]
    extra = {"minhash_alone": median(seconds["alone"]) / median(seconds["ours"])}
    return row_of(bench, "signatures_daft", seconds, f"{peer}, minhash of lower-cased text", at_least=3, extra=extra)


def against_rensa(bench: Bench) -> Row:
    """Ours and rensa in turns."""
    folder = bench.scratch / "signatures_rensa"
    write_plain(folder, "texts", bench.text.texts)
    with running_peer(bench.peer_python, "rensa_signatures.py", folder) as ask:
        require_same_shape("signatures_rensa", bench, ask)
        contenders = {"ours": lambda: our_seconds(bench), "peer": lambda: float(ask("run")["seconds"])}
        seconds = alternate(bench.runs, contenders)
        peer = ask("versions")["versions"]
    return row_of(bench, "signatures_rensa", seconds, f"{peer} RMinHash, Python shingles", at_least=12)


def require_same_shape(what: str, bench: Bench, ask: Ask) -> None:
    """Refuse to time unless the peer makes as many signatures of as many values."""
    signatures, _ = sign_documents(bench.text.texts, PARAMS)
    require_same(what, list(signatures.shape), ask("run")["shape"])


def row_of(
    bench: Bench,
    name: str,
    seconds: dict[str, tuple[float, ...]],
    peer: str,
    *,
    at_least: float,
    extra: dict[str, float] | None = None,
) -> Row:
    """Both sides' seconds for the same megabytes."""
    return Row(
        name=name,
        amount=bench.text.num_megabytes,
        unit="MB",
        ours_seconds=seconds["ours"],
        peer=peer,
        peer_seconds=seconds["peer"],
        extra=extra or {},
        bars=[Bar(figure="ratio", at_least=at_least)],
    )
