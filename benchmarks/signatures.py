"""signatures: MinHash signatures of 112 values, against datasketch with xxhash and Python shingles.

Both start from the same documents in memory: ours from an Arrow array, the peer from a list of `str` (decoding is not
timed), and both end with a uint32 matrix. The peer splits words with a regular expression (`\\w+` of the lower-cased
text), joins runs of five, hashes them with xxh32 and updates one copied MinHash a document with `update_batch`: the
fastest way through its public interface that was found. Words and word hashes differ, which is the point of a kernel;
that the signature scheme is the same is asserted first, on the same shingle hashes.
"""

import hashlib

import numpy as np
from bench import Bench
from corpus import write_plain
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import Ask, running_peer

from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.shingles import shingle_hashes

CHECKED_DOCUMENTS = 200


def measure(bench: Bench) -> list[Row]:
    """One row: MB of text a second."""
    params, texts = MinHashParams(), bench.text.texts
    folder = bench.scratch / "signatures"
    write_plain(folder, "texts", texts)
    hashes = [shingle_hashes(text) for text in texts[:CHECKED_DOCUMENTS].to_pylist()]
    np.save(folder / "hashes.npy", np.concatenate(hashes))
    np.save(folder / "hash_offsets.npy", np.cumsum([0, *map(len, hashes)]))
    with running_peer(bench.peer_python, "datasketch_signatures.py", folder) as ask:
        require_same_signatures(ask, sign_documents(texts[:CHECKED_DOCUMENTS], params)[0])
        seconds = alternate(
            bench.runs,
            {
                "ours": lambda: seconds_of(lambda: sign_documents(texts, params)),
                "peer": lambda: float(ask("run")["seconds"]),
            },
        )
        peer = ask("versions")["versions"]
    return [
        Row(
            name="signatures",
            amount=bench.text.num_megabytes,
            unit="MB",
            ours_seconds=seconds["ours"],
            peer=f"{peer}, Python shingles",
            peer_seconds=seconds["peer"],
            bars=[Bar(figure="ratio", at_least=25)],
        )
    ]


def require_same_signatures(ask: Ask, signatures: np.ndarray) -> None:
    """Refuse to time unless the peer gives the same signatures for the same shingle hashes."""
    require_same("signatures", hashlib.sha256(signatures.tobytes()).hexdigest(), ask("check")["digest"])
