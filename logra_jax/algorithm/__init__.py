"""The method itself: basis, sketch, RowAdam, predicted KL, low-rank merge.

Knows nothing of files, config, tokens or servers.
"""
