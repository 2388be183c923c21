"""How bytes become batches, on a training box: numpy to read, plan and verify; torch for the device half.

    shard_format, document_index ─▶ segments ─▶ packing ─▶ plan ─▶ sampler ─▶ batch ─▶ stream ─▶ train
                        windows ─────────────────────────────────────────────────────────┘
    manifest, invariants, verification, handoff: what was handed over is whole, and its laws hold
    exports: the same documents as other trainers read them

Nothing here knows Parquet or numba, and only `gpu_io_manager` knows Dagster.
"""
