"""A Hugging Face DeepseekV4ForCausalLM served on this backend: flat batches, paged cache, graphs."""
