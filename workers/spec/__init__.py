"""Speculation: drafters, the verifier and the registry that names them."""
