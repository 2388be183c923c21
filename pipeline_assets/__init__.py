"""The asset graph: when each stage runs, and with which recipe.

source -> signatures -> clusters -> tokens -> splits -> shards -> packs -> training

One stage, one file. What a stage computes is in `transforms/`; where its bytes live is in `resources/`; what must be
true of them is in `asset_checks/`.
"""
