"""Keyed sampling: noise as a function of (seed, position, token id), and the one sampler."""
