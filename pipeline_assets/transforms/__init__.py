"""What is done to texts, pure: text, arrays, tables in memory, a tokenizer object and a seed in; arrays and counts out.

    texts ─▶ words ─▶ shingles ─▶ minhash ─▶ lsh ─▶ components ─▶ keep
                         │           │       signatures, buckets, clusters, the kept one of each
                         └▶ jaccard  └▶ scurve
                            evidence    the measured S-curve

    kept texts ─▶ encode ─▶ split ─▶ shuffle ─▶ boundaries, utilisation
                  ids       train,   the final   cuts at section ends, layouts compared
                            validation  order

Nothing here reads a file, a clock or the environment, or knows of Dagster or torch.
"""
