"""Conversion of a float or W8A8 checkpoint to a pruned W8A8 one.

`options` validates the options, `source` knows what a checkpoint holds, `plan` decides how each tensor is written, and
`stream` executes the plan.
"""
