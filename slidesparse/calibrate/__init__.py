"""Calibration: prune a model layer by layer, using sample activations.

Start with `pipeline`, which prunes a model block by block.  It carries out a `task`: the checked options and the
calibration `samples`.  `model` runs transformers' blocks, `roles` finds out what their layers do, `inputs` collects the
statistics of activations, and `sparsegpt` prunes with them.  `rotation` (found by `learning`), `permutation` and
`smoothing` change weights beforehand without changing outputs.  `finetune` then trains the remaining weights of a
block, `distill` those of the whole model, and `resume` saves finished blocks so that an interrupted run can continue.
"""
