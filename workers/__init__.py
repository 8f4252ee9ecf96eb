"""The engine plane: token ids and tensors, from the worker actor down to the block accounting."""
