"""Conversion of checkpoints: a float or W8A8 checkpoint becomes a pruned W8A8 one.

`options` are checked first, `plan` decides how each tensor is written, `stream` carries it out, and `report` tells
what it did.  `synth` writes checkpoints of random weights in the same way, for a model that `synth_model` describes.
"""
