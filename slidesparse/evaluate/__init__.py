"""The quality of a checkpoint as it is served: through vLLM, with the plugin, beside another checkpoint."""
