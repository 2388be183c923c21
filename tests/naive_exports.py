"""Readers of other trainers' formats, each written from the format's description. Imports nothing of the project.

Each gives the documents of a split as (doc_id or None, ids); formats without borders give one long document.
"""

import json
import struct
from array import array
from itertools import pairwise

import pyarrow as pa

SHORT = {"validation": "val"}
TYPECODES = {"uint16": "H", "uint32": "I", "int32": "i"}


def document_cache(folder, split):
    """All ids are 32 bits wide; each line of the index says where its document begins and how long it is."""
    ids = ids_of((folder / f"{split}.bin").read_bytes(), "uint32")
    lines = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["document_id"], ids[line["offset"] : line["offset"] + line["length"]]) for line in lines]


def nanogpt(folder, split):
    """Bare ids of 16 bits."""
    return [(None, ids_of((folder / f"{SHORT.get(split, split)}.bin").read_bytes(), "uint16"))]


def llmc(folder, split):
    """256 numbers of 32 bits (magic, version, count), then the ids; the files of a pattern in the order of names."""
    ids = []
    for path in sorted(folder.glob(f"*_{SHORT.get(split, split)}_*.bin")):
        raw = path.read_bytes()
        magic, version, count = struct.unpack("<3i", raw[:12])
        dtype = {(20240520, 1): "uint16", (20240801, 7): "uint32"}[magic, version]
        assert raw[12:1024] == bytes(1012)
        ids += ids_of(raw[1024:], dtype)
        assert len(raw) == 1024 + count * {"uint16": 2, "uint32": 4}[dtype]
    return [(None, ids)]


def megatron(folder, split):
    """A header, then the sequences' lengths, their places in bytes, and the number of the first of each document."""
    raw = (folder / f"{split}.idx").read_bytes()
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, documents) == (b"MMIDIDX\0\0", 1, sequences + 1)
    lengths = struct.unpack_from(f"<{sequences}i", raw, 34)
    places = struct.unpack_from(f"<{sequences}q", raw, 34 + 4 * sequences)
    firsts = struct.unpack_from(f"<{documents}q", raw, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * documents
    assert firsts == tuple(range(documents))
    dtype, width = {8: ("uint16", 2), 4: ("int32", 4)}[code]
    stored = (folder / f"{split}.bin").read_bytes()
    assert len(stored) == sum(lengths) * width
    return [
        (None, ids_of(stored[place : place + length * width], dtype))
        for place, length in zip(places, lengths, strict=True)
    ]


def datasets(folder, split):
    """Arrow streams, those that the state names, in its order."""
    assert split in json.loads((folder / "dataset_dict.json").read_text())["splits"]
    state = json.loads((folder / split / "state.json").read_text())
    tables = [pa.ipc.open_stream(folder / split / file["filename"]).read_all() for file in state["_data_files"]]
    return [(row["doc_id"], row["input_ids"]) for table in tables for row in table.to_pylist()]


def mds(folder, split):
    """Shards of the index: a count, offsets, and samples whose columns' sizes come first."""
    documents = []
    for shard in json.loads((folder / split / "index.json").read_text())["shards"]:
        assert shard["column_names"] == ["doc_id", "tokens"]
        dtype = shard["column_encodings"][1].removeprefix("ndarray:")
        raw = (folder / split / shard["raw_data"]["basename"]).read_bytes()
        (count,) = struct.unpack_from("<I", raw)
        offsets = struct.unpack_from(f"<{count + 1}I", raw, 4)
        assert (count, offsets[-1]) == (shard["samples"], len(raw)) == (shard["samples"], shard["raw_data"]["bytes"])
        documents += [mds_sample(raw[a:b], dtype) for a, b in pairwise(offsets)]
    return documents


def mds_sample(raw, dtype):
    """Sizes of the two columns, a text, and an array: dimensions and width of their sizes in a byte, sizes, values."""
    first, second = struct.unpack_from("<2I", raw)
    text, column = raw[8 : 8 + first].decode(), raw[8 + first :]
    assert len(column) == second
    dimensions, width = column[0] >> 2, 1 << (column[0] & 3)
    assert dimensions == 1
    ids = ids_of(column[1 + width :], dtype)
    assert int.from_bytes(column[1 : 1 + width], "little") == len(ids)
    return text, ids


def ids_of(raw, dtype):
    """Little-endian ids (on the machines that the tests run on)."""
    return array(TYPECODES[dtype], raw).tolist()


READERS = {
    "document-cache": document_cache,
    "nanogpt": nanogpt,
    "llm.c": llmc,
    "megatron": megatron,
    "datasets": datasets,
    "mds": mds,
}
