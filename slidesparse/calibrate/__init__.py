"""Calibration: prune a model layer by layer, using sample activations.

Start with `pipeline`, which walks through the model.  It carries out a `task`: the checked options and the calibration
`samples`.  `models` implements the transformer blocks, `inputs` collects the statistics of their activations, and the
methods of `slidesparse.methods` prune with these statistics.  `finetune` then trains the remaining weights of a block,
and `resume` saves finished blocks so that an interrupted run can continue.
"""
