"""The sections of a recipe and their keys, one file for each, in the order of the flow.

source → reading → references → dedup → tokenizer → splits → shards → mixture → packs → model → training
"""
