"""A study of hand-written N:M sparse products on CUDA cores, for comparison only; serving does not use them."""
