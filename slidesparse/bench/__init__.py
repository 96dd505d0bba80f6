"""Measurements of this machine: each a function that returns a record with its conditions."""
