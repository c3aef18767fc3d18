"""Delta checkpoints: the weights of every step, stored as what changed since the step before.

`encoding` (pure functions on bits), `state` (tensors as bits), `link` (the file of one difference),
`pair` (two files), `folder` (a chain on disk), `chain` (what training code calls), `upkeep` (squash,
gc), `statistics`.
"""
