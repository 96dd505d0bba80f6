"""Conversion of a float or W8A8 checkpoint to a pruned W8A8 one.

`options` validates the options, `plan` decides how each tensor is written, `stream` executes the plan, and `report`
describes the result.  `synth` writes checkpoints of random weights, for models that `synth_model` describes.
"""
