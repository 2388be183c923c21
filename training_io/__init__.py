"""How bytes become batches, on a training box: numpy to read, plan and verify; torch for the device half.

    shard_format, document_index ─▶ segments ─▶ packing ─▶ plan ─▶ sampler ─▶ batch ─▶ stream ─▶ train
                        windows ─────────────────────────────────────────────────────────┘
    epochs, balance ─▶ sampler: which packs a step and a rank gets; streaming: the same without a stored plan
    loader: a plan's steps for torch's DataLoader
    staging ─▶ stream: onto a device; attention, model, loss ─▶ train; flops: what a step costs
    manifest, invariants, verification, handoff: what was handed over is whole, and its laws hold
    exports: the same documents as other trainers read them

Nothing here knows Parquet or numba, and only `gpu_io_manager` knows Dagster.
"""
