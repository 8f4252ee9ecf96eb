"""Keys and values: who owns which block (no torch), and the tensors behind the blocks."""
