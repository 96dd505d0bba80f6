"""Programs that measure the product; run from a clone as ``python -m benchmarks`` (see README.md beside this file)."""
