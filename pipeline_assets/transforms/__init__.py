"""What is done to texts, pure: text, arrays, tables in memory, a tokenizer object and a seed in; arrays and counts out.

    texts ─▶ words ─▶ shingles ─▶ minhash ─▶ lsh ─▶ verify ─▶ components ─▶ keep ─▶ duplicates
               │         │           │       candidates, those that are alike,    what was removed, counted
               │         │           │       clusters, the kept one of each
               │         └▶ jaccard  ├▶ scurve    the measured S-curve
               │            evidence └▶ lookup    is this text in the corpus?
               └▶ overlap   runs of words that references and documents share

    kept texts ─▶ encode ─▶ split ─▶ shuffle ─▶ boundaries, utilisation
                  ids       train,   the final   cuts at section ends, layouts compared
                            validation  order

Nothing here reads a file, a clock or the environment, or knows of Dagster or torch.
"""
