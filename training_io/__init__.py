"""How bytes become batches, on a training box: numpy to read, plan and verify; torch for the device half.

    shard_format, document_index ─▶ segments ─▶ packing ─▶ plan ─▶ sampler ─▶ batch ─▶ stream ─▶ train
                        windows ─▶ window_source ────────────────────────────────────────┘
    pack_spaces ─▶ packing: where a segment fits; carry: what packing one buffer leaves to the next
    epochs, balance ─▶ sampler: which packs a step and a rank gets; streaming: the same without a stored plan
    loader: a plan's steps for torch's DataLoader
    staging ─▶ stream: onto a device; attention, model, loss ─▶ train; flops: what a step costs
    experiment ─▶ preflight: what a model computes on some batches, and the laws that hold of it
    manifest, invariants, verification, handoff: what was handed over is whole, and its laws hold
    exports: the same documents as other trainers read them

Nothing here knows Parquet or numba, and only `gpu_io_manager` knows Dagster.
"""
