"""Slow and plain versions of what looking up does; they import nothing of the project."""


def rows_sharing_a_band(signatures, queries, rows_per_band, empty_value):
    """(query, row) for each pair that agrees in all values of a band; a signature of empty values agrees with none."""
    found = []
    for number, query in enumerate(queries):
        for row, signature in enumerate(signatures):
            bands = range(0, len(query), rows_per_band)
            agrees = any(query[at : at + rows_per_band] == signature[at : at + rows_per_band] for at in bands)
            if agrees and set(query) != {empty_value} and set(signature) != {empty_value}:
                found.append([number, row])
    return found


def rows_of_doc_ids(doc_ids, wanted):
    """(number wanted, row) for each pair of equal ids, by row."""
    return [[number, row] for row, one in enumerate(doc_ids) for number, other in enumerate(wanted) if one == other]
