"""Calibration: prune a model layer by layer, with data that show what each layer reads.

Read `pipeline` first, which goes through the model.  It runs a `task`, the checked options.  The `samples` of the task
are run through the layers that `models` reads from safetensors; `inputs` holds what those layers read and sums it up.
The methods of `slidesparse.methods` prune by these sums, `finetune` trains the weights that stay, and `resume` keeps
finished layers, so that a killed run can go on.
"""
